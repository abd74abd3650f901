"""Sizes and names: small functions, small files, and no words that could mean anything."""

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("orchestrator", "workloads")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_MEDIAN_FUNCTION_LINES = 10

BANNED_ANYWHERE = {"manager", "managers", "helper", "helpers", "util", "utils"}
BANNED_LAST = {"data", "info"}  # as the noun a name ends in; "data_loader" is the field's own term
BANNED_FIRST = {"process", "processes", "processor"}  # "process_group" is a noun: only functions may not start so
ALLOWED_MODULES = {
    "workloads/data",  # the data plane's own package
    "orchestrator/cli/data",  # the command group `orchestrator data`
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _place(path: Path, line: int | None = None) -> str:
    name = path.relative_to(ROOT).as_posix()
    return name if line is None else f"{name}:{line}"


def _nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path)))


def _function_lines(*folders: str) -> dict[str, int]:
    """Lines of every function from `def` to its end, signature and docstring included, by place and name."""
    return {
        f"{_place(path, node.lineno)} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in _sources(*folders)
        for node in _nodes(path)
        if isinstance(node, Function)
    }


def _words(name: str) -> list[str]:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return [word for word in spaced.lower().split("_") if word]


def _banned(name: str, *, is_function: bool = False) -> bool:
    words = _words(name)
    if not words:
        return False
    vague = BANNED_ANYWHERE.intersection(words) or words[-1] in BANNED_LAST or words[-1] == "processor"
    bare = len(words) == 1 and words[0] in BANNED_FIRST
    # do_GET and its kind are the standard library's names for overriding.
    verb = is_function and (words[0] in BANNED_FIRST or re.match(r"_*do_(?![A-Z])", name) is not None)
    return bool(vague or bare or verb)


def _banned_in(path: Path) -> Iterator[str]:
    module = path.parent if path.name == "__init__.py" else path.with_suffix("")
    if module.relative_to(ROOT).as_posix() not in ALLOWED_MODULES and _banned(module.name):
        yield f"{_place(path)} module {module.name}"
    for node in _nodes(path):
        if isinstance(node, ast.ClassDef) and _banned(node.name):
            yield f"{_place(path, node.lineno)} class {node.name}"
        # A test's name is a sentence about its subject, not a noun of ours.
        if isinstance(node, Function) and not node.name.startswith("test_") and _banned(node.name, is_function=True):
            yield f"{_place(path, node.lineno)} function {node.name}"


def test_files_any_folder_stay_below_the_limit() -> None:
    lines = {_place(path): len(path.read_text(encoding="utf-8").splitlines()) for path in _sources(*PRODUCT, "tests")}
    assert {place: n for place, n in lines.items() if n > MAX_FILE_LINES} == {}


def test_functions_any_folder_stay_below_the_limit() -> None:
    lines = _function_lines(*PRODUCT, "tests")
    assert {place: n for place, n in lines.items() if n > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("package", PRODUCT)
def test_functions_of_a_package_have_a_short_median(package: str) -> None:
    lines = _function_lines(package).values()
    assert statistics.median(lines or [0]) <= MAX_MEDIAN_FUNCTION_LINES


def test_names_any_folder_avoid_the_banned_words() -> None:
    assert [found for path in _sources(*PRODUCT, "tests") for found in _banned_in(path)] == []


@pytest.mark.parametrize("name", ["RunManager", "utils", "test_helper", "SampleInfo", "load_data", "data", "process"])
def test_banned_vague_name_is_found(name: str) -> None:
    assert _banned(name)


@pytest.mark.parametrize("name", ["process_batch", "do_step", "_do_step", "processes"])
def test_banned_vague_function_name_is_found(name: str) -> None:
    assert _banned(name, is_function=True)


@pytest.mark.parametrize("name", ["dataset", "DataLoader", "metadata", "inprocess", "spawn_process", "do_GET", "_"])
def test_banned_meaningful_name_is_left_alone(name: str) -> None:
    assert not _banned(name, is_function=True)
