"""Messages and questions on the terminal, on stderr: commands print only results on stdout."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from orchestrator.services.settings_sources import CONTEXT_FLAG, flagged_context

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PIPE_WIDTH = 10_000
"""A pipe or a file has no width of its own: tables keep all columns, and sentences stay on one line."""


def say(text: str) -> None:
    """One line, never wrapped: terminals do that, and pipes must not."""
    sys.stderr.write(f"{text}\n")


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
    from rich.console import Console  # a tenth of the time of commands that print one plain line

    console = Console(stderr=True, highlight=False)
    return console if console.is_terminal else Console(stderr=True, highlight=False, width=PIPE_WIDTH)


def show(*renderables: RenderableType) -> None:
    """Tables and lines, as wide as the terminal."""
    console = stderr_console()
    for renderable in renderables:
        console.print(renderable, markup=False)


def confirmed(question: str, *, subject: str) -> bool:
    """Ask the user a yes/no question; without a terminal, print an error and return False.

    Args:
        question: ``Submit?``
        subject: the command that asks, and when: ``submit asks for confirmation``.
    """
    if not sys.stdin.isatty():
        say(f"error: {subject}; there is no terminal to ask, so pass -y")
        return False
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    try:
        return input().strip().lower() in {"y", "yes"}
    except EOFError:
        return False
