"""The last results of a pure function, which stay behind when their owner is sent to another process."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Memo(Generic[Result]):
    """Calls a function, or returns one of its last ``num_kept`` results. Thread-safe; pickled without results."""

    def __init__(self, function: Callable[..., Result], num_kept: int) -> None:
        self._function, self._num_kept = function, num_kept
        self._kept = lru_cache(num_kept)(function)

    def __call__(self, *args: Hashable) -> Result:
        """As the function."""
        return self._kept(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Without results."""
        return Memo, (self._function, self._num_kept)
