"""What ``up --full`` adds: PostgreSQL under MLflow, passwords before it, and Prometheus. All on this machine alone."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from orchestrator.errors import ClusterError
from orchestrator.stack import postgres, prometheus
from orchestrator.stack.children import Child, ServerOptions, start_mlflow
from orchestrator.stack.description import BUCKET, FULL_FILE, MLFLOW_LOGIN_FILE
from orchestrator.stack.postgres import ACCOUNTS_DATABASE, TRACKING_DATABASE, PostgresServer
from orchestrator.stack.private import ensure_password, shell_lines, write_private

MLFLOW_USER: Final = "admin"
MLFLOW_TIMEOUT_S: Final = 300.0
"""The first start makes its tables: 10 s on an idle machine. One that has died is noticed at once."""
_NEEDED: Final = {"psycopg": "talks to PostgreSQL", "flask_wtf": "MLflow's passwords need it"}
_POLL_S = 0.1
_LOG = logging.getLogger("orchestrator.stack")


class FullServices:
    """PostgreSQL, MLflow with accounts, and Prometheus of one project directory."""

    def __init__(self, directory: Path) -> None:
        check_installed()
        self._directory = directory
        self._home = directory / "services"
        self.postgres = PostgresServer(self._home / "postgresql")
        """Under MLflow."""
        self._prometheus: Child | None = None
        self._prometheus_port = 0

    @property
    def tracking_uri(self) -> str:
        """Of the database, which the publisher writes directly; without a password."""
        return self.postgres.uri(TRACKING_DATABASE)

    @property
    def environment(self) -> dict[str, str]:
        """With which the publisher and commands reach the database; holds no password itself."""
        return self.postgres.environment

    def start(self, *, prometheus_port: int) -> None:
        """Start PostgreSQL and wait for it, and Prometheus. Raises ``ClusterError``."""
        self.postgres.start()
        self._prometheus_port = prometheus_port
        self._prometheus = prometheus.start_prometheus(self._directory, port=prometheus_port)

    def start_mlflow(self, *, port: int) -> Child:
        """Start MLflow on PostgreSQL; everyone has to log in."""
        self._home.mkdir(parents=True, exist_ok=True)
        password = ensure_password(self._home / "mlflow_password")
        key = ensure_password(self._home / "mlflow_session_key")
        login = {"MLFLOW_TRACKING_USERNAME": MLFLOW_USER, "MLFLOW_TRACKING_PASSWORD": password}
        write_private(self._directory / MLFLOW_LOGIN_FILE, shell_lines(login))
        write_private(self._home / "mlflow_accounts.ini", self._accounts(password))
        environment = {
            **self.environment,
            "MLFLOW_AUTH_CONFIG_PATH": str(self._home / "mlflow_accounts.ini"),
            "MLFLOW_FLASK_SERVER_SECRET_KEY": key,
        }
        options = ServerOptions(
            backend_uri=self.tracking_uri, arguments=("--app-name", "basic-auth"), environment=environment
        )
        return start_mlflow(self._directory, port=port, options=options)

    def write_environment(self, s3: dict[str, str]) -> None:
        """The file that a shell reads so that its commands use these servers; holds the S3 server's keys."""
        variables = {
            "ORCHESTRATOR_STORE": f"s3://{BUCKET}/store",
            "MLFLOW_TRACKING_URI": self.tracking_uri,
            **self.environment,
            **s3,
        }
        write_private(self._directory / FULL_FILE, shell_lines(variables))

    def mind(self) -> None:
        """Start again what has died: data are on disk, and publishing waits for PostgreSQL."""
        child = self.postgres.child
        if child is not None and child.exit_code is not None:
            _LOG.warning("PostgreSQL has died (exit code %s); see %s", child.exit_code, child.log_path)
            with suppress(ClusterError):
                self.postgres.launch()
        if self._prometheus is not None and self._prometheus.exit_code is not None:
            _LOG.warning("Prometheus has died (exit code %s)", self._prometheus.exit_code)
            self._prometheus = prometheus.start_prometheus(self._directory, port=self._prometheus_port)

    def end(self, deadline_s: float) -> None:
        """End both; after MLflow, which uses one of them."""
        if self._prometheus is not None:
            self._prometheus.terminate()
        self.postgres.end(deadline_s)
        if self._prometheus is not None:
            self._prometheus.end(deadline_s)

    def _accounts(self, password: str) -> str:
        """What MLflow reads at each start; the password counts at the first one."""
        return (
            "[mlflow]\n"
            "default_permission = NO_PERMISSIONS\n"
            f"database_uri = {self.postgres.uri(ACCOUNTS_DATABASE)}\n"
            f"admin_username = {MLFLOW_USER}\n"
            f"admin_password = {password}\n"
            "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        )


def check_installed() -> None:
    """Raise ``ClusterError`` with all that is missing, before anything is started."""
    missing = []
    finders: tuple[Callable[[], str], ...] = (partial(postgres.program, "initdb"), prometheus.program)
    for find in finders:
        try:
            find()
        except ClusterError as error:
            missing.append(str(error))
    missing += [
        f"the Python package {name} is not installed ({why}): pip install 'pretraining-orchestrator[full]'"
        for name, why in _NEEDED.items()
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ClusterError("the full stack needs more than is installed:\n" + "\n".join(missing))


def wait_for_mlflow(url: str, child: Child) -> None:
    """Wait until MLflow answers: while it makes its tables, nobody else may write them. Raises ``ClusterError``."""
    deadline_s = time.monotonic() + MLFLOW_TIMEOUT_S
    while child.exit_code is None and time.monotonic() < deadline_s:
        try:
            with urlopen(f"{url}/health", timeout=5):  # noqa: S310 - our own server
                return
        except HTTPError:
            return  # it answers, if only to ask who we are
        except (URLError, OSError):
            time.sleep(_POLL_S)
    message = f"MLflow did not come up (exit code {child.exit_code}); the end of {child.log_path}:\n{child.log_tail()}"
    raise ClusterError(message)
