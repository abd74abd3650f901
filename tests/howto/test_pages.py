"""The how-to pages hold: each is followed literally, by somebody new, in a clean home."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.howto.pages import FOLDER, Place, blocks, new_place

SHORT = ("cluster", "grids")
"""Pages that take seconds: they neither train nor read images."""
LONG = ("factors", "first-sweep", "label-spaces", "resume", "steer")
"""Each in a place of its own: they start from nothing, or end the stack in the middle."""
BEGINNING = "orchestrator init\norchestrator submit sweep.yaml --scale tiny -y\n"
END = re.compile(r"^orchestrator down\b.*\n", re.MULTILINE)
SAME_BEGINNING = ("export", "mlflow", "power", "samples", "compare")
"""Pages that begin with ``BEGINNING``, which is typed once for all: half of what each would take. The last one submits
another sweep, which the others must not find."""
OTHER_SWEEPS = ("own-data", "own-images", "share-backbones", "similarity", "simulate", "structure")
"""Pages of other sweeps, followed beside a stack that already runs: each would wait for one of its own."""
ELSEWHERE = ("own-code",)
"""Followed by ``tests/integration/test_own_code.py``, which installs the package beside it."""
TIMEOUT_S = 900.0
_LINK = re.compile(r"\]\((?P<target>[^)#]+)(?:#[^)]*)?\)")


def test_every_page_is_followed_by_a_test_and_listed() -> None:
    pages = {page.stem for page in FOLDER.glob("*.md")} - {"README"}
    assert pages == {*SHORT, *LONG, *SAME_BEGINNING, *OTHER_SWEEPS, *ELSEWHERE}
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
    with new_place(tmp_path, timeout_s=TIMEOUT_S) as place:
        place.follow(FOLDER / f"{name}.md")


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("name", LONG)
def test_long_page_is_right(name: str, tmp_path: Path) -> None:
    with new_place(tmp_path, timeout_s=TIMEOUT_S) as place:
        place.follow(FOLDER / f"{name}.md")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A place where ``BEGINNING`` was typed; its stack runs until all pages are followed."""
    folder = tmp_path_factory.mktemp("begun")
    with new_place(folder, timeout_s=TIMEOUT_S) as place:
        place.type(BEGINNING, "the beginning of several pages")
        yield place
        place.type("orchestrator down\n", "the end of several pages")
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("name", SAME_BEGINNING)
def test_page_is_right_after_the_beginning_that_it_has_in_common_with_others(name: str, begun: Place) -> None:
    begun.follow(FOLDER / f"{name}.md", after=BEGINNING, without=END)
    begun.remove_files(but=("sweep.yaml",))  # no page may need what another one has made


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("name", OTHER_SWEEPS)
def test_page_of_another_sweep_is_right_where_sweeps_have_run(name: str, begun: Place) -> None:
    sweep_file = begun.folder / "sweep.yaml"
    of_the_beginning = sweep_file.read_bytes()
    begun.remove_files()  # these pages write a file of this name
    begun.follow(FOLDER / f"{name}.md", without=END)
    begun.remove_files()
    sweep_file.write_bytes(of_the_beginning)
