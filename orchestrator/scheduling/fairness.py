"""Present and past use of each sweep, and its fair share: weighted dominant-resource fairness between sweeps. Pure.

Source: Ghodsi et al., Dominant Resource Fairness (NSDI 2011). When every sweep has its share, past use decides which
one goes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.scheduling.demand import (
    MIB_PER_GIB,
    NOTHING,
    UNITS_PER_RESOURCE,
    Amount,
    AttemptDemand,
    DemandTable,
    dominant,
    plus,
    times,
)
from orchestrator.state.snapshot import Attempt
from orchestrator.state.spending import ResourceUse

# ------------------------------------------------------------------------------------------------------------- past use
HALF_LIFE_S = 24 * 3600.0
"""Use counts half as much after a day: long enough for gangs that run half a day, as Slurm's default of a week."""
_BUCKET_S = 3600.0
_MAX_BUCKETS = 240


class UsageHistory:
    """Amount-seconds of ended attempts by the hour of their end. In whole numbers: see ``Measured``."""

    __slots__ = ("_gpu_ms", "_hours")

    def __init__(self) -> None:
        self._hours: dict[int, Amount] = {}
        self._gpu_ms = 0

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of all time."""
        return self._gpu_ms / 3.6e6

    def add(self, used: Sequence[ResourceUse], demand: AttemptDemand, ended_at_s: float, count: int) -> None:
        """Add what the ended attempts at a job held (``count`` 1), or take it out again (-1)."""
        hour, gpu_ms = int(ended_at_s // _BUCKET_S), int(sum(use.gpu_s for use in used) * 1000)
        amount_ms = (
            int(sum(use.cpu_s for use in used) * UNITS_PER_RESOURCE * 1000),
            # A part of a GPU that leaves no room for another attempt counts as the whole one.
            gpu_ms * (round(demand.total[1] / demand.gpus) if demand.gpus else UNITS_PER_RESOURCE),
            int(sum(use.memory_gib_s for use in used) * MIB_PER_GIB * 1000),
        )
        new = plus(self._hours.get(hour, NOTHING), times(amount_ms, count))
        if new == NOTHING:
            self._hours.pop(hour, None)
        else:
            self._hours[hour] = new
        self._gpu_ms += count * gpu_ms

    def decayed_s(self, now: float) -> tuple[float, float, float]:
        """Amount-seconds, halved for every half-life since."""
        cpus = gpus = memory = 0.0
        this = int(now // _BUCKET_S)
        for hour in sorted(self._hours):
            if this - hour < _MAX_BUCKETS:
                weight = 0.5 ** (max(0, this - hour) * _BUCKET_S / HALF_LIFE_S) / 1000.0
                used = self._hours[hour]
                cpus, gpus, memory = cpus + used[0] * weight, gpus + used[1] * weight, memory + used[2] * weight
        return cpus, gpus, memory


# ----------------------------------------------------------------------------------------------------- what is held now
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """A live attempt and the resources that it holds: ``nodes`` maps names to numbers of workers, empty = anywhere."""

    attempt: Attempt
    demand: AttemptDemand
    nodes: tuple[tuple[str, int], ...]


class Holdings:
    """The live attempts of one sweep and their sums."""

    def __init__(self, demands: DemandTable) -> None:
        self._demands = demands
        self.live: dict[str, Held] = {}
        self.by_node: dict[str, Amount] = {}
        self.floating: Amount = NOTHING
        """Attempts whose nodes are not known yet."""
        self.total: Amount = NOTHING
        self.keys: dict[str, int] = {}
        self.history = UsageHistory()
        self._leaving: Mapping[str, Attempt] = {}

    @property
    def num_gpus(self) -> float:
        """GPUs of all live attempts."""
        return self.total[1] / UNITS_PER_RESOURCE

    def change(self, old: Attempt | None, new: Attempt | None) -> None:
        """Replace a job's live attempt by another one, or none."""
        if old is new:
            return
        if old is not None:
            self._remove(old)
        if new is not None:
            self._add(new)

    def set_leaving(self, leaving: Mapping[str, Attempt]) -> None:
        """The live attempts at jobs that are no longer wanted."""
        if leaving is self._leaving:
            return
        for attempt_id, attempt in self._leaving.items():
            if leaving.get(attempt_id) is not attempt:
                self._remove(attempt)
        for attempt_id, attempt in leaving.items():
            if self._leaving.get(attempt_id) is not attempt:
                self._add(attempt)
        self._leaving = leaving

    def _add(self, attempt: Attempt) -> None:
        demand = self._demands.of(attempt.resources, attempt.num_workers)
        counts: dict[str, int] = {}
        for name in attempt.nodes:
            counts[name] = counts.get(name, 0) + (attempt.num_workers if len(attempt.nodes) == 1 else 1)
        held = Held(attempt=attempt, demand=demand, nodes=tuple(sorted(counts.items())))
        self.live[attempt.attempt_id] = held
        self._sum(held, 1)

    def _remove(self, attempt: Attempt) -> None:
        held = self.live.get(attempt.attempt_id)
        if held is not None and held.attempt is attempt:  # it may have become one of the ending attempts
            del self.live[attempt.attempt_id]
            self._sum(held, -1)

    def _sum(self, held: Held, count: int) -> None:
        amount = times(held.demand.total, count)
        self.total = plus(self.total, amount)
        if not held.nodes:
            self.floating = plus(self.floating, amount)
        for name, num_workers in held.nodes:
            part = plus(self.by_node.get(name, NOTHING), times(held.demand.worker, count * num_workers))
            self.by_node[name] = part
            if part == NOTHING:
                del self.by_node[name]
        key = held.attempt.key
        self.keys[key] = self.keys.get(key, 0) + count
        if not self.keys[key]:
            del self.keys[key]


