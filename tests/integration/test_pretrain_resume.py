"""Interrupted training ends with the weights of undisturbed training, bit for bit."""

import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.contract import Execution, JobRequest, JobResult
from orchestrator.core.errors import PreemptedError
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.artifacts import Record, read_record
from orchestrator.storage.layout import checkpoints_folder, metrics_folder
from orchestrator.storage.local import LocalStore
from tests.tiny_training import BATCHNORM, NO_BATCHNORM, TinyTraining, prepared
from workloads.train import samples

__all__ = ["prepared"]

ADAMW: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.05}
GHOST: dict[str, Any] = {
    "batch_size": 32,
    "norm_group": 16,
    "augment": "crop_flip",
    "label_smoothing": 0.1,
    "grad_clip": 1.0,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sgd": (NO_BATCHNORM, {"nesterov": True}),
    "adamw": (NO_BATCHNORM, ADAMW),
    "sgd-batchnorm": (BATCHNORM, {"augment": "flip"}),
    "adamw-ghost-batchnorm": (BATCHNORM, ADAMW | GHOST),
}
TIMED = {"images_per_s", "data_wait", "data_wait_ms", "cache_hit_rate", "store_gib_per_epoch", "cpu_s", "memory_gib"}
TIMED |= {"mfu", "gpu_memory", "gpu_memory_gib", "gpu_utilization"}


class CrashError(Exception):
    """Stands for a death without warning: no checkpoint is written on the way out."""


@pytest.fixture
def fresh(prepared: Path, tmp_path: Path) -> Callable[[], TinyTraining]:
    numbers = itertools.count()

    def copy() -> TinyTraining:
        folder = tmp_path / str(next(numbers))
        shutil.copytree(prepared, folder)
        return TinyTraining(LocalStore(folder / "store"), folder)

    return copy


@pytest.fixture(scope="module")
def trained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyTraining, str]:
    """A store with a backbone that nothing disturbed, and its key."""
    folder = tmp_path_factory.mktemp("trained") / "copy"
    shutil.copytree(prepared, folder)
    tiny = TinyTraining(LocalStore(folder / "store"), folder)
    return tiny, tiny.run(tiny.training(model=BATCHNORM)).key


def _stop_after(calls: int, error: type[Exception] | None = None) -> Callable[[], bool]:
    """Asked once per step: True (or a crash) at question number ``calls``, from 0."""
    counter = itertools.count()

    def should_stop() -> bool:
        is_time = next(counter) == calls
        if is_time and error is not None:
            raise error
        return is_time

    return should_stop


def _lines(tiny: TinyTraining, key: str) -> list[dict[str, Any]]:
    """Metric lines as a reader sees them: a later attempt supersedes the earlier ones' lines after its first step."""
    lines: list[dict[str, Any]] = []
    seen = set()
    for stat in sorted(tiny.store.list_objects(metrics_folder(key)), key=lambda stat: stat.name):
        attempt, _, segment = stat.name.removeprefix(metrics_folder(key)).partition("/")
        if attempt not in seen:
            seen.add(attempt)
            lines = [line for line in lines if line["step"] <= int(segment.partition("-")[0])]
        lines += map(json.loads, tiny.store.get(stat.name).decode().splitlines())
    return lines


def _stable(lines: list[dict[str, Any]]) -> list[tuple[int, float, dict[str, float]]]:
    """Lines without what a clock decides."""
    return [(x["step"], x["epoch"], {n: v for n, v in x["metrics"].items() if n not in TIMED}) for x in lines]


def _record(tiny: TinyTraining, result: JobResult) -> Record:
    return read_record(tiny.store, result.key)


def _weights(record: Record) -> str:
    return str(record.summary["weights_sha256"])


@pytest.mark.parametrize("case", CASES)
def test_pretrain_stopped_at_several_steps_equals_undisturbed(fresh: Callable[[], TinyTraining], case: str) -> None:
    model, recipe = CASES[case]
    plain, stopped = fresh(), fresh()
    expected = plain.run(plain.training(model=model, recipe=recipe))
    # 15 steps (8 with batches of 32), 6 (3) per epoch: at once, within an epoch, right after its end, twice in a row.
    stops = [0, 2, 4, 0, 1] if "ghost" in case else [0, 4, 2, 0, 5]
    steps = []
    for attempt, calls in enumerate(stops, start=1):
        request = stopped.training(model=model, recipe=recipe, attempt=attempt)
        with pytest.raises(PreemptedError, match="stopped at step"):
            stopped.run(request, should_stop=_stop_after(calls))
        steps.append(sum(stops[:attempt]))
    result = stopped.run(stopped.training(model=model, recipe=recipe, attempt=9))
    assert result.resumed_from_step == steps[-1]
    record, undisturbed = _record(stopped, result), _record(plain, expected)
    assert record.metrics == undisturbed.metrics
    assert _weights(record) == _weights(undisturbed)
    assert record.summary["resumed_steps"] == sorted({*steps} - {0})
    assert record.summary["fingerprint_changes"] == []
    assert _stable(_lines(stopped, result.key)) == _stable(_lines(plain, expected.key))


