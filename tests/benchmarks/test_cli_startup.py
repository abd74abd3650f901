"""How long people wait for the commands that need no cluster, beside a bare interpreter in the same run."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.bench

_ROUNDS = 7
_ARMS = {
    "python -c pass": ["-c", "pass"],
    "orchestrator --help": ["-m", "orchestrator.cli", "--help"],
    "orchestrator plan quickstart": ["-m", "orchestrator.cli", "plan", "quickstart"],
}


def test_cli_startup_beside_a_bare_interpreter(tmp_path: Path) -> None:
    """Asked: --help <= 0.5 s, plan <= 2 s."""
    seconds: dict[str, list[float]] = {name: [] for name in _ARMS}
    for _ in range(_ROUNDS):
        for name, arguments in _ARMS.items():
            started_s = time.perf_counter()
            subprocess.run([sys.executable, *arguments], cwd=tmp_path, check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - started_s)
    bare_s = statistics.median(seconds["python -c pass"])
    for name, values in seconds.items():
        median_s = statistics.median(values)
        print(f"{name:32} {median_s:6.3f} s  {median_s / bare_s:5.1f}x")  # noqa: T201 - a benchmark's result
