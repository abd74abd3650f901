"""What services tell and ask whoever sits at the terminal, on stderr: results alone go to stdout, by the commands."""

from __future__ import annotations

import sys

from rich.console import Console, RenderableType

_PIPE_WIDTH = 140


def say(text: str) -> None:
    """One line, never wrapped: terminals do that, and pipes must not."""
    sys.stderr.write(f"{text}\n")


def show(*renderables: RenderableType) -> None:
    """Tables and lines, as wide as the terminal."""
    console = Console(stderr=True, highlight=False)
    console = console if console.is_terminal else Console(stderr=True, highlight=False, width=_PIPE_WIDTH)
    for renderable in renderables:
        console.print(renderable, markup=False)


def confirmed(question: str, *, subject: str) -> bool:
    """Whether the user says yes; without a terminal, that nobody could be asked is said instead.

    Args:
        question: ``Submit?``
        subject: what asks, and when: ``a submit asks before it starts``.
    """
    if not sys.stdin.isatty():
        say(f"error: {subject}; there is no terminal to ask on, so pass -y")
        return False
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    try:
        return input().strip().lower() in {"y", "yes"}
    except EOFError:
        return False
