"""Numerics failures: what counts as one, which batches are left out, whatever interrupts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.contract import Execution
from orchestrator.core.errors import NumericsError, PreemptedError
from orchestrator.report.inputs import read_metric_history
from orchestrator.storage.layout import checkpoints_folder, metrics_folder
from orchestrator.storage.local import LocalStore
from tests.memory_images import KEY, MemoryImages, memory_loop
from workloads.checkpoint.retention import Keeper, KeepPolicy
from workloads.jobs import training
from workloads.train import loop as loop_module
from workloads.train.safety import NormTrend, Reading, Rewind, batch_of, rewind_to, steps_before_gap

RECIPE = {"epochs": 5, "batch_size": 8, "lr": 0.01, "on_numerics": {"rewind": 3}}
NUM_SAMPLES = 40  # five steps an epoch, 25 in all


class CrashError(Exception):
    """Stands for a death without warning."""


def _reading(**values: float) -> Reading:
    return replace(Reading(step=0, num_wrong=0, loss=1.0, grad_norm=1.0), **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"loss": float("nan")}, "loss is nan"),
        ({"loss": float("inf")}, "loss is inf"),
        ({"grad_norm": float("inf")}, "gradient norm is inf"),
        ({"grad_norm": 5.5}, "gradient norm is 5.5, more than recipe.grad_spike = 5 times its running mean 1"),
        ({"grad_norm": 4.5}, None),
    ],
)
def test_reading_says_what_is_wrong(values: dict[str, float], reason: str | None) -> None:
    trend = NormTrend()
    for _ in range(60):
        trend.add(1.0)
    assert _reading(**values).failure(trend, spike_factor=5, may_overflow=False) == reason


def test_reading_of_an_overflow_that_fp16_skips_is_no_failure() -> None:
    trend = NormTrend()
    overflow = _reading(grad_norm=float("inf"))
    assert overflow.failure(trend, spike_factor=5, may_overflow=True) is None
    trend.add(overflow.grad_norm)
    trend.add(1.0)
    assert (trend.mean, trend.num_overflows) == (1.0, 0)


def test_readings_that_fp16_skips_without_end_are_a_failure() -> None:
    """A gradient that is NaN at every loss scale: the run would end with the weights that it began with."""
    trend, overflow = NormTrend(), _reading(grad_norm=float("nan"))
    for _ in range(40):
        assert overflow.failure(trend, spike_factor=0, may_overflow=True) is None
        trend.add(overflow.grad_norm)
    reason = overflow.failure(trend, spike_factor=0, may_overflow=True)
    assert reason == "gradient norm is nan, as in the 40 updates before: no loss scale makes it finite"


def test_norm_trend_is_not_trusted_in_its_first_steps() -> None:
    trend = NormTrend()
    trend.add(1.0)
    assert not trend.is_spike(1000.0, 5)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 10)), max_size=8))
def test_rewinds_leave_out_exactly_the_batches_behind_them(failures: list[tuple[int, int]]) -> None:
    """Against a list of batches from which each rewind cuts those of the updates that it undoes."""
    batches, rewinds, step = list(range(500)), list[Rewind](), 0
    for back, further in failures:
        failed_step = step + further  # a run that went back to a step can fail there or later, not before
        step = max(0, failed_step + 1 - back)
        rewinds.append(rewind_to(step, failed_step, rewinds, reason="", samples=()))
        assert batches[failed_step] == rewinds[-1].end
        del batches[step : failed_step + 1]
        assert [batch_of(each, rewinds) for each in range(200)] == batches[:200]
    gap = steps_before_gap(step, 200, rewinds)
    assert batches[step : step + gap] == list(range(batches[step], batches[step] + gap))


def _train(folder: Path, *, poisoned: tuple[int, ...], attempt: int = 1, **changes: Any) -> Any:
    crash_at, stop_at = changes.pop("crash_at", None), changes.pop("stop_at", None)
    execution = Execution(checkpoint_every_steps=changes.pop("save_every", 4))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3))
    task = MemoryImages(model, batch_size=8, num_samples=NUM_SAMPLES, image_size=4, poisoned=poisoned)
    asked = iter(range(10**6))

    def should_stop() -> bool:
        question = next(asked)
        if question == crash_at:
            raise CrashError
        return bool(question == stop_at)

    loop = memory_loop(
        task,
        LocalStore(folder),
        RECIPE | changes,
        execution=execution,
        attempt=attempt,
        should_stop=should_stop,
    )
    return loop, task


def test_loop_told_to_stop_names_the_sample_without_a_finite_loss_first(tmp_path: Path) -> None:
    loop, _ = _train(tmp_path, poisoned=(7,), on_numerics=None)
    with pytest.raises(NumericsError, match=r"loss is nan at step 7 .*finite loss first: sample19, sample16, sample17"):
        loop.run()


def test_loop_rewinds_and_leaves_out_the_batches_that_led_to_the_failure(tmp_path: Path) -> None:
    loop, task = _train(tmp_path, poisoned=(7,))
    state = loop.run()
    # Update 7 fails: back to the newest multiple of 3 at least 3 updates before its end, then on with batch 8.
    assert [(r.failed_step, r.to_step, r.first_batch, r.num_batches) for r in state.rewinds] == [(7, 3, 3, 5)]
    assert task.seen[:8] + task.seen[8:] == [*range(8), *range(8, 30)]
    assert state.step == 25
    assert all(torch.isfinite(tensor).all() for tensor in task.model.state_dict().values())


def test_loop_after_a_rewind_equals_one_that_never_saw_those_batches(tmp_path: Path) -> None:
    loop, task = _train(tmp_path / "a", poisoned=(7,))
    loop.run()
    other, clean = _train(tmp_path / "b", poisoned=())
    other.state.rewinds = loop.state.rewinds
    other.run()
    for name, tensor in task.model.state_dict().items():
        assert torch.equal(tensor, clean.model.state_dict()[name])


def test_loop_rewinding_again_leaves_out_both(tmp_path: Path) -> None:
    loop, _ = _train(tmp_path, poisoned=(7, 10))
    state = loop.run()
    assert [(r.failed_step, r.to_step) for r in state.rewinds] == [(7, 3), (5, 3)]
    assert batch_of(3, state.rewinds) == 11
    assert state.step == 25


@pytest.mark.parametrize("crash_at", [5, 8, 10, 14])
def test_loop_killed_around_a_rewind_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path, crash_at: int) -> None:
    undisturbed, expected = _train(tmp_path / "a", poisoned=(7,))
    undisturbed.run()
    crashed, _ = _train(tmp_path / "b", poisoned=(7,), crash_at=crash_at)
    with pytest.raises(CrashError):
        crashed.run()
    resumed, task = _train(tmp_path / "b", poisoned=(7,), attempt=2)
    state = resumed.run()
    assert state.rewinds == undisturbed.state.rewinds
    for name, tensor in task.model.state_dict().items():
        assert torch.equal(tensor, expected.model.state_dict()[name])


def test_loop_stopped_right_after_a_rewind_leaves_a_checkpoint_that_knows_of_it(tmp_path: Path) -> None:
    stopped, _ = _train(tmp_path, poisoned=(7,), stop_at=8)
    with pytest.raises(PreemptedError, match="stopped at step 3"):
        stopped.run()
    resumed, _ = _train(tmp_path, poisoned=(7,), attempt=2)
    assert resumed.resumed_from_step == 3
    assert resumed.state.rewinds == stopped.state.rewinds


def test_loop_killed_right_after_a_rewind_behind_all_checkpoints_resumes_where_the_rewind_led(tmp_path: Path) -> None:
    """Memory holds the state of step 6, the store those of steps 12 and 14, which the rewind makes void."""
    rewinding: dict[str, Any] = {"poisoned": (15,), "on_numerics": {"rewind": 6}, "save_every": 2}
    crashed, _ = _train(tmp_path, **rewinding, crash_at=16)
    with pytest.raises(CrashError):
        crashed.run()
    resumed, _ = _train(tmp_path, **rewinding, attempt=2)
    assert [rewind.to_step for rewind in resumed.state.rewinds] == [6]
    assert resumed.resumed_from_step == 6


def test_loop_that_goes_back_to_a_former_best_checkpoint_still_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best is step 5, then 10; after the rewind to step 6 it is step 5 again, as step 10 is worse this time."""
    errors = iter([0.30, 0.28, 0.31, 0.5, 0.5, 0.5])
    monkeypatch.setattr(loop_module, "evaluate", lambda *_, **__: {"val_error": next(errors), "val_loss": 1.0})
    loop, _ = _train(tmp_path, poisoned=(13,), on_numerics={"rewind": 6}, save_every=2)
    loop.keeper = Keeper(KeepPolicy(num_best=1), loop.calendar)
    assert [rewind.to_step for rewind in loop.run().rewinds] == [6]
    (best,) = loop.keeper.named().values()
    assert (best.step, best.metrics["val_error"]) == (5, 0.30)
    assert loop.load_kept(best).step == 5


