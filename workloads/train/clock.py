"""Times and throughput of one attempt; none of them influences a result."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from orchestrator.core.activity import RankActivity

_REPORT_EVERY_S: Final = 0.3
_SHORTEST_S: Final = 1e-9
Item = TypeVar("Item")


class Clock:
    """Measures images and waiting, since the last lap and in all."""

    def __init__(self, activity: RankActivity | None = None) -> None:
        self._activity = activity or RankActivity()
        self.started_s = 0.0
        """Value of ``time.perf_counter`` when the first update began."""
        self._report_s = -math.inf
        self._lap_s = 0.0
        self._lap_images = 0
        self._lap_steps = 0
        self._lap_wait_s = 0.0
        self.wait_s = 0.0
        """How long the latest batch was waited for; not known of the first one."""
        self._all_images = 0
        self._all_steps = 0

    def timed(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items; the time until each is there counts as waiting, from the second one on."""
        asked_s = 0.0
        for item in self._activity.each(items):
            now_s = time.perf_counter()
            if not self.started_s:
                self.started_s = self._lap_s = now_s
            elif asked_s:
                self.wait_s = now_s - asked_s
                self._lap_wait_s += self.wait_s
            yield item
            asked_s = time.perf_counter()

    def count(self, num_images: int) -> None:
        """Count the images of one update."""
        self._lap_images += num_images
        self._lap_steps += 1
        self._all_images += num_images
        self._all_steps += 1
        self._activity.stage = "train"

    def lap(self) -> dict[str, float]:
        """Since the last call: ``images_per_s``, evaluation and checkpoints included; ``data_wait``, the share of the
        time that was spent waiting for batches; ``data_wait_ms``, this time per step.
        """
        now_s = time.perf_counter()
        elapsed_s = max(now_s - self._lap_s, _SHORTEST_S)
        metrics = {
            "images_per_s": self._lap_images / elapsed_s,
            "data_wait": min(1.0, self._lap_wait_s / elapsed_s),
            "data_wait_ms": 1e3 * self._lap_wait_s / max(self._lap_steps, 1),
        }
        self._lap_s, self._lap_images, self._lap_steps, self._lap_wait_s = now_s, 0, 0, 0.0
        return metrics

    def counters(self) -> dict[str, float]:
        """Sums of the whole attempt so far: ``images``, ``steps`` and ``train_s``, seconds since the first update."""
        train_s = time.perf_counter() - self.started_s if self.started_s else 0.0
        return {"images": float(self._all_images), "steps": float(self._all_steps), "train_s": train_s}

    def images_per_s(self) -> float:
        """Training throughput of the whole attempt so far."""
        return self._all_images / max(time.perf_counter() - self.started_s, _SHORTEST_S)

    def step_s(self) -> float:
        """Seconds per update of the whole attempt so far, evaluation and checkpoints included; 0 before the first."""
        return (time.perf_counter() - self.started_s) / self._all_steps if self._all_steps else 0.0

    def is_report_due(self) -> bool:
        """Whether the last report is old enough for the next; if so, this moment counts as the last report."""
        now_s = time.perf_counter()
        if now_s - self._report_s < _REPORT_EVERY_S:
            return False
        self._report_s = now_s
        return True
