"""What a log of an attempt says: one JSON object per line, complete in itself.

    {"time":"2026-11-21T10:24:10.123456Z","level":"info","sweep":"s","job":"pretrain/a/seed0","attempt":1,"rank":0,
     "source":"stdout","message":"epoch 3"}

Fields stand in this order, so that a search need not parse lines that it can tell are not wanted. A line that is no
such object is a record all the same: stacks that faulthandler writes from C, the end of a process that was killed
within a line, and all of the plain logs of earlier versions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

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
"""Bytes that stand for themselves within a JSON text."""


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
        """What any line that matches must hold; empty = nothing can be said."""
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
    """As people read it: what was printed as it is, what was logged with its time, level and logger."""
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
    """Whether a message does not match, told without parsing its line, which takes several times as long."""
    start = line.find(_MESSAGE)
    if start < 0 or b"\\" in line or not line.endswith(b'"}'):
        return False
    return pattern.search(line[start + len(_MESSAGE) : -2].decode(errors="replace")) is None


def _rank(line: bytes) -> int:
    """Rank of the level of a line that begins as records do; high where it cannot be told."""
    level = line[_LEVEL_AT : line.find(b'"', _LEVEL_AT)]
    return LEVELS.get(level.decode(errors="replace"), LEVELS["critical"])
