"""Kept checkpoints of a real training: in the artifact under their names, whatever happened to attempts on the way."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch

from orchestrator.core.contract import Execution, JobRequest, Progress
from orchestrator.core.errors import PreemptedError
from orchestrator.core.job_kinds import JobKind
from orchestrator.retention.fsck import Depth, check_store
from orchestrator.storage.artifacts import Record, download_part, read_part, read_record
from orchestrator.storage.local import LocalStore
from orchestrator.storage.sample_outcomes import SUMMARY_FIELD
from tests.checkpoint_cases import HookedStore
from tests.tiny_training import NO_BATCHNORM, RECIPE, TinyTraining

KEEP = {"epochs": [1, 2], "best": {"metric": "val_loss", "k": 2}}
EPOCH_STEPS = 6
STEPS = 15


@pytest.fixture
def tiny(tmp_path: Path) -> TinyTraining:
    return TinyTraining(LocalStore(tmp_path / "store"), tmp_path)


def keeping(tiny: TinyTraining, *, attempt: int = 1, keep: Any = None, **recipe: Any) -> JobRequest:
    parameters = {
        "model": NO_BATCHNORM,
        "recipe": {**RECIPE, **recipe},
        "seed": 0,
        "keep": KEEP if keep is None else keep,
    }
    inputs = {"index": tiny.index, "labels": tiny.labels({"hierarchy": "depth2"})}
    return tiny.request(
        JobKind.PRETRAIN, parameters, inputs, attempt=attempt, execution=Execution(checkpoint_keep_last=1)
    )


def hashes(record: Record) -> dict[str, str]:
    return {name: part.sha256 for name, part in record.parts.items()}


def at_question(number: int) -> Callable[[], bool]:
    questions = itertools.count()
    return lambda: next(questions) == number


def test_kept_checkpoints_are_parts_that_timm_loads_and_the_training_is_as_without(
    tiny: TinyTraining, tmp_path: Path
) -> None:
    request, told = keeping(tiny), list[Progress]()
    tiny.run(request, report=told.append)
    record = read_record(tiny.store, request.key)
    assert sorted(progress.step for progress in told) == [progress.step for progress in told]
    writing = [progress.phase for progress in told if progress.phase.startswith("write")]
    assert writing == ["write", "write weights of step 6", "write weights of step 12"]
    places = {name.rpartition("/")[0] for name in record.parts} - {""}
    assert places == {"epochs/1", "epochs/2", "best/1", "best/2"}
    kept = record.summary["kept"]
    assert {place: kept[place]["step"] for place in ("epochs/1", "epochs/2")} == {"epochs/1": 6, "epochs/2": 12}
    assert kept["best/1"]["metrics"]["val_loss"] <= kept["best/2"]["metrics"]["val_loss"]
    assert kept["best/1"]["metrics"]["val_error"] >= record.metrics["best_val_error"]
    document = json.loads(read_part(tiny.store, record, "model.json"))
    for place in places:
        path = download_part(tiny.store, record, f"{place}/backbone.safetensors", tmp_path / "weights.safetensors")
        model = timm.create_model(document["name"], num_classes=0, checkpoint_path=str(path), **document["timm_kwargs"])
        expected = safetensors.torch.load_file(path)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert list(check_store(tiny.store, Depth.CONTENT)) == []
    plain = tiny.training()
    tiny.run(plain)
    without = read_record(tiny.store, plain.key)
    assert without.key != record.key
    assert without.summary["weights_sha256"] == record.summary["weights_sha256"]
    assert "kept" not in without.summary
    assert not list(tiny.store.list_objects(f"artifacts/pretrain/{request.key}/checkpoints/"))


def test_kept_weights_are_those_that_the_run_had_then(tmp_path: Path) -> None:
    """Also where moving averages are what is evaluated and committed."""
    store = HookedStore(tmp_path / "store")
    tiny = TinyTraining(store, tmp_path)
    request = keeping(tiny, keep={"epochs": [1, 2]}, average="ema", average_decay=0.9)
    seen: dict[int, dict[str, torch.Tensor]] = {}

    def look(name: str) -> None:
        if name.endswith("optimizer.safetensors") and store.exists(name):
            step = int(Path(name).parent.name.partition("-")[0])
            seen[step] = safetensors.torch.load(store.get(name))

    store.after = look
    tiny.run(request)
    record = read_record(store, request.key)
    for epoch in (1, 2):
        part = safetensors.torch.load(read_part(store, record, f"epochs/{epoch}/backbone.safetensors"))
        averages = seen[epoch * EPOCH_STEPS]
        assert part.keys() <= {name.removeprefix("average/backbone.") for name in averages}
        assert all(torch.equal(tensor, averages[f"average/backbone.{name}"]) for name, tensor in part.items())


@pytest.mark.parametrize("stopped_at", [EPOCH_STEPS + 1, STEPS - 1])
def test_kept_checkpoints_survive_the_end_of_the_attempt_that_wrote_them(
    tiny: TinyTraining, tmp_path: Path, stopped_at: int
) -> None:
    tiny.run(keeping(tiny))
    undisturbed = read_record(tiny.store, keeping(tiny).key)
    other = TinyTraining(LocalStore(tmp_path / "other"), tmp_path / "elsewhere")
    with pytest.raises(PreemptedError):
        other.run(keeping(other), should_stop=at_question(stopped_at))
    result = other.run(keeping(other, attempt=2))
    assert result.resumed_from_step == stopped_at
    record = read_record(other.store, keeping(other).key)
    assert hashes(record) == hashes(undisturbed)
    assert record.summary["kept"] == undisturbed.summary["kept"]
    assert record.summary[SUMMARY_FIELD] == undisturbed.summary[SUMMARY_FIELD]
    assert record.summary[SUMMARY_FIELD]["num_counted"] == 48


def test_kept_epoch_is_evaluated_although_the_recipe_would_not(tiny: TinyTraining) -> None:
    request = keeping(tiny, keep={"epochs": [1]}, eval_every_epochs=5)
    tiny.run(request)
    metrics = read_record(tiny.store, request.key).summary["kept"]["epochs/1"]["metrics"]
    assert {"val_error", "val_loss"} <= metrics.keys()
