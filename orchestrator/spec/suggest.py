"""Nearest valid names for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_MAX_LISTED = 12


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """``did you mean 'x'? known: ...`` for a name that is not among the known ones."""
    names = list(dict.fromkeys(known))
    lowered = {name.lower(): name for name in names}
    near = get_close_matches(wrong.lower(), lowered, n=1, cutoff=0.5)
    listed = ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
    guess = f"did you mean '{lowered[near[0]]}'? " if near else ""
    return f"{guess}known: {listed}" if names else "there are none"
