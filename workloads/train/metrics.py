"""Metrics of one attempt: lines gathered in memory, written as immutable JSONL segments at every checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.core.contract import JobRequest
from orchestrator.storage import ObjectStore
from orchestrator.storage.layout import metrics_segment
from orchestrator.storage.seals import seal


@dataclass(slots=True)
class Tally:
    """Sums over training samples; ``loss`` and ``errors`` are sums, not means."""

    loss: float = 0.0
    errors: int = 0
    num_samples: int = 0

    def add(self, loss: float, errors: int, num_samples: int) -> None:
        """Add one batch."""
        self.loss += loss
        self.errors += errors
        self.num_samples += num_samples

    def means(self, prefix: str) -> dict[str, float]:
        """``<prefix>_loss`` and ``<prefix>_error`` per sample; nothing if there is none."""
        if not self.num_samples:
            return {}
        return {f"{prefix}_loss": self.loss / self.num_samples, f"{prefix}_error": self.errors / self.num_samples}


class MetricsLog:
    """The segments of one attempt. A segment covers ``from_step < step <= to_step``; segments follow each other."""

    def __init__(self, store: ObjectStore, request: JobRequest, from_step: int) -> None:
        self._store = store
        self._request = request
        self._from_step = from_step
        self._lines: list[tuple[int, str]] = []

    def add(self, step: int, epoch: float, metrics: Mapping[str, float]) -> None:
        """Add a line, stamped with the present time; a step that a sealed segment covers keeps the line it has."""
        if step <= self._from_step:
            return
        line = {"step": step, "epoch": epoch, "at_s": time.time(), "metrics": dict(metrics)}
        self._lines.append((step, json.dumps(line, allow_nan=False)))

    def forget_after(self, step: int) -> None:
        """Drop the lines of later steps that are not sealed yet: the run repeats them."""
        self._lines = [(line_step, line) for line_step, line in self._lines if line_step <= step]

    def seal(self, step: int) -> dict[str, bytes]:
        """Take the lines so far out of the log: name and content of the segment that the caller makes durable.

        Without any lines there is no segment, and the next one starts where this one would have.
        """
        if not self._lines:
            return {}
        name = metrics_segment(self._request.key, self._request.attempt_number, self._from_step, step)
        content = "".join(f"{line}\n" for _, line in self._lines).encode()
        self._lines, self._from_step = [], step
        return {name: seal(name, content)}

    def close_segment(self, step: int) -> None:
        """Write the lines so far."""
        for name, content in self.seal(step).items():
            self._store.put(name, content)
