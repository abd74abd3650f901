"""One thread that works ahead of its consumer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Iterates over ``items`` in a thread, at most ``depth`` ahead; an exception there is raised here, at its turn.

    Use as a context manager: leaving it ends the thread.
    """

    def __init__(self, items: Iterable[Item], *, depth: int) -> None:
        self._items = items
        self._depth = depth
        self._ready: deque[Item] = deque()
        self._changed = threading.Condition()
        self._is_finished = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._produce, name="prefetch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._is_finished)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._error is not None:
                raise self._error
            raise StopIteration

    def _produce(self) -> None:
        try:
            for item in self._items:
                if not self._offer(item):
                    break
        except BaseException as error:  # noqa: BLE001 - the consumer raises it, whatever it is
            self._error = error
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()

    def _offer(self, item: Item) -> bool:
        """Wait for room and hand over; False once the consumer has left."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) < self._depth or self._is_closed)
            if not self._is_closed:
                self._ready.append(item)
                self._changed.notify_all()
            return not self._is_closed
