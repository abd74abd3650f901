"""The report of a sweep of 10,000 transfers, as a command: asked for are 20 s and 1 GiB."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.core.units import GIB
from orchestrator.storage.local import LocalStore
from tests.benchmarks.report_store import NUM_TRANSFERS, SWEEP, write_big_sweep

ASKED_S, ASKED_GIB = 20.0, 1.0
ARMS = {"report": (), "report --html": ("--html",)}


@dataclass(frozen=True, kw_only=True)
class Measured:
    wall_s: float
    cpu_s: float
    peak_gib: float


def run(folder: Path, arguments: tuple[str, ...]) -> Measured:
    """One command in a process of its own, whose peak memory the kernel tells at its end."""
    store = LocalStore(folder).uri
    command = [sys.executable, "-m", "orchestrator.cli", "report", SWEEP, "--store", store, "-o", "csv", *arguments]
    started_s = time.perf_counter()
    with (folder / "out.txt").open("wb") as out:
        child = subprocess.Popen(command, stdout=out)
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    cpu_s = usage.ru_utime + usage.ru_stime
    return Measured(wall_s=time.perf_counter() - started_s, cpu_s=cpu_s, peak_gib=usage.ru_maxrss * 1024 / GIB)


@pytest.mark.bench
def test_report_of_ten_thousand_transfers(tmp_path: Path) -> None:
    write_big_sweep(tmp_path)
    for name, arguments in [*ARMS.items(), *ARMS.items()]:
        found = run(tmp_path, arguments)
        took = f"{found.wall_s:.1f} s ({found.cpu_s:.1f} s CPU, asked {ASKED_S:.0f})"
        sys.stdout.write(
            f"{name}: {NUM_TRANSFERS} transfers in {took}, {found.peak_gib:.2f} GiB (asked {ASKED_GIB:.0f})\n"
        )
    page = tmp_path / "sweeps" / SWEEP / "report" / "report.html"
    sys.stdout.write(f"page: {page.stat().st_size / 1e6:.1f} MB\n")
