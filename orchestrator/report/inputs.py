"""What a report is computed from: the committed results of a plan's jobs, read in bulk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from orchestrator.core.errors import NotFoundError
from orchestrator.core.job_kinds import TIMED_KINDS
from orchestrator.planning.graph.plan import Job
from orchestrator.storage.artifacts import Record, read_record
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.sample_outcomes import SUMMARY_FIELD

_NUM_READERS = 32
"""Requests in flight to a server: each waits some 20 ms for its answer."""
_NUM_READERS_OF_FILES = 4
"""There is hardly any wait, and many threads cost a third more processor time: they contend for Python's lock."""
_MOST_AT_ONCE = 16

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a report needs of a record; thousands of these fit where whole records would not."""

    metrics: Mapping[str, float]
    measured_s: float | None = None
    """Seconds that the attempt which committed took, as far as it said so."""
    has_changed_numerics: bool = False
    """Whether it was resumed on other hardware or libraries, which ends the promise of the same bits."""
    num_rewinds: int = 0
    """How often it went back after a NaN, an infinity or a spike, and left out the batches that led there."""
    num_bad_samples: int = 0
    """Samples that it could not decode, and replaced in training or left out of validation."""
    is_uncompiled: bool = False
    """Whether it ran without ``torch.compile`` although it was asked for."""
    num_val: int | None = None
    """Validation samples that its error is a share of; None in records that do not say."""
    search: Mapping[str, Any] = field(default_factory=dict)
    """What a search found; empty for other jobs."""

    @classmethod
    def of(cls, record: Record) -> Committed:
        """The part of a record that reports need."""
        return cls(
            metrics=record.metrics,
            measured_s=_measured_s(record.summary.get("measured")),
            has_changed_numerics=bool(record.summary.get("fingerprint_changes")),
            num_rewinds=len(record.summary.get("rewinds") or ()),
            num_bad_samples=_num_bad(record.summary.get("bad_samples")),
            is_uncompiled=any("torch.compile failed" in str(one) for one in record.summary.get("notes") or ()),
            num_val=record.summary.get(SUMMARY_FIELD, {}).get("num_counted"),
            search=record.summary.get("search", {}),
        )


def read_committed(store: ObjectStore, jobs: Iterable[Job]) -> dict[str, Committed]:
    """What is committed of some jobs at this moment, by job name; jobs that share a key share the reading."""
    wanted = [job for job in jobs if job.kind in TIMED_KINDS]
    keys = list(dict.fromkeys(job.key for job in wanted))
    found = dict(zip(keys, map_in_threads(store, lambda key: _read(store, key), keys), strict=True))
    return {job.name: committed for job in wanted if (committed := found[job.key]) is not None}


def map_in_threads(store: ObjectStore, function: Callable[[T], U], items: Sequence[T]) -> list[U]:
    """``function``, which reads from the store, of each item, in order.

    Items are handed out by the dozen, as handing over costs as much as a file.
    """
    num_readers = _NUM_READERS_OF_FILES if store.uri.startswith("file:") else _NUM_READERS
    size = max(1, min(_MOST_AT_ONCE, len(items) // num_readers))
    portions = [items[start : start + size] for start in range(0, len(items), size)]
    with ThreadPoolExecutor(num_readers, thread_name_prefix="report") as pool:
        found = pool.map(lambda portion: [function(item) for item in portion], portions)
        return [result for results in found for result in results]


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


def _num_bad(by_split: object) -> int:
    """From ``{split: {reason: {"count": n, ...}}}`` of a record."""
    splits = by_split.values() if isinstance(by_split, Mapping) else ()
    return sum(int(found["count"]) for reasons in splits for found in reasons.values())
