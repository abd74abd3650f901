"""The list of commands that people see first."""

from collections import Counter

from orchestrator.cli.app import app
from orchestrator.cli.on_demand import command_line
from orchestrator.cli.sections import SECTIONS


def test_help_lists_every_command_in_exactly_one_section() -> None:
    listed = Counter(name for names in SECTIONS.values() for name in names)
    assert set(listed.values()) == {1}
    assert set(listed) == set(command_line(app).commands)
