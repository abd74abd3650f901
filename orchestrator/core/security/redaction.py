"""The one filter for all text that leaves a process: logs, failures, errors, notifications.

It replaces by ``[hidden]``: values that this process knows to be secret (see ``known``), text that looks like a secret
(see ``forms``), and text after ``password=`` and similar.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TextIO, TypeAlias

from orchestrator.core.security.secret_patterns import WITH_USER, form_of, secret_forms
from orchestrator.core.security.secret_values import MIN_CHARACTERS, read_small, secret_values

HIDDEN = "[hidden]"
_MAX_LINE = 1_000_000
"""Longer lines are cut into pieces, each of which is redacted separately."""
_KEY_BLOCK = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
# Texts come as they are, within JSON, or encoded as in URIs.
_BLANK, _QUOTES = r"(?:\s|%20|\+)", r"(?:[\"'\\]|%2[27]){0,4}"
_VALUE = r"[^\s\"'\\,;&)}\]]"
_HEADER = re.compile(rf"(?i)((?<![A-Za-z])(?:basic|bearer){_BLANK}{{1,8}})[A-Za-z0-9+/=._~%-]{{12,}}")
_NAMES = (
    r"(?:passw(?:or)?d|pwd|secret|secret[_-]?key|secret[_-]?access[_-]?key|api[_-]?key|private[_-]?key|access[_-]?key"
    r"|(?:(?:auth|access|session|security|refresh|id)[_-]?)?token|credentials?|x-amz-(?:signature|credential)|sig)"
)
_HINT = re.compile(r"(?i)pass|pwd|secret|key|token|credential|sig")
"""A text without any of these cannot match the two patterns below, which take longer."""
_ASSIGNED = re.compile(
    rf"(?i)((?<![A-Za-z]){_NAMES}{_QUOTES}{_BLANK}{{0,8}}(?:=|%3D){_BLANK}{{0,8}}{_QUOTES}){_VALUE}{{8,}}"
)
# Prose may follow a colon, too; a word with letters and digits is no prose.
_NAMED = re.compile(
    rf"(?i)((?<![A-Za-z]){_NAMES}{_QUOTES}{_BLANK}{{0,8}}(?::|%3A){_BLANK}{{0,8}}{_QUOTES})"
    rf"(?={_VALUE}{{0,200}}\d)(?={_VALUE}{{0,200}}[a-z])[^\s\"'\\,;&)}}\]/]{{8,}}"
)
_ExceptionInfo: TypeAlias = tuple[type[BaseException], BaseException, TracebackType | None]


class _Known:
    """The known values as one pattern, made anew when the environment has changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[bytes, bytes] | None = None
        self._added: set[str] = set()
        self._pattern: re.Pattern[str] | None = None

    def add(self, value: str) -> None:
        with self._lock:
            self._added.add(value)
            self._seen = None

    def hide(self, text: str) -> str:
        pattern = self._current()
        return text if pattern is None else pattern.sub(HIDDEN, text)

    def _current(self) -> re.Pattern[str] | None:
        with self._lock:
            found = dict(os.environb)
            if found != self._seen:
                self._pattern, self._seen = self._made(), found
            return self._pattern

    def _made(self) -> re.Pattern[str] | None:
        given = {f"ADDED_SECRET_{number}": value for number, value in enumerate(self._added)}
        values = secret_values({**os.environ, **given}, read_small)
        # The longest first: of two values of which one begins with the other, all of it must go.
        ordered = sorted(values, key=lambda value: (-len(value), value))
        return re.compile("|".join(map(re.escape, ordered))) if ordered else None


_KNOWN = _Known()


def redacted(text: str) -> str:
    """The text without secrets; unchanged if it has none. About 50 us for a line."""
    text = redacted_values(text)
    return text if _HINT.search(text) is None else _NAMED.sub(_after_name, _ASSIGNED.sub(_after_name, text))


