"""What attempts report in sums, added up by sweep and kind for the controller to export."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from orchestrator.core.contract import Progress
from orchestrator.metrics import catalog
from orchestrator.metrics.attempts import STORE_ERRORS_PREFIX
from orchestrator.metrics.catalog import Metric
from orchestrator.metrics.exporter import Exporter
from orchestrator.state.snapshot import Attempt, Snapshot

COUNTERS: Final[Mapping[str, Metric]] = MappingProxyType(
    {
        "images": catalog.IMAGES,
        "steps": catalog.STEPS,
        "train_s": catalog.TRAIN_SECONDS,
        "data_wait_s": catalog.DATA_WAIT,
        "checkpoint_stall_s": catalog.STALL,
        "cache_hits": catalog.CACHE_HITS,
        "cache_misses": catalog.CACHE_MISSES,
        "store_read_bytes": catalog.READ_BYTES,
        "bad_samples": catalog.BAD_SAMPLES,
    }
)
"""By their names in ``Progress.counters``."""
_Place: TypeAlias = tuple[str, str, str]
"""Sweep, kind of job, name of the counter."""


class CounterBook:
    """Use from one thread. What attempts counted before ``started_at_s`` (unix), an earlier controller has exported."""

    def __init__(self, started_at_s: float) -> None:
        self._started_at_s = started_at_s
        self._seen: dict[str, Mapping[str, float]] = {}
        """Latest sums by attempt."""
        self._new: defaultdict[_Place, float] = defaultdict(float)
        """Not exported yet."""
        self._shown: set[_Place] = set()

    def see(self, snapshot: Snapshot, attempt: Attempt, progress: Progress) -> None:
        """Take the latest sums of an attempt; those of its end, too."""
        counters, before = progress.counters, self._seen.get(attempt.attempt_id)
        if not counters or counters == before:
            return
        self._seen[attempt.attempt_id] = counters
        if before is None:
            before = {} if attempt.launched_at_s >= self._started_at_s else counters
        job = snapshot.plan.by_name().get(attempt.job) if snapshot.plan else None
        if job is None:
            return  # of a job that a later revision no longer has
        for name, value in counters.items():
            past = before.get(name, 0.0)
            # A sum that fell began anew, as that of a loader that was opened again.
            self._new[snapshot.sweep, job.kind.value, name] += value - past if value >= past else value

    def retain(self, attempt_ids: Collection[str]) -> None:
        """Forget all attempts but these."""
        if len(self._seen) > len(attempt_ids):
            self._seen = {name: counters for name, counters in self._seen.items() if name in attempt_ids}

    def export(self, exporter: Exporter) -> None:
        """Export what is new since the last call."""
        new, self._new = self._new, defaultdict(float)
        for (sweep, kind, name), amount in new.items():
            if name in COUNTERS and (amount or (sweep, kind, name) not in self._shown):
                self._shown.add((sweep, kind, name))
                exporter.add(COUNTERS[name], amount, {"sweep": sweep, "kind": kind})
            elif name.startswith(STORE_ERRORS_PREFIX) and amount:
                error = name.removeprefix(STORE_ERRORS_PREFIX)
                exporter.add(catalog.STORE_ERRORS, amount, {"source": "runner", "error": error})
