"""What one sweep found out about a node holds for the others, and outlives it."""

from __future__ import annotations

from orchestrator.state import events
from orchestrator.state.commands import ExcludeNode, LaunchJob
from orchestrator.state.snapshot import Snapshot
from tests.makespan_dag import gpu_job, gpu_nodes
from tests.scheduler_cases import HOUR_S, after, decide, done, launched, of_type, plan_of

NODES = gpu_nodes(16)
BAD, GOOD = (node.name for node in NODES)


def ended_sweep() -> Snapshot:
    job = gpu_job("finetune/ended", gpus=1)
    return after(
        plan_of("ended", job),
        events.NodeExcluded(at_s=1.0, node=BAD, reason="Xid 79", until_s=HOUR_S),
        launched(job, GOOD, at_s=2.0),
        done(job, 3.0),
        events.SweepFinished(at_s=4.0, status=events.SweepStatus.SUCCEEDED),
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
