"""A failure of numerics is replayed once elsewhere; the replay tells whether data, recipe or a node was at fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from orchestrator.core.contract import Outcome
from orchestrator.core.errors import FailureKind
from orchestrator.planning.graph.plan import Job
from orchestrator.scheduling.commands import ExcludeNode, FailJob, LaunchJob
from orchestrator.state import events
from orchestrator.state.events import Event
from orchestrator.state.failure_policy import is_same_step
from orchestrator.state.snapshot import Failure, Snapshot
from tests.makespan_dag import gpu_job, gpu_nodes
from tests.scheduler_cases import HOUR_S, after, decide, launched, of_type, plan_of

NODES = gpu_nodes(24)
A, B, C = (node.name for node in NODES)
JOB = gpu_job("pretrain/weeks", gpus=1)
STEP = 100_000


def wrong(job: Job, number: int, node: str, step: int | None, *, at_s: float, gpus: Sequence[str] = ()) -> Event:
    return events.AttemptFailed(
        at_s=at_s,
        job=job.name,
        attempt_id=f"{job.key}.{number}",
        kind=FailureKind.NUMERICS,
        message=f"loss is nan at step {step} of {job.name}; lower recipe.lr",
        node=node,
        step=step,
        gpus=tuple(gpus),
    )


def replayed(*steps: int | None, on: Sequence[str] = (A, B, C), more: Sequence[Event] = ()) -> Snapshot:
    """A job whose attempts each failed at a step, one after the other on these nodes."""
    journal: list[Event] = []
    for number, (node, step) in enumerate(zip(on, steps, strict=False), start=1):
        journal += [
            launched(JOB, node, at_s=10.0 * number, number=number),
            wrong(JOB, number, node, step, at_s=10.0 * number + 5.0, gpus=[f"GPU-{node}"]),
        ]
    return after(plan_of("s", JOB), *journal, *more)


def test_wrong_numbers_are_tried_once_more_on_another_node() -> None:
    (launch,) = of_type(decide(replayed(STEP), nodes=NODES, now=100.0), LaunchJob)
    assert launch.nodes
    assert A not in launch.nodes
    assert "on another node" in launch.reason


@pytest.mark.parametrize("again", [STEP, STEP + 15, STEP - 900, None])
def test_same_step_again_fails_and_says_data_or_recipe(again: int | None) -> None:
    sweep = replayed(None if again is None else STEP, again)
    commands = decide(sweep, nodes=NODES, now=100.0)
    (failed,) = of_type(commands, FailJob)
    assert "the data or the recipe is the cause, no node" in failed.reason
    assert f"on {A} and {B}" in failed.reason
    assert of_type(commands, ExcludeNode) == []


@pytest.mark.parametrize(("second", "blamed"), [(STEP + 5000, A), (STEP - 5000, B)])
def test_other_step_blames_the_node_whose_step_the_other_attempt_passed(second: int, blamed: str) -> None:
    commands = decide(replayed(STEP, second), nodes=NODES, now=100.0)
    (excluded,) = of_type(commands, ExcludeNode)
    assert excluded.node == blamed
    assert "computed wrong numbers" in excluded.reason
    assert f"GPU-{blamed}" in excluded.reason
    assert of_type(commands, FailJob) == []
    assert len(of_type(commands, LaunchJob)) == 1


def test_replay_that_passes_the_step_blames_the_node_while_it_runs() -> None:
    sweep = replayed(STEP, more=[launched(JOB, B, at_s=20.0, number=2)])
    for step, nodes in ((STEP - 1, []), (STEP + 2, []), (STEP + 5000, [A])):
        commands = decide(sweep, nodes=NODES, now=100.0, steps={f"{JOB.key}.2": step})
        assert [one.node for one in of_type(commands, ExcludeNode)] == nodes


def test_success_after_wrong_numbers_blames_the_node_and_only_once() -> None:
    other = gpu_job("pretrain/other", gpus=1)
    done = events.AttemptSucceeded(at_s=30.0, job=JOB.name, attempt_id=f"{JOB.key}.2", outcome=Outcome.COMMITTED)
    journal = [launched(JOB, A, number=1), wrong(JOB, 1, A, STEP, at_s=15.0), launched(JOB, B, number=2), done]
    plan = plan_of("s", JOB, other)
    (excluded,) = of_type(decide(after(plan, *journal), nodes=NODES, now=100.0), ExcludeNode)
    assert excluded.node == A
    told = events.NodeExcluded(at_s=100.0, node=A, reason=excluded.reason, until_s=excluded.until_s)
    for now in (101.0, 100.0 + 2 * HOUR_S):
        assert of_type(decide(after(plan, *journal, told), nodes=NODES, now=now), ExcludeNode) == []


def test_wrong_numbers_count_towards_the_budget_of_failures() -> None:
    steps = [STEP, 2 * STEP, 3 * STEP]
    (failed,) = of_type(decide(replayed(*steps), nodes=NODES, now=100.0), FailJob)
    assert "max_failures" in failed.reason


def test_reopened_job_gets_a_new_replay() -> None:
    failed = events.JobFailed(at_s=40.0, job=JOB.name, reason="numerics")
    again = events.SweepReopened(at_s=41.0, message_id="again")
    end = events.SweepFinished(at_s=40.5, status=events.SweepEnding.FAILED)
    journal = [
        failed, end, again, launched(JOB, C, at_s=50.0, number=3), wrong(JOB, 3, C, STEP, at_s=60.0),
    ]  # fmt: skip
    commands = decide(replayed(STEP, STEP, more=journal), nodes=NODES, now=100.0)
    assert of_type(commands, FailJob) == []
    assert len(of_type(commands, LaunchJob)) == 1


def test_failure_without_a_node_excludes_none() -> None:
    assert of_type(decide(replayed(STEP, 2 * STEP, on=("", "")), nodes=NODES, now=100.0), ExcludeNode) == []


@pytest.mark.parametrize(
    ("first", "later", "same"),
    [(10, 30, True), (10, 31, False), (10_000, 10_100, True), (None, None, True), (10, None, False), (None, 10, False)],
)
def test_steps_near_each_other_are_the_same_failure(first: int | None, later: int | None, same: bool) -> None:
    failure = Failure(attempt_id="k.1", kind=FailureKind.NUMERICS, message="", at_s=0.0, step=first)
    assert is_same_step(failure, replace(failure, step=later)) == same
