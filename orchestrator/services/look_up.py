"""What a store holds of a plan. Reads only, many objects at a time, and never waits longer than it is told to."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from orchestrator.core.code import package_digest
from orchestrator.core.errors import CorruptObjectError, NotFoundError, OrchestratorError
from orchestrator.core.ids import canonical_json
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.planning.graph.reuse import Disposition, dispositions
from orchestrator.services.asking import ask_all
from orchestrator.storage.artifacts import Record, read_record
from orchestrator.storage.layout import checkpoints_folder
from orchestrator.storage.open import is_initialised, open_store
from orchestrator.storage.protocol import ObjectStore

DEADLINE_S = 15.0
_ASKED_ONE_BY_ONE = 256
"""Up to so many keys of a kind, each is asked for; beyond, the store lists what it has of the kind first."""
_NUM_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What planning wants of a committed record; its seal is for whoever relies on its parts to check."""

    key: str
    job: str
    """Its name in the sweep that made it."""
    sweep: str
    identity: Mapping[str, Any]
    metrics: Mapping[str, float]
    summary: Mapping[str, Any]
    package_digest: str
    created_at_s: float
    num_bytes: int

    @classmethod
    def of(cls, record: Record) -> Self:
        """The part of a record that planning needs."""
        return cls(
            key=record.key,
            job=record.job,
            sweep=record.sweep,
            identity=record.identity,
            metrics=record.metrics,
            summary=record.summary,
            package_digest=record.package_digest,
            created_at_s=float(record.created_at_s),
            num_bytes=sum(part.size_bytes for part in record.parts.values()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a store holds of a plan's jobs."""

    dispositions: Mapping[str, Disposition]
    """By name of the job."""
    records: Mapping[str, Seen] = field(default_factory=dict)
    """By key, of committed jobs."""
    problems: tuple[str, ...] = ()
    """Why this may not be all, or must not be relied upon."""

    @property
    def reused(self) -> set[str]:
        """Names of the jobs that need not run."""
        return {name for name, disposition in self.dispositions.items() if disposition.is_reused}


def look_up(plan: Plan, *, deadline_s: float = DEADLINE_S) -> Found:
    """Compare a plan with its store. Creates nothing; a store that cannot be asked is a problem, not an error.

    Args:
        plan: names its store.
        deadline_s: seconds after which to go on with what is known.
    """
    until_s, uri = time.monotonic() + deadline_s, plan.store_uri
    nothing = dispositions(plan, (), ())
    try:
        if not ask_all(is_initialised, [uri], deadline_s=until_s)[uri]:
            return Found(dispositions=nothing, problems=_absent(uri))
        store = open_store(uri)
        records, damaged = _records(store, plan.jobs, until_s)
        started = _started(store, [job for job in plan.jobs if job.key not in records], until_s)
    except TimeoutError:
        problem = f"store {uri} did not answer within {deadline_s:g} s: jobs are shown as new that may have a result"
        return Found(dispositions=nothing, problems=(problem,))
    except (OrchestratorError, OSError, ValueError) as error:
        problem = f"store {uri} cannot be asked, so jobs are shown as new that may have a result: {error}"
        return Found(dispositions=nothing, problems=(problem,))
    digest = package_digest()
    stale = {key for key, record in records.items() if record.package_digest not in {"", digest}}
    return Found(
        dispositions=dispositions(plan, records.keys(), started, stale),
        records=records,
        problems=(*damaged, *_altered(plan, records)),
    )


def read_seen(store: ObjectStore, key: str) -> Seen | None:
    """The record of a key; None if it is not committed, or not readable."""
    found = _seen_or_reason(store, key)
    return found if isinstance(found, Seen) else None


def _seen_or_reason(store: ObjectStore, key: str) -> Seen | str | None:
    """The record of a key, or what is wrong with it."""
    try:
        return Seen.of(read_record(store, key))
    except NotFoundError:
        return None
    except CorruptObjectError as error:
        return str(error)


def _absent(uri: str) -> tuple[str, ...]:
    """A directory is made by the first submit, a bucket by nobody here."""
    if uri.startswith("file:"):
        return ()
    return (f"the bucket of store {uri} does not exist: create it, or correct the store's URI, before you submit",)


def _records(store: ObjectStore, jobs: Iterable[Job], until_s: float) -> tuple[dict[str, Seen], list[str]]:
    """Records by key, and what is said of those that are damaged, at which a submit would stop."""
    keys = _there(store, jobs, until_s)
    found = ask_all(lambda key: _seen_or_reason(store, key), keys, deadline_s=until_s)
    damaged = [reason for reason in found.values() if isinstance(reason, str)]
    shown = damaged[:_NUM_NAMED] + (
        [f"{len(damaged) - _NUM_NAMED} more records are damaged"] if damaged[_NUM_NAMED:] else []
    )
    return {key: seen for key, seen in found.items() if isinstance(seen, Seen)}, shown


def _started(store: ObjectStore, jobs: Collection[Job], until_s: float) -> set[str]:
    """Keys that have checkpoints."""

    def has_checkpoint(key: str) -> bool:
        return bool(store.list_children(checkpoints_folder(key) + "/"))

    found = ask_all(has_checkpoint, _there(store, jobs, until_s), deadline_s=until_s)
    return {key for key, is_started in found.items() if is_started}


def _there(store: ObjectStore, jobs: Iterable[Job], until_s: float) -> list[str]:
    """Keys of which the store may hold anything."""
    by_kind: dict[str, set[str]] = {}
    for job in jobs:
        by_kind.setdefault(job.kind.value, set()).add(job.key)
    large = [kind for kind, keys in by_kind.items() if len(keys) > _ASKED_ONE_BY_ONE]
    listed = ask_all(lambda kind: store.list_children(f"artifacts/{kind}/"), large, deadline_s=until_s)
    for kind, there in listed.items():
        by_kind[kind] &= set(there)
    return sorted(key for keys in by_kind.values() for key in keys)


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two identities have the same canonical form; equal JSON tells it in half the time."""
    is_equal = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    return is_equal or canonical_json(one) == canonical_json(other)


def _altered(plan: Plan, records: Mapping[str, Seen]) -> list[str]:
    """Records whose identity is not that of their key: a submit would stop at them."""
    names = [
        job.name for job in plan.jobs if job.key in records and not _is_same(records[job.key].identity, job.identity)
    ]
    if not names:
        return []
    named = ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")
    return [f"{len(names)} records in {plan.store_uri} hold another identity than their key's ({named}): run fsck"]
