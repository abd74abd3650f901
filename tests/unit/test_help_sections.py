"""The table of commands: what people see first, and that it says what the commands say of themselves."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from orchestrator.cli.app import COMMANDS, Command, load_command
from tests.commands import run_command

_LINES = [command for section in COMMANDS.values() for command in section]
_WHOLE_SENTENCE = 200


def test_help_lists_every_command_in_exactly_one_section() -> None:
    assert set(Counter(command.name for command in _LINES).values()) == {1}


@pytest.mark.parametrize("line", _LINES, ids=lambda line: line.name)
def test_line_of_the_table_begins_the_help_of_its_command(line: Command) -> None:
    command: Any = load_command(line.name)
    assert command.name == line.name
    assert command.get_short_help_str(_WHOLE_SENTENCE) == line.summary


def test_table_of_the_page_has_every_command() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    table = page.partition("| command |")[2].partition("\n\n")[0]
    documented = {
        words.split()[0] for line in table.splitlines() for words in re.findall("`([^`]+)`", line.split(" | ")[0])
    }
    assert {line.name for line in _LINES} - documented == set()


def _usages(command: Any, context: Any) -> Iterator[str]:
    yield command.get_usage(context)
    for verb in getattr(command, "commands", {}).values():
        yield from _usages(verb, type(context)(verb, parent=context, info_name=verb.name))


@pytest.mark.parametrize("line", _LINES, ids=lambda line: line.name)
def test_usage_names_arguments_as_manuals_do_and_the_sweep_before_the_job(line: Command) -> None:
    context: Any = typer.Context(load_command(line.name), info_name=line.name)
    for usage in _usages(context.command, context):
        words = usage.split("[OPTIONS]")[1].split()
        assert all(word == word.upper() and "{" not in word for word in words), usage
        assert not words or "JOB" not in words[0], usage


def test_h_is_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (("-h",), ("status", "-h"), ("data", "index", "-h")):
        result = run_command(capsys, *line)
        assert (result.code, result.out.startswith("Usage: ")) == (0, True)


@pytest.mark.parametrize("line", [("run", "a/b"), ("explain", "a/b"), ("export", "a/b", "out")])
def test_the_old_order_is_refused_with_the_line_to_write(
    capsys: pytest.CaptureFixture[str], line: tuple[str, ...]
) -> None:
    result = run_command(capsys, *line, "--sweep", "mine")
    assert result.code == 2
    assert f"write: orchestrator {line[0]} mine {' '.join(line[1:])}" in result.message
