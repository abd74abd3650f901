"""How likely a difference of a given size would be found, from the noise between seeds; pure.

What is assumed is the report's own test: paired differences to the baseline, averaged over the transfers of each
pretrain seed, Student's t over the pretrain seeds, corrected by Holm's method for all label spaces of the table. Only
``level_of`` and ``power_of`` know that test: with another one in the report, they and ``METHOD`` alone change.

The paired difference of pretrain seed i and transfer seed j is ``difference + pretrain_i + transfer_ij``, with the same
two variances for every label space; they are pooled over the label spaces of a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.plan.graph import Job, Plan
from orchestrator.report.grouping import group_transfers, headline_places, seeds_of
from orchestrator.report.statistics import SeedPair

LEVEL, TARGET_POWER = 0.05, 0.8
METHOD = "paired t tests over pretraining seeds, Holm's correction"
MOST_SEEDS = 100
"""Searches for a design end here."""
_RANGE = 0.8
"""Confidence of the range of a standard deviation."""
_SHARED_BASELINE = 0.25
"""Squared correlation of two differences to one baseline, if all label spaces spread alike."""
_IMPLAUSIBLE_STDS = 10.0
"""Label spaces of the paper's table 5 differ by up to about ten standard deviations between seeds."""
_NUM_POINTS = 2000
_LARGEST_STDS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Design:
    """How many seeds every label space of a table has."""

    num_pretrain_seeds: int
    num_transfer_seeds: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Standard deviations of the paired difference of two label spaces, in the unit of the metric."""

    pretrain_std: float
    """Between pretrain seeds; with one transfer seed its spread is in here."""
    transfer_std: float | None
    """Between transfers of one backbone; None where every backbone has one."""
    num_pretrain_seeds: int
    """That it was measured on; 0 where it was stated."""
    freedom: float
    """Degrees of freedom of the variance; infinite where it was stated."""

    def of_seed(self, num_transfer_seeds: int) -> float:
        """Standard deviation of the mean of one pretrain seed's transfers."""
        transfer = self.transfer_std or 0.0
        return math.sqrt(self.pretrain_std**2 + transfer**2 / num_transfer_seeds)

    @property
    def ends(self) -> tuple[Noise, Noise]:
        """What it may be, from little to much: a range of 80 % by the chi-squared distribution of a variance."""
        if math.isinf(self.freedom):
            return self, self
        from scipy import special

        shares = ((1 + _RANGE) / 2, (1 - _RANGE) / 2)
        low, high = (math.sqrt(self.freedom / (2 * special.gammaincinv(self.freedom / 2, p))) for p in shares)
        return self._times(low), self._times(high)

    def _times(self, factor: float) -> Noise:
        transfer = None if self.transfer_std is None else factor * self.transfer_std
        return replace(self, pretrain_std=factor * self.pretrain_std, transfer_std=transfer)


def noise_of(rows: Sequence[Mapping[SeedPair, float]], baseline: Mapping[SeedPair, float]) -> Noise | None:
    """The noise of a table from the values of its rows; None without a row that has two pretrain seeds in common."""
    between, num_between, within, num_within, shares, most = 0.0, 0, 0.0, 0, list[float](), 0
    num_rows = 0
    for row in rows:
        groups: dict[int, list[float]] = {}
        for pair in sorted(row.keys() & baseline.keys()):
            groups.setdefault(pair.pretrain, []).append(row[pair] - baseline[pair])
        if len(groups) < 2:
            continue
        means = [math.fsum(group) / len(group) for group in groups.values()]
        between += float(np.var(means)) * len(means)
        within += math.fsum(float(np.var(group)) * len(group) for group in groups.values())
        num_between, num_within = num_between + len(means) - 1, num_within + sum(map(len, groups.values())) - len(means)
        shares += [1 / len(group) for group in groups.values()]
        num_rows, most = num_rows + 1, max(most, len(means))
    if not num_rows:
        return None
    of_mean = between / num_between
    transfer = within / num_within if num_within else None
    pretrain = of_mean if transfer is None else max(0.0, of_mean - transfer * math.fsum(shares) / len(shares))
    return Noise(
        pretrain_std=math.sqrt(pretrain),
        transfer_std=None if transfer is None else math.sqrt(transfer),
        num_pretrain_seeds=most,
        freedom=num_between / (1 + (num_rows - 1) * _SHARED_BASELINE),
    )


def level_of(num_comparisons: int) -> float:
    """The p-value below which one comparison with the baseline is called different, if no other is.

    That is the first step of Holm's method; where others are called different, too, it is larger.
    """
    return LEVEL / num_comparisons


