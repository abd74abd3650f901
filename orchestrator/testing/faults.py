"""A store that fails where a test says: before, after or instead of its n-th write, or with what it reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Generic, TypeVar

from orchestrator.core.errors import StorageError
from orchestrator.storage.protocol import ObjectStat, ObjectStore

Written = TypeVar("Written")


class SimulatedCrash(BaseException):
    """The process dies here. Not an ``Exception``: nothing may catch it."""


class Harm(StrEnum):
    """Damage of the content at the chosen read."""

    FLIPPED = "flipped"
    """One bit in its middle is another."""
    CUT = "cut"
    """Its last half is missing."""
    REFUSED = "refused"
    """There is none: the read raises."""


class Moment(StrEnum):
    """The fault at the chosen write."""

    ERROR_BEFORE = "error_before"
    """The write fails and leaves nothing."""
    ERROR_AFTER = "error_after"
    """The write is durable, its acknowledgement is lost."""
    CRASH_BEFORE = "crash_before"
    CRASH_AFTER = "crash_after"
    LATE = "late"
    """The write happens after ``delay_s``: the request was slow, or the process that makes it was suspended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Strikes once, at the ``nth`` write (from 1) that goes to a name containing ``within``, with such an error."""

    moment: Moment
    nth: int = 1
    within: str = ""
    error: type[StorageError] = StorageError
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFault:
    """Strikes once, at the ``nth`` read (from 1) of the content of a name containing ``within``."""

    harm: Harm
    nth: int = 1
    within: str = ""
    error: type[StorageError] = StorageError


AnyFault = TypeVar("AnyFault", Fault, ReadFault)


class FaultyStore:
    """An ``ObjectStore`` around another; ``writes`` records the names of all writes and deletions, in order.

    ``wait`` lets so many seconds pass where a fault says ``LATE``; what else it does happens meanwhile.
    """

    def __init__(
        self,
        store: ObjectStore,
        faults: Sequence[Fault] = (),
        *,
        read_faults: Sequence[ReadFault] = (),
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._store = store
        self._wait = wait
        self._write_faults = _Countdown(faults)
        self._read_faults = _Countdown(read_faults)
        self.writes: list[str] = []

    @property
    def uri(self) -> str:
        """See ``ObjectStore.uri``."""
        return self._store.uri

    def put(self, name: str, content: bytes) -> ObjectStat:
        """See ``ObjectStore.put``."""
        return self._write(name, lambda: self._store.put(name, content))

    def put_file(self, name: str, path: Path) -> ObjectStat:
        """See ``ObjectStore.put_file``."""
        return self._write(name, lambda: self._store.put_file(name, path))

    def put_if_absent(self, name: str, content: bytes) -> ObjectStat:
        """See ``ObjectStore.put_if_absent``."""
        return self._write(name, lambda: self._store.put_if_absent(name, content))

    def put_if_match(self, name: str, content: bytes, etag: str) -> ObjectStat:
        """See ``ObjectStore.put_if_match``."""
        return self._write(name, lambda: self._store.put_if_match(name, content, etag))

    def delete(self, name: str) -> None:
        """See ``ObjectStore.delete``."""
        self._write(name, lambda: self._store.delete(name))

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        """See ``ObjectStore.get``."""
        return self._harmed(name, self._store.get(name, max_bytes=max_bytes))

    def get_with_stat(self, name: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectStat]:
        """See ``ObjectStore.get_with_stat``."""
        content, stat = self._store.get_with_stat(name, max_bytes=max_bytes)
        return self._harmed(name, content), stat

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """See ``ObjectStore.get_range``."""
        return self._harmed(name, self._store.get_range(name, start, length))

    def download(self, name: str, path: Path) -> None:
        """See ``ObjectStore.download``."""
        self._store.download(name, path)
        content = path.read_bytes()
        if (harmed := self._harmed(name, content)) != content:
            path.write_bytes(harmed)

    def stat(self, name: str) -> ObjectStat:
        """See ``ObjectStore.stat``."""
        return self._store.stat(name)

    def exists(self, name: str) -> bool:
        """See ``ObjectStore.exists``."""
        return self._store.exists(name)

    def list_children(self, prefix: str, *, start_after: str = "") -> list[str]:
        """See ``ObjectStore.list_children``."""
        return self._store.list_children(prefix, start_after=start_after)

    def list_objects(self, prefix: str) -> Iterator[ObjectStat]:
        """See ``ObjectStore.list_objects``."""
        return self._store.list_objects(prefix)

    def _write(self, name: str, write: Callable[[], Written]) -> Written:
        self.writes.append(name)
        fault = self._write_faults.due(name)
        moment = None if fault is None else fault.moment
        if moment is Moment.CRASH_BEFORE:
            raise SimulatedCrash(name)
        if fault is not None and moment is Moment.ERROR_BEFORE:
            message = f"simulated: {name} was not written"
            raise fault.error(message)
        if fault is not None and moment is Moment.LATE:
            self._wait(fault.delay_s)
        result = write()
        if moment is Moment.CRASH_AFTER:
            raise SimulatedCrash(name)
        if fault is not None and moment is Moment.ERROR_AFTER:
            message = f"simulated: {name} was written and the answer lost"
            raise fault.error(message)
        return result

    def _harmed(self, name: str, content: bytes) -> bytes:
        fault = self._read_faults.due(name)
        if fault is None:
            return content
        middle = len(content) // 2
        if fault.harm is Harm.REFUSED:
            message = f"simulated: {name} was not read"
            raise fault.error(message)
        if fault.harm is Harm.CUT or not content:
            return content[:middle]
        return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


class _Countdown(Generic[AnyFault]):
    def __init__(self, faults: Sequence[AnyFault]) -> None:
        self._left: dict[AnyFault, int] = {fault: fault.nth for fault in faults}

    def due(self, name: str) -> AnyFault | None:
        """The fault that strikes this access, if one does."""
        found = None
        for fault in self._left:
            if fault.within in name:
                self._left[fault] -= 1
                if self._left[fault] == 0:
                    found = fault
        return found
