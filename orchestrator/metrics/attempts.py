"""Metrics of attempts: rates as gauges of their process, and sums that the controller exports.

The sums are part of the attempt's progress. If the process exported them, there would be a series per process, because
Ray labels each with its worker, and a node's agent keeps the counters of workers that are gone until Ray is restarted:
ten thousand gangs would leave a million series. Gauges disappear with their process.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, TypeAlias

from orchestrator.core.contract import JobRequest, Progress
from orchestrator.metrics import catalog
from orchestrator.metrics.catalog import RUNNER_DATA_WAIT, RUNNER_IMAGES, Metric
from orchestrator.metrics.exporter import Exporter, RayExporter
from orchestrator.state.snapshot import Attempt, Snapshot
from orchestrator.storage.os_errors import error_counts

STORE_ERRORS_PREFIX: Final = "store_errors/"
"""Prefix in ``Progress.counters`` of the name of an error."""
_SHOW_EVERY_S: Final = 2.0
_LOG = logging.getLogger(__name__)
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
"""Metrics by their names in ``Progress.counters``."""
_Place: TypeAlias = tuple[str, str, str]
"""Sweep, kind of job, name of the counter."""


class AttemptMetrics:
    """Follows the progress of one attempt in its own process."""

    def __init__(self, request: JobRequest, exporter: Exporter | None = None) -> None:
        self._labels = {"sweep": request.sweep, "kind": request.kind.value}
        self._exporter = exporter or RayExporter()
        self._errors_before = error_counts()
        self._shown = Progress(phase="")
        self._show_at_s = 0.0
        self._has_failed = False

    def complete(self, progress: Progress) -> Progress:
        """The progress with this process's store errors since the attempt began among its counters."""
        counts, before = error_counts(), self._errors_before
        if counts == before:
            return progress
        new = {f"{STORE_ERRORS_PREFIX}{name}": float(count - before.get(name, 0)) for name, count in counts.items()}
        return replace(progress, counters={**progress.counters, **new})

    def show(self, progress: Progress) -> None:
        """Export the pace since the last time, every few seconds. Errors of Ray never disturb an attempt."""
        now_s = time.monotonic()
        if now_s < self._show_at_s or not progress.counters:
            return
        self._show_at_s = now_s + _SHOW_EVERY_S
        try:
            self._show(progress)
        except Exception:  # noqa: BLE001 - whatever it is, it is not worth the training
            if not self._has_failed:
                _LOG.exception("metrics are not exported; the attempt continues")
            self._has_failed = True

    def _show(self, progress: Progress) -> None:
        train_s = self._since(progress, "train_s")
        if train_s > 0.0:
            self._exporter.set(RUNNER_IMAGES, self._since(progress, "images") / train_s, self._labels)
            waited = min(1.0, self._since(progress, "data_wait_s") / train_s)
            self._exporter.set(RUNNER_DATA_WAIT, waited, self._labels)
        self._shown = progress

    def _since(self, progress: Progress, name: str) -> float:
        return max(0.0, progress.counters.get(name, 0.0) - self._shown.counters.get(name, 0.0))


class CounterBook:
    """Use from one thread. An earlier controller has exported what attempts counted before ``started_at_s`` (unix)."""

    def __init__(self, started_at_s: float) -> None:
        self._started_at_s = started_at_s
        self._seen: dict[str, Mapping[str, float]] = {}
        """Latest sums by attempt."""
        self._new: defaultdict[_Place, float] = defaultdict(float)
        """Not exported yet."""
        self._shown: set[_Place] = set()

    def see(self, snapshot: Snapshot, attempt: Attempt, progress: Progress) -> None:
        """Take the latest sums of an attempt, also those of its end."""
        counters, before = progress.counters, self._seen.get(attempt.attempt_id)
        if not counters or counters == before:
            return
        self._seen[attempt.attempt_id] = counters
        if before is None:
            before = {} if attempt.launched_at_s >= self._started_at_s else counters
        job = snapshot.plan.by_name().get(attempt.job) if snapshot.plan else None
        if job is None:
            return  # of a job that is not in the latest revision
        for name, value in counters.items():
            past = before.get(name, 0.0)
            # A smaller sum was restarted, as by a loader that was opened again.
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
