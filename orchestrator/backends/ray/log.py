"""The log of an attempt: everything this process prints and logs while the attempt runs, as records in the store."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from orchestrator.backends.ray.printed import PrintedRecords
from orchestrator.backends.ray.stacks import write_stacks_into
from orchestrator.core.errors import StorageError
from orchestrator.core.security.redaction import RedactedStream, redacted
from orchestrator.storage.log_records import LEVELS, STDERR, STDOUT, LogContext, LogRecord, encode, format_time
from orchestrator.storage.log_search import context_of
from orchestrator.storage.logs import finish_log, put_segment
from orchestrator.storage.protocol import ObjectStore

_SLOWER = 1.03
_SLOWEST_S = 30.0
_MERGED_BYTES = 32 * 1024**2
"""Longer logs stay in segments: to join them would read and send all of it again."""


_in_handler = threading.local()


class _QuietHandlers:
    """Handlers that print log records, as in workers of Ray Train: what they print is not copied into the log again."""

    def __init__(self, handlers: list[logging.Handler]) -> None:
        self._emits = {handler: handler.emit for handler in handlers}
        for handler, emit in self._emits.items():
            setattr(handler, "emit", _uncopied(emit))  # noqa: B010 - a method of this one handler

    def restore(self) -> None:
        """Put the handlers back."""
        for handler in self._emits:
            del handler.emit


def _uncopied(emit: Callable[[logging.LogRecord], None]) -> Callable[[logging.LogRecord], None]:
    def quiet_emit(record: logging.LogRecord) -> None:
        _in_handler.is_true = True
        try:
            emit(record)
        finally:
            _in_handler.is_true = False

    return quiet_emit


def _is_ours(record: logging.LogRecord) -> bool:
    """Ray's own words, such as a second copy of a traceback, are in the node's files."""
    return not record.name.startswith("ray.")


class _RecordFile:
    """The file of the records. Line buffered: what was printed before a kill -9 is in it, and a later upload has it."""

    def __init__(self, path: Path, context: LogContext) -> None:
        # Others must not read what a job prints, and the directory for scratch is everybody's.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self.file = os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace", buffering=1)
        self._context = context

    def add(self, at_s: float, level: str, source: str, message: str) -> None:
        """Write one record."""
        record = LogRecord(
            context=self._context, time=format_time(at_s), level=level, source=source, message=redacted(message)
        )
        self.file.write(encode(record))


class _RecordHandler(logging.Handler):
    """Log records, with their tracebacks, into the file."""

    def __init__(self, records: _RecordFile) -> None:
        super().__init__()
        self._records = records
        self.setFormatter(logging.Formatter("%(message)s"))
        self.addFilter(_is_ours)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            levels = [name for name, rank in LEVELS.items() if rank <= record.levelno]
            self._records.add(record.created, levels[-1] if levels else "debug", record.name, self.format(record))
        except Exception:  # noqa: BLE001 - as all handlers: what logs must not fail because its log does
            self.handleError(record)


class _Tee:
    """A text stream that is also copied into records; everything else is the original's, which Ray keeps in files."""

    def __init__(self, original: TextIO, copy: PrintedRecords) -> None:
        self._original = original
        self._redacted = RedactedStream(original)
        self._copy = copy

    def write(self, text: str) -> int:
        if not getattr(_in_handler, "is_true", False):
            self._copy.write(text)
        return self._redacted.write(text)

    def flush(self) -> None:
        self._original.flush()

    def close_copy(self) -> None:
        """Let go of what has no end of line yet."""
        self._copy.close()
        self._redacted.finish()

    def __getattr__(self, name: str) -> object:
        return getattr(self._original, name)


class AttemptLog:
    """Context of one attempt. The store has the log a few seconds late, and whole once the context has ended.

    Only what goes through Python is seen; native libraries write to the worker's own files on the node. While the
    context lasts, a signal brings the stacks of this process into the log. Secrets that this process knows are hidden.
    """

    def __init__(self, store: ObjectStore, name: str, path: Path, *, every_s: float) -> None:
        self._store = store
        self._name = name
        self._path = path
        self._every_s = every_s
        self._ended = threading.Event()
        self._uploaded_bytes = 0

    def __enter__(self) -> Self:
        self._streams = (sys.stdout, sys.stderr)
        self._records = _RecordFile(self._path, context_of(self._name))
        write_stacks_into(self._records.file)
        self._tees = [
            _Tee(stream, PrintedRecords(self._records.add, source))
            for stream, source in zip(self._streams, (STDOUT, STDERR), strict=True)
        ]
        tees: list[Any] = list(self._tees)  # as far as anybody uses them, they are text streams
        sys.stdout, sys.stderr = tees
        self._handler = _RecordHandler(self._records)
        root = logging.getLogger()
        self._quiet = _QuietHandlers(root.handlers)
        self._level = root.level
        root.setLevel(min(root.level or logging.INFO, logging.INFO))
        root.addHandler(self._handler)
        self._thread = threading.Thread(target=self._upload_often, name="attempt-log", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        root = logging.getLogger()
        root.removeHandler(self._handler)
        self._quiet.restore()
        root.setLevel(self._level)
        sys.stdout, sys.stderr = self._streams
        for tee in self._tees:
            tee.close_copy()
        self._ended.set()
        self._thread.join()
        write_stacks_into(sys.__stderr__ or sys.stderr)  # before the file is closed: the signal would write into it
        self._records.file.close()
        self._try(self._finish)

    def _upload_often(self) -> None:
        pause_s = self._every_s
        while not self._ended.wait(pause_s):
            self._try(self._upload_news)
            # A week of one object every 3 s would be 200,000 of them.
            pause_s = min(pause_s * _SLOWER, max(_SLOWEST_S, self._every_s))

    def _upload_news(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._uploaded_bytes)
            content = file.read()
        if content:
            put_segment(self._store, self._name, self._uploaded_bytes, content)
            self._uploaded_bytes += len(content)

    def _finish(self) -> None:
        if self._path.stat().st_size <= _MERGED_BYTES:
            finish_log(self._store, self._name, self._path.read_bytes())
        else:
            self._upload_news()

    def _try(self, upload: Callable[[], None]) -> None:
        try:
            upload()
        except StorageError as error:
            # A log is never worth an attempt; the next upload carries what this one did not.
            print(f"log {self._name} was not stored: {error}", file=self._streams[1])
