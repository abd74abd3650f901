"""What the script of an allocation asks ``srun`` for, without Slurm: which task is the head, how many CPUs each has."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "clusters" / "slurm" / "ray.sbatch"


def start(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script; it prints what a stand-in for ``srun`` was called with, at last the role of the allocation."""
    shared, programs = tmp_path / "shared", tmp_path / "bin"
    shared.mkdir()
    programs.mkdir()
    (shared / "address").write_text("10.0.0.1:6379")
    stand_in = programs / "srun"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
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


def test_tasks_have_the_cpus_of_the_allocation(tmp_path: Path) -> None:
    done = start(tmp_path, SLURM_CPUS_PER_TASK="96")
    assert "--cpus-per-task=96" in done.stdout.splitlines()


def test_role_that_is_none_is_refused(tmp_path: Path) -> None:
    done = start(tmp_path, ORCHESTRATOR_ROLE="worker")
    assert done.returncode == 2
    assert "write head or member" in done.stderr
