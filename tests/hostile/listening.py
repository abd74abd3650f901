"""Who listens where: the sockets of a process and all that it started, each with the reason why it is there."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

_LISTEN = "0A"
REASONS = {
    r"gcs_server": "Ray's control store; asks for the token",
    r"raylet": "Ray's scheduler and object transfer on this node; asks for the token",
    r"ray::|ray-|default_worker|IDLE": "a Ray worker takes calls of other workers; asks for the token",
    r"dashboard(/|\.|_)?(dashboard|client)?": "Ray's dashboard and its modules; asks for the token",
    r"dashboard.*agent|agent\.py": "Ray's agent on this node: metrics and logs of the dashboard; asks for the token",
    r"runtime_env": "Ray's agent that would make environments; asks for the token",
    r"log_monitor|monitor\.py": "metrics of Ray's own monitor: numbers only",
    r"mlflow|uvicorn|gunicorn|waitress|huey": "MLflow's pages, which show what the database beside it holds",
    r"seaweed|weed": "the S3 server of `up --s3`; asks for keys",
}
"""What may listen on loopback, by command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A TCP socket that takes connections."""

    address: str
    port: int
    pid: int
    command: str
    reason: str
    """Empty: nobody has said why it is there."""


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
