"""The parent of a stack: ``python -m orchestrator.stack.supervisor DIRECTORY [IDLE_TIMEOUT_S] [--s3]``.

It starts Ray, MLflow and, if asked to, an S3 server side by side, publishes ``stack.json`` when Ray and the S3
server answer, watches them, and ends them when it is told to (SIGTERM),
when Ray dies, or when nobody has used them for a while. A live sweep counts as use.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from orchestrator.errors import ClusterError
from orchestrator.stack.children import (
    GRACE_S,
    IDLE_TIMEOUT_S,
    READY_TIMEOUT_S,
    Child,
    is_ray_ready,
    start_mlflow,
    start_ray,
)
from orchestrator.stack.description import (
    S3_FOLDER,
    STACK_FILE,
    WITH_S3,
    Stack,
    make_private,
    own_identity,
    touch_stack,
    touched_at_s,
    tracking_uri,
    write_stack,
)
from orchestrator.stack.environment import LOOPBACK, ensure_token, renew_mlflow_token
from orchestrator.stack.ports import free_ports

if TYPE_CHECKING:
    from orchestrator.stack.s3_server import S3Server

LOCK_FILE = "stack.lock"
WATCH_EVERY_S = 1.0
MAX_MLFLOW_STARTS = 3
_LOG = logging.getLogger("orchestrator.stack")


class Supervisor:
    """One stack, from its start to its end."""

    def __init__(
        self,
        directory: Path,
        *,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        with_s3: bool = False,
    ) -> None:
        self._directory = directory
        self._idle_timeout_s = idle_timeout_s
        self._told_to_end = threading.Event()
        self._ray: Child | None = None
        self._mlflow: Child | None = None
        self._mlflow_port = 0
        self._num_mlflow_starts = 0
        self._s3 = _s3_server(directory) if with_s3 else None

    def tell_to_end(self) -> None:
        """Make ``run`` end the stack; callable from a signal handler."""
        self._told_to_end.set()

    def run(self) -> None:
        """Start the stack, watch it, end it.

        Raises:
            ClusterError: Ray did not come up.
        """
        started_s = time.monotonic()
        touch_stack(self._directory)
        token_path, mlflow_token_path = ensure_token(self._directory), renew_mlflow_token(self._directory)
        port, dashboard_port, agent_port, self._mlflow_port = free_ports(4)
        if self._s3 is not None:
            # Before Ray starts: its workers inherit the address and the keys.
            os.environ.update(self._s3.client_environment)
        try:
            self._ray = start_ray(self._directory, port=port, dashboard_port=dashboard_port, agent_port=agent_port)
            self._start_mlflow()
            if self._s3 is not None:
                self._s3.start()
            self._wait_for_ray(self._ray)
            pid, pid_started_at = own_identity()
            stack = Stack(
                directory=str(self._directory),
                ray_address=f"{LOOPBACK}:{port}",
                dashboard_url=f"http://{LOOPBACK}:{dashboard_port}",
                mlflow_url=f"http://{LOOPBACK}:{self._mlflow_port}",
                tracking_uri=tracking_uri(self._directory),
                token_path=str(token_path),
                mlflow_token_path=str(mlflow_token_path),
                s3_url=self._s3.endpoint_url if self._s3 is not None else "",
                pid=pid,
                pid_started_at=pid_started_at,
                started_at_s=time.time(),
                start_s=time.monotonic() - started_s,
            )
            write_stack(self._directory, stack)
            self._watch(self._ray)
        finally:
            self._end()

    def _start_mlflow(self) -> None:
        self._num_mlflow_starts += 1
        self._mlflow = start_mlflow(self._directory, port=self._mlflow_port)

    def _wait_for_ray(self, ray: Child) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not is_ray_ready(self._directory):
            if ray.exit_code is not None:
                message = f"Ray ended with exit code {ray.exit_code}; the end of {ray.log_path}:\n{ray.log_tail()}"
                raise ClusterError(message)
            if time.monotonic() > deadline_s or self._told_to_end.wait(0.05):
                message = f"Ray was not up after {READY_TIMEOUT_S:g} s; see {ray.log_path}"
                raise ClusterError(message)

    def _watch(self, ray: Child) -> None:
        while not self._told_to_end.wait(WATCH_EVERY_S):
            if ray.exit_code is not None:
                _LOG.error("Ray has died (exit code %s); see %s", ray.exit_code, ray.log_path)
                return
            idle_s = time.time() - touched_at_s(self._directory)
            if idle_s > self._idle_timeout_s:
                _LOG.info("nobody has used this stack for %.0f s; it leaves", idle_s)
                return
            self._mind_mlflow()
            self._mind_s3()

    def _mind_mlflow(self) -> None:
        # Without its server MLflow's database is written all the same, so this is no reason to end anything.
        if self._mlflow is None or self._mlflow.exit_code is None:
            return
        _LOG.warning("MLflow has died (exit code %s); see %s", self._mlflow.exit_code, self._mlflow.log_path)
        self._mlflow = None
        if self._num_mlflow_starts < MAX_MLFLOW_STARTS:
            self._start_mlflow()

    def _mind_s3(self) -> None:
        # Sweeps wait for their store, so it comes back however often it dies; its data are on disk.
        if self._s3 is None or self._s3.exit_code is None:
            return
        _LOG.warning("the S3 server has died (exit code %s); see %s", self._s3.exit_code, self._s3.log_path)
        with suppress(ClusterError):
            self._s3.launch()  # without waiting: being told to end comes first

    def _end(self) -> None:
        # First the description: whoever reads it from here on starts another stack, after this one's lock is free.
        (self._directory / STACK_FILE).unlink(missing_ok=True)
        children = [child for child in (self._ray, self._mlflow) if child is not None]
        for child in children:
            child.terminate()
        deadline_s = time.monotonic() + GRACE_S
        for child in children:
            child.end(deadline_s)
        if self._s3 is not None:
            self._s3.kill()  # last, as something may have been saved until now; at once, as all of it is on disk


def _s3_server(directory: Path) -> S3Server:
    from orchestrator.stack.s3_server import S3Server  # boto3 takes a third of a second, and few stacks need it

    return S3Server(directory / S3_FOLDER)


def main(arguments: list[str]) -> int:
    """Run a stack in this process; 0 after an orderly end, 1 if it did not come up or another one is there."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    directory = Path(arguments[0]).absolute()
    make_private(directory)
    idle_timeout_s = float(arguments[1]) if len(arguments) > 1 else IDLE_TIMEOUT_S
    try:
        supervisor = Supervisor(directory, idle_timeout_s=idle_timeout_s, with_s3=WITH_S3 in arguments)
    except ClusterError as error:
        _LOG.error("%s", error)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: supervisor.tell_to_end())
    with suppress(AttributeError):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal that started it may close
    try:
        # The kernel frees the lock with the process, however it ends: one stack per directory, and no stale locks.
        with FileLock(directory / LOCK_FILE, timeout=GRACE_S + 5.0):
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
