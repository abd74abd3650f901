"""Shapes of attempts."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.core.contract import Resources
from orchestrator.state.amounts import Amount, amount_of, times


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demand:
    """A shape of attempts. There is one object for each shape, so they compare and hash by identity."""

    resources: Resources
    num_workers: int
    worker: Amount
    total: Amount
    smaller: tuple[Demand, ...] = ()
    """The same job on fewer GPUs, largest first; empty unless it is elastic."""

    @property
    def gpus(self) -> float:
        """GPUs of all workers."""
        return self.resources.gpus

    def slowdown(self, full: Demand) -> float:
        """How many times as long a job takes as at its full size."""
        return full.num_workers / self.num_workers


@dataclass(slots=True)
class Demands:
    """All shapes met so far."""

    _known: dict[tuple[Resources, int], Demand] = field(default_factory=dict)

    def of(self, resources: Resources, num_workers: int) -> Demand:
        """The one object for a shape."""
        found = self._known.get((resources, num_workers))
        if found is None:
            found = self._known[resources, num_workers] = _demand(resources, num_workers)
        return found


def _demand(resources: Resources, num_workers: int) -> Demand:
    worker = amount_of(resources.share(num_workers))
    smaller = [_demand(resources.scaled(size / num_workers), size) for size in _sizes(resources, num_workers)]
    return Demand(
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
