"""Sizes: functions that are read at one look, files that hold one concept with all its parts."""

import ast
import statistics
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

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


@cache
def _function_lines(folder: str) -> Mapping[str, int]:
    """Lines of every function from `def` to its end, signature and docstring included, by place and name."""
    return {
        f"{_place(path, node.lineno)} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in _sources(folder)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path)))
        if isinstance(node, Function)
    }


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
