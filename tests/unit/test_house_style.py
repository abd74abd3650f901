"""Sizes: functions that are read at one look, files that hold one concept with all its parts."""

import ast
import statistics
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # `make lint` runs them: no change needs them twice

ROOT = Path(__file__).parents[2]
PRODUCT = ("orchestrator", "workloads")
ALL = (*PRODUCT, "tests", "benchmarks")
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_MEDIAN_FUNCTION_LINES = 10

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _place(path: Path, line: int | None = None) -> str:
    name = path.relative_to(ROOT).as_posix()
    return name if line is None else f"{name}:{line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What the rules look at in a file; its tree, which takes much more memory, is not kept."""

    functions: Mapping[str, int]
    """Lines from `def` to the end, signature and docstring included, by place and name."""
    classes: Sequence[str]
    imports: Sequence[str]
    """Names of modules, and of what is imported from them with the module before it; also within functions."""


@cache
def _source(path: Path) -> Source:
    functions, classes, imports = {}, [], []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, Function):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            functions[f"{_place(path, node.lineno)} {node.name}"] = lines
        elif isinstance(node, ast.ClassDef):
            classes.append(node.name)
        elif isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports += [f"{node.module}.{alias.name}" for alias in node.names]
    return Source(functions=functions, classes=classes, imports=imports)


def _function_lines(folder: str) -> Mapping[str, int]:
    return {name: lines for path in _sources(folder) for name, lines in _source(path).functions.items()}


def test_files_any_folder_stay_below_the_limit() -> None:
    lines = {_place(path): len(path.read_text(encoding="utf-8").splitlines()) for path in _sources(*ALL)}
    assert {place: n for place, n in lines.items() if n > MAX_FILE_LINES} == {}


def test_functions_any_folder_stay_below_the_limit() -> None:
    lines = [pair for folder in ALL for pair in _function_lines(folder).items()]
    assert [place for place, n in lines if n > MAX_FUNCTION_LINES] == []


@pytest.mark.parametrize("package", PRODUCT)
def test_functions_of_a_package_have_a_short_median(package: str) -> None:
    lines = _function_lines(package).values()
    assert statistics.median(lines or [0]) <= MAX_MEDIAN_FUNCTION_LINES


MIN_LONE_LINES = 80


def _module_names(*folders: str) -> dict[str, Path]:
    """Files by dotted name; a package is its ``__init__``."""
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in _sources(*folders)}
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


def _imported(path: Path, names: Container[str]) -> Iterator[str]:
    """Modules of ours that a file imports, also within functions."""
    for name in _source(path).imports:
        if (found := name if name in names else name.rpartition(".")[0]) in names:
            yield found


@pytest.mark.parametrize("plane", PRODUCT)
def test_class_names_of_a_plane_occur_once(plane: str) -> None:
    places: dict[str, list[str]] = {}
    for path in _sources(plane):
        for name in _source(path).classes:
            places.setdefault(name, []).append(_place(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_small_modules_with_one_importer_beside_them_are_part_of_it() -> None:
    """Unless they are started by name, or a table names them."""
    modules = _module_names(*PRODUCT)
    importers: dict[str, set[str]] = {}
    for name, path in modules.items():
        for imported in _imported(path, modules):
            importers.setdefault(imported, set()).add(name)
    closets = {
        name: next(iter(found))
        for name, found in importers.items()
        if len(found) == 1
        and modules[name].name != "__init__.py"
        and next(iter(found)).rpartition(".")[0] == name.rpartition(".")[0]
        and len(modules[name].read_text(encoding="utf-8").splitlines()) < MIN_LONE_LINES
        and '__name__ == "__main__"' not in modules[name].read_text(encoding="utf-8")
    }
    assert closets == {}
