"""What one sweep found out about a node holds for the others, and outlives it."""

from __future__ import annotations

from typing import Any

from orchestrator.core.contract import Resources
from orchestrator.scheduling.commands import ExcludeNode, LaunchJob, PreemptAttempt
from orchestrator.scheduling.scheduler import ClusterView, Scheduler
from orchestrator.state import events
from orchestrator.state.nodes import Node
from orchestrator.state.snapshot import Snapshot
from tests.makespan_dag import gpu_job, gpu_nodes
from tests.scheduler_cases import HOUR_S, after, decide, done, launched, of_type, plan_of

NODES = gpu_nodes(16)
BAD, GOOD = (node.name for node in NODES)


def ended_sweep(*more: events.Event) -> Snapshot:
    job = gpu_job("finetune/ended", gpus=1)
    return after(
        plan_of("ended", job),
        events.NodeExcluded(at_s=1.0, node=BAD, reason="Xid 79", until_s=HOUR_S),
        launched(job, GOOD, at_s=2.0),
        done(job, 3.0),
        events.SweepFinished(at_s=4.0, status=events.SweepEnding.SUCCEEDED),
        *more,
    )


def test_node_left_out_by_a_sweep_that_has_ended_stays_left_out_until_its_time() -> None:
    job = gpu_job("finetune/next", gpus=1)
    running, former = after(plan_of("next", job)), [ended_sweep()]
    for now, places in ((10.0, {GOOD}), (HOUR_S + 1.0, {GOOD, BAD})):
        (command,) = of_type(decide(running, nodes=NODES, now=now, former=former), LaunchJob)
        assert command.nodes[0] in places
    both = [gpu_job(f"finetune/{number}", gpus=8) for number in range(2)]
    assert len(of_type(decide(after(plan_of("both", *both)), nodes=NODES, former=former), LaunchJob)) == 1
    assert len(of_type(decide(after(plan_of("both", *both)), nodes=NODES), LaunchJob)) == 2


def test_node_that_is_left_out_already_is_not_left_out_again() -> None:
    job = gpu_job("finetune/unlucky", gpus=1)
    failure = events.AttemptLost(
        at_s=5.0, job=job.name, attempt_id=f"{job.key}.1", reason="CUDA error: uncorrectable ECC error", node=BAD
    )
    running = after(plan_of("s", job), launched(job, BAD, at_s=2.0), failure)
    assert [one.node for one in of_type(decide(running, nodes=NODES), ExcludeNode)] == [BAD]
    assert of_type(decide(running, nodes=NODES, former=[ended_sweep()]), ExcludeNode) == []
    # It has passed a check since, which the sweep that had excluded it knows: what failed before is settled.
    passed = ended_sweep(events.NodeExcluded(at_s=6.0, node=BAD, reason="it has passed its check", until_s=6.0))
    assert of_type(decide(running, nodes=NODES, former=[passed]), ExcludeNode) == []


def test_node_whose_fault_a_sweep_shows_that_takes_no_news_is_recorded_by_another() -> None:
    job, other = gpu_job("finetune/unlucky", gpus=1), gpu_job("finetune/other", gpus=1)
    failure = events.AttemptLost(
        at_s=5.0, job=job.name, attempt_id=f"{job.key}.1", reason="CUDA error: uncorrectable ECC error", node=BAD
    )
    snapshots = after(plan_of("s", job), launched(job, BAD, at_s=2.0), failure), after(plan_of("other", other))
    for held, sweep in (({"s"}, "other"), (set[str](), "s")):
        (command,) = of_type(decide(*snapshots, nodes=NODES, held=held), ExcludeNode)
        assert (command.sweep, command.node) == (sweep, BAD)


def gang_beside_an_excluded_node(gpus: int, *, min_gpus: int = 0, maximum: tuple[Node, ...] | None = None):
    """Launches of a job of so many GPUs on two nodes of eight, one of which is excluded; and the scheduler."""
    job, scheduler = gpu_job("pretrain/gang", gpus=gpus, min_gpus=min_gpus), Scheduler()
    total = Resources(cpus=128.0, gpus=16.0)
    commands = scheduler.decide(
        ClusterView(
            snapshots=[after(plan_of("s", job))],
            total=total,
            nodes=NODES,
            maximum=maximum,
            now=10.0,
            former=[ended_sweep()],
        )
    )
    return of_type(commands, LaunchJob), scheduler


def test_gang_that_needs_all_nodes_starts_on_the_one_that_is_left_out_and_says_so() -> None:
    (command,), _ = gang_beside_an_excluded_node(16)
    assert set(command.nodes) == {BAD, GOOD}
    assert f"the excluded nodes count ({BAD}): the others are too few for it" in command.reason
    job = gpu_job("pretrain/gang", gpus=16)
    running = after(plan_of("s", job), launched(job, *command.nodes, at_s=10.0))
    scheduler = Scheduler()
    scheduler.decide(ClusterView(snapshots=[running], total=Resources(), nodes=NODES, now=20.0, former=[ended_sweep()]))
    assert f"pretrain/gang runs on excluded nodes ({BAD})" in scheduler.warnings["s"]


def test_gang_that_fits_elsewhere_keeps_away_from_the_node_that_is_left_out() -> None:
    (command,), scheduler = gang_beside_an_excluded_node(8)
    assert set(command.nodes) == {GOOD}
    assert "excluded" not in command.reason
    assert not scheduler.warnings


def test_elastic_gang_starts_smaller_rather_than_on_a_node_that_is_left_out() -> None:
    (command,), _ = gang_beside_an_excluded_node(16, min_gpus=4)
    assert (set(command.nodes), command.num_workers) == ({GOOD}, 8)
    assert f"at full size it would need excluded nodes ({BAD})" in command.reason


def test_elastic_gang_does_not_grow_onto_a_node_that_is_left_out_before_its_time() -> None:
    job = gpu_job("pretrain/gang", gpus=16, min_gpus=4)
    half = Resources(cpus=32.0, gpus=8.0)
    start = launched(job, *(GOOD,) * 8, at_s=10.0, resources=half, num_workers=8)
    running = after(plan_of("s", job), start)
    for now, is_restarted in ((1000.0, False), (HOUR_S + 1.0, True)):
        options: dict[str, Any] = {"now": now, "durations": {"s": {job.name: 20 * HOUR_S}}, "former": [ended_sweep()]}
        assert bool(of_type(decide(running, nodes=NODES, **options), PreemptAttempt)) is is_restarted


def test_gang_asks_a_cluster_that_grows_for_a_node_in_place_of_the_one_that_is_left_out() -> None:
    shape = NODES[0].resources
    for max_count, is_asked_for in ((3, True), (2, False), (None, True)):
        (command,), _ = gang_beside_an_excluded_node(16, maximum=(Node(resources=shape, max_count=max_count),))
        assert command.awaits_room is is_asked_for
        assert command.exclude == ((BAD,) if is_asked_for else ())
        assert bool(command.nodes) is not is_asked_for


def test_wait_for_a_new_node_ends_when_the_one_that_was_left_out_may_be_used_again() -> None:
    job, more = gpu_job("pretrain/gang", gpus=16), (Node(resources=NODES[0].resources, max_count=3),)
    running = after(plan_of("s", job), launched(job, at_s=10.0, awaits_room=True, exclude=(BAD,)))
    for now, is_ended in ((1000.0, False), (HOUR_S + 1.0, True)):
        commands = decide(running, nodes=NODES, now=now, maximum=more, former=[ended_sweep()])
        assert [f"on {BAD} too" in one.reason for one in of_type(commands, PreemptAttempt)] == [True] * is_ended
