"""Nodes that join the Ray cluster that all tests share, with GPUs that are invented, and can be killed as a whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from orchestrator.backends.ray.backend import RayBackend
from tests.chaos.member import READY

ROOT = Path(__file__).parents[2]
READY_S = 120.0


class UncheckedNodes(RayBackend):
    """Checks no nodes: GPUs that are invented do not pass."""

    def check_node(self, name: str, store_uri: str) -> None:
        """Leave it as it is."""


class ExtraNodes:
    """``start`` nodes one by one; ``kill`` one by its name, as ``Capacity`` tells it; ``end`` kills what is left."""

    def __init__(self, ray: Any, folder: Path, until: Callable[..., None]) -> None:
        self._ray, self._folder, self._until = ray, folder, until
        self._leaders: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *, cpus: int, gpus: int) -> str:
        """Start a node and wait until it has joined; its name."""
        before = self._alive()
        log_path = self._folder / f"node-{len(before)}-{len(self._leaders)}.log"
        address = self._ray.get_runtime_context().gcs_address
        with log_path.open("wb") as log:
            leader = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.member", address, str(cpus), str(gpus)],
                cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

        def is_up() -> bool:
            assert leader.poll() is None, log_path.read_text()
            return READY.encode() in log_path.read_bytes() and len(self._alive()) > len(before)

        try:
            self._until(is_up, READY_S)
        except BaseException:
            kill_session(leader)
            raise
        (name,) = self._alive() - before
        self._leaders[name] = leader
        return name

    def kill(self, name: str) -> None:
        """SIGKILL to all processes of a node at once, as if the machine had lost its power."""
        kill_session(self._leaders.pop(name))

    def end(self) -> None:
        for name in list(self._leaders):
            self.kill(name)
            self._until(lambda name=name: name not in self._alive())

    def _alive(self) -> set[str]:
        return {f"{node['NodeManagerHostname']}/{node['NodeID'][:8]}" for node in self._ray.nodes() if node["Alive"]}


def kill_session(leader: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and all of its session, whatever their groups."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == leader.pid:
                os.kill(int(folder.name), signal.SIGKILL)
    leader.wait()
