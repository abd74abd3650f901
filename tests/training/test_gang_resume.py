"""Gangs that die, stop or change their size: same weights for a gang of the same size, same samples for any."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.core.contract import Execution, JobResult
from orchestrator.core.errors import FailureKind, PreemptedError
from orchestrator.core.job_kinds import JobKind
from orchestrator.report.inputs import read_metric_history
from orchestrator.storage.artifacts import Record, read_record
from orchestrator.storage.local import LocalStore
from tests.tiny_training import BATCHNORM, TinyTraining
from tests.training.gang_jobs import Gang, Seen, copied, sequence
from workloads.data.index import SampleIndex
from workloads.data.order import SampleOrder

pytestmark = [pytest.mark.ci, pytest.mark.xdist_group("ranks")]  # one process has loaded for all what ranks begin with

RECIPE: dict[str, Any] = {
    "batch_size": 24,
    "norm_group": 6,
    "augment": "crop_flip",
    "optimizer": "adamw",
    "lr": 1e-3,
    "grad_clip": 1.0,
    "average": "ema",
    "average_decay": 0.8,
}
STEPS = 10  # 2.5 epochs of 96 samples
EVERY = Execution(checkpoint_every_steps=2)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "0"
    tiny = TinyTraining(LocalStore(folder / "store"), folder)
    tiny.labels({"hierarchy": "depth2"})
    return folder


@pytest.fixture
def fresh(prepared: Path, tmp_path: Path) -> Callable[[], TinyTraining]:
    numbers = itertools.count()
    return lambda: copied(prepared, tmp_path / str(next(numbers)))


@pytest.fixture(scope="module")
def undisturbed(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Record]:
    """The record of a run that nothing happens to, by the size of its gang."""
    records: dict[int, Record] = {}

    def record(world_size: int) -> Record:
        if world_size not in records:
            tiny = copied(prepared, tmp_path_factory.mktemp("undisturbed") / "0")
            records[world_size] = _record(tiny, Gang(tiny.folder, _request(tiny, 1), world_size).results())
        return records[world_size]

    return record


def _request(tiny: TinyTraining, attempt: int) -> Any:
    return tiny.training(model=BATCHNORM, recipe=RECIPE, execution=EVERY, attempt=attempt)


def _record(tiny: TinyTraining, results: list[Any]) -> Record:
    results = [result for result, _ in results]
    assert all(isinstance(result, JobResult) for result in results), results
    return read_record(tiny.store, results[0].key)


def _check_kill(
    number: int, world_size: int, fresh: Callable[[], TinyTraining], undisturbed: Callable[[int], Record]
) -> None:
    random = np.random.default_rng(number)
    victim, question = int(random.integers(world_size)), int(random.integers(2, STEPS + 1))
    tiny = fresh()
    gang = Gang(tiny.folder, _request(tiny, 1), world_size)
    gang.kill(victim, question)
    for rank, result in enumerate(gang.results()):
        if rank == victim:
            assert isinstance(result, EOFError)
        else:
            assert result[0].failure_kind is FailureKind.NODE_LOST
            assert "lost another rank" in str(result[0])
    results = Gang(tiny.folder, _request(tiny, 2), world_size).results()
    record, expected = _record(tiny, results), undisturbed(world_size)
    assert record.summary["weights_sha256"] == expected.summary["weights_sha256"], (victim, question)
    assert record.summary["fingerprint_changes"] == []
    assert record.metrics == expected.metrics


@pytest.mark.parametrize("world_size", [2, 3])
def test_gang_killed_at_a_random_step_ends_with_the_weights_of_an_undisturbed_one(
    fresh: Callable[[], TinyTraining], undisturbed: Callable[[int], Record], world_size: int
) -> None:
    _check_kill(world_size, world_size, fresh, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(20))
def test_gang_killed_at_many_steps_ends_with_the_weights_of_an_undisturbed_one(
    fresh: Callable[[], TinyTraining], undisturbed: Callable[[int], Record], number: int
) -> None:
    _check_kill(100 + number, 1 + number % 3, fresh, undisturbed)


def test_gang_stopped_within_evaluations_ends_with_the_results_of_an_undisturbed_one(
    fresh: Callable[[], TinyTraining],
) -> None:
    """Rank 1 is asked at its batch of the first evaluation, then at that of the last one."""
    plain, stopped = fresh(), fresh()
    undisturbed = _record(plain, Gang(plain.folder, _request(plain, 1), 2, asks_often=True).results())
    for attempt, stop_after in enumerate([4 + 1, 1 + 4 + 1 + 2 + 1], start=1):
        gang = Gang(stopped.folder, _request(stopped, attempt), 2, stop_after=stop_after, asks_often=True)
        errors = [error for error, _ in gang.results()]
        assert [type(error) for error in errors] == [PreemptedError] * 2, errors
    record = _record(stopped, Gang(stopped.folder, _request(stopped, 3), 2, asks_often=True).results())
    assert record.metrics == undisturbed.metrics
    assert record.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]
    assert record.summary["resumed_steps"] == [4, 10]
    lines = [read_metric_history(tiny.store, record.key) for tiny in (plain, stopped)]
    told = [[(line.step, line.metrics["train_loss"], line.metrics["val_loss"]) for line in some] for some in lines]
    assert told[0] == told[1]
    assert [step for step, *_ in told[0]] == [4, 8, 10]


def test_gang_of_changing_size_sees_the_samples_of_one_process(fresh: Callable[[], TinyTraining]) -> None:
    tiny = fresh()
    attempts: list[tuple[int, int, list[Seen]]] = []
    step = 0
    # In a gang, the step at whose beginning one rank is asked is the last one that all make.
    for attempt, (world_size, stop_after, end) in enumerate([(2, 3, 3), (1, 3, 5), (2, 2, 7), (4, None, 10)], start=1):
        results = Gang(tiny.folder, _request(tiny, attempt), world_size, stop_after=stop_after).results()
        wanted = JobResult if stop_after is None else PreemptedError
        assert all(isinstance(result, wanted) for result, _ in results), results
        attempts.append((step, end, [seen for _, seen in results]))
        step = end
    index = SampleIndex.open(tiny.store, tiny.index, tiny.folder / "cache")
    order = SampleOrder(index.split("train").shard_sizes, 0, 4)
    assert sequence(attempts) == order.ordinals(0, STEPS * RECIPE["batch_size"]).tolist()
    record = read_record(tiny.store, _request(tiny, 1).key)
    assert record.summary["resumed_steps"] == [3, 5, 7]
    sizes = [change for change in record.summary["fingerprint_changes"] if change.startswith("world_size")]
    assert sizes == ["world_size: 2 -> 1", "world_size: 1 -> 2", "world_size: 2 -> 4"]


@pytest.mark.parametrize("augment", ["none", "flip"])
def test_probe_in_a_gang_measures_what_one_process_does(fresh: Callable[[], TinyTraining], augment: str) -> None:
    tiny = fresh()
    backbone = tiny.run(tiny.training(model=BATCHNORM)).key
    metrics = []
    for number, world_size in enumerate((1, 2), start=1):
        recipe = {"augment": augment, "epochs": 1.5 + number / 1000}  # another key, as many steps
        request = tiny.training(JobKind.PROBE, model=BATCHNORM, recipe=recipe, backbone=backbone, attempt=number)
        metrics.append(_record(tiny, Gang(tiny.folder, request, world_size).results()).metrics)
    assert metrics[0]["num_steps"] == metrics[1]["num_steps"] == 9
    assert metrics[1]["val_loss"] == pytest.approx(metrics[0]["val_loss"], rel=1e-3)
    assert metrics[1]["train_loss"] == pytest.approx(metrics[0]["train_loss"], rel=1e-3)
