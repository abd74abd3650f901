"""What people read when a sweep.yaml is wrong: one file for each mistake, and beside it the whole message.

A changed message is put into place by ``python -m tests.unit.test_golden_errors``, and read before it is committed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path

import pytest

from orchestrator.cli.exits import ExitCode
from orchestrator.sweepfile.parse.tree import MAX_BYTES
from tests.commands import run_captured
from tests.golden_refusals import as_anywhere

FOLDER = Path(__file__).parents[1] / "golden" / "errors"
CASES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
CATALOGUE = Path(__file__).parents[2] / "docs" / "errors.md"
MARK = "<!-- From here on: python -m tests.unit.test_golden_errors -->"
_ARGUMENTS = re.compile(rb"# run: (.*)")
_PLACE = re.compile(r"^(?:\S+\.yaml:\d+:\d+|--set .+?): ")


def arguments_of(path: Path) -> list[str]:
    """What the first line of a case says that it is run with."""
    with path.open("rb") as file:
        found = _ARGUMENTS.match(file.readline(200))
    return shlex.split(found.group(1).decode()) if found else []


def message_of(path: Path) -> str:
    """What ``orchestrator validate`` refuses a file with; it is run in the file's folder, so that places are short."""
    with chdir(path.parent), as_anywhere({}):
        ended = run_captured("validate", path.name, *arguments_of(path))
    assert (ended.code, ended.out) == (ExitCode.SPEC, "")
    return ended.err.removeprefix("error: ").removeprefix("errors:\n")


@pytest.mark.parametrize("case", CASES)
def test_wrong_sweep_is_refused_with_the_golden_message(case: str) -> None:
    expected = (FOLDER / f"{case}.expected").read_text(encoding="utf-8")
    message = message_of(FOLDER / f"{case}.yaml")
    assert message == expected, "if it should be so, run: python -m tests.unit.test_golden_errors"


@pytest.mark.parametrize("case", CASES)
def test_golden_message_says_where_what_and_what_to_do(case: str) -> None:
    for line in (FOLDER / f"{case}.expected").read_text(encoding="utf-8").splitlines():
        assert _PLACE.match(line), line
        assert len(line) < 500
        assert not re.search(r"hunter2|AKIA|Traceback|pydantic|<class", line)


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 60
    assert {path.stem for path in FOLDER.glob("*.expected")} == set(CASES)


def test_huge_file_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole: nobody could read it
    assert f"huge.yaml:1:1: the file has more than {MAX_BYTES} bytes" in message_of(path)


@pytest.mark.parametrize(("content", "said"), [(b"\xef\xbb\xbfversion: 2\n", "1:1: version: 2 is not"), (b"", "1:1:")])
def test_file_with_a_byte_order_mark_or_nothing_is_read(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(content)
    assert said in message_of(path)


def test_wrong_sweep_ends_the_command_with_code_2_and_its_message_on_stderr() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", "validate", "typo-section.yaml"],
        cwd=FOLDER,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    expected = (FOLDER / "typo-section.expected").read_text(encoding="utf-8").rstrip("\n")
    assert expected in result.stderr


def _environment() -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": str(FOLDER.parents[2])}


def catalogue() -> str:
    """The messages by their subject, for ``docs/errors.md``."""
    lines: list[str] = []
    subject = ""
    for case in CASES:
        if case.partition("-")[0] != subject:
            subject = case.partition("-")[0]
            lines += [*(["```", ""] if lines else []), f"### {subject.capitalize()}", "", "```"]
        lines += (FOLDER / f"{case}.expected").read_text(encoding="utf-8").splitlines()
    return "\n".join([*lines, "```", ""])


def test_error_catalogue_of_the_docs_is_current() -> None:
    text = CATALOGUE.read_text(encoding="utf-8")
    assert text.partition(MARK)[2].lstrip("\n") == catalogue(), "run: python -m tests.unit.test_golden_errors"


if __name__ == "__main__":
    for name in CASES:
        (FOLDER / f"{name}.expected").write_text(message_of(FOLDER / f"{name}.yaml"), encoding="utf-8")
    above = CATALOGUE.read_text(encoding="utf-8").partition(MARK)[0]
    CATALOGUE.write_text(f"{above}{MARK}\n\n{catalogue()}", encoding="utf-8")
