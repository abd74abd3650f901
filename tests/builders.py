"""Builders of small sweeps: jobs, plans, requests as attempts get them, and journals as controllers write them.

What runs or commits something is beside: ``scripted_sweep.World`` (a controller over scripted attempts),
``sample_sweep`` (records of a finished sweep), ``tiny_training`` and ``data_jobs`` (real work of a second).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.core.contract import Execution, JobRequest, Outcome, Resources
from orchestrator.core.errors import FailureKind
from orchestrator.core.ids import make_key
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state import events
from orchestrator.state.events import Event
from orchestrator.storage import ObjectStore
from orchestrator.storage.journal import Journal
from orchestrator.storage.layout import plan_name
from orchestrator.sweepfile.values import Policy

START_S = 1_800_000_000.0


def make_job(
    name: str,
    *needs: str,
    key: str = "",
    label: str = "",
    cpus: float = 1.0,
    gpus: float = 0.0,
    min_gpus: float = 0.0,
    workers: int = 1,
    kind: JobKind | None = None,
    parameters: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Job] | None = None,
    facets: Mapping[str, str | int] | None = None,
) -> Job:
    """A job of the kind that its name begins with; it needs its inputs where no needs are given.

    ``key`` is what its identity consists of without ``parameters``, so that jobs with the same one share a key;
    default: its name. ``label`` is the readable part of its key.
    """
    kind = kind or JobKind(name.partition("/")[0])
    identity = {
        "kind": kind.value,
        "code_version": 1,
        "parameters": {"key": key or name} if parameters is None else dict(parameters),
        "inputs": {role: job.key for role, job in (inputs or {}).items()},
    }
    return Job(
        name=name,
        kind=kind,
        key=make_key(kind.value, label or key or name.partition("/")[2], identity),
        identity=identity,
        needs=needs or tuple(job.name for job in (inputs or {}).values()),
        resources=Resources(cpus=cpus, gpus=gpus, min_gpus=min_gpus),
        execution=Execution(num_workers=workers),
        facets=facets or {},
    )


def make_plan(
    *jobs: Job,
    sweep: str = "sweep",
    revision: int = 0,
    store_uri: str = "",
    owner: str = "",
    tracking_uri: str = "",
    **policy: Any,
) -> Plan:
    """A plan of these jobs; ``policy`` are fields of ``Policy``."""
    return Plan(
        sweep=sweep,
        revision=revision,
        store_uri=store_uri,
        jobs=jobs,
        baseline="",
        policy=Policy(**policy),
        owner=owner,
        tracking_uri=tracking_uri,
    )


def request_of(job: Job, store_uri: str, number: int = 1, *, sweep: str = "sweep", **changes: Any) -> JobRequest:
    """An attempt at a job; ``changes`` are further fields of the request, or others."""
    fields: dict[str, Any] = {
        "attempt_id": f"{job.key}.{number}",
        "attempt_number": number,
        "sweep": sweep,
        "job": job.name,
        "key": job.key,
        "kind": job.kind,
        "identity": job.identity,
        "store_uri": store_uri,
        "execution": job.execution,
    }
    return JobRequest(**{**fields, **changes})


# ------------------------------------------------------------------------------------------------------------- events
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


def failed(
    job: Job, kind: FailureKind, message: str = "", *, at_s: float = 2.0, number: int = 1, node: str = ""
) -> Event:
    return events.AttemptFailed(
        at_s=at_s, job=job.name, attempt_id=f"{job.key}.{number}", kind=kind, message=message, node=node
    )


def done(job: Job, at_s: float, number: int = 1, metrics: Mapping[str, float] | None = None) -> Event:
    return events.AttemptSucceeded(
        at_s=at_s,
        job=job.name,
        attempt_id=f"{job.key}.{number}",
        outcome=Outcome.COMMITTED,
        metrics=dict(metrics or {}),
    )


class SweepJournal:
    """Writes what a controller writes of one sweep into a store: its plans, and ``num_per_segment`` events at once."""

    def __init__(self, store: ObjectStore, sweep: str, *, num_per_segment: int = 1) -> None:
        self.store, self.sweep, self.num_per_segment = store, sweep, num_per_segment
        self.revision = 0
        self._journal = Journal(store, sweep, holder="test")
        self._waiting: list[dict[str, Any]] = []

    def accept(self, plan: Plan, at_s: float = START_S, *, cluster: str = "local") -> None:
        """A controller takes the sweep over, unless it has, and accepts a plan."""
        self.store.put(plan_name(self.sweep, plan.revision), json.dumps(plan.to_json()).encode())
        if not self.revision:
            self.tell(events.SweepAdopted(at_s=at_s, cluster=cluster, epoch=1, holder="test"))
        self.revision = plan.revision
        message_id = f"message-{plan.revision}"
        self.tell(events.PlanAccepted(at_s=at_s, message_id=message_id, revision=plan.revision))

    def tell(self, *more: Event) -> None:
        self._waiting += [events.encode_event(event) for event in more]
        while len(self._waiting) >= self.num_per_segment:
            self.flush()

    def flush(self) -> None:
        """Write the next segment, however full."""
        segment, self._waiting = self._waiting[: self.num_per_segment], self._waiting[self.num_per_segment :]
        if segment:
            self._journal.append(segment)


def accept(store: ObjectStore, plan: Plan) -> None:
    """Put the plan into the store as a sweep that a controller has taken over and not begun."""
    SweepJournal(store, plan.sweep).accept(plan, 1.0)
