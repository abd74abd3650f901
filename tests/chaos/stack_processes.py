"""The processes of the one-machine stack by what they are, told by their environment and command line alone."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

KINDS: Final = {
    "supervisor": r"orchestrator\.stack\.supervisor ",
    "ray": r"ray\.scripts\.scripts start ",
    "gcs": r"gcs_server ",
    "raylet": r"raylet/raylet ",
    "agent": r"^ray::(RuntimeEnv|Dashboard)Agent",
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


def command_lines(*folders: Path) -> dict[int, str]:
    """Command lines by pid of all processes whose ``TMPDIR`` or ``HOME`` is one of these folders, or below it.

    The S3 server is known by its home: it gets no temporary folder, since it puts its sockets where it likes. Ray's
    agents have written their titles over the first of their variables, and are known by their parent.
    """
    marks, found = [f"{name}={folder}".encode() for folder in folders for name in ("TMPDIR", "HOME")], {}
    titled: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = entry.joinpath("environ").read_bytes().split(b"\0")
            line = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if any(one == mark or one.startswith(mark + b"/") for one in variables for mark in marks):
                found[int(entry.name)] = line
            elif line and not variables[0]:
                parent = entry.joinpath("stat").read_text().rpartition(")")[2].split()[1]
                titled[int(entry.name)] = int(parent), line
    return found | {pid: line for pid, (parent, line) in titled.items() if parent in found}
