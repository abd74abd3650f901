"""The probability that a difference of a given size is found, from the noise between seeds; pure.

The test is that of the report: paired differences to the baseline, averaged over the transfers of each pretrain seed,
Student's t over the pretrain seeds, at a comparison's share of the error level of the table's one corrected family.
Where the report compares independent samples (``is_paired`` is False), it is Welch's.

The paired difference of pretrain seed i and transfer seed j is ``difference + pretrain_i + transfer_ij``, with the same
two variances for every label space; they are pooled over the label spaces of a table.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from statistics import NormalDist
from typing import Final, Self

from orchestrator.core.job_kinds import TRANSFER_KINDS
from orchestrator.planning.graph.design import Cell, PlanDesign
from orchestrator.planning.graph.pairing import pretraining_of, sharing_between
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.sweepfile.values import LABELS_FACTOR

CONFIDENCE: Final = 0.95
"""Of all intervals and verdicts. Docs name it: 95 %, p < 0.05; texts of reports and their page read the next two."""
ALPHA: Final = 1 - CONFIDENCE
CONFIDENCE_TEXT: Final = f"{100 * CONFIDENCE:g} %"
ALPHA_TEXT: Final = f"{ALPHA:g}"
FAMILY_METHOD: Final = "paired t tests over pretrain seeds, Bonferroni"
"""Of comparisons that are all paired; of others see ``method_of``."""
_BASELINE_SHARE: Final = 0.5
_USED_SHARE: Final = 0.9
"""Of the 5 %; the rest is the reserve. A single comparison needs none: it is an ordinary test."""
MAX_ROWS_ALL_PAIRS = 64
"""Of combinations of factors: tables with more rows compare each with the baseline alone, since pairs are squares."""
TARGET_POWER = 0.8
MOST_SEEDS = 100
"""Searches for a design end here."""
_RANGE = 0.8
"""Confidence of the range of a standard deviation."""
_IMPLAUSIBLE_STDS = 10.0
"""Label spaces of the paper's table 5 differ by up to about ten standard deviations between seeds."""
_LARGEST_SHIFT = 1e6
_LAST_LOG, _NUM_POINTS, _EXACT = 2.3, 400, 1e-9
"""Of the integral over the logarithm of a standard deviation, and relative, of the level of a critical value."""
_REACH_STDS, _REACH_TAIL = 12.0, 37.0
"""Between these places around its mode the density of that logarithm is above 1e-15 of its largest value."""
_MANY, _NORMAL_END, _NUM_SIZES = 10, 9.0, 240
"""Degrees of freedom from which on that integral is exact for any shift; of the integral over sizes of effects."""
_LEAST = 1e-300
"""A probability whose logarithm exists."""
_NUM_SHARES = 16
"""Of the integral over the shares of two variances."""


