"""The processes of the one-machine stack by what they are, told by their environment and command line alone."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Final

KINDS: Final = {
    "supervisor": r"orchestrator\.stack\.supervisor ",
    "ray": r"ray\.scripts\.scripts start ",
    "gcs": r"gcs_server ",
    "raylet": r"raylet/raylet ",
    "dashboard": r"dashboard/dashboard\.py ",
    "mlflow": r"-m orchestrator\.stack\.mlflow_server ",
    "controller": r"^ray::ControllerActor",
    "watchdog": r"^ray::WatchdogActor",
    "publisher": r"^ray::PublisherActor",
    "runner": r"^ray::Runner",
    "s3": r"weed ",
    "rank": r"^ray::RayTrainWorker",
    "gang controller": r"^ray::TrainController",
}
"""How their command lines look."""
OF_S3: Final = frozenset({"s3"})
OF_GANGS: Final = frozenset({"rank", "gang controller"})


def command_lines(temporary: Path) -> dict[int, str]:
    """Command lines by pid of all processes whose ``TMPDIR`` is this folder, or below it."""
    mark, found = f"TMPDIR={temporary}".encode(), {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = entry.joinpath("environ").read_bytes().split(b"\0")
            if any(one == mark or one.startswith(mark + b"/") for one in variables):
                line = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry.name)] = line.decode(errors="replace")
    return found


def pids_of(temporary: Path, kind: str) -> list[int]:
    """Processes of one kind."""
    return sorted(pid for pid, line in command_lines(temporary).items() if re.search(KINDS[kind], line))