@pytest.mark.parametrize("failed", [1, 4])
def test_loop_rewinds_behind_an_update_that_only_an_evaluation_shows_to_be_wrong(
    failed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind the last of all. Loss and gradient of an update are measured before it is applied."""
    evaluations = iter(range(10))

    def evaluate(*_: object, **__: object) -> dict[str, float]:
        return {"val_error": 0.5, "val_loss": float("nan") if next(evaluations) == failed else 1.0}

    monkeypatch.setattr(loop_module, "evaluate", evaluate)
    loop, task = _train(tmp_path, poisoned=())
    state = loop.run()
    (rewind,) = state.rewinds
    step = 5 * failed + 4
    assert (rewind.failed_step, rewind.end, state.step) == (step, step, 25)
    assert rewind.reason == "the evaluation after the update gives val_loss nan"
    assert task.seen[step + 1] == step + 1
    assert state.latest["val_loss"] == 1.0


@pytest.mark.parametrize(("failed", "save_every", "to_step"), [(1, 5, 6), (4, 5, 21), (4, 4, 24)])
def test_loop_stopped_within_an_evaluation_rewinds_behind_it_like_one_undisturbed(
    failed: int, save_every: int, to_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for one whose checkpoints from before the update that failed are too young: it goes back less far."""
    states = []
    for name, stops_at in (("whole", -1), ("cut", failed)):
        values: dict[int, Any] = {stops_at: PreemptedError("asked to stop"), failed + (name == "cut"): float("nan")}
        evaluations = iter(values.get(number, 1.0) for number in range(10))

        def evaluate(*_: object, evaluations: Iterator[Any] = evaluations, **__: object) -> dict[str, float]:
            value = next(evaluations)
            if isinstance(value, PreemptedError):
                raise value
            return {"val_error": 0.5, "val_loss": value}

        monkeypatch.setattr(loop_module, "evaluate", evaluate)
        loop, task = _train(tmp_path / name, poisoned=(), save_every=save_every)
        if name == "cut":
            with pytest.raises(PreemptedError, match=f"stopped at step {5 * failed + 5} as asked"):
                loop.run()
            loop, task = _train(tmp_path / name, poisoned=(), save_every=save_every, attempt=2)
        states.append((loop.run(), dict(task.model.state_dict())))
    (whole, expected), (cut, weights) = states
    (rewind,) = cut.rewinds
    assert rewind.to_step == to_step
    if to_step < 24:
        assert cut.rewinds == whole.rewinds
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
    lines = [[line.step for line in read_metric_history(LocalStore(tmp_path / name), KEY)] for name in ("whole", "cut")]
    assert lines[0] == lines[1] == [5, 10, 15, 20, 25]


def test_loop_that_fails_without_end_gives_up(tmp_path: Path) -> None:
    loop, _ = _train(tmp_path, poisoned=tuple(range(7, 500)))
    with pytest.raises(NumericsError, match="loss is nan"):
        loop.run()
    assert len(loop.state.rewinds) == 20


def test_loop_after_a_rewind_has_one_line_per_step_and_no_abandoned_checkpoint(tmp_path: Path) -> None:
    loop, _ = _train(tmp_path, poisoned=(22,), epochs=5)
    loop.run()
    store = LocalStore(tmp_path)
    segments = [stat.name for stat in store.list_objects(metrics_folder(KEY))]
    steps = [json.loads(line)["step"] for name in segments for line in store.get(name).splitlines()]
    assert sorted(steps) == sorted(set(steps)) == [5, 10, 15, 20, 25]
    assert list(store.list_objects(f"{checkpoints_folder(KEY)}/"))


def test_held_out_samples_whose_loss_is_not_finite_are_a_failure_of_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    """No record can hold it: the commit would fail with an error that names no metric, again and again."""
    stub: Any = MagicMock()
    monkeypatch.setattr(training, "build_objective", stub)
    monkeypatch.setattr(training, "evaluate", lambda *_, **__: {"val_error": 0.5, "val_loss": float("inf")})
    with pytest.raises(NumericsError, match="held out, at step 7, gives select_loss inf") as caught:
        training._select_metrics(stub, stub, stub, stub, 7)
    assert caught.value.step == 7
