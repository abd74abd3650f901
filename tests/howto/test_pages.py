"""The how-to pages hold: each is followed literally, by somebody new, in a clean home."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.howto.pages import FOLDER, blocks, follow

SHORT = ("cluster", "grids")
"""Pages that take seconds: they neither train nor read images."""
LONG = (
    "compare",
    "export",
    "factors",
    "first-sweep",
    "label-spaces",
    "similarity",
    "mlflow",
    "own-data",
    "own-images",
    "power",
    "resume",
    "samples",
    "share-backbones",
    "simulate",
    "steer",
    "structure",
)
ELSEWHERE = ("own-code",)
"""Followed by ``tests/integration/test_own_code.py``, which installs the package beside it."""
TIMEOUT_S = 900.0
_LINK = re.compile(r"\]\((?P<target>[^)#]+)(?:#[^)]*)?\)")


def test_every_page_is_followed_by_a_test_and_listed() -> None:
    pages = {page.stem for page in FOLDER.glob("*.md")} - {"README"}
    assert pages == {*SHORT, *LONG, *ELSEWHERE}
    listed = (FOLDER / "README.md").read_text()
    assert all(f"({page}.md)" in listed for page in pages)


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.stem)
def test_page_links_lead_somewhere_and_its_blocks_are_of_known_kinds(page: Path) -> None:
    for found in _LINK.finditer(page.read_text()):
        assert (page.parent / found["target"]).exists(), found["target"]
    for block in blocks(page):
        assert block.file or block.kind in {"sh", "sh cluster", "sh package"}, (
            f"{page.name}:{block.line}: nobody follows this block"
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_short_page_is_right(name: str, tmp_path: Path) -> None:
    follow(FOLDER / f"{name}.md", tmp_path, timeout_s=TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("name", LONG)
def test_long_page_is_right(name: str, tmp_path: Path) -> None:
    follow(FOLDER / f"{name}.md", tmp_path, timeout_s=TIMEOUT_S)
