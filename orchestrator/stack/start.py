"""Starting and stopping the stack of a directory from outside, or a Ray cluster inside this command.

The second is for tests and notebooks: it ends with the command, together with everything that runs on it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from orchestrator.core.errors import ClusterError, InfeasibleError, OrchestratorError
from orchestrator.stack.attach import log_raylet_messages, set_ray_environment
from orchestrator.stack.children import (
    IDLE_TIMEOUT_S,
    LOCK_FILE,
    NUM_TRIES,
    OBJECT_STORE_BYTES,
    READY_TIMEOUT_S,
    STACK_STOP_GRACE_S,
    ray_directory,
    ray_sessions,
    remove_ray_directory,
)
from orchestrator.stack.description import (
    LOG_FOLDER,
    LOOPBACK,
    STACK_FILE,
    WITH_S3,
    Stack,
    check_owner,
    make_private,
    own_boot_id,
    read_description,
    read_stack,
    remove_description,
    start_ticks_of,
    touch_stack,
    unusable,
    write_stack,
)
from orchestrator.stack.environment import child_environment, client_environment, python, renew_token
from orchestrator.storage.files import scratch_folder

START_LOCK_FILE = "stack-start.lock"
STACK_LOG = "stack.log"
_POLL_S = 0.05
RESTART_EVERY_S = 20.0
"""Seconds between two restarts of a killed stack by commands that show a sweep, if the new supervisor dies at once."""


def ensure_stack(directory: Path, *, idle_timeout_s: float = IDLE_TIMEOUT_S, with_s3: bool = False) -> Stack:
    """The directory's stack, started if there is none; several callers at once get the same one.

    ``idle_timeout_s`` counts for a stack that this call starts: it ends after so long without a client or live sweep.
    ``with_s3`` asks for a local S3 server; one that is there without being asked for is fine.

    Raises:
        ClusterError: it did not come up, runs without the requested server, or is of another host.
    """
    home = directory.absolute()
    make_private(home)
    deadline_s = time.monotonic() + NUM_TRIES * READY_TIMEOUT_S + STACK_STOP_GRACE_S
    while True:
        with _alone(home, timeout_s=deadline_s - time.monotonic()):
            _check_is_here(home)
            stack = read_stack(home) or _start(home, idle_timeout_s, with_s3=with_s3 or _had_s3(home))
        if with_s3 and not stack.s3_url:
            message = (
                f"the stack of {home} runs without an S3 server; run `orchestrator down`, then `orchestrator up --s3`"
            )
            raise ClusterError(message)
        touch_stack(home)
        if not stack.trouble:
            return stack
        if time.monotonic() > deadline_s:
            message = f"{stack.trouble}, and is not up again; see {home / LOG_FOLDER / STACK_LOG}"
            raise ClusterError(message)
        time.sleep(_POLL_S)  # its supervisor starts it again


@contextmanager
def no_stack(directory: Path) -> Iterator[None]:
    """Keep the directory free of a stack while the body runs: its controller would have the name of the body's.

    Raises:
        InfeasibleError: a stack runs or is starting, or another process is here.
    """
    home = directory.absolute()
    make_private(home)
    with _alone(home, timeout_s=0, refusal=InfeasibleError):
        if read_stack(home) is not None:
            raise InfeasibleError(_not_alone(home))
        yield


@contextmanager
def _alone(home: Path, *, timeout_s: float, refusal: type[OrchestratorError] = ClusterError) -> Iterator[None]:
    lock = FileLock(home / START_LOCK_FILE)
    try:
        lock.acquire(timeout=max(0.0, timeout_s))
    except Timeout as error:
        raise refusal(_not_alone(home)) from error
    except OSError as error:
        raise unusable(home, error) from error
    try:
        yield
    finally:
        lock.release()


def _not_alone(home: Path) -> str:
    return (
        f"a stack runs or is starting in {home}, or a command with --foreground runs there: two controllers would take "
        "each other's sweeps; submit without --foreground, wait for that command, or run `orchestrator down`"
    )


def stop_stack(directory: Path) -> bool:
    """End the directory's stack with all of its processes; False if there is none. Checkpoints and results stay.

    What a killed stack has left is removed, too.

    Raises:
        ClusterError: it is of another host, or the directory is another user's.
    """
    home = directory.absolute()
    check_owner(home)
    ends_s = time.monotonic() + STACK_STOP_GRACE_S + 5.0
    while True:
        _check_is_here(home)
        if (stack := read_stack(home)) is not None:
            break
        try:
            return _tidy_up(home)
        except Timeout as error:  # a stack is starting or ending
            if _is_starting(home):
                ends_s = time.monotonic() + STACK_STOP_GRACE_S + 5.0
            elif time.monotonic() > ends_s:
                raise ClusterError(
                    f"a supervisor that this process cannot see holds {home / LOCK_FILE}: it runs in another container "
                    "of this machine; run `orchestrator down` there"
                ) from error
        time.sleep(_POLL_S)
    _signal(stack, signal.SIGTERM)
    deadline_s = time.monotonic() + STACK_STOP_GRACE_S + 5.0
    while stack.is_alive:
        if time.monotonic() > deadline_s:
            _signal(stack, signal.SIGKILL)
        time.sleep(_POLL_S)
    with suppress(Timeout):  # another one is starting
        _tidy_up(home)
    return True


def _is_starting(home: Path) -> bool:
    try:
        with FileLock(home / START_LOCK_FILE, timeout=0):
            return False
    except Timeout:
        return True


def _check_is_here(home: Path) -> None:
    """Refuse to touch a stack that may run where this host cannot see it: two would write the same files."""
    stack = read_description(home)
    if stack is None or stack.is_here:
        return
    again = "; then start it by `orchestrator up --s3`, as it had an S3 server" if stack.s3_url else ""
    raise ClusterError(
        f"the stack of {home} was started on host {stack.host}, and this is {socket.gethostname()}: run the command "
        f"there; if {stack.host} or its stack is gone for good, delete {home / STACK_FILE}{again}"
    )


def _tidy_up(home: Path) -> bool:
    """End and remove the remains of a killed stack; returns whether there was one.

    Raises:
        Timeout: a stack runs, starts or ends.
    """
    if not (home / LOCK_FILE).exists():
        return False
    with FileLock(home / LOCK_FILE, timeout=0):
        was_there = read_description(home) is not None
        remove_ray_directory(ray_directory(home))
        remove_description(home)
        return was_there


def _had_s3(home: Path) -> bool:
    """Whether the stack that was killed here had an S3 server: sweeps may have their store there."""
    killed = read_description(home)
    return killed is not None and bool(killed.s3_url)


def restart_killed_stack(directory: Path) -> Stack | None:
    """Begin to start the directory's stack again if its supervisor was killed, without waiting for it.

    Returns the killed stack's description; ``None`` if there is none on this host, and nothing was done. From here on
    ``read_stack`` finds the new one, with its trouble.
    """
    home = directory.absolute()
    if (killed := read_description(home)) is None or killed.is_alive or not killed.is_here:
        return None
    try:
        with FileLock(home / START_LOCK_FILE, timeout=0):
            if (killed := read_description(home)) is None or killed.is_alive:
                return None
            if killed.trouble and time.time() - (home / STACK_FILE).stat().st_mtime < RESTART_EVERY_S:
                return None  # the latest restart has failed just now
            with FileLock(home / LOCK_FILE, timeout=0):
                pass  # held: its supervisor lives in another container, whose processes cannot be seen here
            pid = _launch(home, IDLE_TIMEOUT_S, with_s3=bool(killed.s3_url)).pid
            trouble = f"The supervisor of the local stack (pid {killed.pid}) has died"
            started_at = start_ticks_of(pid) or 0
            starting = replace(killed, pid=pid, pid_started_at=started_at, boot_id=own_boot_id(), trouble=trouble)
            write_stack(home, starting)
    except (Timeout, OSError):
        return None  # another process starts it, or the disk is full or not writable
    return killed


def _launch(home: Path, idle_timeout_s: float, *, with_s3: bool) -> subprocess.Popen[bytes]:
    log_path = home / LOG_FOLDER / STACK_LOG
    log_path.parent.mkdir(parents=True, exist_ok=True)
    command = [python(), "-m", "orchestrator.stack.supervisor", str(home), str(idle_timeout_s)]
    command += [WITH_S3] if with_s3 else []
    with log_path.open("wb") as log:
        # Its own session: Ctrl-C and a closing terminal reach this command, not the stack.
        return subprocess.Popen(
            command, cwd=home, env=child_environment(home), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip


def _start(home: Path, idle_timeout_s: float, *, with_s3: bool) -> Stack:
    supervisor = _launch(home, idle_timeout_s, with_s3=with_s3)
    deadline_s = time.monotonic() + NUM_TRIES * READY_TIMEOUT_S + STACK_STOP_GRACE_S
    is_up = False
    try:
        while time.monotonic() < deadline_s:
            stack = read_stack(home)
            if stack is not None and stack.pid == supervisor.pid:
                is_up = True
                return stack
            if supervisor.poll() is not None:
                break
            time.sleep(_POLL_S)
    finally:
        if not is_up:  # also after Ctrl-C: it would come up later, with nobody who waits for it
            supervisor.terminate()
    reason = why_stack_ended(home) or f"see {home / LOG_FOLDER / STACK_LOG}"
    raise ClusterError(f"the local stack of {home} did not come up: {reason}")


def why_stack_ended(directory: Path) -> str:
    """The last error that a directory's stack has logged; empty if it ended in order."""
    try:
        logged = (directory / LOG_FOLDER / STACK_LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "".join([line.partition(" ERROR ")[2] for line in logged.splitlines() if " ERROR " in line][-1:])


def _signal(stack: Stack, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(stack.pid, number)


@contextmanager
def foreground_cluster(directory: Path, namespace: str, *, num_cpus: int | None = None) -> Iterator[None]:
    """Connect this process to a cluster of its own; ``num_cpus`` may be more than there are (default: all).

    A handler of SIGTERM that this process has set stays; Ray would put its own in its place.
    """
    home = directory.absolute()
    make_private(home)
    former = signal.getsignal(signal.SIGTERM)
    with scratch_folder("fg") as closed:  # its own: two of these may run at once
        environment = {**child_environment(home), **client_environment(renew_token(closed))}
        set_ray_environment({name: value for name, value in environment.items() if os.environ.get(name) != value})
        import ray

        log_raylet_messages()
        try:
            ray.init(
                address="local",
                namespace=namespace,
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.WARNING,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(ray_sessions(closed)),
            )
            if callable(former) and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, former)
            yield
        finally:
            ray.shutdown()
