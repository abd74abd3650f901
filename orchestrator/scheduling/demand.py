"""Amounts of CPUs, GPUs and memory, and the shapes of attempts. Pure.

Amounts are whole numbers: sums of fractional CPUs must come out the same in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from orchestrator.core.contract import Resources

Amount: TypeAlias = tuple[int, int, int]
"""CPUs and GPUs in ten-thousandths (Ray's unit) and memory in MiB."""

NOTHING: Amount = (0, 0, 0)
UNITS_PER_RESOURCE = 10_000
MIB_PER_GIB = 1024
_LIMIT = 10**15  # stands for infinity
_ROUNDING = 1e-6


def amount_of(resources: Resources) -> Amount:
    """The amounts, rounded down to whole units."""
    return (
        _whole(resources.cpus * UNITS_PER_RESOURCE),
        _whole(_gpu_share(resources.gpus) * UNITS_PER_RESOURCE),
        _whole(resources.memory_gib * MIB_PER_GIB),
    )


def dominant(used: Amount, total: Amount) -> float:
    """Dominant share: the largest fraction of any one resource.

    Source: Ghodsi et al., Dominant Resource Fairness (NSDI 2011), section 3.
    """
    return max((part / whole for part, whole in zip(used, total, strict=True) if whole), default=0.0)


def times(amount: Amount, factor: int) -> Amount:
    """A multiple."""
    return amount[0] * factor, amount[1] * factor, amount[2] * factor


def plus(amount: Amount, other: Amount) -> Amount:
    """A sum."""
    return amount[0] + other[0], amount[1] + other[1], amount[2] + other[2]


def minus(amount: Amount, other: Amount) -> Amount:
    """A difference."""
    return amount[0] - other[0], amount[1] - other[1], amount[2] - other[2]


def total_of(amounts: Iterable[Amount]) -> Amount:
    """The sum of any number of them."""
    cpus = gpus = memory = 0
    for amount in amounts:
        cpus, gpus, memory = cpus + amount[0], gpus + amount[1], memory + amount[2]
    return cpus, gpus, memory


def count_workers(worker: Amount, room: Amount) -> int:
    """How many workers fit into free resources; 0 if these are negative."""
    count = _LIMIT
    if worker[0]:
        count = room[0] // worker[0]
    if worker[1]:
        gpus = room[1] // worker[1]
        count = min(gpus, count)
    if worker[2]:
        memory = room[2] // worker[2]
        count = min(memory, count)
    return max(count, 0)


def _whole(value: float) -> int:
    return _LIMIT if math.isinf(value) else int(value + _ROUNDING)


def _gpu_share(gpus: float) -> float:
    """The effective share of a GPU, ``1 / n`` if n attempts fit on one: two attempts of 0.6 never share it."""
    return 1.0 / math.floor(1.0 / gpus + _ROUNDING) if 0.0 < gpus < 1.0 else gpus


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttemptDemand:
    """A shape of attempts. There is one object for each shape, so they compare and hash by identity."""

    resources: Resources
    num_workers: int
    worker: Amount
    total: Amount
    smaller: tuple[AttemptDemand, ...] = ()
    """The same job on fewer GPUs, largest first; empty unless it is elastic."""

    @property
    def gpus(self) -> float:
        """GPUs of all workers."""
        return self.resources.gpus

    def slowdown(self, full: AttemptDemand) -> float:
        """How many times as long a job takes as at its full size."""
        return full.num_workers / self.num_workers


@dataclass(slots=True)
class DemandTable:
    """All shapes met so far."""

    _known: dict[tuple[Resources, int], AttemptDemand] = field(default_factory=dict)

    def of(self, resources: Resources, num_workers: int) -> AttemptDemand:
        """The one object for a shape."""
        found = self._known.get((resources, num_workers))
        if found is None:
            found = self._known[resources, num_workers] = _demand(resources, num_workers)
        return found


def _demand(resources: Resources, num_workers: int) -> AttemptDemand:
    worker = amount_of(resources.share(num_workers))
    smaller = [_demand(resources.scaled(size / num_workers), size) for size in _sizes(resources, num_workers)]
    return AttemptDemand(
        resources=resources,
        num_workers=num_workers,
        worker=worker,
        total=times(worker, num_workers),
        smaller=tuple(smaller),
    )


def _sizes(resources: Resources, num_workers: int) -> list[int]:
    """Halves of the full size down to the smallest allowed, and that one: few sizes keep warm runners of use."""
    least = int(resources.min_gpus)
    if not least or resources.gpus != num_workers or least >= num_workers:
        return []
    sizes = [num_workers >> power for power in range(1, num_workers.bit_length())]
    return [size for size in sizes if size > least] + [least]
