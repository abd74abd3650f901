"""Starting and stopping a directory's stack from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from orchestrator.errors import ClusterError
from orchestrator.stack.children import GRACE_S, IDLE_TIMEOUT_S, READY_TIMEOUT_S
from orchestrator.stack.description import LOG_FOLDER, WITH_S3, Stack, make_private, read_stack, touch_stack
from orchestrator.stack.environment import child_environment, python

START_LOCK_FILE = "stack-start.lock"
_POLL_S = 0.05


def ensure_stack(directory: Path, *, idle_timeout_s: float = IDLE_TIMEOUT_S, with_s3: bool = False) -> Stack:
    """The directory's stack, started if there is none; several callers at once get the same one.

    ``idle_timeout_s`` counts for a stack that this call starts: it leaves after so long without a client or live sweep.
    ``with_s3`` asks for a local S3 server; one that is there without being asked for is fine.

    Raises:
        ClusterError: it did not come up, or runs without what is asked for.
    """
    home = directory.absolute()
    make_private(home)
    with FileLock(home / START_LOCK_FILE):
        arguments = [WITH_S3] if with_s3 else []
        stack = read_stack(home) or _start(home, idle_timeout_s, arguments)
    if with_s3 and not stack.s3_url:
        message = f"the stack of {home} runs without an S3 server; run `orchestrator down`, then `orchestrator up --s3`"
        raise ClusterError(message)
    touch_stack(home)
    return stack


def stop_stack(directory: Path) -> bool:
    """End the directory's stack with all that runs on it; false if there is none. Checkpoints and results stay."""
    home = directory.absolute()
    stack = read_stack(home)
    if stack is None:
        return False
    _signal(stack, signal.SIGTERM)
    deadline_s = time.monotonic() + GRACE_S + 5.0
    while stack.is_alive:
        if time.monotonic() > deadline_s:
            # Its children notice: Ray's head has a process that ends the rest when the head is gone.
            _signal(stack, signal.SIGKILL)
        time.sleep(_POLL_S)
    return True


def _start(home: Path, idle_timeout_s: float, arguments: list[str]) -> Stack:
    log_path = home / LOG_FOLDER / "stack.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    command = [python(), "-m", "orchestrator.stack.supervisor", str(home), str(idle_timeout_s), *arguments]
    with log_path.open("wb") as log:
        # Its own session: Ctrl-C and a closing terminal reach this command, not the stack.
        supervisor = subprocess.Popen(
            command, cwd=home, env=child_environment(home), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    deadline_s = time.monotonic() + READY_TIMEOUT_S + GRACE_S
    while time.monotonic() < deadline_s:
        stack = read_stack(home)
        if stack is not None and stack.pid == supervisor.pid:
            return stack
        if supervisor.poll() is not None:
            break
        time.sleep(_POLL_S)
    with suppress(ProcessLookupError):
        supervisor.terminate()
    said = log_path.read_text(encoding="utf-8", errors="replace").strip()
    message = f"the local stack of {home} did not come up; {log_path} says:\n{said}"
    raise ClusterError(message)


def _signal(stack: Stack, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(stack.pid, number)
