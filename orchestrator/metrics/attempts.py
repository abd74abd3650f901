"""What a process that trains says of itself: its pace as gauges, and sums for the controller to export.

The sums travel with the attempt's progress. Exported here they would be a series per process, as Ray labels each with
its worker, and a node's agent keeps the counters of workers that are gone until Ray is started anew: ten thousand gangs
would leave a million series. Gauges vanish with their process.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Final

from orchestrator.core.contract import JobRequest, Progress
from orchestrator.metrics.catalog import RUNNER_DATA_WAIT, RUNNER_IMAGES
from orchestrator.metrics.exporter import Exporter, RayExporter
from orchestrator.storage.error_counts import error_counts

STORE_ERRORS_PREFIX: Final = "store_errors/"
"""In ``Progress.counters``, before the name of an error."""
_SHOW_EVERY_S: Final = 2.0
_LOG = logging.getLogger(__name__)


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
        """Export the pace since the last time, every few seconds. What Ray meets never disturbs an attempt."""
        now_s = time.monotonic()
        if now_s < self._show_at_s or not progress.counters:
            return
        self._show_at_s = now_s + _SHOW_EVERY_S
        try:
            self._show(progress)
        except Exception:  # noqa: BLE001 - whatever it is, it is not worth the training
            if not self._has_failed:
                _LOG.exception("metrics are not exported; the attempt goes on all the same")
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
