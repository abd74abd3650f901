"""What a program prints, as records: one per line, one per traceback, one per finished progress bar."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from orchestrator.storage.log_records import STDERR

Add = Callable[[float, str, str, str], None]
"""Takes time, level, source and message of a record."""
_MAX_CHARS = 64 * 1024
"""A line that goes on for longer becomes several records."""
_WARNING = re.compile(r"\b\w*Warning: ")
_TRACEBACK = "Traceback (most recent call last):"
_BETWEEN = ("\nDuring handling of the above exception", "\nThe above exception was the direct cause")
"""How ``traceback`` joins the tracebacks of a chain."""


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
        """Let go of what has no end yet."""
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
