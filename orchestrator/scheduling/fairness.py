"""Whose turn it is: priority first, then weighted dominant-resource fairness between sweeps. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.state.amounts import Amount, dominant, plus
from orchestrator.state.sweep_index import SweepIndex

AGING_S = 6 * 3600.0
"""A sweep that has work and runs nothing rises by one class of priorities in such a time, evenly."""
MAX_AGING = 20
"""Two classes: what is low gets a turn among what is high, and never among what is urgent."""
_CLASS = 10


def aging(index: SweepIndex, place: int, now: float) -> int:
    """How much waiting adds to a sweep's priority, for the job that it would start next. 0 while anything runs."""
    if index.holdings.live:
        return 0
    waited_s = now - max(index.last_launch_s, index.last_end_s, index.ready_since_s(place))
    return min(MAX_AGING, max(0, int(waited_s / AGING_S * _CLASS)))


@dataclass(slots=True, kw_only=True)
class Standing:
    """What a sweep holds and held, beside its weight; ``live`` grows while a round of decisions is made."""

    weight: float
    live: Amount
    past: tuple[float, float, float]
    """Decayed amount-seconds."""
    whole: Amount
    """Of the cluster."""
    entitlement: float = 1.0
    """Dominant share that is its due while all the sweeps of its priority want more."""

    def key(self, asked: Amount) -> tuple[int, float, float]:
        """Order among sweeps of one priority, if it took so much more; the least goes first.

        A sweep that stays within its entitlement comes before all that do not, the one with the smallest share for its
        weight first (Ghodsi et al., Dominant Resource Fairness, NSDI 2011). Beyond, where whole attempts do not divide
        the cluster evenly, past use for its weight decides: that makes the shares right over time even on one GPU.
        """
        share = dominant(self.live, self.whole)
        after = dominant(plus(self.live, asked), self.whole)
        past = max((part / all_ for part, all_ in zip(self.past, self.whole, strict=True) if all_), default=0.0)
        if after <= self.entitlement + 1e-9:
            return 0, share / self.weight, past / self.weight
        return 1, past / self.weight, share / self.weight

    def add(self, asked: Amount) -> None:
        """Something more of it runs."""
        self.live = plus(self.live, asked)


def entitle(standings: list[Standing]) -> None:
    """Divide the cluster among sweeps of one priority that want more."""
    total = sum(standing.weight for standing in standings)
    for standing in standings:
        standing.entitlement = standing.weight / total
