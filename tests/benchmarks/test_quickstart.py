"""The quickstart as a newcomer runs it: time, memory and where the time goes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.memory import watch_memory

pytestmark = pytest.mark.bench

_GIB = 1024**3


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """An empty directory whose stack is stopped afterwards."""
    yield tmp_path
    subprocess.run([sys.executable, "-m", "orchestrator.cli", "down"], cwd=tmp_path, env=_environment(), check=False)


def test_quickstart_time_memory_and_second_submit(project: Path) -> None:
    """Asked: first submit <= 300 s on 2 cores, <= 8 GiB for everything; second submit 0 jobs, <= 15 s."""
    roots: set[int] = set()
    with watch_memory(roots) as peak:
        first_s = _submit(project, roots)
    second_s = _submit(project, roots)
    jobs = _status(project)["jobs"]
    say("first submit", f"{first_s:.1f} s (asked 300)")
    say("peak memory", f"{peak.pss_bytes / _GIB:.2f} GiB in {peak.num_processes} processes (asked 8)")
    say("second submit", f"{second_s:.1f} s (asked 15), attempts now {sum(job['attempts'] for job in jobs)}")
    say("jobs", str(len(jobs)))
    for kind in dict.fromkeys(job["job"].partition("/")[0] for job in jobs):
        say(f"  {kind}", _phases([job for job in jobs if job["job"].startswith(f"{kind}/")]))
    assert {job["attempts"] for job in jobs} == {1}


def _phases(jobs: list[dict[str, Any]]) -> str:
    def median_s(values: list[float | None]) -> float:
        return statistics.median(value or 0.0 for value in values)

    timings = [job["timings"] or {} for job in jobs]
    return (
        f"median s: queued {median_s([job['queued_s'] for job in jobs]):.2f}"
        f"  launch+report {median_s([job['overhead_s'] for job in jobs]):.2f}"
        f"  import {median_s([timing.get('import_s') for timing in timings]):.2f}"
        f"  setup to first step {median_s([timing.get('setup_s') for timing in timings]):.2f}"
        f"  work {median_s([timing.get('work_s') for timing in timings]):.2f}  (n={len(jobs)})"
    )


def _submit(project: Path, roots: set[int]) -> float:
    started_s = time.perf_counter()
    command = [sys.executable, "-m", "orchestrator.cli", "submit", "quickstart", "-y"]
    with subprocess.Popen(command, cwd=project, env=_environment(), stdout=subprocess.DEVNULL) as process:
        roots.add(process.pid)
        while process.poll() is None:
            stack = project / ".orchestrator" / "stack.json"
            if stack.exists():
                roots.add(json.loads(stack.read_text())["pid"])
            time.sleep(0.5)
    assert process.returncode == 0
    return time.perf_counter() - started_s


def _status(project: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "orchestrator.cli", "status", "quickstart", "-o", "json"]
    result = subprocess.run(command, cwd=project, env=_environment(), capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "NO_COLOR": "1"}


def say(name: str, value: str) -> None:
    """One line of a benchmark's result."""
    print(f"{name:16} {value}")  # noqa: T201 - a benchmark's result
