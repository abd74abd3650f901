"""In which sections ``orchestrator --help`` lists the commands."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

SECTIONS: dict[str, tuple[str, ...]] = {
    "Write a sweep": ("init", "validate", "schema", "plan", "forecast", "labels", "data"),
    "Run it": ("submit", "run", "up", "down"),
    "See how it stands": ("status", "watch", "top", "logs", "describe", "explain", "notify", "doctor"),
    "Steer it": ("pause", "resume", "stop", "cancel", "retry", "priority"),
    "Take the answer": ("report", "compare", "power", "export", "publish", "reproduce"),
    "Keep the store": ("ls", "du", "gc", "fsck"),
    "Keep a cluster": ("cluster", "serve", "drain", "quota", "config"),
}
"""By title, in the order in which people need them; every command is in one of them."""
_SENTENCE = 200
"""Characters: the first sentence of every command's help, which is wrapped and never cut."""


class SectionedGroup(TyperGroup):
    """A group whose help lists its commands by section."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - classes that typer keeps private
        """Write the sections; what is in none of them comes last."""
        listed = {name for names in SECTIONS.values() for name in names}
        rest = tuple(name for name in self.list_commands(ctx) if name not in listed)
        width = max(map(len, self.commands))
        for title, names in {**SECTIONS, "Other commands": rest}.items():
            found = [(name, self.commands[name]) for name in names if name in self.commands]
            rows = [(name.ljust(width), command.get_short_help_str(_SENTENCE)) for name, command in found]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