def method_of(are_paired: Iterable[bool]) -> str:
    """The tests of a family and its correction in words, of whether each comparison is one of pairs."""
    kinds = set(are_paired)
    if False not in kinds:
        return FAMILY_METHOD
    return f"{'paired and ' if True in kinds else ''}Welch's t tests over pretrain seeds, Bonferroni"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparisons:
    """The testable comparisons of one table of a report, and their shares of the common error level of 5 %.

    Comparisons with the baseline are what a sweep asks, so they share at least half of the level. A tenth of the 5 % is
    given to no comparison: Bonferroni's bound is nearly reached where seeds are few (4.9 % of null sweeps at 3 seeds),
    and errors of real runs are not quite normal.
    """

    num_with_baseline: int
    num_others: int

    @classmethod
    def of_spaces(cls, num_spaces: int, *, has_baseline: bool) -> Self:
        """Every pair of so many label spaces, one of which may be the baseline."""
        with_baseline = num_spaces - 1 if has_baseline else 0
        return cls(num_with_baseline=with_baseline, num_others=num_spaces * (num_spaces - 1) // 2 - with_baseline)

    @classmethod
    def of_combinations(cls, num_rows: int, *, has_baseline: bool) -> Self:
        """Of combinations of factors: above ``MAX_ROWS_ALL_PAIRS`` each with the baseline alone."""
        if num_rows <= MAX_ROWS_ALL_PAIRS:
            return cls.of_spaces(num_rows, has_baseline=has_baseline)
        return cls(num_with_baseline=num_rows - 1 if has_baseline else 0, num_others=0)

    @property
    def total(self) -> int:
        """All of them."""
        return self.num_with_baseline + self.num_others

    @property
    def shares(self) -> tuple[float, float]:
        """The share of the 5 % for each comparison with the baseline, and for each other one."""
        whole = self.total
        if whole < 2:
            return (1.0, 1.0)
        if not self.num_with_baseline or not self.num_others:
            return (_USED_SHARE / whole, _USED_SHARE / whole)
        of_baseline = max(_BASELINE_SHARE, self.num_with_baseline / whole)
        return _USED_SHARE * of_baseline / self.num_with_baseline, _USED_SHARE * (1 - of_baseline) / self.num_others

    @property
    def level(self) -> float:
        """The p-value below which a comparison with the baseline is established; without a baseline, any one."""
        with_baseline, other = self.shares
        return ALPHA * (with_baseline if self.num_with_baseline else other)


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
        """Its range, low and high: an 80 % interval by the chi-squared distribution of a variance."""
        if math.isinf(self.freedom):
            return self, self
        from scipy import special

        shares = ((1 + _RANGE) / 2, (1 - _RANGE) / 2)
        low, high = (math.sqrt(self.freedom / (2 * special.gammaincinv(self.freedom / 2, p))) for p in shares)
        return self.times(low), self.times(high)

    def times(self, factor: float) -> Noise:
        """So many times the noise."""
        transfer = None if self.transfer_std is None else factor * self.transfer_std
        return replace(self, pretrain_std=factor * self.pretrain_std, transfer_std=transfer)


def power_of(
    design: Design, noise: Noise, difference: float, comparisons: Comparisons, *, is_paired: bool = True
) -> float:
    """Chance that the report calls a label space different from the baseline, if it differs by so much; in [0, 1].

    The other label spaces are taken to be as good as the baseline. 0 with one pretrain seed.
    """
    freedom = design.num_pretrain_seeds - 1
    if freedom < 1:
        return 0.0
    std = noise.of_seed(design.num_transfer_seeds)
    if not std:
        return float(difference != 0)
    shift = abs(difference) / std * math.sqrt(design.num_pretrain_seeds)
    return chance_of(shift, freedom, comparisons.level, is_paired=is_paired)


def chance_of(shift: float, freedom: int, level: float, *, is_paired: bool = True) -> float:
    """Chance that a two-sided t test at ``level`` finds an effect of ``shift`` standard errors; in [0, 1].

    Args:
        shift: the true effect, at least 0.
        freedom: degrees of freedom of one sample, at least 1.
        level: the p-value below which it is found, in (0, 1).
        is_paired: False: Welch's test of two independent samples that have equal sizes and vary equally. Where one has
            more seeds than the other, ``freedom`` is of the smaller one.
    """
    if is_paired:
        return _beyond(_critical(freedom, level), shift, freedom)
    # The sum of the two estimated variances is chi-squared and independent of its first part's share, which is beta
    # distributed; Satterthwaite's degrees of freedom follow from the share alone.
    return math.fsum(weight * _beyond(_critical(own, level), shift, 2 * freedom) for own, weight in _welch(freedom))


@cache
def _welch(freedom: int) -> tuple[tuple[float, float], ...]:
    """Satterthwaite's degrees of freedom of two samples that vary equally, and the weights of these values.

    The share of the first variance is sin(angle)^2, whose density over the angle has no poles: a midpoint rule.
    """
    # The other half of the angles is the mirror of these.
    angles = [(number + 0.5) / _NUM_SHARES * math.pi / 4 for number in range(_NUM_SHARES)]
    densities = [math.sin(2 * angle) ** (freedom - 1) for angle in angles]
    total = math.fsum(densities)
    return tuple(
        (freedom / (math.sin(angle) ** 4 + math.cos(angle) ** 4), density / total)
        for angle, density in zip(angles, densities, strict=True)
    )


def _beyond(critical: float, shift: float, freedom: float) -> float:
    """Chance that a noncentral t variable lies beyond the critical values, on either side.

    Here and not by scipy, as planning loads neither it nor numpy; tests hold it to scipy.
    """
    if shift and freedom < _MANY:
        return _beyond_of_few(critical, shift, int(freedom))
    # The mean, over what the estimated standard deviation may be, of a normal probability each.
    moved = shift / math.sqrt(2)
    return math.fsum(
        [
            weight * (math.erfc(critical * ratio - moved) + math.erfc(critical * ratio + moved))
            for ratio, weight in _ratios(freedom)
        ]
    )


def _beyond_of_few(critical: float, shift: float, freedom: int) -> float:
    """The same for few degrees of freedom and a large critical value, where that probability is almost a step.

    The mean, over the size of the effect that is observed, of a chi-squared probability each, by Simpson's rule.
    """
    first, last = max(0.0, shift - _NORMAL_END), shift + _NORMAL_END
    step = (last - first) / _NUM_SIZES
    total = []
    for number in range(_NUM_SIZES + 1):
        size = first + step * number
        density = math.exp(-((size - shift) ** 2) / 2) + math.exp(-((size + shift) ** 2) / 2)
        weight = 1 if number in (0, _NUM_SIZES) else 4 if number % 2 else 2
        total.append(weight * density * _chi_squared(freedom * (size / critical) ** 2, freedom))
    return math.fsum(total) * step / 3 / math.sqrt(2 * math.pi)


def _chi_squared(value: float, freedom: int) -> float:
    """Chance that a chi-squared variable is below a value (Abramowitz and Stegun, 26.4.4 and 26.4.5)."""
    half = value / 2
    powers = (power + (freedom % 2) / 2 for power in range(freedom // 2))
    tail = math.fsum([half**power / math.gamma(power + 1) for power in powers]) * math.exp(-half)
    return (math.erf(math.sqrt(half)) if freedom % 2 else 1.0) - tail


@cache
def _ratios(freedom: float) -> tuple[tuple[float, float], ...]:
    """Estimated over true standard deviation, and the weights of these values.

    The former are divided by the root of 2 and the latter by 2, as a normal probability is ``erfc(x / sqrt(2)) / 2``.

    The square of the former times ``freedom`` is chi-squared. The trapezoid rule over the logarithm, at whose ends the
    density vanishes, converges exponentially. Below the mode the density falls as ``exp(freedom * logarithm)``.
    """
    reach = _REACH_STDS / math.sqrt(2 * freedom)  # the logarithm's standard deviation where freedom is large
    first, last = -reach - _REACH_TAIL / freedom, min(_LAST_LOG, reach)
    step = (last - first) / _NUM_POINTS
    logs = [first + step * number for number in range(_NUM_POINTS + 1)]
    constant = math.log(2) + freedom / 2 * math.log(freedom / 2) - math.lgamma(freedom / 2)
    densities = [math.exp(constant + freedom * log - freedom * math.exp(2 * log) / 2) for log in logs]
    return tuple(
        (math.exp(log) / math.sqrt(2), step * density / 2) for log, density in zip(logs, densities, strict=True)
    )


@cache
def _critical(freedom: float, level: float) -> float:
    """The two-sided critical value of Student's t for this probability.

    Regula falsi with the Illinois rule, in logarithms: the tails of t are nearly straight lines there.
    """

    def excess(log_value: float) -> float:
        return math.log(max(_beyond(math.exp(log_value), 0.0, freedom), _LEAST) / level)

    low = math.log(-NormalDist().inv_cdf(level / 2))  # t has the heavier tails
    high = low + math.log(2)
    at_low, at_high = excess(low), excess(high)
    while at_high > 0:
        low, high, at_low, at_high = high, high + math.log(2), at_high, excess(high + math.log(2))
    moved_high: bool | None = None
    while True:
        middle = high - at_high * (high - low) / (at_high - at_low)
        at_middle = excess(middle)
        if abs(at_middle) <= _EXACT or high - low <= _EXACT:
            return math.exp(middle)
        if at_middle < 0:
            high, at_high = middle, at_middle
            at_low /= 2 if moved_high else 1
        else:
            low, at_low = middle, at_middle
            at_high /= 2 if moved_high is False else 1
        moved_high = at_middle < 0


def seeds_needed(
    noise: Noise,
    difference: float,
    comparisons: Comparisons,
    *,
    num_transfer_seeds: int,
    power: float = TARGET_POWER,
    is_paired: bool = True,
) -> int | None:
    """The fewest pretrain seeds with so much power; None if more than ``MOST_SEEDS``."""
    low, high = 2, MOST_SEEDS

    def suffices(num: int) -> bool:
        design = Design(num_pretrain_seeds=num, num_transfer_seeds=num_transfer_seeds)
        return power_of(design, noise, difference, comparisons, is_paired=is_paired) >= power

    if not suffices(high):
        return None
    while low < high:  # more seeds, more power
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle + 1, high)
    return low


def seeds_compared(one: AbstractSet[Hashable], other: AbstractSet[Hashable], *, is_paired: bool) -> int:
    """Pretrain seeds of a comparison of two rows with these: pairs need those that both have."""
    return len(one & other) if is_paired else min(len(one), len(other))


def smallest_difference(num_pretrain_seeds: int, comparisons: Comparisons, *, is_paired: bool = True) -> float:
    """The smallest difference with ``TARGET_POWER``, in standard deviations of the difference of two runs with equal
    seeds; infinite with fewer than two seeds.
    """
    if num_pretrain_seeds < 2:
        return math.inf
    least = least_shift(num_pretrain_seeds - 1, comparisons.level, is_paired=is_paired)
    return least / math.sqrt(num_pretrain_seeds)


def least_shift(freedom: int, level: float, power: float = TARGET_POWER, *, is_paired: bool = True) -> float:
    """The smallest effect, in standard errors, that ``chance_of`` finds with so much power; infinite if none."""

    def suffices(shift: float) -> bool:
        return chance_of(shift, freedom, level, is_paired=is_paired) >= power

    low, high = 0.0, _LARGEST_SHIFT
    if freedom < 1 or not suffices(high):
        return math.inf
    while high - low > 1e-3 * high:
        middle = (low + high) / 2 if low else high / 100
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


@dataclass(slots=True, kw_only=True)
class _PlannedRow:
    """A row of a table of the report, as it is planned."""

    is_label_space: bool
    """Rather than a combination of factors: label spaces are compared by pairs."""
    backbone: Job | None
    """Of a combination the first pretraining; None where searches find its backbones."""
    seeds: set[str] = field(default_factory=set)
    """Pretrain seeds."""
    is_baseline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """What a table can find out at best."""

    num_seeds: int
    """Of the comparison that has most."""
    comparisons: Comparisons
    is_paired: bool
    """Whether that is one of pairs."""

    def least(self, num_seeds: int | None = None) -> float:
        """See ``smallest_difference``; with so many seeds."""
        num = self.num_seeds if num_seeds is None else num_seeds
        least = smallest_difference(num, self.comparisons)
        # Welch's test has more degrees of freedom: it finds whatever the test of pairs finds, and takes longer here.
        is_enough = self.is_paired or least <= _IMPLAUSIBLE_STDS / 2
        return least if is_enough else smallest_difference(num, self.comparisons, is_paired=False)


def weak_designs(plan: Plan) -> Iterator[str]:
    """Warnings of transfers whose seeds cannot find any plausible difference, and what would."""
    design = PlanDesign.of(plan)
    rows = design.rows_of(plan)
    make = Comparisons.of_spaces if rows == (LABELS_FACTOR,) else Comparisons.of_combinations
    alike: dict[_Question, list[str]] = {}
    for place, found in _planned_tables(plan, design, rows).items():
        comparisons = make(len(found), has_baseline=any(row.is_baseline for row in found.values()))
        if comparisons.total:
            alike.setdefault(_question(found, comparisons, plan), []).append(place[0])
    for question, transfers in alike.items():
        if question.least() > _IMPLAUSIBLE_STDS:
            yield f"{', '.join(dict.fromkeys(transfers))}: {_weakness(question)}"


def _planned_tables(plan: Plan, design: PlanDesign, rows: Sequence[str]) -> dict[Cell, dict[Cell, _PlannedRow]]:
    """The tables of the report and their rows, as of the plan."""
    baseline, jobs = design.baseline_of(plan), plan.by_name()
    tables: dict[Cell, dict[Cell, _PlannedRow]] = {}
    for job in plan.jobs:
        if job.kind in TRANSFER_KINDS:
            values = None if rows == (LABELS_FACTOR,) else design.values_of(job)
            place, row = _row_of(values, rows, job)
            table = tables.setdefault(place, {})
            if row not in table:
                backbone = None if values is None else pretraining_of(job, jobs)
                table[row] = _PlannedRow(is_label_space=values is None, backbone=backbone)
            found = table[row]
            found.seeds.add(str(job.facets.get("pretrain_seed", 0)))
            is_named = row == tuple(baseline.get(name) for name in rows)
            found.is_baseline |= is_named or job.facets.get("baseline") == "retrain"
    return tables


def _question(found: Mapping[Cell, _PlannedRow], comparisons: Comparisons, plan: Plan) -> _Question:
    """Of the comparison with most seeds; the report tests those of rows that share nothing by Welch's test."""
    rows, jobs = list(found.values()), plan.by_name()
    pairs: Iterable[tuple[_PlannedRow, _PlannedRow]] = combinations(rows, 2)
    if len(rows) > MAX_ROWS_ALL_PAIRS and (baseline := next((row for row in rows if row.is_baseline), None)):
        pairs = ((baseline, row) for row in rows if row is not baseline)
    counts = [
        (seeds_compared(one.seeds, other.seeds, is_paired=is_paired), is_paired)
        for one, other in pairs
        for is_paired in [
            one.is_label_space or other.is_label_space or bool(sharing_between(one.backbone, other.backbone, jobs))
        ]
    ]
    num_seeds = max(num for num, _ in counts)
    return _Question(num_seeds=num_seeds, comparisons=comparisons, is_paired=(num_seeds, False) not in counts)


def _row_of(values: Mapping[str, str] | None, rows: Sequence[str], job: Job) -> tuple[Cell, Cell]:
    """Table and row of a transfer in the report."""
    transfer = str(job.facets["transfer"])
    if values is None:
        return (transfer, str(job.facets.get("pretrain", ""))), (str(job.facets["label_space"]),)
    others = (value for name, value in values.items() if name not in rows)
    return (transfer, *others), tuple(values[name] for name in rows)


def _weakness(question: _Question) -> str:
    family, num_seeds, least = question.comparisons, question.num_seeds, question.least()
    finds = ((seeds, question.least(seeds)) for seeds in range(3, MOST_SEEDS))
    enough, found = next((seeds, found) for seeds, found in finds if found <= _IMPLAUSIBLE_STDS / 2)
    would = (
        f"{enough} pretraining seeds find differences of {found:.1f} standard deviations between seeds; "
        "`orchestrator power` says what they cost"
    )
    if num_seeds < 1:
        return f"no two rows share a pretraining seed, so no comparison can be tested; {would}"
    if math.isinf(least):
        tested = f"none of the {family.total} comparisons can" if family.total > 1 else "the comparison cannot"
        return f"one pretraining seed shows no noise between seeds, so {tested} be tested; {would}"
    method = method_of([question.is_paired])
    tests = f"in {family.total} comparison{'s' * (family.total > 1)} ({method})"
    return (
        f"{num_seeds} pretraining seeds find, {tests}, only differences of {least:,.0f} standard deviations between "
        f"seeds or more (power {TARGET_POWER:.0%}), which no plausible difference reaches; {would}"
    )