def power_of(design: Design, noise: Noise, difference: float, num_comparisons: int) -> float:
    """Chance that the report calls a label space different from the baseline, if it differs by so much; in [0, 1].

    The other label spaces are taken to be as good as the baseline. 0 with one pretrain seed.
    """
    from scipy import special  # 0.1 s to import: only who asks for power pays for it

    freedom = design.num_pretrain_seeds - 1
    if freedom < 1:
        return 0.0
    std = noise.of_seed(design.num_transfer_seeds)
    if not std:
        return float(difference != 0)
    critical = special.stdtrit(freedom, 1 - level_of(num_comparisons) / 2)
    # The mean over what the estimated standard deviation may be, of a normal probability each: unlike the noncentral t
    # distribution of scipy this holds for any size of difference.
    points = (np.arange(_NUM_POINTS) + 0.5) / _NUM_POINTS
    ratios = np.sqrt(2 * special.gammaincinv(freedom / 2, points) / freedom)
    shift = abs(difference) / std * math.sqrt(design.num_pretrain_seeds)
    found = special.ndtr(shift - critical * ratios) + special.ndtr(-shift - critical * ratios)
    return float(found.mean())


def seeds_needed(
    noise: Noise, difference: float, num_comparisons: int, *, num_transfer_seeds: int, power: float = TARGET_POWER
) -> int | None:
    """The fewest pretrain seeds with so much power; None if more than ``MOST_SEEDS``."""
    low, high = 2, MOST_SEEDS

    def suffices(num: int) -> bool:
        design = Design(num_pretrain_seeds=num, num_transfer_seeds=num_transfer_seeds)
        return power_of(design, noise, difference, num_comparisons) >= power

    if not suffices(high):
        return None
    while low < high:  # more seeds, more power
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle + 1, high)
    return low


def smallest_difference(num_pretrain_seeds: int, num_comparisons: int) -> float:
    """The smallest difference with ``TARGET_POWER``, in standard deviations between seeds; infinite with one seed."""
    design = Design(num_pretrain_seeds=num_pretrain_seeds)
    noise = Noise(pretrain_std=1.0, transfer_std=None, num_pretrain_seeds=0, freedom=math.inf)
    low, high = 0.0, _LARGEST_STDS
    if power_of(design, noise, high, num_comparisons) < TARGET_POWER:
        return math.inf
    while high - low > 1e-3 * high:
        middle = (low + high) / 2 if low else high / 100
        is_seen = power_of(design, noise, middle, num_comparisons) >= TARGET_POWER
        low, high = (low, middle) if is_seen else (middle, high)
    return high


def weak_designs(plan: Plan) -> Iterator[str]:
    """Warnings of transfers whose seeds cannot find any plausible difference, and what would."""
    grouped = group_transfers(plan.jobs)
    places = headline_places(grouped)
    alike: dict[tuple[int, int], list[str]] = {}
    for place, spaces in grouped.items():
        num = num_comparisons(len(spaces), has_baseline=plan.baseline in spaces)
        if place in places and num:
            jobs = [job for cells in spaces.values() for some in cells.values() for job in some]
            alike.setdefault((design_of(jobs).num_pretrain_seeds, num), []).append(place.transfer)
    for (num_seeds, num), transfers in alike.items():
        least = smallest_difference(num_seeds, num)
        if least > _IMPLAUSIBLE_STDS:
            yield f"{', '.join(dict.fromkeys(transfers))}: {_weakness(num_seeds, num, least)}"


def design_of(jobs: Iterable[Job]) -> Design:
    """The seeds of the transfers of one table."""
    pairs = {seeds_of(job) for job in jobs}
    return Design(
        num_pretrain_seeds=len({pair.pretrain for pair in pairs}),
        num_transfer_seeds=max(1, len({pair.transfer for pair in pairs})),
    )


def num_comparisons(num_spaces: int, *, has_baseline: bool) -> int:
    """Tests of one table's family: each label space with the baseline, or all pairs without one."""
    return num_spaces - 1 if has_baseline else num_spaces * (num_spaces - 1) // 2


def _weakness(num_seeds: int, num: int, least: float) -> str:
    enough = next(seeds for seeds in range(3, MOST_SEEDS) if smallest_difference(seeds, num) <= _IMPLAUSIBLE_STDS / 2)
    would = f"{enough} seeds find {smallest_difference(enough, num):.1f}; `orchestrator power` says what they cost"
    tests = f"in {num} comparison{'s' * (num > 1)} ({METHOD})"
    if math.isinf(least):
        return f"1 pretraining seed finds no difference {tests}: nothing tells how others would differ; {would}"
    return (
        f"{num_seeds} pretraining seeds find, {tests}, only differences of {least:,.0f} standard deviations between "
        f"seeds or more (power {TARGET_POWER:.0%}), which no plausible difference reaches; {would}"
    )
