"""The machine of a process: interpreter, processor, GPUs and their driver, read from files.

No program is started, so that a controller can use it within a round.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from orchestrator.core.machine import cpu_model

_NVIDIA = Path("/proc/driver/nvidia")
_DRIVER = re.compile(r"Kernel Module\s+(?:for \S+\s+)?([0-9][0-9.]*)")
_MODEL = re.compile(r"(?m)^Model:\s*(.+?)\s*$")
_UUID = re.compile(r"(?m)^GPU UUID:\s*(\S+)")
_MEMORY = re.compile(r"(?m)^MemTotal:\s*(\d+) kB")


def describe_machine() -> dict[str, Any]:
    """Plain JSON: ``host``, ``platform``, ``python``, ``cpu``, ``num_cpus``, ``memory_bytes``, ``gpus``, ``driver``."""
    memory = _MEMORY.search(_text(Path("/proc/meminfo")))
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "num_cpus": os.cpu_count() or 0,
        "memory_bytes": int(memory.group(1)) * 1024 if memory else 0,
        "gpus": _gpus(),
        "driver": _driver(),
    }


def gpu_uuids(ids: Iterable[str]) -> tuple[str, ...]:
    """UUIDs of GPUs by the ids that Ray gives: numbers in the order of the PCI bus, or UUIDs already.

    A GPU that the driver does not tell of keeps its number.
    """
    found = [_UUID.search(_text(path)) for path in sorted(_NVIDIA.glob("gpus/*/information"))]
    uuids = {str(number): uuid.group(1) for number, uuid in enumerate(found) if uuid}
    return tuple(uuids.get(one, one) for one in ids)


def _gpus() -> list[str]:
    models = (_MODEL.search(_text(path)) for path in sorted(_NVIDIA.glob("gpus/*/information")))
    return [model.group(1) for model in models if model]


def _driver() -> str:
    found = _DRIVER.search(_text(_NVIDIA / "version"))
    return found.group(1) if found else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
