"""Questions to whoever sits at the terminal."""

from __future__ import annotations

import sys

from orchestrator.cli.exits import complain
from orchestrator.cli.output import stderr_console


def confirmed(question: str, *, subject: str) -> bool:
    """Whether the user says yes; without a terminal, that nobody could be asked is said instead.

    Args:
        question: ``Submit?``
        subject: what asks, and when: ``a submit asks before it starts``.
    """
    if not sys.stdin.isatty():
        complain(f"{subject}; there is no terminal to ask on, so pass -y")
        return False
    stderr_console().print(f"{question} [y/N] ", end="", markup=False)
    try:
        return input().strip().lower() in {"y", "yes"}
    except EOFError:
        return False
