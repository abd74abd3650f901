"""The children of a supervisor: how they are started, and how each is ended with all of its own children."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from orchestrator.core.errors import ClusterError
from orchestrator.core.units import MIB
from orchestrator.stack.description import LOG_FOLDER, LOOPBACK
from orchestrator.stack.environment import child_environment, python

OBJECT_STORE_BYTES = 256 * MIB  # everything large goes through the object store of the project, not through Ray's
READY_TIMEOUT_S = 180.0
"""Time for Ray's head to start on a very busy machine; a head that dies is noticed at once."""
LOCK_FILE = "stack.lock"
"""Lock file in the project's directory, held by its one supervisor."""
NUM_TRIES = 2
"""Tries to start Ray: on a busy machine a second one, with everything cached, often succeeds."""
STACK_STOP_GRACE_S = 10.0
"""Seconds from the request to end until the kill."""
IDLE_TIMEOUT_S = 30 * 60.0
"""A stack that was not used for this long ends."""
_POLL_S = 0.05
_TEMPORARY = "tmp"
"""Folder of the temporary folders (``TMPDIR``) of a stack's servers."""
_END_WITHIN_S = 10.0
# PR_SET_PDEATHSIG of prctl(2): in a session of its own, nothing else would end a server whose supervisor was killed.
# The parent is the thread that started it, so that has to live as long as the server is needed.
_DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, int(sys.argv[1])); os.execvp(sys.argv[2], sys.argv[2:])"
)


def bound_to_parent(command: list[str], if_orphaned: signal.Signals = signal.SIGTERM) -> list[str]:
    """A command whose process gets a signal from the kernel when its parent dies for any reason."""
    return [python(), "-I", "-S", "-c", _DIE_WITH_PARENT, str(int(if_orphaned)), *command]


class Child:
    """A server in its own session, so that a signal to its process group reaches what it started, and nothing else.

    Should this process die without ending it, the kernel sends it ``if_orphaned``. ``stops_by`` asks it to end.
    With ``temporary`` it gets a temporary folder of its own, which ends with it, and so does every process that has
    inherited the name of this folder, in whatever group it is. It inherits ``sockets``, by their numbers here. What it
    printed in its last life is kept in ``<name>.before.log``.
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
        temporary: Path | None = None,
        sockets: Sequence[socket.socket] = (),
    ) -> None:
        self.name = name
        self._stops_by = stops_by
        self._temporary = temporary
        if temporary is not None:
            temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
            environment = {**environment, "TMPDIR": str(temporary)}
        self.log_path = directory / LOG_FOLDER / f"{name}.log"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            self.log_path.replace(self.log_path.with_suffix(".before.log"))
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                bound_to_parent(command, if_orphaned),
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=[one.fileno() for one in sockets],
            )

    @property
    def exit_code(self) -> int | None:
        """``None`` while it runs."""
        return self._process.poll()

    def log_tail(self, num_lines: int = 20) -> str:
        """Last lines of its output."""
        return "\n".join(self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])

    def terminate(self) -> None:
        """Ask it to end; does not wait."""
        self._signal(self._stops_by)

    def end(self, deadline_s: float) -> None:
        """Wait for its end until a time of the monotonic clock, then kill its remaining processes."""
        while self._process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        # Also after its end, clean or not: a grandchild may have outlived its parent, and keep its port.
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._temporary is not None:
            end_processes_of(self._temporary)
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def ray_directory(directory: Path) -> Path:
    """Where the directory's stack keeps Ray's sessions and sockets, and the temporary folders of its servers.

    Its path is short, because a socket's may have 107 characters. It belongs to the directory's lock file, so that
    whoever holds that lock owns this folder: a directory that was deleted and made again has another one.
    """
    try:
        lock = (directory / LOCK_FILE).stat().st_ino
    except FileNotFoundError:
        lock = 0
    digest = sha256(f"{directory}#{lock}".encode()).hexdigest()[:8]
    return Path(tempfile.gettempdir(), f"orc-{os.getuid()}-{digest}")


def ray_sessions(closed: Path) -> Path:
    """Where in a closed folder Ray keeps sessions and sockets. Ray opens that folder to all users of the machine."""
    return closed / "r"


def make_ray_directory(home: Path) -> None:
    """Make a stack's folder anew: an earlier stack may have been killed before it removed it.

    Raises:
        ClusterError: another user has created it.
    """
    remove_ray_directory(home)
    try:
        home.mkdir(mode=0o700)  # its name can be guessed: never use a directory that another user has created
    except FileExistsError as error:
        message = f"{home} belongs to another user and cannot be removed, but Ray needs it for its sockets; delete it"
        raise ClusterError(message) from error


def remove_ray_directory(home: Path) -> None:
    """Remove the folder of a stack whose supervisor has ended, and end its remaining processes."""
    with suppress(FileNotFoundError):
        if not home.is_symlink() and home.stat().st_uid == os.getuid():
            for temporary in (home / _TEMPORARY).glob("*"):
                end_processes_of(temporary)
            shutil.rmtree(home, ignore_errors=True)


def end_processes_of(temporary: Path) -> None:
    """Kill every process that has this temporary folder in its environment, until there is none (a few seconds)."""
    mark = f"TMPDIR={temporary}".encode()
    deadline_s = time.monotonic() + _END_WITHIN_S
    while sum(_kill_if_marked(int(entry.name), mark) for entry in Path("/proc").glob("[0-9]*")):
        if time.monotonic() > deadline_s:
            return
        time.sleep(_POLL_S)


def _kill_if_marked(pid: int, mark: bytes) -> bool:
    """Kill a process with this text in its environment; returns whether there was one."""
    try:
        descriptor = os.pidfd_open(pid)  # from here on the pid cannot be reused for another process
    except OSError:
        return False
    try:
        if mark not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:  # it has ended, or belongs to another user
        return False
    finally:
        os.close(descriptor)
    return True


def start_ray(directory: Path, home: Path, *, port: int, dashboard_port: int, agent_port: int) -> Child:
    """Start a Ray head that stays in the foreground of its own session, with its files in ``home``."""
    command = [
        python(), "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}",
        "--include-dashboard=true", f"--dashboard-host={LOOPBACK}", f"--dashboard-port={dashboard_port}",
        f"--dashboard-agent-listen-port={agent_port}", f"--temp-dir={ray_sessions(home)}",
        f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats",
    ]  # fmt: skip
    return Child("ray", command, directory, child_environment(directory), temporary=home / _TEMPORARY / "ray")


def is_ray_ready(home: Path) -> bool:
    """Whether Ray's head has come up: it then writes its address into its directory."""
    return (ray_sessions(home) / "ray_current_cluster").exists()


