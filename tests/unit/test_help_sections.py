"""The table of commands: what people see first, and that it says what the commands say of themselves."""

from collections import Counter
from typing import Any

import pytest

from orchestrator.cli.app import COMMANDS, Command, load_command

_LINES = [command for section in COMMANDS.values() for command in section]
_WHOLE_SENTENCE = 200


def test_help_lists_every_command_in_exactly_one_section() -> None:
    assert set(Counter(command.name for command in _LINES).values()) == {1}


@pytest.mark.parametrize("line", _LINES, ids=lambda line: line.name)
def test_line_of_the_table_begins_the_help_of_its_command(line: Command) -> None:
    command: Any = load_command(line.name)
    assert command.name == line.name
    assert command.get_short_help_str(_WHOLE_SENTENCE) == line.summary
