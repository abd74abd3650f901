"""Sweeps at one point of their journal, and what the scheduler makes of them."""

from typing import Any

from orchestrator.core.contract import Resources
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.scheduling.commands import Command
from orchestrator.scheduling.scheduler import ClusterView, Scheduler
from orchestrator.state import events
from orchestrator.state.events import Event
from orchestrator.state.fold import fold
from orchestrator.state.nodes import Node
from orchestrator.state.snapshot import Snapshot
from tests.builders import done, failed, launched, make_plan

__all__ = ["HOUR_S", "after", "decide", "done", "failed", "launched", "of_type", "plan_of"]

HOUR_S = 3600.0


def plan_of(name: str, *jobs: Job, owner: str = "", **policy: Any) -> Plan:
    return make_plan(*jobs, sweep=name, revision=1, owner=owner, **policy)


def after(plan: Plan, *journal: Event) -> Snapshot:
    accepted = events.PlanAccepted(at_s=0.0, message_id="m", revision=1)
    return fold(plan.sweep, [accepted, *journal], lambda _: plan)


def decide(*snapshots: Snapshot, nodes: tuple[Node, ...], now: float = 10.0, **options: Any) -> list[Command]:
    total = Resources(cpus=sum(node.resources.cpus for node in nodes), gpus=sum(node.resources.gpus for node in nodes))
    return Scheduler().decide(ClusterView(snapshots=snapshots, total=total, nodes=nodes, now=now, **options))


def of_type(commands: list[Command], kind: type[Any]) -> list[Any]:
    return [command for command in commands if isinstance(command, kind)]