# ---------------------------------------------------------------------------------------------------------- fair shares
@dataclass(slots=True, kw_only=True)
class FairShare:
    """A sweep's present and past use, and its weight; ``live`` grows during a round of decisions."""

    weight: float
    live: Amount
    past: tuple[float, float, float]
    """Decayed amount-seconds."""
    whole: Amount
    """Resources of the cluster."""
    entitlement: float = 1.0
    """Dominant share to which it is entitled while all sweeps of its priority want more."""
    is_least_used: bool = False
    """Whether no sweep of its priority that wants more has used less for its weight recently."""

    def key(self, requested: Amount) -> tuple[int, float, float]:
        """Order among sweeps of one priority, if it took so much more; the least goes first.

        A sweep that stays within its entitlement comes before all that do not, the one with the smallest share for its
        weight first (Ghodsi et al., Dominant Resource Fairness, NSDI 2011). Beyond, where whole attempts do not divide
        the cluster evenly, past use for its weight decides: that makes the shares right over time even on one GPU.
        """
        share = dominant(self.live, self.whole)
        after = dominant(plus(self.live, requested), self.whole)
        if after <= self.entitlement + 1e-9:
            return 0, share / self.weight, self.past_share
        return 1, self.past_share, share / self.weight

    @property
    def past_share(self) -> float:
        """Dominant recent use for its weight."""
        past = max((part / all_ for part, all_ in zip(self.past, self.whole, strict=True) if all_), default=0.0)
        return past / self.weight

    def add(self, requested: Amount) -> None:
        """Count one more running attempt."""
        self.live = plus(self.live, requested)


def entitle(fair_shares: list[FairShare]) -> None:
    """Divide the cluster among sweeps of one priority that want more."""
    total = sum(fair_share.weight for fair_share in fair_shares)
    least = min(fair_share.past_share for fair_share in fair_shares)
    for fair_share in fair_shares:
        fair_share.entitlement = fair_share.weight / total
        fair_share.is_least_used = fair_share.past_share <= least
