"""``data shard`` that is killed: its processes end with it, and the next one removes what it left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conversions import fill, photo
from tests.waiting import pids_below

ROOT = Path(__file__).parents[2]
NUM_IMAGES = 4000  # some seconds of work


def command(folder: Path, out: str) -> list[str]:
    arguments = ["shard", "imagefolder", str(folder / "in"), str(folder / out), "-j", "2", "--shard-mib", "1"]
    return [sys.executable, "-m", "orchestrator.cli", "data", *arguments]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["command", "writer"])
def test_killed_shard_leaves_no_process_and_the_next_one_no_folder(tmp_path, until, victim):
    images = {f"c{n % 3}/i{n}.jpg": photo(n) for n in range(100)}
    content = {f"c{n % 3}/i{n}.jpg": images[f"c{n % 100 % 3}/i{n % 100}.jpg"] for n in range(NUM_IMAGES)}
    fill(tmp_path / "in", content)
    temporary = tmp_path / "t"
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    killed = subprocess.Popen(command(tmp_path, "killed"), env=environment, stderr=subprocess.DEVNULL)
    until(lambda: list(temporary.glob("orc-scratch-shard-*/*")))
    pids = [
        int(pid)
        for pid in pids_below(temporary)
        if b"workloads.answer" in Path(f"/proc/{pid}/cmdline").read_bytes() and int(pid) != killed.pid
    ]
    os.kill(killed.pid if victim == "command" else min(pids), signal.SIGKILL)
    killed.wait(30)
    until(lambda: not pids_below(temporary), 20)
    subprocess.run(command(tmp_path, "whole"), env=environment, check=True, capture_output=True)
    assert list(temporary.iterdir()) == []
