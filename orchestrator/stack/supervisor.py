"""The parent of a stack: ``python -m orchestrator.stack.supervisor DIRECTORY [IDLE_TIMEOUT_S] [--s3]``.

It starts Ray, MLflow and, if asked to, an S3 server side by side, publishes ``stack.json`` when Ray and the S3
server answer, watches them, restarts those that die (after Ray, also its controllers), and ends them on
SIGTERM, when its directory is deleted, or when they have not been used for some time. A live sweep counts
as use.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from filelock import FileLock, Timeout

from orchestrator.core.errors import ClusterError
from orchestrator.stack.children import (
    IDLE_TIMEOUT_S,
    LOCK_FILE,
    NUM_TRIES,
    READY_TIMEOUT_S,
    STACK_STOP_GRACE_S,
    Child,
    is_ray_ready,
    make_ray_directory,
    ray_directory,
    remove_ray_directory,
    revive_services,
    set_ray_files_aside,
    start_mlflow,
    start_ray,
    what_died,
)
from orchestrator.stack.description import (
    LOOPBACK,
    S3_FOLDER,
    TOKEN_FILE,
    WITH_S3,
    Stack,
    make_private,
    own_boot_id,
    own_identity,
    remembered_services,
    remove_description,
    touch_stack,
    touched_at_s,
    tracking_uri,
    write_stack,
)
from orchestrator.stack.environment import renew_mlflow_token, renew_token
from orchestrator.stack.ports import are_free, free_ports, listen_on_loopback

if TYPE_CHECKING:
    from orchestrator.stack.s3_server import S3Server

WATCH_EVERY_S = 0.5
MAX_STARTS_PER_HOUR = 10
"""Limit for Ray, and for MLflow: if one dies more often, another start does not help."""
_HOUR_S = 3600.0
MAX_REVIVALS = 5
_LOG = logging.getLogger("orchestrator.stack")


class StartLimit:
    """Limits the starts of a server within an hour."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_at_s: deque[float] = deque()

    def allows_start(self) -> bool:
        """Returns whether it may be started now, and counts the start."""
        now_s = self._clock()
        while self._started_at_s and self._started_at_s[0] <= now_s - _HOUR_S:
            self._started_at_s.popleft()
        if len(self._started_at_s) >= MAX_STARTS_PER_HOUR:
            return False
        self._started_at_s.append(now_s)
        return True


class Idleness:
    """Adds up for how long a stack has not been used.

    A look counts for two intervals between looks at most. So neither a step of the wall clock nor a suspended
    machine ends a stack whose controller marks it as used every few seconds.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory, self._clock = directory, clock
        self._looked_at_s = clock()
        self._touched_at_s = touched_at_s(directory)
        self._idle_s = 0.0

    def look(self) -> float:
        """Call it every ``WATCH_EVERY_S``; returns for how many seconds the stack has not been used."""
        now_s, touched = self._clock(), touched_at_s(self._directory)
        counted_s = min(now_s - self._looked_at_s, 2 * WATCH_EVERY_S)
        self._idle_s = self._idle_s + counted_s if touched == self._touched_at_s else 0.0
        self._looked_at_s, self._touched_at_s = now_s, touched
        return self._idle_s


class DirectoryLock:
    """The lock of a directory's one stack. The kernel releases it when the process ends.

    Raises ``Timeout`` on entering if another stack of the directory is there, and does not end in time.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_FILE
        self._lock = FileLock(self._path, timeout=STACK_STOP_GRACE_S + 5.0)
        self._held: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        self._lock.acquire()
        self._held = self._identity()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @property
    def is_held(self) -> bool:
        """Whether the directory's lock file is still the locked one: not deleted or created again."""
        return self._held is not None and self._identity() == self._held

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino


