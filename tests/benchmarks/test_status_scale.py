"""Looking at a sweep of 10,000 jobs: one `status`, and what a following display takes at each look."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.cli.commands.watch import Watching, view
from orchestrator.storage.local import LocalStore
from tests.live_sweep import SWEEP, write_live_sweep

ROOT = Path(__file__).parents[2]


@pytest.mark.bench
@pytest.mark.parametrize("num_transfers", [1_000, 10_000])
def test_status_of_a_live_sweep_in_a_process_of_its_own(tmp_path: Path, num_transfers: int) -> None:
    store = LocalStore(tmp_path / "store")
    plan = write_live_sweep(store, num_transfers=num_transfers, now=time.time())
    took = {}
    for form in ("table", "json"):
        began_s, began = time.perf_counter(), os.times()
        command = [sys.executable, "-m", "orchestrator.cli", "status", SWEEP, "--store", store.uri, "-o", form]
        result = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
        )
        ended = os.times()
        assert result.returncode == 101, result.stderr
        cpu_s = ended.children_user + ended.children_system - began.children_user - began.children_system
        took[form] = (time.perf_counter() - began_s, cpu_s)
    told = ", ".join(f"-o {form} {wall_s:.2f} s ({cpu_s:.2f} s CPU)" for form, (wall_s, cpu_s) in took.items())
    sys.stdout.write(f"\nstatus of {len(plan.jobs)} jobs: {told}\n")


@pytest.mark.bench
def test_look_of_watch_at_a_live_sweep(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    plan = write_live_sweep(store, num_transfers=10_000, now=time.time())
    watching, console = Watching(store, SWEEP), Console(width=140, height=50, force_terminal=True, highlight=False)
    looks = []
    for _ in range(11):
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        watching.look()
        with console.capture():
            console.print(view(watching, console))
        looks.append((time.perf_counter() - began_s, time.thread_time() - began_cpu_s))
    watching.tracker.wait()
    first, later, cpu = looks[0], sorted(looks[1:]), sorted(cpu_s for _, cpu_s in looks[1:])
    sys.stdout.write(
        f"\nwatch of {len(plan.jobs)} jobs: first look {first[0]:.2f} s, median of the others "
        f"{1e3 * later[5][0]:.0f} ms ({1e3 * cpu[5]:.0f} ms CPU), longest {1e3 * later[-1][0]:.0f} ms\n"
    )
