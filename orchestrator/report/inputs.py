"""What a report is computed from: the committed results of a plan's jobs, read in bulk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from orchestrator.contract import JobKind
from orchestrator.errors import NotFoundError
from orchestrator.plan.graph import Job
from orchestrator.storage.artifacts import Record, read_record
from orchestrator.storage.protocol import ObjectStore

TRANSFER_KINDS = frozenset({JobKind.FINETUNE, JobKind.PROBE, JobKind.KNN})
REPORTED_KINDS = TRANSFER_KINDS | {JobKind.LABELS, JobKind.PRETRAIN}
TIMED_KINDS = REPORTED_KINDS | {JobKind.EMBED, JobKind.SEARCH}
_NUM_READERS = 32
"""Requests in flight: on S3 each waits some 20 ms for its answer; on a local disk two would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a report needs of a record; thousands of these fit where whole records would not."""

    metrics: Mapping[str, float]
    measured_s: float | None = None
    """Seconds that the attempt which committed took, as far as it said so."""
    has_changed_numerics: bool = False
    """Whether it was resumed on other hardware or libraries, which ends the promise of the same bits."""
    search: Mapping[str, Any] = field(default_factory=dict)
    """What a search found; empty for other jobs."""

    @classmethod
    def of(cls, record: Record) -> Committed:
        """The part of a record that reports need."""
        return cls(
            metrics=record.metrics,
            measured_s=_measured_s(record.summary.get("measured")),
            has_changed_numerics=bool(record.summary.get("fingerprint_changes")),
            search=record.summary.get("search", {}),
        )


def read_committed(store: ObjectStore, jobs: Iterable[Job]) -> dict[str, Committed]:
    """What is committed of some jobs at this moment, by job name; jobs that share a key share the reading."""
    wanted = [job for job in jobs if job.kind in TIMED_KINDS]
    keys = list(dict.fromkeys(job.key for job in wanted))
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="report") as pool:
        found = dict(zip(keys, pool.map(lambda key: _read(store, key), keys), strict=True))
    return {job.name: committed for job in wanted if (committed := found[job.key]) is not None}


def _read(store: ObjectStore, key: str) -> Committed | None:
    try:
        return Committed.of(read_record(store, key))
    except NotFoundError:
        return None  # not committed (yet): the report says so


def _measured_s(measured: object) -> float | None:
    if not isinstance(measured, Mapping):
        return None
    parts = [measured[name] for name in ("setup_s", "train_s", "work_s") if name in measured]
    return float(sum(parts)) if parts else None
