"""Asynchronous successive halving: which trials may continue. Pure.

The stopping rule of Ray Tune's ``AsyncHyperBandScheduler`` (Li et al. 2020, "A System for Massively Parallel
Hyperparameter Tuning", section 3.1, in its stopping variant), as a function of the reports, so that a log rebuilds
it. At each rung a trial ends if it is worse than the best ``1 / reduction`` of those that reached the rung before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class AshaRule:
    """``grace_epochs`` is the first rung; each further one is ``reduction`` times as far, before ``max_epochs``."""

    grace_epochs: float
    reduction: float
    max_epochs: float

    @property
    def rungs(self) -> tuple[float, ...]:
        """Epochs, ascending; none where a training is over by the first."""
        if self.max_epochs <= self.grace_epochs:
            return ()
        # A rung at the very end would decide nothing; the tolerance is for powers that rounding moves there.
        number = math.ceil(math.log(self.max_epochs / self.grace_epochs) / math.log(self.reduction) - 1e-9)
        return tuple(self.grace_epochs * self.reduction**power for power in range(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class RungVerdict:
    """What is decided at a rung."""

    rung: float
    goes_on: bool
    cutoff: float | None
    """Largest value that may go on; None for the first trial at a rung."""
    num_before: int
    """Trials that had reached the rung before."""


class Ladder:
    """The values of all trials at each rung; smaller is better, and NaN worse than anything."""

    def __init__(self, rungs: Sequence[float], reduction: float) -> None:
        self._reduction = reduction
        self._values: dict[float, dict[int, float]] = {rung: {} for rung in sorted(rungs)}

    @property
    def values(self) -> Mapping[float, Mapping[int, float]]:
        """By rung, the value of each trial that reached it."""
        return self._values

    def judge(self, trial: int, epoch: float, value: float) -> RungVerdict | None:
        """Take a trial's value at an epoch; None where it says nothing new: before a rung, or at one judged already."""
        reached = [rung for rung in self._values if rung <= epoch and trial not in self._values[rung]]
        if not reached:
            return None
        # As in Ray, the highest one counts: a trial that is evaluated seldom passes several at once.
        rung = max(reached)
        if any(trial in self._values[higher] for higher in self._values if higher > rung):
            return None
        others, value = list(self._values[rung].values()), math.inf if math.isnan(value) else value
        self._values[rung][trial] = value
        cutoff = cutoff_of(others, self._reduction)
        goes_on = cutoff is None or value <= cutoff
        return RungVerdict(rung=rung, goes_on=goes_on, cutoff=cutoff, num_before=len(others))


def cutoff_of(values: Sequence[float], reduction: float) -> float | None:
    """The ``1 / reduction`` quantile, linearly interpolated; None of no values."""
    if not values:
        return None
    with np.errstate(invalid="ignore"):
        cutoff = float(np.percentile(np.asarray(values), 100.0 / reduction))
    return math.inf if math.isnan(cutoff) else cutoff
