"""The metrics that a controller exports, and their cost: a look at what changed in each round, and all of it seldom."""

from __future__ import annotations

import logging
import time
from typing import Final

from orchestrator.controller.controller import Controller
from orchestrator.core.errors import StorageThrottledError, StorageTimeoutError
from orchestrator.metrics import catalog
from orchestrator.metrics.exporter import Exporter, RayExporter, StoreErrors
from orchestrator.metrics.sweeps import SweepMetrics

SHOW_EVERY_S: Final = 5.0
"""Ray passes values on every 10 s."""
_LOG = logging.getLogger(__name__)


class ControllerMetrics:
    """Use from the controller's thread. Metrics that cannot be exported never disturb it."""

    def __init__(self, namespace: str, exporter: Exporter | None = None) -> None:
        self._labels = {"namespace": namespace}
        self._exporter = exporter or RayExporter()
        self._sweeps = SweepMetrics(self._exporter)
        self._store_errors = StoreErrors(self._exporter)
        self._show_at_s = 0.0
        self._longest_s = 0.0
        self._has_failed = False
        self._is_shown = False

    def follow(self, controller: Controller, round_s: float) -> None:
        """After each round, which took ``round_s``."""
        self._longest_s = max(self._longest_s, round_s)
        try:
            self._sweeps.follow(controller.snapshots, time.time())
            if time.monotonic() >= self._show_at_s:
                self._show_at_s = time.monotonic() + SHOW_EVERY_S
                self._show(controller)
        except Exception:  # noqa: BLE001 - whatever it is, sweeps come first
            if not self._has_failed:
                _LOG.exception("metrics are not exported; sweeps run on all the same")
            self._has_failed = True

    def count_error(self, error: Exception) -> None:
        """A round failed."""
        try:
            self._exporter.add(catalog.ERRORS, 1, {**self._labels, "error": type(error).__name__})
        except Exception:  # noqa: BLE001 - the round's own error is raised
            _LOG.exception("a failed round is not counted")

    def _show(self, controller: Controller) -> None:
        self._sweeps.show(controller.observed(), time.time())
        if not self._is_shown:
            self._is_shown = True
            for error in (StorageTimeoutError, StorageThrottledError):
                self._exporter.add(catalog.ERRORS, 0, {**self._labels, "error": error.__name__})
        total = controller.capacity
        self._exporter.set(catalog.EPOCH, controller.epoch, self._labels)
        self._exporter.set(catalog.ROUND, self._longest_s, self._labels)
        self._exporter.set(catalog.CAPACITY, total.cpus, {**self._labels, "resource": "cpu"})
        self._exporter.set(catalog.CAPACITY, total.gpus, {**self._labels, "resource": "gpu"})
        self._store_errors.show()
        controller.counters.export(self._exporter)
        self._longest_s = 0.0
