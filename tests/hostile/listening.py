"""Who listens where: the sockets of a process and of all that it started, each with what it is."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"
_ACCEPTS = 0x10000  # __SO_ACCEPTCON of the kernel
RAY, DASHBOARD = "Ray: control store, raylet, workers, agents", "Ray's dashboard"
MLFLOW, SEAWEED = "MLflow", "SeaweedFS of `up --s3`"
REASONS = {
    r"gcs_server": RAY,
    r"/raylet/raylet": RAY,
    r"orchestrator\.stack\.(mlflow_server|supervisor)": MLFLOW,  # the supervisor keeps the socket
    r"/dashboard/dashboard\.py": DASHBOARD,
    r"^ray::|default_worker|runtime_env|dashboard.*agent": RAY,
    r"seaweed|weed": SEAWEED,
}
"""What may listen, by command line: the first column of the table in docs/security.md, which a test compares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A TCP socket that takes connections."""

    address: str
    port: int
    pid: int
    command: str
    reason: str
    """Which row of the table it is; empty: nobody has said why it is there."""


def listeners_of(pid: int) -> list[Listener]:
    """All listening TCP sockets of a process, its children, and theirs, and of its whole session."""
    sockets = {inode: place for table in ("tcp", "tcp6") for inode, place in _table(table)}
    found: list[Listener] = []
    for one in sorted(_family(pid)):
        command = _text(Path(f"/proc/{one}/cmdline")).replace("\0", " ").strip()
        for inode in _sockets(one):
            if inode in sockets:
                address, port = sockets[inode]
                found.append(Listener(address=address, port=port, pid=one, command=command[:200], reason=_why(command)))
    return found


def unix_sockets_of(pid: int) -> set[str]:
    """Paths of all Unix sockets on which the same processes listen; those without a place in files begin with ``@``."""
    rows = [line.split() for line in _text(Path("/proc/net/unix")).splitlines()[1:]]
    listening = {row[6]: row[7] for row in rows if len(row) == 8 and int(row[3], 16) & _ACCEPTS}
    mine = {inode for one in _family(pid) for inode in _sockets(one)}
    return {path for inode, path in listening.items() if inode in mine}


def commands_of(pid: int) -> list[str]:
    """Command lines of the same processes, which everybody may read."""
    return [_text(Path(f"/proc/{one}/cmdline")).replace("\0", " ") for one in sorted(_family(pid))]


def is_loopback(one: Listener) -> bool:
    """Whether only this machine reaches it."""
    return ipaddress.ip_address(one.address).is_loopback


def _why(command: str) -> str:
    return next((reason for pattern, reason in REASONS.items() if re.search(pattern, command)), "")


def _table(name: str) -> list[tuple[str, tuple[str, int]]]:
    """(inode, (address, port)) of listening sockets (proc_pid_net(5))."""
    rows = [line.split() for line in _text(Path(f"/proc/net/{name}")).splitlines()[1:]]
    return [(row[9], _place(row[1])) for row in rows if row[3] == _LISTEN]


def _place(text: str) -> tuple[str, int]:
    """Address in host byte order by words of four bytes, port."""
    words, port = text.split(":")
    raw = b"".join(bytes.fromhex(words[start : start + 8])[::-1] for start in range(0, len(words), 8))
    address = ipaddress.ip_address(raw)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), int(port, 16)


def _sockets(pid: int) -> list[str]:
    found: list[str] = []
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []
    for descriptor in descriptors:
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        found += re.findall(r"socket:\[(\d+)\]", target)
    return found


def _family(pid: int) -> set[int]:
    parents = {int(folder.name): _parent(folder) for folder in Path("/proc").iterdir() if folder.name.isdigit()}
    family = {pid}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    return family


def _parent(folder: Path) -> int:
    fields = _text(folder / "stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
