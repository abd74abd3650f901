"""Elastic gangs whose nodes are lost and come back: what is decided, without any cluster."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core.contract import Resources
from orchestrator.core.errors import FailureKind
from orchestrator.scheduling.commands import FailJob, LaunchJob, PreemptAttempt
from orchestrator.scheduling.preemption import GROWS_AFTER_S
from orchestrator.state.nodes import Node
from orchestrator.state.snapshot import Snapshot
from tests.makespan_dag import gpu_job, gpu_nodes
from tests.scheduler_cases import HOUR_S, after, decide, failed, launched, of_type, plan_of

GANG = gpu_job("pretrain/elastic", gpus=16, min_gpus=6)
BOTH = tuple(node.name for node in gpu_nodes(16) for _ in range(8))
DURATIONS = {"s": {GANG.name: 4 * HOUR_S}}


def without(*lost: str) -> tuple[Node, ...]:
    """The two nodes, of which these are gone."""
    return tuple(replace(node, is_alive=node.name not in lost) for node in gpu_nodes(16))


def bereft() -> Snapshot:
    """The sweep whose gang ran on both nodes and lost one."""
    return after(plan_of("s", GANG), launched(GANG, *BOTH), failed(GANG, FailureKind.NODE_LOST, at_s=HOUR_S))


def test_gang_that_lost_a_node_goes_on_at_once_with_what_is_left() -> None:
    (command,) = of_type(decide(bereft(), nodes=without("node-0001"), now=HOUR_S + 60.0), LaunchJob)
    assert (command.num_workers, command.resources, set(command.nodes)) == (
        8,
        Resources(cpus=32.0, gpus=8.0),
        {"node-0000"},
    )


def test_gang_whose_nodes_are_back_starts_at_its_full_size() -> None:
    (command,) = of_type(decide(bereft(), nodes=without(), now=HOUR_S + 60.0), LaunchJob)
    assert (command.num_workers, command.resources) == (0, None), "what the job asks for"


def test_work_of_a_smaller_attempt_counts_by_its_size() -> None:
    """After an hour on half of its GPUs, 3.5 of 4 hours are left: 56 GPU-hours, and 8 are used."""
    smaller = launched(GANG, *BOTH[:8], at_s=0.0, resources=Resources(cpus=32.0, gpus=8.0), num_workers=8)
    for gpu_hours, num_started in ((65.0, 1), (63.0, 0)):
        snapshot = after(
            plan_of("s", GANG, gpu_hours=gpu_hours), smaller, failed(GANG, FailureKind.PREEMPTED, at_s=HOUR_S)
        )
        commands = decide(snapshot, nodes=gpu_nodes(16), now=HOUR_S + 60.0, durations=DURATIONS)
        assert len(of_type(commands, LaunchJob)) == num_started


def test_gang_never_starts_below_its_least_size_and_waits_for_nodes_to_come_back() -> None:
    left = (*without("node-0000", "node-0001"), Node(name="small", resources=Resources(cpus=64.0, gpus=5.0)))
    commands = decide(bereft(), nodes=left, now=HOUR_S + 60.0)
    assert of_type(commands, LaunchJob) == []
    assert of_type(commands, FailJob) == []


def test_gang_is_left_as_it_is_for_a_while_before_it_grows_back() -> None:
    again_s = HOUR_S + 60.0
    smaller = launched(GANG, *BOTH[:8], at_s=again_s, number=2, resources=Resources(cpus=32.0, gpus=8.0), num_workers=8)
    snapshot = after(
        plan_of("s", GANG), launched(GANG, *BOTH), failed(GANG, FailureKind.NODE_LOST, at_s=HOUR_S), smaller
    )
    early = decide(snapshot, nodes=without(), now=again_s + GROWS_AFTER_S - 1.0, durations=DURATIONS)
    late = decide(snapshot, nodes=without(), now=again_s + GROWS_AFTER_S, durations=DURATIONS)
    assert early == []
    (command,) = late
    assert isinstance(command, PreemptAttempt)
    assert "grows from 8 to 16 GPUs" in command.reason
