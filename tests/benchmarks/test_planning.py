"""How planning grows with the number of jobs: seconds by step, memory, and the schedule beside its bound."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
_SIZES = (1_000, 10_000, 100_000)
_ROUNDS = 3


def test_planning_time_and_memory_over_numbers_of_jobs() -> None:
    """Asked: 1,000 jobs <= 1 s; 100,000 jobs <= 60 s and <= 2 GiB; linear growth."""
    runs: dict[int, list[dict[str, Any]]] = {size: [] for size in _SIZES}
    for _ in range(_ROUNDS):
        for size in _SIZES:
            command = [sys.executable, "-m", "tests.benchmarks.planning_arm", str(size)]
            done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
            runs[size].append(json.loads(done.stdout))
    base = 0.0
    for size, found in runs.items():
        total_s = statistics.median(sum(run["steps"].values()) for run in found)
        per_job_us = 1e6 * total_s / found[0]["jobs"]
        base = base or per_job_us
        steps = {name: statistics.median(run["steps"][name] for run in found) for name in found[0]["steps"]}
        shown = "  ".join(f"{name} {seconds:.2f} s" for name, seconds in steps.items())
        memory = f"{max(run['peak_mib'] for run in found):,.0f} MiB"
        speed = f"{per_job_us:5.0f} us/job ({per_job_us / base:.2f}x)"
        line = f"{found[0]['jobs']:7,} jobs  {total_s:6.2f} s  {speed}  {memory}"
        print(f"{line}  {shown}  makespan / bound {found[0]['makespan']:.3f}")  # noqa: T201 - a benchmark's result
        assert size * 0.8 <= found[0]["jobs"] <= size * 1.2
