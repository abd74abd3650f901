"""Names of runner actors. A name carries the runner's resource shape, so that listing names is enough to choose one."""

from __future__ import annotations

import re
import secrets

from orchestrator.core.contract import Resources

_NAME = re.compile(r"runner/cpus([0-9.e+-]+)-gpus([0-9.e+-]+)-memory_gib([0-9.e+-]+)/[0-9a-f]+")


def new_runner_name(resources: Resources) -> str:
    """A fresh name for a runner of this shape."""
    shape = f"cpus{resources.cpus:g}-gpus{resources.gpus:g}-memory_gib{resources.memory_gib:g}"
    return f"runner/{shape}/{secrets.token_hex(4)}"


def shape_of(name: str) -> Resources | None:
    """Resource shape of the runner with this name; ``None`` if the name is not a runner's."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    cpus, gpus, memory_gib = (float(number) for number in match.groups())
    return Resources(cpus=cpus, gpus=gpus, memory_gib=memory_gib)
