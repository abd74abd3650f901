"""A store whose requests are throttled, time out, lose their acknowledgement, or take effect long after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from orchestrator.backends.simulated import VirtualClock
from orchestrator.core.errors import StorageError, StorageThrottledError, StorageTimeoutError
from orchestrator.storage.protocol import ObjectStat, ObjectStore

Written = TypeVar("Written")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """Probabilities per request."""

    throttled: float = 0.0
    """Refused, with no effect; reads too."""
    unheard: float = 0.0
    """A write that took effect and whose answer is lost."""
    late: float = 0.0
    """A write that is answered by a time-out and takes effect up to ``max_late_s`` later."""
    max_late_s: float = 30.0


FAIR = Weather()


class StormyStore:
    """An ``ObjectStore`` around another; ``weather`` may be changed at any time."""

    def __init__(self, store: ObjectStore, clock: VirtualClock, random: Random, weather: Weather = FAIR) -> None:
        self._store, self._clock, self._random = store, clock, random
        self.weather = weather

    @property
    def uri(self) -> str:
        return self._store.uri

    def put(self, name: str, content: bytes) -> ObjectStat:
        return self._write(lambda: self._store.put(name, content))

    def put_file(self, name: str, path: Path) -> ObjectStat:
        return self._write(lambda: self._store.put_file(name, path))

    def put_if_absent(self, name: str, content: bytes) -> ObjectStat:
        return self._write(lambda: self._store.put_if_absent(name, content))

    def put_if_match(self, name: str, content: bytes, etag: str) -> ObjectStat:
        return self._write(lambda: self._store.put_if_match(name, content, etag))

    def delete(self, name: str) -> None:
        self._write(lambda: self._store.delete(name))

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        self._read()
        return self._store.get(name, max_bytes=max_bytes)

    def get_with_stat(self, name: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectStat]:
        self._read()
        return self._store.get_with_stat(name, max_bytes=max_bytes)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        self._read()
        return self._store.get_range(name, start, length)

    def download(self, name: str, path: Path) -> None:
        self._read()
        self._store.download(name, path)

    def stat(self, name: str) -> ObjectStat:
        self._read()
        return self._store.stat(name)

    def exists(self, name: str) -> bool:
        self._read()
        return self._store.exists(name)

    def list_children(self, prefix: str, *, start_after: str = "") -> list[str]:
        self._read()
        return self._store.list_children(prefix, start_after=start_after)

    def list_objects(self, prefix: str) -> Iterator[ObjectStat]:
        self._read()
        return self._store.list_objects(prefix)

    def _read(self) -> None:
        if self._strikes(self.weather.throttled):
            raise StorageThrottledError("simulated: slow down")

    def _write(self, write: Callable[[], Written]) -> Written:
        self._read()
        if self._strikes(self.weather.late):
            self._clock.after(self._random.uniform(0.0, self.weather.max_late_s), lambda: _try(write))
            raise StorageTimeoutError("simulated: no answer, and it may still take effect")
        written = write()
        if self._strikes(self.weather.unheard):
            raise StorageTimeoutError("simulated: it was written and nobody heard")
        return written

    def _strikes(self, probability: float) -> bool:
        return probability > 0.0 and self._random.random() < probability


def _try(write: Callable[[], Any]) -> None:
    with suppress(StorageError):
        write()
