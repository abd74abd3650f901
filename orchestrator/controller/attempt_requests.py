"""How an attempt begins: its number, and the request that a runner gets.

A number of a key is given out once, over all sweeps and clusters, by a conditional write.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass

from orchestrator.core.contract import JobRequest
from orchestrator.core.errors import (
    PreconditionFailedError,
    StorageError,
)
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.storage.layout import attempt_name
from orchestrator.storage.protocol import ObjectStore, check_name
from orchestrator.storage.seals import seal


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
    """Take the next attempt number of a key, over all sweeps and clusters, and return it; numbers start at 1.

    Without ``has_run`` (no attempt is known of) the first number is tried before those that are taken are listed.
    """
    if not has_run and _claim(store, job, 1, claimant):
        return 1
    taken = store.list_children(attempt_name(job.key, 0).rpartition("/")[0] + "/")
    number = 1 + max((int(name.removesuffix(".json")) for name in taken), default=0)
    while not _claim(store, job, number, claimant):
        number += 1
    return number


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


def _claim(store: ObjectStore, job: Job, number: int, claimant: Claimant) -> bool:
    document = {
        "sweep": claimant.sweep,
        "cluster": claimant.cluster,
        "epoch": claimant.epoch,
        "job": job.name,
        "nonce": secrets.token_hex(8),
    }
    try:
        name = attempt_name(job.key, number)
        store.put_if_absent(name, seal(name, json.dumps(document).encode()))
    except PreconditionFailedError:
        return False
    return True
