"""How many requests of this process its stores answered with an error, those included that a retry cured.

What callers ask on purpose is not counted: a name that does not exist, a conditional write that another one won.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

from orchestrator.core.errors import (
    NoSpaceError,
    StorageDeniedError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
)

COUNTED: Final = ("timeout", "throttled", "denied", "no_space", "other")
_NAMES: Final[dict[type[StorageError], str]] = {
    StorageTimeoutError: "timeout",
    StorageThrottledError: "throttled",
    StorageDeniedError: "denied",
    NoSpaceError: "no_space",
    StorageError: "other",
}
"""Subclasses without a line here are answers, not failures."""
_lock = threading.Lock()
_counts: Counter[str] = Counter()


def count_error(error: StorageError) -> StorageError:
    """Count an error of a store that is about to be raised, and return it."""
    name = _NAMES.get(type(error))
    if name is not None:
        with _lock:
            _counts[name] += 1
    return error


def error_counts() -> dict[str, int]:
    """Errors by name, one of ``COUNTED``, since the process began."""
    with _lock:
        return dict(_counts)
