"""The how-to pages hold: each is followed literally, by somebody new, in a clean home."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.howto.pages import FOLDER, blocks, follow

SHORT = ("cluster", "grids")
"""Pages that take seconds: they neither train nor read images."""
FIRST = "first-sweep"
AFTER_FIRST = ("compare", "export", "mlflow", "power", "samples", "share-backbones")
"""Pages that begin with the sweep of ``FIRST``. Their reader has its artifacts; what is trained besides is trained."""
LONG = (
    "factors",
    "label-spaces",
    "similarity",
    "own-data",
    "own-images",
    "resume",
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
    assert pages == {*SHORT, FIRST, *AFTER_FIRST, *LONG, *ELSEWHERE}
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


@pytest.fixture(scope="module")
def first_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a reader who has followed the first page, in a clean home as all of them."""
    folder = tmp_path_factory.mktemp(FIRST)
    follow(FOLDER / f"{FIRST}.md", folder, timeout_s=TIMEOUT_S)
    return folder / "place" / ".orchestrator" / "store"


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_first_page_is_right(first_store: Path) -> None:
    assert any((first_store / "artifacts").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("name", AFTER_FIRST)
def test_page_after_the_first_is_right(name: str, first_store: Path, tmp_path: Path) -> None:
    home = tmp_path / "place" / ".orchestrator"
    home.mkdir(parents=True, mode=0o700)
    for folder in ("artifacts", "metrics"):
        shutil.copytree(first_store / folder, home / "store" / folder)
    follow(FOLDER / f"{name}.md", tmp_path, timeout_s=TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("name", LONG)
def test_long_page_is_right(name: str, tmp_path: Path) -> None:
    follow(FOLDER / f"{name}.md", tmp_path, timeout_s=TIMEOUT_S)
