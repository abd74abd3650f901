"""A weights file of ours in somebody else's hands: timm loads it, and a script without us gets our validation error."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.contract import JobResult
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.artifacts import download_part, read_record
from orchestrator.storage.local import LocalStore
from tests.tiny_training import BATCHNORM, NO_BATCHNORM, TinyTraining

SCRIPT = Path(__file__).parents[2] / "docs" / "tools" / "accuracy_elsewhere.py"
# Labels that fit no simple rule of the pixels: an error that neither 0 nor 1 would give away by chance.
SPACE = {"hierarchy": "depth2"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTraining:
    folder = tmp_path_factory.mktemp("elsewhere")
    return TinyTraining(LocalStore(folder / "store"), folder)


def _download(tiny: TinyTraining, result: JobResult, folder: Path, backbone_of: str | None = None) -> list[str]:
    """Parts of an artifact and the validation shards as files, as a person would copy them out of the store."""
    record, labels = read_record(tiny.store, result.key), read_record(tiny.store, tiny.labels(SPACE))
    backbone = record if backbone_of is None else read_record(tiny.store, backbone_of)
    wanted = [(record, "model.json"), (record, "head.safetensors"), (backbone, "backbone.safetensors")]
    for source, name in [*wanted, (labels, "targets.npy")]:
        download_part(tiny.store, source, name, folder / name)
    dataset = read_record(tiny.store, tiny.dataset)
    shards = [name for name in dataset.parts if name.startswith("val") and name.endswith(".tar")]
    return [str(download_part(tiny.store, dataset, name, folder / name)) for name in shards]


def _elsewhere(folder: Path, shards: list[str]) -> dict[str, Any]:
    # Isolated: neither the working directory nor PYTHONPATH makes this project importable there.
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-I", str(SCRIPT), str(folder), *shards]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _here(folder: Path, shards: list[str]) -> dict[str, Any]:
    """The script in this process, which has imported what it imports: that takes most of its time."""
    written = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(written):
        patch.setattr(sys, "argv", [str(SCRIPT), str(folder), *shards])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    document: dict[str, Any] = json.loads(written.getvalue())
    return document


def _error(result: JobResult) -> float:
    return result.metrics["val_error"]


@pytest.mark.parametrize(
    ("kind", "run_script"),
    [
        (JobKind.PRETRAIN, _here),
        pytest.param(JobKind.PRETRAIN, _elsewhere, marks=pytest.mark.slow),
        pytest.param(JobKind.PROBE, _elsewhere, marks=pytest.mark.slow),
    ],
)
def test_weights_of_ours_give_our_val_error_in_a_script_without_us(
    tiny: TinyTraining, kind: JobKind, run_script: Callable[[Path, list[str]], dict[str, Any]], tmp_path: Path
) -> None:
    # A batch norm's running statistics and an image that must be resized: what such a script gets wrong first.
    model = {**BATCHNORM, "image_size": 24} if kind is JobKind.PRETRAIN else NO_BATCHNORM
    result = tiny.run(tiny.training(model=model, space=SPACE))
    backbone_of = None
    if kind is JobKind.PROBE:
        backbone_of = result.key
        result = tiny.run(tiny.training(kind, model=model, backbone=result.key, space=SPACE, seed=1))
    found = run_script(tmp_path, _download(tiny, result, tmp_path, backbone_of))
    assert found["num_samples"] == 48
    assert found["val_error"] == pytest.approx(_error(result))
    assert 0 < _error(result) < 1


def test_script_without_us_imports_nothing_of_ours() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert "orchestrator" not in text
    assert "workloads" not in text
    assert len(text.splitlines()) <= 36