class Supervisor:
    """One stack, from its start to its end, of the directory that ``lock`` is for."""

    def __init__(
        self, directory: Path, lock: DirectoryLock, *, idle_timeout_s: float = IDLE_TIMEOUT_S, with_s3: bool = False
    ) -> None:
        self._directory = directory
        self._lock = lock
        self._idle_timeout_s = idle_timeout_s
        self._home = ray_directory(directory)
        self._is_ending = threading.Event()
        self._stack: Stack | None = None
        self._ray: Child | None = None
        self._ray_ports: list[int] = []
        self._ray_starts = StartLimit()
        self._mlflow: Child | None = None
        self._mlflow_listener: socket.socket | None = None
        """Of all MLflow servers of this stack, one after the other: its port is never free for other users."""
        self._mlflow_starts = StartLimit()
        self._revival: Child | None = None
        self._num_revivals = 0
        self._s3 = _s3_server(directory) if with_s3 else None

    def request_end(self) -> None:
        """Make ``run`` end the stack; callable from a signal handler."""
        self._is_ending.set()

    def run(self) -> None:
        """Start the stack, watch it, end it.

        Raises:
            ClusterError: Ray did not come up, or dies again and again.
        """
        started_s = time.monotonic()
        touch_stack(self._directory)
        mlflow_token_path = renew_mlflow_token(self._directory)
        make_ray_directory(self._home)
        listener = self._mlflow_listener = listen_on_loopback()
        self._ray_ports = free_ports(3)
        if self._s3 is not None:
            # Before Ray starts: its workers inherit the address and the keys.
            os.environ.update(self._s3.client_environment)
        try:
            self._ray = self._start_ray()
            self._start_mlflow()
            if self._s3 is not None:
                self._s3.start()
            self._bring_up_ray()
            pid, pid_started_at = own_identity()
            self._publish(
                Stack(
                    directory=str(self._directory),
                    ray_address=self._ray_address,
                    dashboard_url=self._dashboard_url,
                    mlflow_url=f"http://{LOOPBACK}:{listener.getsockname()[1]}",
                    tracking_uri=tracking_uri(self._directory),
                    token_path=str(self._directory / TOKEN_FILE),
                    mlflow_token_path=str(mlflow_token_path),
                    s3_url=self._s3.endpoint_url if self._s3 is not None else "",
                    pid=pid,
                    pid_started_at=pid_started_at,
                    started_at_s=time.time(),
                    start_s=time.monotonic() - started_s,
                    host=socket.gethostname(),
                    boot_id=own_boot_id(),
                    inode=self._directory.stat().st_ino,
                )
            )
            self._revive()  # of a supervisor that was killed
            self._watch()
        finally:
            self._end()

    def _publish(self, stack: Stack) -> None:
        self._stack = stack
        if self._lock.is_held:
            write_stack(self._directory, stack)

    @property
    def _ray_address(self) -> str:
        return f"{LOOPBACK}:{self._ray_ports[0]}"

    @property
    def _dashboard_url(self) -> str:
        return f"http://{LOOPBACK}:{self._ray_ports[1]}"

    def _start_mlflow(self) -> None:
        if self._mlflow_listener is not None and self._mlflow_starts.allows_start():
            self._mlflow = start_mlflow(self._directory, self._home, listener=self._mlflow_listener)

    def _start_ray(self) -> Child:
        if not are_free(self._ray_ports):  # the same port if possible: open pages continue to work
            self._ray_ports = free_ports(len(self._ray_ports))
        renew_token(self._directory)
        port, dashboard_port, agent_port = self._ray_ports
        return start_ray(self._directory, self._home, port=port, dashboard_port=dashboard_port, agent_port=agent_port)

    def _bring_up_ray(self) -> None:
        """Wait for the started Ray; start it once more if it does not come up.

        Raises:
            ClusterError: neither did.
        """
        for num_left in reversed(range(NUM_TRIES)):
            ray = self._ray = self._ray or self._start_ray()
            trouble = self._wait_for_ray(ray)
            if not trouble:
                return
            self._ray = None
            ray.end(time.monotonic())
            set_ray_files_aside(self._directory, self._home)
            if not num_left:
                message = (
                    f"Ray did not come up in {NUM_TRIES} tries ({trouble}): the machine may be too busy or short of "
                    f"memory; try again when it is calmer; {ray.log_path} has what Ray printed"
                )
                raise ClusterError(message)
            _LOG.warning("Ray did not come up (%s); it is started once more", trouble)

    def _wait_for_ray(self, ray: Child) -> str:
        """Why Ray is not up; empty if it is.

        Raises:
            ClusterError: this stack has to end first.
        """
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not is_ray_ready(self._home):
            if ray.exit_code is not None:
                return f"exit code {ray.exit_code}"
            if time.monotonic() > deadline_s:
                return f"it took more than {READY_TIMEOUT_S:g} s"
            if self._is_ending.wait(0.05) or not self._lock.is_held:
                raise ClusterError("the stack was stopped while Ray started")
        return ""

    def _watch(self) -> None:
        idleness = Idleness(self._directory)
        while not self._is_ending.wait(WATCH_EVERY_S):
            if not self._lock.is_held:
                _LOG.warning("%s was deleted or made again: this stack is not used any more and ends", self._directory)
                return
            idle_s = idleness.look()
            if idle_s > self._idle_timeout_s:
                _LOG.info("this stack has not been used for %.0f s; it ends", idle_s)
                return
            self._mind_ray()
            self._mind_mlflow()
            self._mind_s3()
            self._mind_revival()

    def _mind_ray(self) -> None:
        # Running attempts are lost, but sweeps continue from the store once Ray runs again.
        ray = self._ray
        if ray is None or ray.exit_code is None or self._stack is None:
            return
        cause = what_died(self._home, ray)
        if not self._ray_starts.allows_start():
            message = f"Ray has died ({cause}) more than {MAX_STARTS_PER_HOUR} times within an hour; see {ray.log_path}"
            raise ClusterError(message)
        _LOG.warning("Ray has died (%s); it starts again; see %s", cause, ray.log_path)
        self._publish(replace(self._stack, trouble=f"Ray has died ({cause})"))
        ray.end(time.monotonic())
        self._ray = None
        set_ray_files_aside(self._directory, self._home)
        self._bring_up_ray()
        self._publish(
            replace(
                self._stack,
                ray_address=self._ray_address,
                dashboard_url=self._dashboard_url,
                num_ray_starts=self._stack.num_ray_starts + 1,
                trouble="",
            )
        )
        self._num_revivals = 0
        self._revive()

    def _revive(self) -> None:
        if self._revival is not None:
            self._revival.end(time.monotonic())
            self._revival = None
        if remembered_services(self._directory):
            self._num_revivals += 1
            self._revival = revive_services(self._directory, self._home)

    def _mind_revival(self) -> None:
        revival = self._revival
        if revival is None or revival.exit_code is None:
            return
        if revival.exit_code and self._num_revivals < MAX_REVIVALS:
            _LOG.warning("the controller did not start; once more; see %s", revival.log_path)
            self._revive()
            return
        revival.end(time.monotonic())
        self._revival = None

    def _mind_mlflow(self) -> None:
        # MLflow's database is also written without its server, so the stack does not end.
        if self._mlflow is None:
            self._start_mlflow()  # if the limit lets it
        elif self._mlflow.exit_code is not None:
            _LOG.warning("MLflow has died (exit code %s); see %s", self._mlflow.exit_code, self._mlflow.log_path)
            # With every process that it started, which would go on accepting connections.
            self._mlflow.end(time.monotonic())
            self._mlflow = None
            self._start_mlflow()

    def _mind_s3(self) -> None:
        # Sweeps wait for their store, so it comes back however often it dies; its data are on disk.
        if self._s3 is None or self._s3.exit_code is None:
            return
        _LOG.warning("the S3 server has died (exit code %s); see %s", self._s3.exit_code, self._s3.log_path)
        with suppress(ClusterError):
            self._s3.launch()  # without waiting: a request to end has priority

    def _end(self) -> None:
        # First the description: a command that reads it from here on starts another stack, after this one's lock is
        # free.
        if self._lock.is_held:
            remove_description(self._directory)
        children = [child for child in (self._revival, self._ray, self._mlflow) if child is not None]
        for child in children:
            child.terminate()
        deadline_s = time.monotonic() + STACK_STOP_GRACE_S
        for child in children:
            child.end(deadline_s)
        if self._mlflow_listener is not None:
            self._mlflow_listener.close()
        if self._s3 is not None:
            self._s3.kill()  # last, as something may have been saved until now; at once, as all of it is on disk
        remove_ray_directory(self._home)


def _s3_server(directory: Path) -> S3Server:
    from orchestrator.stack.s3_server import S3Server  # boto3 takes a third of a second, and few stacks need it

    return S3Server(directory / S3_FOLDER)


def main(arguments: list[str]) -> int:
    """Run a stack in this process; 0 after an orderly end, 1 if it did not come up or another one is there."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    directory = Path(arguments[0]).absolute()
    make_private(directory)
    idle_timeout_s = float(arguments[1]) if len(arguments) > 1 else IDLE_TIMEOUT_S
    supervisors: list[Supervisor] = []

    def request_end(*_: object) -> None:
        for supervisor in supervisors:
            supervisor.request_end()
        if not supervisors:
            sys.exit(1)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, request_end)
    with suppress(AttributeError):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal that started it may close
    try:
        with DirectoryLock(directory) as lock:
            supervisor = Supervisor(directory, lock, idle_timeout_s=idle_timeout_s, with_s3=WITH_S3 in arguments)
            supervisors.append(supervisor)
            supervisor.run()
    except Timeout:
        _LOG.error("another stack of %s is starting or ending", directory)
        return 1
    except (ClusterError, OSError) as error:
        _LOG.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
