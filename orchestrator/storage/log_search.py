"""Finding logs of a sweep, and records in them: one listing, then many reads at a time."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from orchestrator.core.errors import NotFoundError
from orchestrator.storage.layout import short_hash
from orchestrator.storage.log_records import EVERYTHING, LineReader, LogContext, LogQuery, LogRecord, format_time
from orchestrator.storage.logs import read_log
from orchestrator.storage.protocol import ObjectStat, ObjectStore

_NAME = re.compile(
    r"(?P<folder>logs/(?P<sweep>[^/]+)/(?P<job>.+)/(?P<attempt>\d+)(?:-(?P<digits>\w+))?)/rank(?P<rank>\d+)"
    r"(?:\.log|/\d+-(?P<end>\d+)\.log)"
)
_NUM_THREADS = 16
_NUM_AHEAD = 32
"""Logs that are read before they are asked for: bounds what is in memory."""
_SKEW_S = 600.0
"""Clocks of nodes and of the store may differ by so much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLog:
    """The log of one rank of one attempt, as a listing of the store tells it."""

    name: str
    context: LogContext
    digits: str
    """Of the key of the attempt (``short_hash``); empty in stores of earlier versions."""
    size_bytes: int
    """What is stored so far."""
    modified_at_s: float
    """Of its newest part, by the store's clock."""


def find_logs(store: ObjectStore, sweep: str, job: str = "") -> list[StoredLog]:
    """All logs of a sweep, or of one job, by job, attempt and rank. Takes one listing."""
    found: dict[str, StoredLog] = {}
    for stat in store.list_objects(f"logs/{sweep}/{f'{job}/' if job else ''}"):
        log = _stored_log(stat)
        if log is None or (job and log.context.job != job):
            continue
        # Of one that is being finished, parts and whole are both there for a moment.
        if (other := found.get(log.name)) is None or other.size_bytes < log.size_bytes:
            found[log.name] = log
    return sorted(found.values(), key=lambda log: (log.context.job, log.context.attempt, log.context.rank))


def context_of(name: str) -> LogContext:
    """Whose log has this name (``layout.log_name``). Raises ``ValueError`` for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        message = f"{name!r} is no name of a log"
        raise ValueError(message)
    return _context(match)


def of_keys(logs: Iterable[StoredLog], keys: dict[str, str]) -> list[StoredLog]:
    """Those of the jobs in ``keys``, at their keys: after a changed submit those before it are not mixed in.

    Where a job has no log at its key, those of stores of earlier versions count, which told no keys.
    """
    known = [log for log in logs if log.context.job in keys]
    current = [log for log in known if log.digits and log.digits == short_hash(keys[log.context.job])]
    covered = {log.context.job for log in current}
    older = [log for log in known if not log.digits and log.context.job not in covered]
    return sorted([*current, *older], key=lambda log: (log.context.job, log.context.attempt, log.context.rank))


def search_logs(store: ObjectStore, logs: Collection[StoredLog], query: LogQuery = EVERYTHING) -> Iterator[LogRecord]:
    """The wanted records of logs, log after log; what was last written before ``query.since`` is not even read.

    Raises:
        StorageError: the store does not answer.
    """
    wanted = deque(log for log in logs if not _is_before(log, query.since))
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="logs") as pool:
        pending: deque[Future[list[LogRecord]]] = deque()
        while wanted or pending:
            while wanted and len(pending) < _NUM_AHEAD:
                pending.append(pool.submit(_matches, store, wanted.popleft(), query))
            yield from pending.popleft().result()


class LogFollower:
    """One log that may still grow; each look returns what is new."""

    def __init__(self, store: ObjectStore, name: str, context: LogContext) -> None:
        self._store, self._name = store, name
        self._reader = LineReader(context)
        self.num_bytes = 0
        """Read so far."""

    def take(self, query: LogQuery = EVERYTHING, *, is_whole: bool = False) -> list[LogRecord]:
        """The wanted records among what is new; ``is_whole``: no more will come."""
        content = read_log(self._store, self._name, self.num_bytes)
        self.num_bytes += len(content)
        return list(self._reader.take(content, query, is_whole=is_whole))


def follow_logs(
    store: ObjectStore,
    find: Callable[[], Collection[StoredLog]],
    is_over: Callable[[], bool],
    query: LogQuery = EVERYTHING,
) -> Iterator[list[LogRecord]]:
    """What is new in logs, again and again: each step lists them once and reads those that have grown.

    ``find`` says which logs count at the moment; the records of a step are sorted by time. The step after ``is_over``
    is the last one.
    """
    followers: dict[str, LogFollower] = {}
    is_last = False
    while not is_last:
        news: list[LogRecord] = []
        is_last = is_over()  # asked first: what came before is there to be read
        for log in find():
            follower = followers.setdefault(log.name, LogFollower(store, log.name, log.context))
            if is_last or log.size_bytes > follower.num_bytes:
                news += follower.take(query, is_whole=is_last)
        yield sorted(news, key=lambda record: record.time)


def _stored_log(stat: ObjectStat) -> StoredLog | None:
    match = _NAME.fullmatch(stat.name)
    if match is None:
        return None
    return StoredLog(
        name=f"{match['folder']}/rank{match['rank']}.log",
        context=_context(match),
        digits=match["digits"] or "",
        size_bytes=int(match["end"]) if match["end"] else stat.size_bytes,
        modified_at_s=stat.modified_at_s,
    )


def _context(match: re.Match[str]) -> LogContext:
    return LogContext(sweep=match["sweep"], job=match["job"], attempt=int(match["attempt"]), rank=int(match["rank"]))


def _is_before(log: StoredLog, since: str) -> bool:
    return bool(since) and format_time(min(log.modified_at_s + _SKEW_S, 4e9)) < since


def _matches(store: ObjectStore, log: StoredLog, query: LogQuery) -> list[LogRecord]:
    try:
        content = read_log(store, log.name)
    except NotFoundError:
        return []  # collected meanwhile
    return list(LineReader(log.context).take(content, query, is_whole=True))
