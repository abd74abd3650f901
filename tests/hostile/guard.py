"""Watches what a process does while it reads hostile input: programs, connections, writes, memory and time.

The interpreter tells an audit hook of everything of the kind (PEP 578). A hook cannot be removed, and it slows down
what its process does later: the first test that watches sets it, and it is switched.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

EXECUTIONS = frozenset(
    {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.system", "pty.spawn"}
) | {"subprocess.Popen", "ctypes.dlopen"}
CONNECTIONS = frozenset({"socket.connect", "socket.getaddrinfo", "socket.bind", "urllib.Request"})
CHANGES = frozenset({"os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}) | {
    "os.symlink",
    "os.truncate",
    "shutil.rmtree",
}
MAX_GROWTH_BYTES = 600 * 1024**2
"""An image of 100 million pixels as RGB, once decoded and once copied; bombs would take thousands of times as much."""
MAX_CPU_S = 10.0
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(slots=True)
class Seen:
    """What happened that must not."""

    root: Path
    """Below it, writing is allowed."""
    events: list[str] = field(default_factory=list)
    thread: int = 0


_watching: list[Seen] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    for seen in tuple(_watching):
        if seen.thread == threading.get_ident():
            _judge(seen, event, arguments)


def _judge(seen: Seen, event: str, arguments: tuple[Any, ...]) -> None:
    if event in EXECUTIONS and not (event == "ctypes.dlopen" and arguments[0] is None):
        seen.events.append(f"{event} {arguments[:2]}")
    elif event in CONNECTIONS:
        seen.events.append(f"{event} {arguments[1:]}")
    elif event in CHANGES and not _is_below(seen.root, arguments[-2] if event == "os.symlink" else arguments[0]):
        seen.events.append(f"{event} {arguments}")
    elif event == "open" and _is_writing(arguments[2]) and not _is_below(seen.root, arguments[0]):
        seen.events.append(f"open for writing {arguments[0]}")


def _is_writing(flags: object) -> bool:
    return isinstance(flags, int) and bool(flags & _WRITING)


def _is_below(root: Path, path: object) -> bool:
    if not isinstance(path, str | bytes | os.PathLike):
        return True  # an open descriptor, whose opening was seen
    text = os.fspath(path)
    real = os.path.realpath(text.decode(errors="replace") if isinstance(text, bytes) else text)
    # Compiled modules are written as they are imported for the first time.
    return real == os.devnull or real.startswith(f"{root}{os.sep}") or "__pycache__" in real


@cache
def _set_hook() -> None:
    sys.addaudithook(_hook)


@contextmanager
def watched(root: Path) -> Iterator[Seen]:
    """Fail if the body runs a program, opens a connection, writes elsewhere, or takes too much memory or time."""
    _set_hook()
    seen = Seen(root=root.resolve(), thread=threading.get_ident())
    before_bytes = _forget_peak()
    started_s = time.thread_time()
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching.remove(seen)
        assert seen.events == []
        assert time.thread_time() - started_s < MAX_CPU_S
        assert _peak() - before_bytes < MAX_GROWTH_BYTES


def _forget_peak() -> int:
    """Resident bytes now; the kernel's peak begins anew (proc_pid_clear_refs(5))."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return _status("VmHWM")  # growth beyond the former peak is noticed all the same
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