def what_died(home: Path, ray: Child) -> str:
    """The process of an ended Ray that died first, according to Ray: ``raylet``."""
    with suppress(OSError):
        noted = (ray_sessions(home) / "session_latest" / "logs" / "ray_process_exit.log").read_text(encoding="utf-8")
        names = dict.fromkeys(re.findall(r"^ +(\w+) \[exit code=", noted, re.MULTILINE))
        if names:
            return ", ".join(names)
    return f"ray start, exit code {ray.exit_code}"


def set_ray_files_aside(directory: Path, home: Path) -> None:
    """Clear the directory for the next Ray of a stack; the logs of the dead one are kept in ``logs/ray-before``."""
    kept = directory / LOG_FOLDER / "ray-before"
    shutil.rmtree(kept, ignore_errors=True)
    with suppress(OSError):
        logs = (ray_sessions(home) / "session_latest" / "logs").resolve()
        shutil.copytree(logs, kept, ignore_dangling_symlinks=True)
    shutil.rmtree(ray_sessions(home), ignore_errors=True)


def start_mlflow(directory: Path, home: Path, *, listener: socket.socket) -> Child:
    """Start an MLflow server on the project's database, with low CPU priority, on a socket that listens.

    Clients need the token of ``renew_mlflow_token``.
    """
    command = [
        "nice", "-n", "10", python(), "-m", "orchestrator.stack.mlflow_server", str(directory),
        str(listener.fileno()),
    ]  # fmt: skip
    return Child(
        "mlflow",
        command,
        directory,
        child_environment(directory),
        temporary=home / _TEMPORARY / "mlflow",
        sockets=[listener],
    )


def revive_services(directory: Path, home: Path) -> Child:
    """Start the controllers and publishers of the previous Ray again."""
    command = [python(), "-m", "orchestrator.controller.calls", str(directory), "--revive"]
    return Child("revive", command, directory, child_environment(directory), temporary=home / _TEMPORARY / "revive")
