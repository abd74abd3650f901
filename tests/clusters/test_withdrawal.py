"""Which attempts leave a node before it does."""

from __future__ import annotations

import math

import pytest

from orchestrator.controller.attempt_tracker import AttemptLimits, AttemptTracker
from orchestrator.core.contract import Progress, Resources
from orchestrator.core.errors import FailureKind
from orchestrator.scheduling.commands import LaunchJob, PreemptAttempt, StopAttempt
from orchestrator.scheduling.preemption import MARGIN_S
from orchestrator.scheduling.scheduler import ClusterView, Scheduler
from orchestrator.state import events
from orchestrator.state.nodes import Node
from orchestrator.testing import ScriptedBackend
from orchestrator.testing.memory_store import MemoryStore
from tests.scheduler_cases import after, decide, launched, of_type, plan_of
from tests.scripted_sweep import make_job

NOW = 100.0
STAYS = Node(name="stays", resources=Resources(cpus=4.0))
GOES = Node(name="goes", resources=Resources(cpus=4.0), leaves_at_s=NOW + 120.0)
JOB = make_job("pretrain/a", cpus=2.0)
ATTEMPT = f"{JOB.key}.1"


def withdrawn(*journal, nodes=(STAYS, GOES), **options):
    return of_type(decide(after(plan_of("sweep", JOB), *journal), nodes=nodes, now=NOW, **options), PreemptAttempt)


def test_attempt_on_a_leaving_node_is_asked_for_its_checkpoint():
    (command,) = withdrawn(launched(JOB, "goes"))
    assert command.attempt_id == ATTEMPT
    assert "node goes will be gone in 120 s" in command.reason


def test_attempt_on_a_node_that_stays_is_left_alone():
    assert withdrawn(launched(JOB, "stays")) == []


def test_attempt_for_which_the_cluster_grew_is_asked_where_it_came_to_be():
    """It was sent to no node, because its node was not there yet."""
    assert withdrawn(launched(JOB)) == []
    (command,) = withdrawn(launched(JOB), node_by_attempt={ATTEMPT: "goes"})
    assert command.attempt_id == ATTEMPT
    assert withdrawn(launched(JOB), node_by_attempt={ATTEMPT: "stays"}) == []


def test_gang_is_asked_if_one_of_its_nodes_leaves():
    gang = launched(JOB, "stays", "goes", num_workers=2)
    assert [command.attempt_id for command in withdrawn(gang)] == [ATTEMPT]


def test_gang_is_asked_if_only_the_node_of_its_coordinator_leaves():
    """Without a chosen node it came up anywhere; once the workers are placed, the journal names theirs alone."""
    gang = launched(JOB, num_workers=2, awaits_room=True)
    placed = events.AttemptPlaced(at_s=2.0, job=JOB.name, attempt_id=ATTEMPT, nodes=("stays", "stays"), lots=())
    (command,) = withdrawn(gang, placed, node_by_attempt={ATTEMPT: "goes"})
    assert "node goes will be gone in 120 s" in command.reason
    assert withdrawn(gang, placed, node_by_attempt={ATTEMPT: "stays"}) == []


def test_attempt_that_was_asked_is_not_asked_again():
    asked = events.AttemptPreempting(at_s=50.0, job=JOB.name, attempt_id=ATTEMPT, reason="", grace_s=120.0)
    assert withdrawn(launched(JOB, "goes"), asked) == []


@pytest.mark.parametrize(("remaining_s", "is_asked"), [(120.0 - MARGIN_S, False), (120.0 - MARGIN_S + 1.0, True)])
def test_attempt_that_ends_before_its_node_may_end(remaining_s, is_asked):
    found = withdrawn(launched(JOB, "goes"), remaining_s={ATTEMPT: remaining_s})
    assert bool(found) is is_asked


def test_attempt_in_its_last_evaluation_is_asked_though_its_training_had_a_second_left():
    """How long an evaluation takes is not known, and the time left before it does not count it."""
    tracker = AttemptTracker(ScriptedBackend(MemoryStore()), AttemptLimits(), NOW)
    for phase, step, eta_s, num_asked in (("train", 99, 1.2, 0), ("evaluate", 100, 0.0, 1)):
        progress = Progress(phase=phase, step=step, total_steps=100, eta_s=eta_s)
        tracker.follow(ATTEMPT, "goes", progress, NOW)
        assert len(withdrawn(launched(JOB, "goes"), remaining_s=tracker.remaining_s)) == num_asked, phase


def test_node_that_does_not_say_when_it_goes_is_left_at_once():
    leaving = Node(name="goes", resources=Resources(cpus=4.0), leaves_at_s=math.inf)
    (command,) = withdrawn(launched(JOB, "goes"), nodes=(STAYS, leaving), remaining_s={ATTEMPT: 1.0})
    assert "node goes leaves the cluster" in command.reason


def test_attempt_of_a_cancelled_sweep_is_only_stopped():
    cancelled = events.CancelRequested(at_s=60.0, message_id="c")
    commands = decide(after(plan_of("sweep", JOB), launched(JOB, "goes"), cancelled), nodes=(STAYS, GOES), now=NOW)
    assert of_type(commands, PreemptAttempt) == []
    assert [command.attempt_id for command in of_type(commands, StopAttempt)] == [ATTEMPT]


def test_leaving_node_takes_nothing_new():
    jobs = [make_job(f"pretrain/{number}", cpus=2.0) for number in range(4)]
    commands = decide(after(plan_of("sweep", *jobs)), nodes=(STAYS, GOES), now=NOW)
    assert [command.nodes for command in of_type(commands, LaunchJob)] == [("stays",), ("stays",)]


def test_job_that_fits_nowhere_else_waits_for_another_node():
    """It ran here before, so that its node is lost for now; the job is not refused as too large."""
    preempted = events.AttemptFailed(
        at_s=90.0, job=JOB.name, attempt_id=ATTEMPT, kind=FailureKind.PREEMPTED, message="stopped"
    )
    snapshot = after(plan_of("sweep", JOB), launched(JOB, "goes"), preempted)
    small = Node(name="small", resources=Resources(cpus=1.0))
    assert decide(snapshot, nodes=(small, GOES), now=NOW + 600.0) == []


def test_job_that_fits_only_a_leaving_node_is_not_given_up():
    """It never ran anywhere; the machine may come back, and until it is gone nobody knows."""
    small = Node(name="small", resources=Resources(cpus=1.0))
    assert decide(after(plan_of("sweep", JOB)), nodes=(small, GOES), now=NOW) == []


def test_cluster_of_leaving_nodes_starts_nothing():
    nothing = Resources(cpus=0.0)  # what a backend counts without the nodes that leave
    assert (
        Scheduler().decide(ClusterView(snapshots=[after(plan_of("sweep", JOB))], total=nothing, nodes=(GOES,), now=NOW))
        == []
    )
