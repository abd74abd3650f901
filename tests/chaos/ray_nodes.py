"""A Ray cluster of several raylets on this machine, each a process group of its own that can be killed and come back.

The head keeps its tables in RocksDB, so that it comes back knowing its actors and nodes. This process never connects:
whoever is connected to a head that dies may die with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from orchestrator.core.units import MIB
from orchestrator.stack.description import LOOPBACK
from orchestrator.stack.environment import child_environment, renew_token
from orchestrator.stack.ports import free_ports
from tests.chaos.member import READY

READY_S = 120.0
ROOT = Path(__file__).parents[2]
NUM_CPUS = 2  # invented, of each node
_HEAD = "head"
_UP = (b"Ray runtime started", READY.encode())


class RayNodes:
    """``start`` all, then ``kill`` and ``start_node`` single ones by name: ``head``, ``node1``, ..."""

    def __init__(self, home: Path, environment: Mapping[str, str], *, num_nodes: int, dashboard: bool) -> None:
        self.home = home
        self.names = [f"node{number + 1}" for number in range(num_nodes)]
        self._dashboard = dashboard
        renew_token(home)
        (home / "gcs").mkdir()
        self._port, self._dashboard_port = free_ports(2)
        self.environment = {
            **child_environment(home),
            **environment,
            "PYTHONPATH": str(ROOT),
            "RAY_gcs_storage": "rocksdb",
            "RAY_gcs_storage_path": str(home / "gcs"),
        }
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        """The same after every start of the head."""
        return f"{LOOPBACK}:{self._port}"

    def start(self) -> None:
        """All of it."""
        self.start_node(_HEAD)
        for name in self.names:
            self._spawn(name)
        for name in self.names:
            self._await(name)

    def start_node(self, name: str) -> None:
        """Start a node that is not there, and wait until it is up."""
        self._spawn(name)
        self._await(name)

    def _spawn(self, name: str) -> None:
        # Where members of the same host know the head's address, ``ray start`` would take it for a head that lives.
        (self.home / "r" / "ray_current_cluster").unlink(missing_ok=True)
        command = self._head_command() if name == _HEAD else self._member_command()
        with self._log_of(name).open("wb") as log:
            self._children[name] = subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def _await(self, name: str) -> None:
        log_path, deadline_s = self._log_of(name), time.monotonic() + READY_S
        while not any(word in log_path.read_bytes() for word in _UP):
            assert time.monotonic() < deadline_s, log_path.read_text()
            if self._children[name].poll() is not None:  # Ray gives a node up that does not start in its time
                self.kill(name)
                self._spawn(name)
            time.sleep(0.05)

    def _log_of(self, name: str) -> Path:
        return self.home / f"{name}.log"

    def kill(self, name: str) -> None:
        """SIGKILL to all processes of a node at once, as if the machine had lost its power."""
        child = self._children.pop(name)
        for pid in _session_of(child.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.wait()

    def kill_raylet(self, name: str) -> None:
        """SIGKILL to its raylet alone: its workers and its agents notice, and ``ray start`` ends with it."""
        child = self._children.pop(name)
        members = _session_of(child.pid)
        for pid in members:
            if _program(pid).endswith("raylet"):
                os.kill(pid, signal.SIGKILL)
        child.wait(READY_S)
        for pid in members:  # what is left would go by itself; the next start of this name needs no company
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill what is left."""
        for name in list(self._children):
            self.kill(name)

    def _head_command(self) -> list[str]:
        return [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--node-ip-address={LOOPBACK}",
            f"--port={self._port}", f"--num-cpus={NUM_CPUS}", f"--object-store-memory={100 * MIB}",
            "--disable-usage-stats", f"--include-dashboard={str(self._dashboard).lower()}",
            f"--dashboard-host={LOOPBACK}", f"--dashboard-port={self._dashboard_port}", f"--temp-dir={self.home / 'r'}",
        ]  # fmt: skip

    def _member_command(self) -> list[str]:
        return [sys.executable, "-m", "tests.chaos.member", self.address, str(NUM_CPUS)]


def new_home() -> Path:
    """A directory with a short path: those of sockets may have 107 characters."""
    return Path(tempfile.mkdtemp(prefix="orc-c-"))


def _session_of(leader: int) -> list[int]:
    """All processes of a session, whatever their groups."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(folder.name))
    return found


def _program(pid: int) -> str:
    with suppress(OSError):
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")[0].decode()
    return ""
