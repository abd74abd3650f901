"""A PostgreSQL of one project directory, for MLflow: reached through a socket that only the user can reach, no port.

The programs are the system's (Debian: the package ``postgresql``; its own server need not run). PostgreSQL refuses to
run as root: root's stacks run it as the user ``postgres``.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from orchestrator.errors import ClusterError
from orchestrator.stack.children import Child
from orchestrator.stack.private import ensure_password, write_private

ROLE: Final = "orchestrator"
TRACKING_DATABASE: Final = "mlflow"
ACCOUNTS_DATABASE: Final = "mlflow_accounts"
READY_TIMEOUT_S: Final = 60.0
_SYSTEM_USER = "postgres"
_POLL_S = 0.05
_DEBIAN = "/usr/lib/postgresql"


class PostgresServer:
    """One server on the data of ``directory``, made at the first start; it can be started again after any end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        self._data = self._directory / "data"
        self._user = _SYSTEM_USER if os.getuid() == 0 else ""
        self._child: Child | None = None

    @property
    def environment(self) -> dict[str, str]:
        """With which libpq finds the password; holds none itself."""
        return {"PGPASSFILE": str(self._directory / "pgpass")}

    @property
    def exit_code(self) -> int | None:
        """``None`` while it runs or before it was started."""
        return self._child.exit_code if self._child else None

    @property
    def child(self) -> Child | None:
        """Its process, once started."""
        return self._child

    def uri(self, database: str) -> str:
        """For SQLAlchemy and MLflow, without a password."""
        return f"postgresql://{ROLE}@/{database}?host={quote(str(self._sockets), safe='/')}"

    def start(self) -> None:
        """Start the server, wait until it answers and make sure of its databases.

        Raises:
            ClusterError: it is not installed, cannot use the directory or did not come up.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        password = ensure_password(self._directory / "password")
        write_private(self._directory / "pgpass", f"*:*:*:{ROLE}:{password}\n")
        self._make_sockets()
        if not (self._data / "PG_VERSION").exists():
            self._initialise(password)
        self.launch()
        self._wait_until_ready()
        for database in (TRACKING_DATABASE, ACCOUNTS_DATABASE):
            self._ensure_database(database)

    def launch(self) -> None:
        """Start the server without waiting for it."""
        command = [
            *self._as_its_user(), program("postgres"), "-D", str(self._data), "-k", str(self._sockets),
            "-c", "listen_addresses=", "-c", "max_connections=100", "-c", "unix_socket_permissions=0700",
        ]  # fmt: skip
        environment = {"PATH": os.defpath, "LC_ALL": "C.UTF-8"}
        # SIGINT is its "fast" shutdown: SIGTERM would wait until every client has left.
        self._child = Child(
            "postgresql", command, self._directory, environment,
            if_orphaned=signal.SIGINT, stops_by=signal.SIGINT
        )  # fmt: skip

    def end(self, deadline_s: float) -> None:
        """End it, by force at a time of the monotonic clock: what was committed is on disk either way."""
        if self._child is not None:
            self._child.terminate()
            self._child.end(deadline_s)
            shutil.rmtree(self._sockets, ignore_errors=True)

    @property
    def _sockets(self) -> Path:
        """Short, because a socket's path may have 107 characters."""
        digest = sha256(str(self._directory).encode()).hexdigest()[:8]
        return Path(tempfile.gettempdir(), f"orc-{os.getuid()}-pg-{digest}")

    def _make_sockets(self) -> None:
        shutil.rmtree(self._sockets, ignore_errors=True)
        try:
            self._sockets.mkdir(mode=0o700)  # its name can be guessed: never one that somebody else has made
        except FileExistsError as error:
            message = f"{self._sockets} is not ours and cannot be removed, but PostgreSQL's socket belongs there; "
            raise ClusterError(f"{message}delete it") from error
        self._give_away(self._sockets)

    def _initialise(self, password: str) -> None:
        """Make the data directory; one that was begun and not finished is made anew."""
        self._check_reach()
        partial = self._directory / "data.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        self._give_away(partial)
        password_file = self._sockets / "password"  # no pipe: the other user could not open it
        write_private(password_file, f"{password}\n")
        self._give_away(password_file)
        command = [
            program("initdb"), "-D", str(partial), "-U", ROLE, "-A", "scram-sha-256", "-E", "UTF8", "--locale=C.UTF-8",
            f"--pwfile={password_file}", "--data-checksums",
        ]  # fmt: skip
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, **_as_user(self._user))
        password_file.unlink()
        if done.returncode:
            message = f"PostgreSQL cannot make its data in {partial}:\n{done.stdout}{done.stderr}"
            raise ClusterError(message)
        partial.replace(self._data)

    def _as_its_user(self) -> list[str]:
        """A change of user ends what the kernel was told about orphans, so that it is told again."""
        if not self._user:
            return []
        return ["setpriv", f"--reuid={self._user}", f"--regid={self._user}", "--init-groups", "--pdeathsig=INT", "--"]

    def _give_away(self, path: Path) -> None:
        if self._user:
            shutil.chown(path, self._user, self._user)

    def _check_reach(self) -> None:
        """Root's PostgreSQL is another user's: that one must be able to reach the directory."""
        if not self._user:
            return
        try:
            pwd.getpwnam(self._user)
        except KeyError as error:
            message = f"PostgreSQL does not run as root and there is no user {self._user}; install Debian's package "
            raise ClusterError(f"{message}postgresql, or start the stack as an ordinary user") from error
        closed = [folder for folder in (self._directory, *self._directory.parents) if not folder.stat().st_mode & 0o001]
        if closed:
            message = (
                f"PostgreSQL does not run as root, and its user {self._user} cannot reach {self._directory} because "
                f"{closed[-1]} is closed to others; start the stack as an ordinary user, or from another directory"
            )
            raise ClusterError(message)

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        child = self._child
        while child is not None and child.exit_code is None and time.monotonic() < deadline_s:
            if subprocess.run([program("pg_isready"), "-q", "-h", str(self._sockets)], check=False).returncode == 0:
                return
            time.sleep(_POLL_S)
        message = "PostgreSQL did not come up"
        if child is not None:
            message += f" (exit code {child.exit_code}); the end of {child.log_path}:\n{child.log_tail()}"
        raise ClusterError(message)

    def _ensure_database(self, name: str) -> None:
        command = [program("createdb"), "-h", str(self._sockets), "-U", ROLE, "-w", name]
        done = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False
        )
        if done.returncode and "already exists" not in done.stderr:
            raise ClusterError(f"PostgreSQL cannot make the database {name}: {done.stderr.strip()}")


def program(name: str) -> str:
    """Path of one of PostgreSQL's programs; Debian keeps most of them off the PATH.

    Raises:
        ClusterError: it is not installed.
    """
    newest_first = sorted(Path(_DEBIAN).glob("*/bin"), key=lambda path: _version(path.parent.name), reverse=True)
    found = next((path for folder in newest_first if (path := shutil.which(name, path=str(folder)))), None)
    found = found or shutil.which(name)
    if found is None:
        message = f"PostgreSQL is not installed (no program {name}); on Debian: apt-get install postgresql"
        raise ClusterError(message)
    return found


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def _as_user(user: str) -> dict[str, Any]:
    return {"user": user, "group": user, "extra_groups": []} if user else {}
