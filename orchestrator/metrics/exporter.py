"""From values to metrics of Ray, which Prometheus reads from every node; failed requests to stores are counted here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, Protocol

from orchestrator.metrics.catalog import STORE_ERRORS, Metric, MetricType
from orchestrator.storage.os_errors import COUNTED, error_counts

_NEXT_TO_NOTHING: Final = 5e-324
"""Ray's counters refuse 0, and one that begins at 1 hides its first event from ``increase()``. The smallest float
shows a counter that is still 0; any whole number added to it is exact.
"""


class Exporter(Protocol):
    """Takes values of the catalogue's metrics. Never raises because of a value."""

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """Set a gauge's value for these labels; to be repeated, or Ray drops it."""

    def add(self, metric: Metric, amount: float, labels: Mapping[str, str]) -> None:
        """Add to a counter; 0 makes a counter visible that is still 0. Negative amounts are ignored."""


class RayExporter:
    """Metrics of this process, if it is connected to Ray; else nothing is exported."""

    def set(self, metric: Metric, value: float, labels: Mapping[str, str]) -> None:
        """See ``Exporter.set``."""
        _made(metric).set(float(value), dict(labels))

    def add(self, metric: Metric, amount: float, labels: Mapping[str, str]) -> None:
        """See ``Exporter.add``."""
        if amount >= 0:
            _made(metric).inc(float(amount) or _NEXT_TO_NOTHING, dict(labels))


@cache
def _made(metric: Metric) -> Any:  # noqa: ANN401 - a gauge or a counter of Ray
    """One object per metric and process: attempts come and go, their runner stays."""
    from ray.util import metrics

    made = metrics.Counter if metric.type is MetricType.COUNTER else metrics.Gauge
    return made(metric.name, metric.meaning, metric.labels)


class StoreErrors:
    """Exports errors that the storage layer counted in a controller's process since the last call."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._seen = error_counts()
        self._is_shown = False

    def show(self) -> None:
        """Count what is new."""
        if not self._is_shown:
            self._is_shown = True
            for source in ("controller", "runner"):
                for error in COUNTED:
                    self._exporter.add(STORE_ERRORS, 0, {"source": source, "error": error})
        counts = error_counts()
        for error, count in counts.items():
            if count > self._seen.get(error, 0):
                labels = {"source": "controller", "error": error}
                self._exporter.add(STORE_ERRORS, count - self._seen.get(error, 0), labels)
        self._seen = counts
