"""Messages and questions on the terminal, on stderr: commands print only results on stdout.

Names of classes, samples and files, and reasons of failures, are printed as they are: neither rich nor the terminal
may take a part of them for an instruction.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from orchestrator.core.units import printable
from orchestrator.services.settings_sources import CONTEXT_FLAG, flagged_context

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

PIPE_WIDTH = 10_000
"""A pipe or a file has no width of its own: tables keep all columns, and sentences stay on one line."""


def say(text: str) -> None:
    """One line, never wrapped: terminals do that, and pipes must not."""
    sys.stderr.write(f"{printable(text)}\n")


def command_line(*words: str, store: str = "") -> str:
    """A command to type next, as a shell takes it, with the context that this command's flag chose.

    Args:
        words: the command and its arguments.
        store: for ``--store``; empty = the settings name it.
    """
    context = flagged_context()
    places = [*(["--store", store] if store else []), *([CONTEXT_FLAG, context] if context else [])]
    return shlex.join(["orchestrator", *words, *places])


def stderr_console() -> Console:
    """The console for progress and messages. It honours NO_COLOR, and prints plain text on a pipe."""
    return plain_console(stderr=True)


def plain_console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """A console without markup and emoji names, also in cells of tables; see ``printable`` for control characters.

    Args:
        stderr: print there instead of on stdout.
        soft_wrap: leave it to the terminal to wrap lines.
    """
    from rich.console import Console  # a tenth of the time of commands that print one plain line

    class PlainConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:  # noqa: ANN401 - as rich names them
            return super().render_str(printable(text), **options)  # columns get the width of what is shown

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                # Control segments are rich's own: they move the cursor.
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    console = PlainConsole(stderr=stderr, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def show(*renderables: RenderableType) -> None:
    """Tables and lines, as wide as the terminal."""
    console = stderr_console()
    for renderable in renderables:
        console.print(renderable)


def confirmed(question: str, *, subject: str) -> bool:
    """Ask the user a yes/no question; without a terminal, print an error and return False.

    Args:
        question: ``Submit?``
        subject: the command that asks, and when: ``submit asks for confirmation``.
    """
    if not sys.stdin.isatty():
        say(f"error: {subject}; there is no terminal to ask, so pass -y")
        return False
    sys.stderr.write(f"{printable(question)} [y/N] ")
    sys.stderr.flush()
    try:
        return input().strip().lower() in {"y", "yes"}
    except EOFError:
        return False
