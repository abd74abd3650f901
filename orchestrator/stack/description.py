"""``stack.json``: the description of a running stack. Every read checks that its supervisor runs.

The directory may come from somebody else: a copied project, or a shared folder in which another user was first. So:

- a directory or description of another user counts as none, and nothing is started in such a directory;
- all addresses are of this machine, and the files that they belong to are those of the directory that was read;
- a stack runs only if it was started in this very directory (a copy has another inode) since this machine has booted,
  under the pid of a process that began when the file says. Only such a process is sent a signal;
- a controller is started again with Ray only if its settings were written in this directory, on this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from orchestrator.core.errors import ClusterError
from orchestrator.storage.files import write_private

LOOPBACK = "127.0.0.1"
STACK_FILE = "stack.json"
TOUCH_FILE = "stack.touch"
TOKEN_FILE = "ray_token"  # noqa: S105 - the file's name
MLFLOW_TOKEN_FILE = "mlflow_token"  # noqa: S105 - the file's name
TOKEN_PARAMETER = "token"  # noqa: S105 - of links to MLflow's pages: its name
DATABASE_FILE = "mlflow.db"
MLFLOW_ARTIFACTS = "mlflow-artifacts"
LOG_FOLDER = "logs"
SERVICES_FOLDER = "services"
"""Settings with which controllers and publishers of a running stack were started."""
S3_FOLDER = "s3"
BUCKET = "orchestrator"
CLIENT_FILE = "client.env"
"""In ``S3_FOLDER``: for a shell to read, so that its commands use the local S3 server. Holds a secret."""
WITH_S3 = "--s3"
"""Argument of the supervisor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Addresses of a running stack."""

    directory: str
    ray_address: str
    """Of Ray's control store, for ``attach_stack``."""
    dashboard_url: str
    """Asks for the Ray token once per browser: paste the content of ``token_path``."""
    mlflow_url: str
    """Of the MLflow server, which may answer some seconds after Ray does."""
    tracking_uri: str
    """Of the database behind it, which needs no server."""
    token_path: str
    pid: int
    """Supervisor."""
    pid_started_at: int
    """Its start time in clock ticks since boot: a pid alone may be reused by another process."""
    started_at_s: float
    """Unix time at which the stack was ready."""
    mlflow_token_path: str = ""
    """Path of the file with the MLflow server's token."""
    s3_url: str = ""
    """Of the local S3 server; empty without one."""
    start_s: float = 0.0
    """Seconds until it was ready."""
    num_ray_starts: int = 1
    """Increases after each death of its Ray: clients must connect again."""
    trouble: str = ""
    """A sentence about the part that has died and is being started again; empty while all parts run."""
    host: str = ""
    """Where it runs."""
    boot_id: str = ""
    """Of the machine it runs on: stays as the host is renamed, or its container is made again."""
    inode: int = 0
    """Of its directory; 0 for a stack of an earlier version."""

    @property
    def is_alive(self) -> bool:
        """Whether its supervisor runs."""
        return self.boot_id == own_boot_id() and start_ticks_of(self.pid) == self.pid_started_at

    @property
    def is_here(self) -> bool:
        """Whether it is of this host: several may see its directory, and none sees the processes of another."""
        return self.host == socket.gethostname() or bool(self.boot_id and self.boot_id == own_boot_id())

    def browser_link(self, url: str) -> str:
        """The address of one of its MLflow pages, with the token: for its user's terminal, never to be stored."""
        try:
            token = Path(self.mlflow_token_path).read_text(encoding="utf-8").strip()
        except OSError:
            return url
        parts = urlsplit(url)
        return parts._replace(path=parts.path or "/", query=f"{TOKEN_PARAMETER}={token}").geturl()

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Inverse of ``to_bytes``; a field of another release, which may have started the stack, is left out.

        Raises:
            ValueError: it is no description, has an address of another machine, or a pid that no supervisor has.
            TypeError: a field is missing.
        """
        known = {field.name for field in fields(cls)}
        document = {name: value for name, value in dict(json.loads(content)).items() if name in known}
        if not all(isinstance(document.get(name, ""), str) for name in ("dashboard_url", "mlflow_url", "s3_url")):
            raise ValueError("an address that is no text")
        if not all(isinstance(document.get(name), int) for name in ("pid", "pid_started_at")) or document["pid"] <= 1:
            raise ValueError("no pid of a supervisor")
        stack = cls(**document)
        addresses = (f"http://{stack.ray_address}", stack.dashboard_url, stack.mlflow_url, stack.s3_url)
        if any(urlsplit(address).hostname not in {LOOPBACK, None} for address in addresses):
            raise ValueError("an address of another machine")
        return stack

    def to_bytes(self) -> bytes:
        """JSON document."""
        return json.dumps(asdict(self), indent=1).encode()


def make_private(directory: Path) -> None:
    """Make a project's own directory, or close the one that is there: other users of the machine do not enter it.

    So other users cannot read the files below it, whatever their mode.

    Raises:
        ClusterError: it cannot be made or closed, or is another user's.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
        if found.st_uid == os.getuid() and found.st_mode & 0o077:
            directory.chmod(0o700)
    except OSError as error:
        raise unusable(directory, error) from error
    check_owner(directory)