@pytest.mark.parametrize("keep_last", [1, 2])
def test_pretrain_stopped_within_evaluations_equals_undisturbed(
    fresh: Callable[[], TinyTraining], monkeypatch: pytest.MonkeyPatch, keep_last: int
) -> None:
    """Also in the one at the end; each evaluation that a run stopped in comes first in the next attempt."""
    monkeypatch.setattr(samples, "EVAL_BATCH_SIZE", 16)  # three batches
    plain, stopped = fresh(), fresh()
    execution = Execution(deterministic=True, checkpoint_keep_last=keep_last)

    def request(tiny: TinyTraining, attempt: int = 1) -> JobRequest:
        made = tiny.training(model=BATCHNORM, recipe=ADAMW | {"average": "ema"}, execution=execution, attempt=attempt)
        keep = {"epochs": [1], "best": {"metric": "val_loss", "k": 1}}
        return replace(made, identity={**made.identity, "parameters": {**made.parameters, "keep": keep}})

    expected = plain.run(request(plain))
    monkeypatch.setattr(samples, "_ASK_EVERY_S", 0.0)
    # Questions: 6 steps and 3 batches of validation an epoch, 15 steps in all. At the second batch, again at once, in
    # training, at the third batch of the second evaluation, and at the first one of the last.
    for attempt, calls in enumerate([7, 1, 3 + 2, 4 + 2, 3 + 3], start=1):
        with pytest.raises(PreemptedError, match=f"stopped at step {[6, 6, 8, 12, 15][attempt - 1]} as asked"):
            stopped.run(request(stopped, attempt), should_stop=_stop_after(calls))
    result = stopped.run(request(stopped, 9))
    record, undisturbed = _record(stopped, result), _record(plain, expected)
    assert record.metrics == undisturbed.metrics
    assert _weights(record) == _weights(undisturbed)
    assert {name: part.sha256 for name, part in record.parts.items()} == {
        name: part.sha256 for name, part in undisturbed.parts.items()
    }
    assert record.summary["kept"] == undisturbed.summary["kept"]
    assert record.summary["resumed_steps"] == [6, 8, 12, 15]  # nothing was new at the second stop
    assert record.summary["fingerprint_changes"] == []
    measured = record.summary["measured"]
    assert measured["setup_s"] > 0
    assert "images_per_s" not in measured
    assert _stable(_lines(stopped, result.key)) == _stable(_lines(plain, expected.key))
    assert list(stopped.store.list_objects(f"{checkpoints_folder(result.key)}/")) == []


@pytest.mark.parametrize(("every_steps", "calls", "resumed"), [(0, 5, None), (0, 8, 6), (4, 11, 8)])
def test_pretrain_crashed_resumes_from_its_checkpoint(
    fresh: Callable[[], TinyTraining],
    trained: tuple[TinyTraining, str],
    every_steps: int,
    calls: int,
    resumed: int | None,
) -> None:
    (plain, key), crashed = trained, fresh()
    execution = Execution(deterministic=True, checkpoint_every_steps=every_steps)
    with pytest.raises(CrashError):
        crashed.run(crashed.training(model=BATCHNORM, execution=execution), should_stop=_stop_after(calls, CrashError))
    result = crashed.run(crashed.training(model=BATCHNORM, execution=execution, attempt=2))
    assert result.resumed_from_step == resumed
    assert _weights(_record(crashed, result)) == _weights(read_record(plain.store, key))
    assert _stable(_lines(crashed, result.key)) == _stable(_lines(plain, key))


def test_pretrain_with_damaged_checkpoint_falls_back_to_the_older(fresh: Callable[[], TinyTraining]) -> None:
    plain, crashed = fresh(), fresh()
    expected = plain.run(plain.training())
    request = crashed.training()
    with pytest.raises(CrashError):
        crashed.run(request, should_stop=_stop_after(14, CrashError))
    newest = max(stat.name for stat in crashed.store.list_objects(f"{checkpoints_folder(request.key)}/000000000012"))
    crashed.store.put(newest, b"damaged")
    result = crashed.run(crashed.training(attempt=2))
    assert result.resumed_from_step == 6
    assert _weights(_record(crashed, result)) == _weights(_record(plain, expected))


@pytest.mark.parametrize("kind", [JobKind.FINETUNE, JobKind.PROBE])
@pytest.mark.parametrize("recipe", [{}, {"augment": "crop_flip", "optimizer": "adam"}], ids=["sgd", "adam-augmented"])
def test_transfer_stopped_equals_undisturbed(
    trained: tuple[TinyTraining, str], tmp_path: Path, kind: JobKind, recipe: Mapping[str, Any]
) -> None:
    before, backbone = trained
    records = []
    for name, stops in (("plain", []), ("stopped", [3, 5])):
        shutil.copytree(before.folder, tmp_path / name)
        tiny = TinyTraining(LocalStore(tmp_path / name / "store"), tmp_path / name)
        wanted: dict[str, Any] = {
            "model": BATCHNORM,
            "recipe": recipe,
            "backbone": backbone,
            "space": {"hierarchy": "depth1"},
        }
        for attempt, calls in enumerate(stops, start=1):
            with pytest.raises(PreemptedError):
                tiny.run(tiny.training(kind, attempt=attempt, **wanted), should_stop=_stop_after(calls))
        records.append(_record(tiny, tiny.run(tiny.training(kind, attempt=9, **wanted))))
    assert _weights(records[0]) == _weights(records[1])
    assert records[0].metrics == records[1].metrics


def test_pretrain_committed_leaves_no_checkpoints(fresh: Callable[[], TinyTraining]) -> None:
    tiny = fresh()
    result = tiny.run(tiny.training(execution=Execution(deterministic=True, checkpoint_every_steps=2)))
    assert list(tiny.store.list_objects(f"{checkpoints_folder(result.key)}/")) == []


def test_pretrain_checkpoint_cadence_changes_no_result(fresh: Callable[[], TinyTraining]) -> None:
    plain, other = fresh(), fresh()
    expected = plain.run(plain.training())
    result = other.run(other.training(execution=Execution(deterministic=True, checkpoint_every_steps=1)))
    assert result.key == expected.key
    assert _weights(_record(other, result)) == _weights(_record(plain, expected))
