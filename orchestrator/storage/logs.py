"""The logs of attempts in the store: their records, how they are written in segments, and how they are searched.

A record is one JSON object per line, complete in itself:

    {"time":"2026-11-21T10:24:10.123456Z","level":"info","sweep":"s","job":"pretrain/a/seed0","attempt":1,"rank":0,
     "source":"stdout","message":"epoch 3"}

Fields have this order, so that a search can skip lines without parsing them. Any other line is also
a record: stacks that faulthandler writes from C, the end of a process that was killed
within a line, and all of the plain logs of earlier versions.

Writing the whole log again every few seconds would cost its length each time. So while a process runs, new
parts become segments, ``rank0/<from>-<to>.log`` in bytes; a process that ends normally writes the
whole log under its name and deletes the segments. The segments of a killed process stay and are its log.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from orchestrator.core.errors import NotFoundError, PreconditionFailedError
from orchestrator.storage.layout import short_hash
from orchestrator.storage.protocol import ObjectStat, ObjectStore

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
"""Names of levels, and their ranks as in ``logging``."""
STDOUT, STDERR, TEXT = "stdout", "stderr", "text"
"""Sources of what was printed, and of lines that are no records; all other sources are names of loggers."""
_START = b'{"time":"'
_TIME = slice(9, 36)
"""Where the time stands in a line."""
_LEVEL_AT = 47
_MESSAGE = b'","message":"'
_CLASSIC = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) (DEBUG|INFO|WARNING|ERROR|CRITICAL) (\S+): (.*)", re.DOTALL
)
"""A line of ``logging`` in the plain logs of earlier versions; the time is the node's local time."""
_TRACEBACK = "Traceback (most recent call last):"
_PLAIN_JSON = re.compile(rb"[A-Za-z0-9 _,:;=/<>@%!'-]+")
"""Bytes that are not escaped within a JSON text."""
_NAME = re.compile(
    r"(?P<folder>logs/(?P<sweep>[^/]+)/(?P<job>.+)/(?P<attempt>\d+)(?:-(?P<digits>\w+))?)/rank(?P<rank>\d+)"
    r"(?:\.log|/\d+-(?P<end>\d+)\.log)"
)
_NUM_THREADS = 16
_NUM_AHEAD = 32
"""Number of logs that are read ahead, which limits the memory."""
_SKEW_S = 600.0
"""Tolerated difference between clocks of nodes and of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogContext:
    """Whose log it is."""

    sweep: str
    job: str
    attempt: int
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """One thing that was printed or logged."""

    context: LogContext
    time: str
    """As ``format_time`` writes it, which sorts as text; empty = not known."""
    level: str
    source: str
    """``stdout``, ``stderr``, ``text`` or the name of a logger."""
    message: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form, in the order of the fields on a line."""
        context = self.context
        return {
            "time": self.time,
            "level": self.level,
            "sweep": context.sweep,
            "job": context.job,
            "attempt": context.attempt,
            "rank": context.rank,
            "source": self.source,
            "message": self.message,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """Which records are wanted."""

    pattern: re.Pattern[str] | None = None
    """Searched for in the message."""
    level: str = "debug"
    """The lowest one."""
    since: str = ""
    """No record before this time, as ``format_time`` writes it."""

    def admits(self, record: LogRecord) -> bool:
        """Whether a record is wanted."""
        if LEVELS.get(record.level, 0) < LEVELS[self.level] or (record.time and record.time < self.since):
            return False
        return self.pattern is None or self.pattern.search(record.message) is not None

    @property
    def literal(self) -> bytes:
        """Text that every matching line must contain; empty = none is known."""
        if self.pattern is None or self.pattern.flags & re.IGNORECASE:
            return b""
        text = self.pattern.pattern
        is_plain = re.escape(text).replace("\\ ", " ").replace("\\-", "-") == text
        content = text.encode()
        return content if is_plain and _PLAIN_JSON.fullmatch(content) else b""


EVERYTHING = LogQuery()


def format_time(at_s: float) -> str:
    """Unix seconds as ISO 8601 in UTC with microseconds: always as long, so that texts compare as times do."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def encode(record: LogRecord) -> str:
    """The line of a record, with its end."""
    return json.dumps(record.to_json(), ensure_ascii=False, separators=(",", ":")) + "\n"


def plain_text(record: LogRecord) -> str:
    """The record for people: printed text as it is, logged text with its time, level and logger."""
    if record.source in {STDOUT, STDERR, TEXT}:
        return record.message
    moment = f"{record.time[:10]} {record.time[11:19]},{record.time[20:23]}"
    return f"{moment} {record.level.upper()} {record.source}: {record.message}"


class LineReader:
    """Turns the bytes of one log, piece by piece, into records. Remembers an unfinished line and the last time."""

    def __init__(self, context: LogContext) -> None:
        self._context = context
        self._rest = b""
        self._last = b""
        """The last record's line, whose time is that of the text that follows."""
        self._time = ""
        self._is_in_traceback = False

    def take(self, content: bytes, query: LogQuery = EVERYTHING, *, is_whole: bool = False) -> Iterator[LogRecord]:
        """The wanted records of the next bytes; ``is_whole``: no more will come, the last line counts as it is."""
        literal = query.literal
        if is_whole and literal and literal not in content and literal not in self._rest + content[: len(literal)]:
            return
        *lines, self._rest = (self._rest + content).split(b"\n")
        if is_whole and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        since, lowest = query.since.encode(), LEVELS[query.level]
        for line in lines:
            if line.startswith(_START):
                self._last = line
                if (since and line[_TIME] < since) or (literal and literal not in line) or _rank(line) < lowest:
                    continue
                if query.pattern is not None and _surely_differs(line, query.pattern):
                    continue
                record = self._decode(line)
            else:
                record = self._read_text(line.decode(errors="replace"))
            if query.admits(record):
                yield record

    def _decode(self, line: bytes) -> LogRecord:
        try:
            document = json.loads(line)
            time, level = str(document["time"]), str(document["level"])
            source, message = str(document["source"]), str(document["message"])
        except (ValueError, KeyError, TypeError):
            self._last = b""  # it only began as records do
            return self._read_text(line.decode(errors="replace"))
        return LogRecord(context=self._context, time=time, level=level, source=source, message=message)

    def _read_text(self, line: str) -> LogRecord:
        if self._last:
            self._time, self._is_in_traceback = self._last[_TIME].decode(errors="replace"), False
            self._last = b""
        record = LogRecord(context=self._context, time=self._time, level="info", source=TEXT, message=line)
        classic = _CLASSIC.fullmatch(line)
        if classic is not None:
            moment = datetime.fromisoformat(f"{classic[1]}.{classic[2]}").timestamp()
            self._time, self._is_in_traceback = format_time(moment), False
            return replace(record, time=self._time, level=classic[3].lower(), source=classic[4], message=classic[5])
        if line.startswith(_TRACEBACK):
            self._is_in_traceback = True
            return replace(record, level="error")
        if self._is_in_traceback:
            self._is_in_traceback = line.startswith(" ") or not line
            return replace(record, level="error")
        return record


def _surely_differs(line: bytes, pattern: re.Pattern[str]) -> bool:
    """Whether a message cannot match, found without parsing its line, which takes several times as long."""
    start = line.find(_MESSAGE)
    if start < 0 or b"\\" in line or not line.endswith(b'"}'):
        return False
    return pattern.search(line[start + len(_MESSAGE) : -2].decode(errors="replace")) is None


def _rank(line: bytes) -> int:
    """Rank of the level of a line that begins like a record; high if it is unknown."""
    level = line[_LEVEL_AT : line.find(b'"', _LEVEL_AT)]
    return LEVELS.get(level.decode(errors="replace"), LEVELS["critical"])


def append_log(store: ObjectStore, name: str, content: bytes) -> int:
    """Add what a log's content has beyond its segments as one more segment; returns the number of bytes added.

    Another writer of the same log (the task for a process that hangs) may add the same bytes; readers see them once.
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
    # Only now: a reader finds either the segments or the whole log.
    for start, end in _segments(store, name):
        store.delete(_segment_name(name, start, end))


def read_log(store: ObjectStore, name: str, start: int = 0) -> bytes:
    """What is stored of a log from byte ``start`` on; empty if there is nothing (yet)."""
    try:
        return store.get(name)[start:]
    except NotFoundError:
        pass
    try:
        return _read_segments(store, name, start)
    except NotFoundError:
        return store.get(name)[start:]  # the whole log has replaced the segments meanwhile


def _read_segments(store: ObjectStore, name: str, start: int) -> bytes:
    parts: list[bytes] = []
    for begin, end in _segments(store, name):
        if end <= start or begin > start:
            continue  # known already; or there is a gap, which may be filled later
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLog:
    """The log of one rank of one attempt, from a listing of the store."""

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
        message = f"{name!r} is not the name of a log"
        raise ValueError(message)
    return _context(match)


def is_log(name: str) -> bool:
    """Whether an object has the name of a log, or of a part of one."""
    return _NAME.fullmatch(name) is not None


def of_keys(logs: Iterable[StoredLog], keys: dict[str, str]) -> list[StoredLog]:
    """Those of the jobs in ``keys``, at their keys: after a changed submit those before it are not mixed in.

    Where a job has no log at its key, those of stores of earlier versions count, whose names have no keys.
    """
    known = [log for log in logs if log.context.job in keys]
    current = [log for log in known if log.digits and log.digits == short_hash(keys[log.context.job])]
    covered = {log.context.job for log in current}
    older = [log for log in known if not log.digits and log.context.job not in covered]
    return sorted([*current, *older], key=lambda log: (log.context.job, log.context.attempt, log.context.rank))


def search_logs(store: ObjectStore, logs: Collection[StoredLog], query: LogQuery = EVERYTHING) -> Iterator[LogRecord]:
    """The wanted records of logs, log after log; logs that end before ``query.since`` are not read.

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
    """One log that may still grow; each call returns new records."""

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
    """New records of logs: each step lists them once and reads those that have grown.

    ``find`` says which logs count at the moment; the records of a step are sorted by time. The step after ``is_over``
    is the last one.
    """
    followers: dict[str, LogFollower] = {}
    is_last = False
    while not is_last:
        news: list[LogRecord] = []
        is_last = is_over()  # checked first: all earlier records are stored already
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
        return []  # deleted by garbage collection meanwhile
    return list(LineReader(log.context).take(content, query, is_whole=True))
