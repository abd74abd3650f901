"""The processor of this machine: part of what decides the last bits of a result, and of a node's description."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path


@cache
def cpu_model() -> str:
    """Architecture and model: equal instruction sets with other cache sizes already choose other blockings."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{platform.machine()} {next(named, platform.processor())}".strip()
