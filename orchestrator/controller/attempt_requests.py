"""How an attempt begins: its number, and the request that a runner gets.

A number of a key is given out once, over all sweeps and clusters, by a conditional write.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.contract import JobRequest
from orchestrator.core.errors import StorageError
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.storage.claims import take_attempt_number
from orchestrator.storage.protocol import ObjectStore, check_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """The sweep, job and cluster that ask for an attempt number."""

    sweep: str
    cluster: str
    epoch: int


def attempt_id(key: str, number: int) -> str:
    """``<key>.<number>``."""
    return f"{key}.{number}"


def allocate_attempt(store: ObjectStore, job: Job, claimant: Claimant, *, has_run: bool = True) -> int:
    """Take the next attempt number of a job for a sweep; see ``take_attempt_number``."""
    document = {"sweep": claimant.sweep, "cluster": claimant.cluster, "epoch": claimant.epoch, "job": job.name}
    return take_attempt_number(store, job.key, document, has_run=has_run)


def make_request(plan: Plan, job: Job, number: int) -> JobRequest:
    """The request of one attempt at a job. Raises ``StorageError``: its key could be a folder elsewhere."""
    if "/" in check_name(job.key):
        raise StorageError(
            f"the key {job.key!r} of job {job.name} is a path; the plan was altered: submit the sweep again"
        )
    return JobRequest(
        attempt_id=attempt_id(job.key, number),
        attempt_number=number,
        sweep=plan.sweep,
        job=job.name,
        key=job.key,
        kind=job.kind,
        identity=job.identity,
        store_uri=plan.store_uri,
        execution=job.execution,
    )
