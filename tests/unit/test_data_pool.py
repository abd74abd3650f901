"""Pools of the data plane: scans by several processes, and what happens when a process is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from orchestrator.core.errors import OrchestratorError
from tests.data_jobs import Member, encoded, tar_of
from workloads.data.scan import ClassRule
from workloads.data.scan_splits import ShardSource, scan_sources
from workloads.runtime.processes import owned_pool

ROOT = Path(__file__).parents[2]
OWNER = """
import os, sys, time
from workloads.runtime.processes import owned_pool
if __name__ == "__main__":
    with owned_pool(2) as pool:
        for _ in range(2):
            print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 600)
        time.sleep(600)
"""
DEADLINE_S = 60.0


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_pool_processes_end_when_their_owner_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        workers = {int(owner.stdout.readline()) for _ in range(2)}
        assert all(is_running(pid) for pid in workers)
        owner.kill()
    deadline_s = time.monotonic() + DEADLINE_S
    while any(is_running(pid) for pid in workers) and time.monotonic() < deadline_s:
        os.sched_yield()
    assert not any(is_running(pid) for pid in workers)


def test_pool_killed_process_is_reported(tmp_path: Path) -> None:
    with pytest.raises(OrchestratorError, match="one of 1 processes was killed"), owned_pool(1) as pool:
        pool.submit(os.kill, pool.submit(os.getpid).result(), signal.SIGKILL).result()


def test_scan_by_processes_gives_the_same_tables_in_order(tmp_path: Path) -> None:
    sources = []
    for number in range(5):
        members: list[Member] = []
        for row in range(number + 1):
            members += [(f"{number}{row}.png", encoded(seed=row)), (f"{number}{row}.cls", b"0")]
        path = tmp_path / f"train-{number}.tar"
        path.write_bytes(tar_of(members))
        sources.append(ShardSource(name=path.name, size_bytes=path.stat().st_size, path=path))
    rule = ClassRule(num_classes=1)
    alone = list(scan_sources(sources, rule, num_processes=1, total_bytes=0))
    together = list(scan_sources(sources, rule, num_processes=2, total_bytes=1 << 40))
    assert [table.name for table in together] == [source.name for source in sources]
    for one, other in zip(alone, together, strict=True):
        assert (one.digests, one.num_samples) == (other.digests, other.num_samples)
        assert np.array_equal(one.offsets, other.offsets)
