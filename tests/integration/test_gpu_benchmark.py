"""The benchmarks of training and of jobs on a GPU: they say where there is none, and their code works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILES = ("benchmarks/bench_gpu_training.py", "benchmarks/bench_gpu_jobs.py")


def _run(*arguments: str, **environment: str) -> str:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-q",
        "-s",
        "-rs",
        "--timeout=0",
        *arguments,
        *FILES,
    ]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=root, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: make bench measures")
@pytest.mark.timeout(900)
def test_gpu_benchmark_without_a_gpu_is_skipped_and_its_code_works() -> None:
    said = _run()
    assert "there is no GPU here; GPU_BENCHMARK_DRY_RUN=1" in said
    assert "passed" not in said
    table = _run(GPU_BENCHMARK_DRY_RUN="1")
    assert "the figures say nothing" in table
    for row in (
        "test_vit, batch 8, timm --torchcompile",
        "test_resnet, batch 8, blocks",
        "test_vit, activations",
        "test_resnet, groups of 4 in 8, at once, compiled",
        "EMA",
        "stall of a checkpoint",
        "fed by its process",
        "test_resnet, compile off, deterministic True: resumed in the middle, equal weights True",
        "probe of features",
        "k-means of 2000 x 768",
    ):
        assert row in table
