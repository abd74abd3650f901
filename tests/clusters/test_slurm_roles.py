"""Which allocation of a Slurm cluster starts the head, without Slurm: the script, and a stand-in for ``srun``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "clusters" / "slurm" / "ray.sbatch"


def start(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script; what it prints last is the role of the allocation."""
    shared, programs = tmp_path / "shared", tmp_path / "bin"
    shared.mkdir()
    programs.mkdir()
    (shared / "address").write_text("10.0.0.1:6379")
    stand_in = programs / "srun"
    stand_in.write_text('#!/bin/sh\nfor last; do :; done\necho "$last"\n')
    stand_in.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_SUBMIT_DIR": str(ROOT)}
    ours = {"ORCHESTRATOR_STORE": "s3://bucket/prefix", "ORCHESTRATOR_SHARED": str(shared), "HOME": str(tmp_path)}
    path = f"{programs}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(SCRIPT)],
        env={"PATH": path, **slurm, **ours, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("variables", "role"),
    [
        ({}, "head"),
        ({"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_MIN": "0"}, "head"),
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "0"}, "member"),
        ({"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MIN": "1", "ORCHESTRATOR_ROLE": "member"}, "member"),
        ({"ORCHESTRATOR_ROLE": "member"}, "member"),
    ],
)
def test_allocation_has_the_head_unless_it_joins_another_one(
    tmp_path: Path, variables: dict[str, str], role: str
) -> None:
    done = start(tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == role
    # Only who has the head takes away the address of the former one.
    assert (tmp_path / "shared" / "address").exists() is (role == "member")


def test_role_that_is_none_is_refused(tmp_path: Path) -> None:
    done = start(tmp_path, ORCHESTRATOR_ROLE="worker")
    assert done.returncode == 2
    assert "write head or member" in done.stderr
