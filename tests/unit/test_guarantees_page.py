"""The page of guarantees names tests: each of them exists, and every promise has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "guarantees.md").read_text()
NAMED = sorted(set(re.findall(r"`((?:[a-z_]+/)+(?:[a-z0-9_]+\.py)?(?:::[a-z0-9_]+)?)`", PAGE)) - {"tests/"})
PROMISES = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| promise")]


def test_page_names_many_tests_one_by_one() -> None:
    assert len(NAMED) > 40
    assert sum("::" in name for name in NAMED) > 20


@pytest.mark.parametrize("name", NAMED)
def test_test_that_is_named_as_evidence_exists(name: str) -> None:
    file, _, function = name.partition("::")
    assert (TESTS / file).exists(), f"docs/guarantees.md names {file}"
    if function:
        assert re.search(rf"^def {function}\(", (TESTS / file).read_text(), re.MULTILINE), f"{file} has no {function}"


@pytest.mark.parametrize("row", PROMISES, ids=lambda row: row[2:50])
def test_promise_names_its_evidence(row: str) -> None:
    evidence = row.rstrip(" |").rpartition("|")[2]
    files = re.findall(r"`([a-z_/0-9]+\.py)", evidence)
    assert "simulation" in evidence or any("def test_" in (TESTS / file).read_text() for file in files), row
