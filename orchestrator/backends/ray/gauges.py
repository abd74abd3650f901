"""What an attempt reports of its data, as metrics of Ray: Prometheus reads them from every node of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from orchestrator.contract import JobRequest, Progress

EXPORTED: Mapping[str, str] = {
    "images_per_s": "Images per second that the loader delivers.",
    "wait_s_per_step": "Seconds that a training step waits for its batch.",
    "cache_hit_rate": "Share of samples whose shard was on the node.",
    "bytes_from_store": "Bytes that this attempt read from the object store.",
    "bad_samples": "Samples that could not be decoded.",
}
"""Progress fields of the loader, exported as ``orchestrator_<name>``."""
_TAGS = ("sweep", "job", "kind")


class Gauge(Protocol):
    """The part of ``ray.util.metrics.Gauge`` that is used here."""

    def set(self, value: float, tags: dict[str, str] = ...) -> object:
        """Show a value."""


def ray_gauge(name: str, description: str) -> Gauge:
    """A gauge of this process, tagged by sweep, job and kind."""
    from ray.util.metrics import Gauge as RayGauge

    gauge: Gauge = RayGauge(name, description, _TAGS)
    return gauge


class AttemptGauges:
    """The gauges of one attempt; each is made when the attempt first reports its field."""

    def __init__(self, request: JobRequest, make: Callable[[str, str], Gauge] = ray_gauge) -> None:
        self._tags = {"sweep": request.sweep, "job": request.job, "kind": request.kind.value}
        self._make = make
        self._gauges: dict[str, Gauge] = {}

    def show(self, progress: Progress) -> None:
        """Export what a progress report says."""
        for name in EXPORTED.keys() & progress.metrics.keys():
            if name not in self._gauges:
                self._gauges[name] = self._make(f"orchestrator_{name}", EXPORTED[name])
            self._gauges[name].set(float(progress.metrics[name]), self._tags)

    def end(self) -> None:
        """Rates of an attempt that has ended are 0: a warm runner lives on, and would show the last ones for ever."""
        for gauge in self._gauges.values():
            gauge.set(0.0, self._tags)