def check_owner(directory: Path) -> None:
    """Raise ``ClusterError`` for a directory of another user, who could make this process run any program."""
    try:
        owner = directory.stat().st_uid
    except FileNotFoundError:
        return
    if owner != os.getuid():
        raise ClusterError(
            f"{directory} belongs to user {owner}, and this process runs as {os.getuid()}: run the command as its "
            "owner, give the directory to this user (chown -R), or name another one (ORCHESTRATOR_DIRECTORY)"
        )


def unusable(directory: Path, error: OSError) -> ClusterError:
    """The error of a project's directory that cannot be written to."""
    why = error.strerror or str(error)
    return ClusterError(f"{directory} cannot be used: {why}; it must be a directory that you may write to")


def tracking_uri(directory: Path) -> str:
    """The project's MLflow database; works without any server."""
    return f"sqlite:///{directory / DATABASE_FILE}"


def read_stack(directory: Path) -> Stack | None:
    """The directory's running stack; ``None`` if there is none, or its description is of one that has died."""
    stack = read_description(directory)
    return stack if stack is not None and stack.is_alive else None


def read_description(directory: Path) -> Stack | None:
    """The last description of a stack, running or killed; a stack that ends in order removes it.

    One of another user, of another directory or with addresses of another machine counts as none.
    """
    try:
        with (directory / STACK_FILE).open("rb") as file:
            if {directory.stat().st_uid, os.fstat(file.fileno()).st_uid} != {os.getuid()}:
                return None
            stack = Stack.from_bytes(file.read())
        if stack.inode not in {0, directory.stat().st_ino}:
            return None
    except (OSError, ValueError, TypeError):
        return None
    home = directory.absolute()
    return replace(
        stack,
        directory=str(home),
        tracking_uri=tracking_uri(home),
        token_path=str(home / TOKEN_FILE),
        mlflow_token_path=str(home / MLFLOW_TOKEN_FILE),
    )


def remove_description(directory: Path) -> None:
    """Remove a stack's description and the settings of its services; only for the holder of the directory's lock."""
    (directory / STACK_FILE).unlink(missing_ok=True)
    shutil.rmtree(directory / SERVICES_FOLDER, ignore_errors=True)


def remember_service(directory: Path, service: Mapping[str, str]) -> None:
    """Store the settings of a controller and its publisher, so that they can be started again with Ray."""
    text = json.dumps({**service, **_marks_of(directory)}, sort_keys=True, indent=1)
    folder = directory / SERVICES_FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{sha256(service['namespace'].encode()).hexdigest()[:12]}.json"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_private(path, text)  # the address of a tracking server may hold a password


def remembered_services(directory: Path) -> list[dict[str, str]]:
    """All settings that were stored in this directory on this machine, one per namespace.

    Those of a copied directory would start a controller that runs sweeps of a store which somebody else has chosen.
    """
    found = [json.loads(path.read_bytes()) for path in sorted((directory / SERVICES_FOLDER).glob("*.json"))]
    own = _marks_of(directory)
    machines = [(name, own[name]) for name in ("boot_id", "machine_id") if own[name]]
    here = [one for one in found if any(one.get(name) == mark for name, mark in machines)]
    here = [one for one in here if one.get("inode") == own["inode"]]
    return [{name: value for name, value in one.items() if name not in own} for one in here]


def _marks_of(directory: Path) -> dict[str, str]:
    """Of a directory and this machine, until it boots again, and for good where it has an id. Empty if unknown."""
    inode = str(directory.stat().st_ino)
    return {"boot_id": own_boot_id(), "machine_id": _first_line("/etc/machine-id"), "inode": inode}


def database_behind(uri: str, directory: Path) -> str:
    """The database of the directory's own MLflow server, where ``uri`` names that server; any other URI as it is.

    So no process of the stack needs the server's token, even if a sweep or a setting names its address.
    """
    if not uri.startswith("http://") or (stack := read_stack(directory)) is None:
        return uri
    own, given = urlsplit(stack.mlflow_url), urlsplit(uri)
    try:
        is_own = given.hostname in {own.hostname, "localhost"} and given.port == own.port
    except ValueError:
        return uri  # its port is invalid; opening it reports the error
    return stack.tracking_uri if is_own else uri


def write_stack(directory: Path, stack: Stack) -> None:
    """Publish the description: a reader sees the whole of it or nothing."""
    write_private(directory / STACK_FILE, stack.to_bytes().decode())


def touch_stack(directory: Path) -> None:
    """Mark the stack as used, so that it does not end as idle."""
    (directory / TOUCH_FILE).touch()


def touched_at_s(directory: Path) -> float:
    """Unix time of the last use; now if it was never used."""
    try:
        return (directory / TOUCH_FILE).stat().st_mtime
    except FileNotFoundError:
        return time.time()


def start_ticks_of(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot (field 22 of proc_pid_stat(5)); ``None`` if there is none.

    A zombie counts as ended.
    """
    try:
        # The command in parentheses may hold anything, spaces and parentheses too: count from its end.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def own_boot_id() -> str:
    """The kernel's random name for this boot of the machine, the same in all of its containers; empty if unknown."""
    return _first_line("/proc/sys/kernel/random/boot_id")


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").partition("\n")[0].strip()
    except OSError:
        return ""


def own_identity() -> tuple[int, int]:
    """Pid and start time of this process."""
    pid = os.getpid()
    return pid, start_ticks_of(pid) or 0
