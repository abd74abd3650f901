"""The text log of an attempt: everything this process prints and logs while the attempt runs, copied to the store."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from orchestrator.backends.ray.stacks import write_stacks_into
from orchestrator.errors import StorageError
from orchestrator.storage.logs import finish_log, put_segment
from orchestrator.storage.protocol import ObjectStore

_SLOWER = 1.03
_SLOWEST_S = 30.0
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


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


class _Tee:
    """A text stream that writes to two; everything else is the first one's."""

    def __init__(self, original: TextIO, copy: TextIO) -> None:
        self._original = original
        self._copy = copy

    def write(self, text: str) -> int:
        if not getattr(_in_handler, "is_true", False):
            self._copy.write(text)
        return self._original.write(text)

    def flush(self) -> None:
        self._original.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._original, name)


class AttemptLog:
    """Context of one attempt. The store has the log a few seconds late, and whole once the context has ended.

    Only what goes through Python is seen; native libraries write to the worker's own files on the node. While the
    context lasts, a signal brings the stacks of this process into the log.
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
        # Line buffered: what was printed before a kill -9 is in the file, and the last upload has it.
        self._file = self._path.open("w", encoding="utf-8", errors="backslashreplace", buffering=1)
        write_stacks_into(self._file)
        sys.stdout, sys.stderr = _Tee(sys.stdout, self._file), _Tee(sys.stderr, self._file)
        self._handler = logging.StreamHandler(self._file)
        self._handler.setFormatter(logging.Formatter(_FORMAT))
        self._handler.addFilter(_is_ours)
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
        self._ended.set()
        self._thread.join()
        write_stacks_into(sys.__stderr__ or sys.stderr)  # before the file is closed: the signal would write into it
        self._file.close()
        self._try(lambda: finish_log(self._store, self._name, self._path.read_bytes()))

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

    def _try(self, upload: Callable[[], None]) -> None:
        try:
            upload()
        except StorageError as error:
            # A log is never worth an attempt; the next upload carries what this one did not.
            print(f"log {self._name} was not stored: {error}", file=self._streams[1])
