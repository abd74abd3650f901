"""The children of a supervisor: how they are started, and how each is ended with all that it started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from orchestrator.errors import ClusterError
from orchestrator.stack.description import LOG_FOLDER
from orchestrator.stack.environment import LOOPBACK, child_environment, python
from orchestrator.units import MIB

OBJECT_STORE_BYTES = 256 * MIB  # everything large goes through the object store of the project, not through Ray's
READY_TIMEOUT_S = 180.0
"""For Ray's head to come up on a very busy machine; one that has died is noticed at once."""
GRACE_S = 10.0
"""From the request to end to the kill."""
IDLE_TIMEOUT_S = 30 * 60.0
"""A stack that nobody has used for this long leaves."""
_POLL_S = 0.05
# PR_SET_PDEATHSIG of prctl(2): in a session of its own, nothing else would end a server whose supervisor was killed.
# The parent is the thread that started it, so that has to live as long as the server is needed.
_DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, int(sys.argv[1])); os.execvp(sys.argv[2], sys.argv[2:])"
)


class Child:
    """A server in its own session, so that a signal to its process group reaches what it started, and nothing else.

    Should this process die without ending it, the kernel sends it ``if_orphaned``. ``stops_by`` asks it to end.
    """

    def __init__(
        self,
        name: str,
        command: list[str],
        directory: Path,
        environment: dict[str, str],
        *,
        if_orphaned: signal.Signals = signal.SIGTERM,
        stops_by: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.name = name
        self._stops_by = stops_by
        self.log_path = directory / LOG_FOLDER / f"{name}.log"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [python(), "-I", "-S", "-c", _DIE_WITH_PARENT, str(int(if_orphaned)), *command],
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """``None`` while it runs."""
        return self._process.poll()

    def log_tail(self, num_lines: int = 20) -> str:
        """Last lines of what it printed."""
        return "\n".join(self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])

    def terminate(self) -> None:
        """Ask it to end; does not wait."""
        self._signal(self._stops_by)

    def end(self, deadline_s: float) -> None:
        """Wait for its end until a time of the monotonic clock, then kill its whole process group."""
        while self._process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        # Also after a clean exit: a grandchild may have outlived its parent.
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def ray_directory(directory: Path) -> Path:
    """The closed folder around Ray's own: short, because a socket's path may have 107 characters."""
    digest = sha256(str(directory).encode()).hexdigest()[:8]
    return Path(tempfile.gettempdir(), f"orc-{os.getuid()}-{digest}")


def ray_sessions(closed: Path) -> Path:
    """Where in a closed folder Ray keeps sessions and sockets. Ray opens that folder to all users of the machine."""
    return closed / "r"


def start_ray(directory: Path, *, port: int, dashboard_port: int, agent_port: int) -> Child:
    """Start a Ray head that stays in the foreground of its own session."""
    home = ray_directory(directory)
    shutil.rmtree(home, ignore_errors=True)  # the last stack's sessions: their logs end with the next start
    try:
        home.mkdir(mode=0o700)  # its name can be guessed: never use a directory that somebody else has made
    except FileExistsError as error:
        message = f"{home} is not ours and cannot be removed, but Ray's sockets belong there; delete it"
        raise ClusterError(message) from error
    command = [
        python(), "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}",
        "--include-dashboard=true", f"--dashboard-host={LOOPBACK}", f"--dashboard-port={dashboard_port}",
        f"--dashboard-agent-listen-port={agent_port}", f"--temp-dir={ray_sessions(home)}",
        f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats",
    ]  # fmt: skip
    return Child("ray", command, directory, child_environment(directory))


def is_ray_ready(directory: Path) -> bool:
    """Whether Ray's head has come up: it then writes its address into its directory."""
    return (ray_sessions(ray_directory(directory)) / "ray_current_cluster").exists()


def start_mlflow(directory: Path, *, port: int) -> Child:
    """Start an MLflow server on the project's database, behind everything else that wants the processor.

    Whoever asks it needs the token that ``renew_mlflow_token`` has made.
    """
    command = [
        "nice", "-n", "10", python(), "-m", "orchestrator.stack.mlflow_server", str(directory), str(port)
    ]  # fmt: skip
    return Child("mlflow", command, directory, child_environment(directory))
