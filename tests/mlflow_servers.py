"""Real MLflow servers and a real PostgreSQL for tests, on loopback."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Self
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from orchestrator.stack.ports import free_ports
from orchestrator.tracking.server import TrackingServer

_READY_S = 90.0
_POLL_S = 0.05
_POSTGRES_USER = "postgres"


@cache
def _template() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="orc-mlflow-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    assert TrackingServer(f"sqlite:///{folder}/mlflow.db").client is not None
    with sqlite3.connect(folder / "mlflow.db") as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return folder / "mlflow.db"


def new_database(path: Path) -> str:
    """A fresh MLflow database at a path, copied: making one takes seconds. Returns its tracking URI."""
    shutil.copyfile(_template(), path)
    return f"sqlite:///{path}"


class MlflowServer:
    """``mlflow server`` on a port of its own, which it keeps when it is started again."""

    def __init__(self, folder: Path, backend_uri: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self._folder, self._backend_uri, self._arguments = folder, backend_uri, arguments
        self._env = dict(env or {})
        self._child: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{free_ports(1)[0]}"

    def start(self) -> None:
        """Start it, without waiting for it."""
        port = self.url.rpartition(":")[2]
        command = [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", port, "--workers", "1",
            "--backend-store-uri", self._backend_uri, "--artifacts-destination", str(self._folder / "artifacts"),
            *self._arguments,
        ]  # fmt: skip
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self._folder / "mlflow.log").open("ab") as log:
            self._child = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={**os.environ, **quiet, **self._env},
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + _READY_S
        while time.monotonic() < deadline_s:
            try:
                with urlopen(f"{self.url}/health", timeout=5) as answer:  # noqa: S310 - ours
                    if answer.status == 200:
                        return
            except (URLError, OSError):
                pass
            if self._child is not None and self._child.poll() is not None:
                break
            time.sleep(_POLL_S)
        raise AssertionError((self._folder / "mlflow.log").read_text()[-3000:])

    def kill(self) -> None:
        """SIGKILL, with all its workers."""
        if self._child is not None:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
            self._child = None

    def __enter__(self) -> Self:
        self.start()
        self.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextmanager
def postgres_cluster() -> Iterator[str]:
    """A PostgreSQL of its own; yields the URI of an empty database. Skips where PostgreSQL is not installed."""
    pytest.importorskip("psycopg", reason="needs psycopg (part of the extra postgres)")
    if not all(shutil.which(name) for name in ("initdb", "pg_ctl")):
        pytest.skip("needs initdb and pg_ctl on the PATH (Debian: the package postgresql, /usr/lib/postgresql/*/bin)")
    folder = Path(tempfile.mkdtemp(prefix="orc-pg-"))
    as_user: list[str] = []
    if os.getuid() == 0:  # it refuses to run as root
        as_user = ["runuser", "-u", _POSTGRES_USER, "--"]
        shutil.chown(folder, _POSTGRES_USER)
    port, control = free_ports(1)[0], [*as_user, "pg_ctl", "-D", str(folder / "data")]
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
    try:
        _run([*as_user, "initdb", "-D", str(folder / "data"), "-U", "tester", "-A", "trust", "--no-sync"])
        _run([*control, "-w", "-l", str(folder / "log"), "-o", options, "start"])
        yield f"postgresql://tester@127.0.0.1:{port}/postgres"
        _run([*control, "-m", "immediate", "stop"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr + done.stdout