def redacted_values(text: str) -> str:
    """As ``redacted``, but what follows ``password=`` stays unless it looks like a secret itself: for program text."""
    text = _HEADER.sub(_after_name, _KEY_BLOCK.sub(HIDDEN, _KNOWN.hide(text)))
    pieces, end = [], 0
    for found in secret_forms(text):
        scheme = re.match(r"[\w+.-]+", found.group()) if form_of(found) == WITH_USER else None
        shown = f"{scheme.group()}://{HIDDEN}@" if scheme else HIDDEN
        pieces += [text[end : found.start()], shown]
        end = found.end()
    return "".join([*pieces, text[end:]]) if pieces else text


def add_secret(value: str) -> None:
    """Hide a value from now on that only this process knows; values below 8 characters are not hidden."""
    if len(value) >= MIN_CHARACTERS:
        _KNOWN.add(value)


class RedactedStream:
    """A text stream that passes on whole lines, redacted; a secret written in pieces is found all the same.

    What follows the last end of a line waits for its own, or for ``finish``.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.RLock()
        self._kept = ""
        self._is_in_key = False

    def write(self, text: str) -> int:
        """As of any text stream."""
        with self._lock:
            self._kept += text
            end = max(self._kept.rfind("\n"), self._kept.rfind("\r")) + 1
            if end or len(self._kept) > _MAX_LINE:
                whole, self._kept = self._kept[: end or None], self._kept[end:] if end else ""
                self._stream.write(self._cleaned(whole))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """As of any text stream."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Pass on complete lines."""
        self._stream.flush()

    def finish(self) -> None:
        """Pass on the rest."""
        with self._lock:
            kept, self._kept = self._kept, ""
            if kept:
                self._stream.write(self._cleaned(kept))
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def _cleaned(self, text: str) -> str:
        if "PRIVATE KEY-----" not in text and not self._is_in_key:
            return redacted(text)
        return "".join(map(self._cleaned_line, text.splitlines(keepends=True)))

    def _cleaned_line(self, line: str) -> str:
        """Remove all lines of a private key that is written line by line."""
        was_in_key = self._is_in_key
        if "PRIVATE KEY-----" in line:
            self._is_in_key = "-----BEGIN" in line and "-----END" not in line
            return f"{HIDDEN}\n"
        return f"{HIDDEN}\n" if was_in_key else redacted(line)


def install() -> None:
    """From now on this process redacts its log records and the tracebacks of errors that nobody caught."""
    original = logging.getLogRecordFactory()
    if getattr(original, "is_redacting", False):
        return

    def make_record(*args: object, **named: object) -> logging.LogRecord:
        return _cleaned_record(original(*args, **named))

    setattr(make_record, "is_redacting", True)  # noqa: B010 - a mark on this one function
    logging.setLogRecordFactory(make_record)
    sys.excepthook = _show_exception
    threading.excepthook = _show_thread_exception


def _after_name(found: re.Match[str]) -> str:
    return f"{found.group(1)}{HIDDEN}"


def _cleaned_record(record: logging.LogRecord) -> logging.LogRecord:
    try:
        message = record.getMessage()
    except Exception:  # noqa: BLE001 - arguments that do not fit: logging itself tells that
        return record
    cleaned = redacted(message)
    if cleaned != message:
        record.msg, record.args = cleaned, ()
    if record.exc_info and record.exc_info[0] is not None:
        # Formatters show this text where it is there.
        record.exc_text = redacted("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
    return record


def _show_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _print_error((kind, error, trace), sys.stderr.write)


def _show_thread_exception(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None and not issubclass(arguments.exc_type, SystemExit):
        _print_error((arguments.exc_type, arguments.exc_value, arguments.exc_traceback), sys.stderr.write)


def _print_error(raised: _ExceptionInfo, write: Callable[[str], object]) -> None:
    write(redacted("".join(traceback.format_exception(*raised))))
