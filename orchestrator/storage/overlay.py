"""A store whose writes go to one store and whose reads fall through to another: for trials without changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from orchestrator.core.errors import PreconditionFailedError
from orchestrator.storage.protocol import ObjectStat, ObjectStore


class OverlayStore:
    """See ``ObjectStore``. ``top`` takes all writes and hides objects of ``base`` with the same name.

    For one process: conditional writes look at both stores, one after the other. Deleting reaches ``top`` only, so an
    object of ``base`` becomes visible again. Names of ``base`` that start with ``hidden`` are never seen.
    """

    def __init__(self, top: ObjectStore, base: ObjectStore, *, hidden: str = "") -> None:
        self._top = top
        self._base = base
        self._hidden = hidden

    @property
    def uri(self) -> str:
        """The base's URI, since that is what names point into."""
        return self._base.uri

    def put(self, name: str, content: bytes) -> ObjectStat:
        """See ``ObjectStore.put``."""
        return self._top.put(name, content)

    def put_file(self, name: str, path: Path) -> ObjectStat:
        """See ``ObjectStore.put_file``."""
        return self._top.put_file(name, path)

    def put_if_absent(self, name: str, content: bytes) -> ObjectStat:
        """See ``ObjectStore.put_if_absent``."""
        if not self._top.exists(name) and self._in_base(name):
            if self._base.get(name) == content:
                return self._base.stat(name)
            message = f"{name} exists already in {self._base.uri}"
            raise PreconditionFailedError(message)
        return self._top.put_if_absent(name, content)

    def put_if_match(self, name: str, content: bytes, etag: str) -> ObjectStat:
        """See ``ObjectStore.put_if_match``."""
        if self._top.exists(name):
            return self._top.put_if_match(name, content, etag)
        if not self._in_base(name) or self._base.stat(name).etag != etag:
            message = f"{name} has another etag than {etag} in {self._base.uri}"
            raise PreconditionFailedError(message)
        return self._top.put_if_absent(name, content)

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        """See ``ObjectStore.get``."""
        return self._holder(name).get(name, max_bytes=max_bytes)

    def get_with_stat(self, name: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectStat]:
        """See ``ObjectStore.get_with_stat``."""
        return self._holder(name).get_with_stat(name, max_bytes=max_bytes)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """See ``ObjectStore.get_range``."""
        return self._holder(name).get_range(name, start, length)

    def download(self, name: str, path: Path) -> None:
        """See ``ObjectStore.download``."""
        self._holder(name).download(name, path)

    def stat(self, name: str) -> ObjectStat:
        """See ``ObjectStore.stat``."""
        return self._holder(name).stat(name)

    def exists(self, name: str) -> bool:
        """See ``ObjectStore.exists``."""
        return self._top.exists(name) or self._in_base(name)

    def list_objects(self, prefix: str) -> Iterator[ObjectStat]:
        """See ``ObjectStore.list_objects``."""
        written = {stat.name: stat for stat in self._top.list_objects(prefix)}
        yield from written.values()
        yield from (
            stat for stat in self._base.list_objects(prefix) if stat.name not in written and self._visible(stat.name)
        )

    def list_children(self, prefix: str, *, start_after: str = "") -> list[str]:
        """See ``ObjectStore.list_children``."""
        below = self._base.list_children(prefix, start_after=start_after) if self._visible(prefix) else []
        return sorted({*self._top.list_children(prefix, start_after=start_after), *below})

    def delete(self, name: str) -> None:
        """See ``ObjectStore.delete``."""
        self._top.delete(name)

    def _holder(self, name: str) -> ObjectStore:
        return self._base if not self._top.exists(name) and self._visible(name) else self._top

    def _in_base(self, name: str) -> bool:
        return self._visible(name) and self._base.exists(name)

    def _visible(self, name: str) -> bool:
        return not self._hidden or not name.startswith(self._hidden)
