"""The log of an attempt: everything its process prints and logs, as records in the store, and its stacks if it hangs.

A process that hangs may hold Python's lock, so that none of its threads can run. A signal makes faulthandler write the
stacks from C into the log file nevertheless; a task on the process's node then copies the rest of that file into the
store.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.core.errors import StorageError
from orchestrator.core.security.redaction import RedactedStream, redacted
from orchestrator.storage.logs import (
    LEVELS,
    STDERR,
    STDOUT,
    LogContext,
    LogRecord,
    append_log,
    context_of,
    encode,
    finish_log,
    format_time,
    put_segment,
)
from orchestrator.storage.open import open_store
from orchestrator.storage.protocol import ObjectStore

Add = Callable[[float, str, str, str], None]
"""Takes time, level, source and message of a record."""
_MAX_CHARS = 64 * 1024
"""A line that goes on for longer becomes several records."""
_WARNING = re.compile(r"\b\w*Warning: ")
_TRACEBACK = "Traceback (most recent call last):"
_BETWEEN = ("\nDuring handling of the above exception", "\nThe above exception was the direct cause")
"""How ``traceback`` joins the tracebacks of a chain."""
STACKS_SIGNAL = signal.SIGUSR2
_WRITTEN_WITHIN_S = 3.0
_PY_SPY_TIMEOUT_S = 10.0
_SLOWER = 1.03
_SLOWEST_S = 30.0
_MERGED_BYTES = 32 * 1024**2
"""Longer logs stay in segments: to join them would read and send all of it again."""


class PrintedRecords:
    """One stream; ``write`` may come from any thread. What is printed in pieces is put together."""

    def __init__(self, add: Add, source: str, now: Callable[[], float] = time.time) -> None:
        self._add, self._source, self._now = add, source, now
        self._lock = threading.Lock()
        self._line = ""
        self._traceback = ""

    def write(self, text: str) -> None:
        """Take what was printed."""
        if not text:
            return
        with self._lock:
            if self._traceback or (not self._line and self._begins_traceback(text)):
                self._take_traceback(text)
            else:
                self._take(text)

    def close(self) -> None:
        """Flush text that has no end of line yet."""
        with self._lock:
            self._end_traceback()
            if self._line:
                self._emit(self._line)
            self._line = ""

    def _begins_traceback(self, text: str) -> bool:
        return self._source == STDERR and text.startswith((_TRACEBACK, *_BETWEEN))

    def _take_traceback(self, text: str) -> None:
        self._traceback += text
        last = self._traceback.rstrip("\n").rpartition("\n")[2]
        # The interpreter prints a traceback call by call; its last part is the exception, which is not indented.
        is_heading = last.startswith((_TRACEBACK, *(between.strip() for between in _BETWEEN)))
        if (text.endswith("\n") and not is_heading and not last.startswith(" ")) or len(self._traceback) > _MAX_CHARS:
            self._end_traceback()

    def _end_traceback(self) -> None:
        if self._traceback:
            self._add(self._now(), "error", self._source, self._traceback.strip("\n"))
        self._traceback = ""

    def _take(self, text: str) -> None:
        *lines, rest = (self._line + text).split("\n")
        for line in lines:
            self._emit(line)
        if "\r" in rest:  # a progress bar that draws itself anew, for days
            rest = "\r".join(rest.split("\r")[-2:])
        if len(rest) > _MAX_CHARS:
            self._emit(rest)
            rest = ""
        self._line = rest

    def _emit(self, line: str) -> None:
        shown = next((part for part in reversed(line.split("\r")) if part), "")
        level = "warning" if self._source == STDERR and _WARNING.search(shown) else "info"
        self._add(self._now(), level, self._source, shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedProcess:
    """One process of an attempt, and its log."""

    pid: int
    node_id: str
    log_path: str
    """File on that node."""
    log_name: str
    """Object in the store."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        return cls(**document)


def logged_process(log_path: Path, log_name: str) -> LoggedProcess:
    """The calling process."""
    node_id = ray.get_runtime_context().get_node_id()
    return LoggedProcess(pid=os.getpid(), node_id=node_id, log_path=str(log_path), log_name=log_name)


def write_stacks_into(log: TextIO) -> None:
    """From now on, the signal writes the stacks of all threads of this process into this file, which must stay open."""
    faulthandler.register(STACKS_SIGNAL, file=log, all_threads=True)


def examine(process: LoggedProcess, store_uri: str) -> ray.ObjectRef[Any]:
    """Start to write a process's stacks into its log; the reference is ready when that is done. Does not wait."""
    strategy = NodeAffinitySchedulingStrategy(process.node_id, soft=False)
    task: Any = ray.remote(_examine).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    ref: ray.ObjectRef[Any] = task.remote(process.to_json(), store_uri)
    return ref


def _examine(document: Mapping[str, Any], store_uri: str) -> int:
    """Runs on the process's node. Returns by how many bytes the log has grown."""
    process = LoggedProcess.from_json(document)
    path = Path(process.log_path)
    before = path.stat().st_size  # fails if the process has ended and taken its log along: then it needs no signal
    os.kill(process.pid, STACKS_SIGNAL)
    _wait_for_more(path, before)
    content = path.read_bytes() + _py_spy(process.pid)
    return append_log(open_store(store_uri), process.log_name, content)


def _wait_for_more(path: Path, before: int) -> None:
    """Wait until the file has grown and grows no more, or for a few seconds."""
    deadline_s, last = time.monotonic() + _WRITTEN_WITHIN_S, before
    while time.monotonic() < deadline_s:
        time.sleep(0.1)
        size = path.stat().st_size
        if size > before and size == last:
            return
        last = size


def _py_spy(pid: int) -> bytes:
    """Native stacks too, where py-spy is installed and is allowed to inspect other processes."""
    program = shutil.which("py-spy")
    if program is None:
        return b""
    try:
        result = subprocess.run(
            [program, "dump", "--native", "--pid", str(pid)],
            capture_output=True,
            timeout=_PY_SPY_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return b"\n" + result.stdout if result.returncode == 0 else b""


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
    """Ray's own messages, such as a second copy of a traceback, are in the node's files."""
    return not record.name.startswith("ray.")


class _RecordFile:
    """The file of the records. Line buffered: what was printed before a kill -9 is in it, and a later upload has it."""

    def __init__(self, path: Path, context: LogContext) -> None:
        # Other users must not read what a job prints, and all users share the directory for scratch.
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
        """Flush text that has no end of line yet."""
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
        tees: list[Any] = list(self._tees)  # they have all methods of text streams that anybody calls
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
            # A failed upload of the log must not end the attempt; the next upload carries what this one did not.
            print(f"log {self._name} was not stored: {error}", file=self._streams[1])
