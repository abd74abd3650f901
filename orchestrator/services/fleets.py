"""Which cluster a plan is estimated for: one from options, the one of ``RAY_ADDRESS``, or this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.contract import Resources
from orchestrator.core.errors import UsageError
from orchestrator.core.units import GIB
from orchestrator.planning.estimate.eta import Fleet
from orchestrator.services.settings import Settings
from orchestrator.services.terminal import say
from orchestrator.stack.ports import check_answers

DEFAULT_GPUS_PER_NODE = 8


CPUS_PER_GPU = 16
"""Assumed values for a cluster that options describe."""


ASK_RAY_TIMEOUT_S = 25.0


_NVIDIA = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedCluster:
    """Values of ``--gpus``, ``--gpus-per-node`` and ``--cpus``; 0 = not given."""

    gpus: int = 0
    gpus_per_node: int = 0
    cpus: int = 0

    @property
    def is_stated(self) -> bool:
        """Whether any of them is given."""
        return bool(self.gpus or self.gpus_per_node or self.cpus)


def stated_fleet(stated: StatedCluster) -> Fleet:
    """Equal nodes, and a smaller last one if the GPUs do not divide. Raises ``UsageError`` for negative numbers."""
    per_node = stated.gpus_per_node or min(DEFAULT_GPUS_PER_NODE, stated.gpus)
    if min(stated.gpus, stated.gpus_per_node, stated.cpus) < 0:
        raise UsageError("--gpus, --gpus-per-node and --cpus count things: give numbers from 1 up")
    if stated.gpus_per_node and not stated.gpus:
        raise UsageError("--gpus-per-node describes the nodes of --gpus: give --gpus too")
    if not stated.gpus:
        return Fleet(nodes=(Resources(cpus=float(stated.cpus)),), name=f"{stated.cpus} CPUs")
    sizes = [per_node] * (stated.gpus // per_node) + ([stated.gpus % per_node] if stated.gpus % per_node else [])
    cpus = stated.cpus or CPUS_PER_GPU * stated.gpus
    nodes = tuple(Resources(cpus=cpus * size / stated.gpus, gpus=float(size)) for size in sizes)
    return Fleet(nodes=nodes, name=f"{stated.gpus} GPUs on {len(nodes)} nodes")


def this_machine() -> Fleet:
    """Cores that this process may use, and NVIDIA GPUs."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = len(list(_NVIDIA.iterdir())) if _NVIDIA.is_dir() else 0
    name = f"this machine ({cpus} CPUs{f', {gpus} GPUs' if gpus else ''})"
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    node = Resources(cpus=float(cpus), gpus=float(gpus), memory_gib=memory_gib)
    return Fleet(nodes=(node,), name=name, is_fixed=True)


def ray_fleet(address: str, namespace: str) -> Fleet | None:
    """The nodes of a Ray cluster; None if it does not answer in time.

    A separate process asks, which is ended when it hangs: planning must answer, and does not load Ray.
    """
    try:
        check_answers(address)
    except OSError:
        return None
    command = [sys.executable, "-m", "orchestrator.services.ray_nodes", address, namespace]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_RAY_TIMEOUT_S, check=False)
        found = json.loads(done.stdout) if done.returncode == 0 else {}
    except (subprocess.TimeoutExpired, ValueError):
        return None
    if not found.get("nodes"):
        return None
    nodes = tuple(Resources(**node) for node in found["nodes"])
    gpus = sum(node.gpus for node in nodes)
    plural = "s" * (len(nodes) != 1)
    name = f"Ray at {address}: {len(nodes)} node{plural}, {gpus:g} GPUs"
    return Fleet(nodes=nodes, name=name, is_fixed=bool(found["is_fixed"]))


def choose_fleet(settings: Settings, stated: StatedCluster) -> Fleet | None:
    """The stated cluster, else the one of ``RAY_ADDRESS``, else this machine; None if it is unknown."""
    if stated.is_stated:
        return stated_fleet(stated)
    if settings.is_remote:
        return None
    if not settings.driver_address:
        return this_machine()
    fleet = ray_fleet(settings.driver_address, settings.namespace)
    if fleet is None:
        message = (
            f"the cluster at {settings.driver_address} did not list its nodes, so the duration is unknown; "
            "`orchestrator plan` estimates it for a cluster that --gpus describes"
        )
        say(f"warning: {message}")
    return fleet
