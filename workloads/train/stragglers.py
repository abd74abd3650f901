"""Which rank of a gang is slow: each tells its own time on the sum that every step makes anyway.

All ranks of a gang take the same time per step, because they wait for each other. What differs is the time before:
until a rank has its batch, and until its gradients are computed. On CUDA the second is measured between two events on
the device, and known a step or two later; the host never waits for them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from workloads.train.ranks import Ranks

_REMEMBERED_STEPS: Final = 20
"""Steps over which the running means forget, and the fewest before a rank is called slow."""
PER_RANK: Final = 2
"""Numbers that each rank adds to the sums: seconds of computing, seconds of waiting for its batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The slowest rank of a gang, as of the last steps."""

    rank: int
    slowdown: float
    """Its own time per step by the median of the others'."""
    compute_s: float
    data_wait_s: float

    def counters(self) -> dict[str, float]:
        """For ``Progress.counters``."""
        return {
            "slow_rank": float(self.rank),
            "slow_rank_slowdown": self.slowdown,
            "slow_rank_compute_s": self.compute_s,
            "slow_rank_data_wait_s": self.data_wait_s,
        }


class RankTimes:
    """Measures this rank's steps and keeps what all ranks told; does nothing alone.

    ``weight``: mean share of a rank by this rank's, so that a rank with more samples is not taken for a slow one.
    """

    def __init__(self, ranks: Ranks, device: torch.device, weight: float = 1.0) -> None:
        self._ranks, self._weight, self._is_cuda = ranks, weight, device.type == "cuda"
        self._started_s = self._compute_s = 0.0
        self._started: torch.cuda.Event | None = None
        self._under_way: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._means = [[0.0] * PER_RANK for _ in range(ranks.world_size)]
        self._num_steps = 0

    def begin(self) -> None:
        """The batch is there; the forward pass begins."""
        if self._ranks.is_solo:
            return
        self._started_s = time.perf_counter()
        self._started = self._mark()

    def computed(self) -> None:
        """The last backward pass is done or enqueued; from here on the rank waits for others."""
        if self._ranks.is_solo:
            return
        ended = self._mark()
        if self._started is None or ended is None:
            self._compute_s = time.perf_counter() - self._started_s
            return
        self._under_way.append((self._started, ended))
        while self._under_way and self._under_way[0][1].query():  # type: ignore[no-untyped-call]
            first, last = self._under_way.pop(0)
            self._compute_s = first.elapsed_time(last) / 1e3

    def fields(self, data_wait_s: float, like: Tensor) -> list[Tensor]:
        """What this rank adds to the sums, zeros in the places of others; nothing alone. Waits for no device."""
        if self._ranks.is_solo:
            return []
        told = torch.zeros(PER_RANK * self._ranks.world_size, dtype=like.dtype, device=like.device)
        place = PER_RANK * self._ranks.rank
        told[place].fill_(self._compute_s * self._weight)
        told[place + 1].fill_(data_wait_s)
        return [told]

    def take(self, told: Sequence[float]) -> None:
        """What all ranks told with one step."""
        if not told:
            return
        self._num_steps += 1
        share = 1.0 / min(self._num_steps, _REMEMBERED_STEPS)
        for place, value in enumerate(told):
            means = self._means[place // PER_RANK]
            means[place % PER_RANK] += share * (value - means[place % PER_RANK])

    def slowest(self) -> Straggler | None:
        """None alone, and before there are enough steps to tell."""
        if self._ranks.is_solo or self._num_steps < _REMEMBERED_STEPS:
            return None
        own_s = [sum(means) for means in self._means]
        rank = max(range(len(own_s)), key=own_s.__getitem__)
        others_s = statistics.median(own_s[:rank] + own_s[rank + 1 :])
        compute_s, data_wait_s = self._means[rank]
        return Straggler(
            rank=rank,
            slowdown=own_s[rank] / others_s if others_s > 0 else 1.0,
            compute_s=compute_s,
            data_wait_s=data_wait_s,
        )

    def _mark(self) -> torch.cuda.Event | None:
        if not self._is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
