"""One server of the full stack alone: ``python -m orchestrator.stack.serve NAME DIRECTORY``; stays in the foreground.

NAME is ``postgresql``, ``s3``, ``mlflow`` (on the PostgreSQL of the same directory, which must run) or ``prometheus``
(of the Ray that a stack of this directory started). Data and passwords lie where ``orchestrator up --full`` has them.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from orchestrator.errors import ClusterError
from orchestrator.stack.children import GRACE_S, Child
from orchestrator.stack.description import MLFLOW_LOGIN_FILE, S3_FOLDER
from orchestrator.stack.environment import LOOPBACK
from orchestrator.stack.full import FullServices, wait_for_mlflow
from orchestrator.stack.ports import free_ports
from orchestrator.stack.prometheus import start_prometheus
from orchestrator.stack.s3_server import S3Server

_CHECK_EVERY_S: Final = 0.5


class Running(Protocol):
    """A server that was started."""

    @property
    def exit_code(self) -> int | None:
        """``None`` while it runs."""


def _postgresql(directory: Path) -> tuple[Running, str, Callable[[], None]]:
    server = FullServices(directory).postgres
    server.start()
    return server, f"PostgreSQL: {server.uri('mlflow')}", lambda: server.end(time.monotonic() + GRACE_S)


def _s3(directory: Path) -> tuple[Running, str, Callable[[], None]]:
    server = S3Server(directory / S3_FOLDER)
    server.start()
    return server, f"S3: {server.endpoint_url}", server.kill


def _mlflow(directory: Path) -> tuple[Running, str, Callable[[], None]]:
    (port,) = free_ports(1)
    child, url = FullServices(directory).start_mlflow(port=port), f"http://{LOOPBACK}:{port}"
    try:
        wait_for_mlflow(url, child)
    except ClusterError:
        child.end(time.monotonic())
        raise
    return child, f"MLflow: {url} (user and password: {directory / MLFLOW_LOGIN_FILE})", _ending(child)


def _prometheus(directory: Path) -> tuple[Running, str, Callable[[], None]]:
    (port,) = free_ports(1)
    child = start_prometheus(directory, port=port)
    return child, f"Prometheus: http://{LOOPBACK}:{port}", _ending(child)


SERVERS: Final = {"postgresql": _postgresql, "s3": _s3, "mlflow": _mlflow, "prometheus": _prometheus}


def main(arguments: list[str]) -> int:
    """Run a server until SIGINT or SIGTERM; 1 if it did not come up or has died, 2 for wrong arguments."""
    if len(arguments) != 2 or arguments[0] not in SERVERS:
        sys.stderr.write(f"usage: serve {'|'.join(SERVERS)} DIRECTORY, got {' '.join(arguments) or 'nothing'}\n")
        return 2
    directory = Path(arguments[1]).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    told_to_end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told_to_end.set())
    try:
        server, address, end = SERVERS[arguments[0]](directory)
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{address}\n")
    sys.stdout.flush()
    while server.exit_code is None and not told_to_end.wait(_CHECK_EVERY_S):
        pass
    code = server.exit_code
    end()
    if code is not None:
        sys.stderr.write(f"{arguments[0]} has died (exit code {code}); see the logs in {directory}\n")
    return 0 if code is None else 1


def _ending(child: Child) -> Callable[[], None]:
    def end() -> None:
        child.terminate()
        child.end(time.monotonic() + GRACE_S)

    return end


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
