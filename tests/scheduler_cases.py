"""Sweeps at one point of their journal, and what the scheduler makes of them."""

from typing import Any

from orchestrator.core.contract import Outcome, Resources
from orchestrator.core.errors import FailureKind
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.scheduling.commands import Command
from orchestrator.scheduling.scheduler import ClusterView, Scheduler
from orchestrator.state import events
from orchestrator.state.events import Event
from orchestrator.state.fold import fold
from orchestrator.state.nodes import Node
from orchestrator.state.snapshot import Snapshot
from orchestrator.sweepfile.values import Policy

HOUR_S = 3600.0


def plan_of(name: str, *jobs: Job, owner: str = "", **policy: Any) -> Plan:
    return Plan(sweep=name, revision=1, store_uri="", jobs=jobs, baseline="", policy=Policy(**policy), owner=owner)


def after(plan: Plan, *journal: Event) -> Snapshot:
    accepted = events.PlanAccepted(at_s=0.0, message_id="m", revision=1)
    return fold(plan.sweep, [accepted, *journal], lambda _: plan)


def launched(job: Job, *nodes: str, at_s: float = 1.0, number: int = 1, **options: Any) -> Event:
    return events.AttemptLaunched(
        at_s=at_s,
        job=job.name,
        key=job.key,
        attempt_id=f"{job.key}.{number}",
        number=number,
        epoch=1,
        nodes=nodes,
        **options,
    )


def failed(job: Job, kind: FailureKind, message: str = "", *, at_s: float = 2.0, node: str = "") -> Event:
    return events.AttemptFailed(
        at_s=at_s, job=job.name, attempt_id=f"{job.key}.1", kind=kind, message=message, node=node
    )


def decide(*snapshots: Snapshot, nodes: tuple[Node, ...], now: float = 10.0, **options: Any) -> list[Command]:
    total = Resources(cpus=sum(node.resources.cpus for node in nodes), gpus=sum(node.resources.gpus for node in nodes))
    return Scheduler().decide(ClusterView(snapshots=snapshots, total=total, nodes=nodes, now=now, **options))


def of_type(commands: list[Command], kind: type[Any]) -> list[Any]:
    return [command for command in commands if isinstance(command, kind)]


def done(job: Job, at_s: float) -> Event:
    outcome = Outcome.COMMITTED
    return events.AttemptSucceeded(at_s=at_s, job=job.name, attempt_id=f"{job.key}.1", outcome=outcome)
