"""Text logs of attempts: segments while a process runs, one object once it has ended in good order.

A log that is written anew every few seconds would cost its length each time. So what is new becomes a segment beside
the log's name, ``rank0/<from>-<to>.log`` in bytes; a process that ends puts the whole log under its name and deletes
the segments. Of a process that was killed the segments stay, and are its log.
"""

from __future__ import annotations

from orchestrator.core.errors import NotFoundError, PreconditionFailedError
from orchestrator.storage.protocol import ObjectStore


def append_log(store: ObjectStore, name: str, content: bytes) -> int:
    """Add what a log's content has beyond its segments as one more segment; returns the number of bytes added.

    Another writer of the same log (whoever looks after a process that hangs) may add the same bytes; readers see them
    once.
    """
    start = max((end for _, end in _segments(store, name)), default=0)
    if len(content) <= start:
        return 0
    put_segment(store, name, start, content[start:])
    return len(content) - start


def put_segment(store: ObjectStore, name: str, start: int, content: bytes) -> None:
    """Store the bytes of a log from ``start`` on; the same segment again changes nothing."""
    try:
        store.put_if_absent(_segment_name(name, start, start + len(content)), content)
    except PreconditionFailedError:
        return


def finish_log(store: ObjectStore, name: str, content: bytes) -> None:
    """Store the whole log and remove its segments."""
    store.put(name, content)
    # Only now: a reader finds the segments or the whole.
    for start, end in _segments(store, name):
        store.delete(_segment_name(name, start, end))


def log_exists(store: ObjectStore, name: str) -> bool:
    """Whether anything of a log is stored."""
    return store.exists(name) or bool(_segments(store, name))


def read_log(store: ObjectStore, name: str, start: int = 0) -> bytes:
    """What is stored of a log from byte ``start`` on; empty if there is nothing (yet)."""
    try:
        return store.get(name)[start:]
    except NotFoundError:
        pass
    try:
        return _read_segments(store, name, start)
    except NotFoundError:
        return store.get(name)[start:]  # the whole has taken the segments' place meanwhile


def _read_segments(store: ObjectStore, name: str, start: int) -> bytes:
    parts: list[bytes] = []
    for begin, end in _segments(store, name):
        if end <= start or begin > start:
            continue  # known already; or there is a gap, which a later look may find filled
        parts.append(store.get(_segment_name(name, begin, end))[start - begin :])
        start = end
    return b"".join(parts)


def _segments(store: ObjectStore, name: str) -> list[tuple[int, int]]:
    """Ranges of bytes, first to last."""
    names = store.list_children(f"{name.removesuffix('.log')}/")
    ranges = (segment.removesuffix(".log").split("-") for segment in names if segment.endswith(".log"))
    return sorted((int(start), int(end)) for start, end in ranges)


def _segment_name(name: str, start: int, end: int) -> str:
    return f"{name.removesuffix('.log')}/{start:012d}-{end:012d}.log"
