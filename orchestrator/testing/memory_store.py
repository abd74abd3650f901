"""A store in memory, whose objects age by a clock that a test moves."""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import RLock

from orchestrator.core.errors import NotFoundError, PreconditionFailedError
from orchestrator.storage.bounds import check_size
from orchestrator.storage.protocol import ObjectStat, check_name

_PAGE = 1000
_numbers = count(1)


@dataclass(frozen=True, slots=True)
class _Object:
    content: bytes
    stat: ObjectStat


class MemoryStore:
    """See ``ObjectStore``. For the threads of one process; ``now`` stamps the objects."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._objects: dict[str, _Object] = {}
        self._names: list[str] = []
        """Sorted."""
        self._lock = RLock()
        self._versions = count(1)
        self._uri = f"memory://{next(_numbers)}"

    @property
    def uri(self) -> str:
        """Names this very object; nothing opens it elsewhere."""
        return self._uri

    @property
    def is_reachable(self) -> bool:
        """See ``OpenableStore.is_reachable``."""
        return True

    def put(self, name: str, content: bytes) -> ObjectStat:
        """See ``ObjectStore.put``."""
        check_name(name)
        with self._lock:
            etag = f"v{next(self._versions)}"
            stat = ObjectStat(name=name, size_bytes=len(content), etag=etag, modified_at_s=self._now())
            if name not in self._objects:
                insort(self._names, name)
            self._objects[name] = _Object(bytes(content), stat)
        return stat

    def put_file(self, name: str, path: Path) -> ObjectStat:
        """See ``ObjectStore.put_file``."""
        return self.put(name, path.read_bytes())

    def put_if_absent(self, name: str, content: bytes) -> ObjectStat:
        """See ``ObjectStore.put_if_absent``."""
        with self._lock:
            found = self._objects.get(name)
            if found is None:
                return self.put(name, content)
            if found.content == content:
                return found.stat
        message = f"{name} exists already in {self.uri}"
        raise PreconditionFailedError(message)

    def put_if_match(self, name: str, content: bytes, etag: str) -> ObjectStat:
        """See ``ObjectStore.put_if_match``."""
        with self._lock:
            found = self._objects.get(name)
            if found is not None and found.stat.etag == etag:
                return self.put(name, content)
        message = f"{name} does not have the etag {etag} in {self.uri}"
        raise PreconditionFailedError(message)

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        """See ``ObjectStore.get``."""
        return self.get_with_stat(name, max_bytes=max_bytes)[0]

    def get_with_stat(self, name: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectStat]:
        """See ``ObjectStore.get_with_stat``."""
        found = self._find(name)
        check_size(name, self.uri, found.stat.size_bytes, max_bytes)
        return found.content, found.stat

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """See ``ObjectStore.get_range``."""
        return self._find(name).content[start : start + length]

    def download(self, name: str, path: Path) -> None:
        """See ``ObjectStore.download``."""
        path.write_bytes(self._find(name).content)

    def stat(self, name: str) -> ObjectStat:
        """See ``ObjectStore.stat``."""
        return self._find(name).stat

    def exists(self, name: str) -> bool:
        """See ``ObjectStore.exists``."""
        return name in self._objects

    def list_objects(self, prefix: str) -> Iterator[ObjectStat]:
        """See ``ObjectStore.list_objects``; a page at a time, as servers list."""
        after = prefix
        while page := self._page(prefix, after):
            yield from page
            after = page[-1].name + "\0"

    def list_children(self, prefix: str, *, start_after: str = "") -> list[str]:
        """See ``ObjectStore.list_children``."""
        found: list[str] = []
        after = f"{prefix}{start_after}"
        with self._lock:
            while (place := bisect_left(self._names, after)) < len(self._names):
                name = self._names[place]
                if not name.startswith(prefix):
                    break
                child = name.removeprefix(prefix).partition("/")[0]
                found.append(child)
                after = f"{prefix}{child}0" if name != prefix + child else name + "\0"  # "0" follows "/"
        return sorted({child for child in found if child > start_after})

    def refused_children(self, _: str) -> list[str]:
        """See ``OpenableStore.refused_children``: nobody else writes into it."""
        return []

    def delete(self, name: str) -> None:
        """See ``ObjectStore.delete``."""
        with self._lock:
            if self._objects.pop(name, None) is not None:
                del self._names[bisect_left(self._names, name)]

    def _page(self, prefix: str, after: str) -> list[ObjectStat]:
        with self._lock:
            start = bisect_left(self._names, after)
            names = self._names[start : start + _PAGE]
            return [self._objects[name].stat for name in names if name.startswith(prefix)]

    def _find(self, name: str) -> _Object:
        found = self._objects.get(name)
        if found is None:
            message = f"no object {name} in {self.uri}"
            raise NotFoundError(message)
        return found
