"""The sums of each update, read without making the host wait for the device.

On CUDA the sums of a step are copied to pinned memory behind the step, and read when the next step is already enqueued:
the device never idles for it, and the host is never more than one step ahead. On CPU they are there at once.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from orchestrator.core.activity import Activity, RankActivity
from workloads.train.safety import Reading


class Readings:
    """A queue of steps whose sums are under way; at most one, once ``put`` has returned."""

    def __init__(self, device: torch.device, activity: RankActivity | None = None) -> None:
        self._activity = activity or RankActivity()
        self._is_cuda = device.type == "cuda"
        self._waiting: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def put(self, step: int, sums: Tensor) -> list[Reading]:
        """Take the sums of an update, float64 on the device; returns the readings that are ready.

        Loss, number of wrong predictions, gradient norm, votes to stop, votes to save; and in a gang the times of its
        ranks (``stragglers``).
        """
        if not self._is_cuda:
            return [_reading(step, sums)]
        host = torch.empty(len(sums), dtype=sums.dtype, pin_memory=True)
        host.copy_(sums, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._waiting.append((step, host, event))
        return [self._next() for _ in range(len(self._waiting) - 1)]

    def drain(self) -> list[Reading]:
        """All readings that are left; waits for the device."""
        return [self._next() for _ in range(len(self._waiting))]

    def clear(self) -> None:
        """Forget what is under way."""
        self._waiting.clear()

    def _next(self) -> Reading:
        step, host, event = self._waiting.popleft()
        if event is not None:
            with self._activity.during(Activity.PEERS):  # the sums are a collective operation on the device
                event.synchronize()
        return _reading(step, host)


def _reading(step: int, sums: Tensor) -> Reading:
    loss, num_wrong, grad_norm, stops, saves, *rank_times = sums.tolist()
    return Reading(
        step=step,
        loss=loss,
        num_wrong=int(num_wrong),  # sums of integers below 2^53 are exact in float64
        grad_norm=grad_norm,
        wants_stop=stops > 0,
        wants_save=saves > 0,
        rank_times=tuple(rank_times),
    )
