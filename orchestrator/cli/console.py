"""Consoles: results on stdout, everything else on stderr. Both honour NO_COLOR and plain pipes."""

from __future__ import annotations

from rich.console import Console

_PIPE_WIDTH = 140


def stdout_console() -> Console:
    """For a command's result."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=_PIPE_WIDTH)


def stderr_console() -> Console:
    """For progress and messages."""
    console = Console(stderr=True, highlight=False)
    return console if console.is_terminal else Console(stderr=True, highlight=False, width=_PIPE_WIDTH)
