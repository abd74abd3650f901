"""The checkpoint policy of a sweep.yaml: what of it is identity, what is execution, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from orchestrator.core.contract import Execution
from orchestrator.core.errors import FailureKind, SpecError
from orchestrator.core.job_kinds import JobKind
from orchestrator.metrics.sweeps import SHOWN_AFTER_END_S
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Job
from orchestrator.state.failure_policy import observed_mtbf_s
from orchestrator.sweepfile import parse_sweep
from orchestrator.testing import Fail, Hang, Lose, Script, ScriptedBackend, Succeed
from tests.scripted_sweep import World, make_job
from tests.unit.test_plan import TEXT

HOUR_S = 3600.0


def jobs_of(checkpoints: str) -> Mapping[str, Job]:
    text = TEXT.replace("  seeds: [0, 1]\ntransfer", f"  seeds: [0, 1]\n  checkpoints: {checkpoints}\ntransfer")
    assert checkpoints in text
    plan = build_plan(parse_sweep(text, "sweep.yaml", {}), store_uri="file:///store")
    return plan.by_name()


def pretrain_of(checkpoints: str) -> Job:
    return next(job for job in jobs_of(checkpoints).values() if job.kind is JobKind.PRETRAIN)


def keys_of(jobs: Mapping[str, Job]) -> dict[str, str]:
    return {name: job.key for name, job in jobs.items()}


@pytest.mark.parametrize(
    "checkpoints",
    [
        "{every: auto}",
        "{every: {steps: 500}}",
        "{keep: {last: 5}}",
        "{keep: {epochs: []}}",
        "{every: auto, mtbf_s: 60.0}",
    ],
)
def test_policy_of_saving_changes_no_key(checkpoints: str) -> None:
    assert keys_of(jobs_of(checkpoints)) == keys_of(jobs_of("{}"))


@pytest.mark.parametrize(
    "checkpoints", ["{keep: {epochs: [1]}}", "{keep: {best: {k: 1}}}", "{keep: {best: {metric: val_loss}}}"]
)
def test_policy_of_keeping_changes_the_keys_of_backbones_and_what_is_made_of_them(checkpoints: str) -> None:
    plain, kept = keys_of(jobs_of("{}")), keys_of(jobs_of(checkpoints))
    changed = {name.partition("/")[0] for name in plain if plain[name] != kept[name]}
    assert changed == {"pretrain", "finetune", "probe"}


def test_policy_of_keeping_is_the_same_in_any_order() -> None:
    assert keys_of(jobs_of("{keep: {epochs: [2, 1]}}")) == keys_of(jobs_of("{keep: {epochs: [1, 2]}}"))


def test_policy_without_keeping_leaves_no_trace_in_the_identity() -> None:
    assert "keep" not in pretrain_of("{}").identity["parameters"]
    assert pretrain_of("{keep: {epochs: [2], best: {k: 3}}}").identity["parameters"]["keep"] == {
        "epochs": [2],
        "best": {"metric": "val_error", "k": 3},
    }


@pytest.mark.parametrize(
    ("checkpoints", "expected"),
    [
        ("{}", {}),
        ("{every: {epochs: 3}}", {"checkpoint_every_epochs": 3}),
        ("{every: {steps: 7}}", {"checkpoint_every_steps": 7}),
        ("{every: auto, mtbf_s: 600.0}", {"checkpoint_mtbf_s": 600.0}),
        ("{every: auto}", {"checkpoint_mtbf_s": 21_600.0}),
        ("{keep: {last: 4}}", {"checkpoint_keep_last": 4}),
    ],
)
def test_policy_of_saving_reaches_the_attempts_of_backbones_alone(checkpoints: str, expected: dict[str, Any]) -> None:
    assert pretrain_of(checkpoints).execution == Execution(**expected)
    others = [job for job in jobs_of(checkpoints).values() if job.kind is not JobKind.PRETRAIN]
    assert all(job.execution == Execution() for job in others)


@pytest.mark.parametrize(
    ("checkpoints", "said"),
    [
        ("{every: {}}", ["exactly one of steps, epochs", "none"]),
        ("{every: {steps: 1, epochs: 1}}", ["exactly one of steps, epochs"]),
        ("{every: {steps: 0}}", ["0 is refused"]),
        ("{every: often}", ["'often'", "auto"]),
        ("{keep: {last: 0}}", ["0 is refused"]),
        ("{keep: {epochs: [0]}}", ["0 is refused"]),
        ("{keep: {epochs: [3]}}", ["epoch 3 never ends", "2 epochs"]),
        ("{keep: {epochs: [1, 1]}}", ["'1' is given twice"]),
        ("{keep: {best: {k: 0}}}", ["0 is refused"]),
        ("{keep: {best: {metric: val_acc}}}", ["'val_acc'", "val_error"]),
        ("{keep: {bset: {k: 1}}}", ["unknown key 'bset'", "did you mean 'best'"]),
        ("{mtbf_s: 0.0}", ["0.0 is refused"]),
    ],
)
def test_policy_that_cannot_be_followed_is_refused_with_its_place(checkpoints: str, said: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        jobs_of(checkpoints)
    assert all(part in str(caught.value) for part in ("sweep.yaml:14:", *said)), str(caught.value)


# ------------------------------------------------------------------------------------- how often attempts really die
def auto_job() -> Job:
    job = make_job("pretrain/a")
    return Job(
        name=job.name,
        kind=job.kind,
        key=job.key,
        identity=job.identity,
        resources=job.resources,
        execution=Execution(checkpoint_mtbf_s=HOUR_S),
    )


def test_mtbf_without_observations_is_what_was_expected() -> None:
    assert observed_mtbf_s([], prior_s=HOUR_S, now=0.0) == HOUR_S


def test_mtbf_moves_to_what_is_observed_and_counts_deaths_alone(tmp_path) -> None:
    world = World(tmp_path)
    scripts: list[Script] = [Lose(), Fail(kind=FailureKind.PREEMPTED), Lose(), Hang()]
    world.backend = ScriptedBackend(world.store, {"pretrain/a": scripts})
    world.new_controller()
    world.submit(auto_job(), max_failures=9)
    world.tick_until(lambda: len(world.backend.launched) == 4)
    asked = [request.execution.checkpoint_mtbf_s for request in world.backend.launched]
    assert asked[0] == HOUR_S
    assert HOUR_S / 2 < asked[1] < HOUR_S / 2 + 60
    assert asked[1] < asked[2] < HOUR_S / 2 + 60, "a preempted attempt saves before it ends"
    assert HOUR_S / 3 < asked[3] < HOUR_S / 3 + 60
    world.clock.advance(10 * HOUR_S)
    view = world.snapshot()
    assert observed_mtbf_s([view], prior_s=HOUR_S, now=world.clock()) > 3 * HOUR_S, "what runs well counts too"


def test_mtbf_counts_the_deaths_of_sweeps_that_ended_long_ago(tmp_path) -> None:
    world = World(tmp_path)
    world.backend = ScriptedBackend(world.store, {"pretrain/old": [Lose(), Succeed()]})
    world.new_controller()
    world.submit(make_job("pretrain/old"), sweep="old")
    world.finish("old")
    world.clock.advance(2 * SHOWN_AFTER_END_S)
    world.tick()
    world.submit(auto_job())
    world.finish()
    assert HOUR_S / 2 < world.backend.launched[-1].execution.checkpoint_mtbf_s < HOUR_S / 2 + 60


def test_mtbf_of_jobs_that_never_asked_stays_unset(tmp_path) -> None:
    world = World(tmp_path)
    world.backend = ScriptedBackend(world.store, {"pretrain/a": [Lose(), Succeed()]})
    world.new_controller()
    world.submit(make_job("pretrain/a"))
    world.finish()
    assert {request.execution.checkpoint_mtbf_s for request in world.backend.launched} == {0.0}


def test_attempt_after_others_ran_out_of_memory_knows_how_many(tmp_path) -> None:
    world = World(tmp_path)
    scripts: list[Script] = [Fail(kind=FailureKind.OUT_OF_MEMORY), Fail(), Succeed()]
    world.backend = ScriptedBackend(world.store, {"pretrain/a": scripts})
    world.new_controller()
    world.submit(make_job("pretrain/a"))
    world.finish()
    assert [request.execution.memory_retries for request in world.backend.launched] == [0, 1, 1]
