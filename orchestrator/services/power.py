"""How many seeds a difference needs, and what they cost: from a plan and measurements in its store. Read-only."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

from orchestrator.core.errors import NotFoundError, OrchestratorError, UserError
from orchestrator.core.job_kinds import TRANSFER_KINDS, JobKind
from orchestrator.planning.estimate.estimates import Estimates, estimate
from orchestrator.planning.estimate.power import (
    ALPHA,
    TARGET_POWER,
    Comparisons,
    Design,
    Noise,
    chance_of,
    least_shift,
    power_of,
    seeds_compared,
    seeds_needed,
)
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.planning.graph.pairing import makes_backbone, sharing_between
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.report.build import build_report, compute_report
from orchestrator.report.comparisons import planned_comparisons, values_of
from orchestrator.report.factors import FactorLayout, planned_design
from orchestrator.report.render.columns import contrast_text, describe_transfer
from orchestrator.report.results import FactorReport, FactorTable, Report, Table, TablePlace
from orchestrator.report.statistics.effects import Effect, FactorialDesign, effect_noise
from orchestrator.report.statistics.summaries import noise_of
from orchestrator.report.tables import group_transfers, headline_places, seeds_of
from orchestrator.services.artifact_lookup import history_of
from orchestrator.storage.open import is_initialised, open_store
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import list_sweeps, load_plan

ENOUGH_SEEDS = 3
"""With fewer pretrain seeds, the noise is too uncertain for a single number."""
_TRANSFER_SEEDS = (1, 2, 3, 5, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCost:
    """GPU-hours and cost of some jobs; the cost is None without a price."""

    gpu_hours: float = 0.0
    cpu_hours: float = 0.0
    cost: float | None = None

    def plus(self, other: JobCost, times: float = 1.0) -> JobCost:
        """The sum with another one, multiplied by a number."""
        costs = (self.cost, other.cost)
        return JobCost(
            gpu_hours=self.gpu_hours + times * other.gpu_hours,
            cpu_hours=self.cpu_hours + times * other.cpu_hours,
            cost=None if costs[0] is None or costs[1] is None else costs[0] + times * costs[1],
        )

    @property
    def order(self) -> tuple[float, float, float]:
        """Cheaper first: by money where it is known, else by GPU-hours."""
        return (self.cost or 0.0, self.gpu_hours, self.cpu_hours)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A number of transfer seeds and the pretrain seeds that the difference then needs."""

    num_transfer_seeds: int
    num_pretrain_seeds: int | None
    """Pretrain seeds by the measured noise; None = more than the search's limit."""
    least: int | None
    """Pretrain seeds by the lower end of the noise's range."""
    most: int | None
    """Pretrain seeds by the upper end."""
    power: float | None
    added: JobCost | None
    """Cost of the seeds that the plan does not have."""
    least_added: JobCost | None
    most_added: JobCost | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectPower:
    """What the planned seeds detect of a main effect or interaction, by the report's test in its family of effects."""

    name: str
    """Its name in the report: ``optimizer lamb - sgd``."""
    factors: tuple[str, ...]
    is_asked: bool
    """Whether it is a main effect against the baseline's value, which has the larger share of the level."""
    is_paired: bool
    """False: its sides are independent samples, compared by Welch's t."""
    num_matched: int
    """Combinations of the other factors that it is averaged over."""
    num_pretrain_seeds: int
    level: float
    """The p-value below which it is established."""
    noise: Noise | None = None
    """Of the contrast of one pretraining seed. None where its sides share the number of the seed only and the sweep has
    not measured it: what a difference of two pairs varies by says nothing of that."""
    is_measured: bool = False
    """Whether the noise is the effect's own, from results of this sweep; False: that of a difference of two cells."""
    smallest: float | None = None
    """The smallest effect that is found with the target power; None where that is not known, or with one seed."""
    smallest_range: tuple[float, float] | None = None
    """With the noise at the lower and at the upper end of what it may be."""
    power: float | None = None
    """For the difference that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerAnswer:
    """The seeds that one transfer of a sweep needs."""

    transfer: str
    place: str
    difference: float
    baseline: str
    comparisons: Comparisons
    planned: Design
    planned_power: float
    planned_range: tuple[float, float]
    """With the noise at the upper and at the lower end of what it may be."""
    noise: Noise
    source: str
    """Where the noise was measured."""
    target_power: float
    options: tuple[Option, ...]
    is_paired: bool = True
    """Whether the report compares by pairs; False where all rows share only the number of the seed with the baseline,
    so that it compares them by Welch's t."""
    unpaired: tuple[str, ...] = ()
    """Rows that it compares with the baseline by Welch's t. Unless all are such, the answer is about the others."""
    effects: tuple[EffectPower, ...] = ()
    """Of all factors under this transfer, in the answer of its first table; empty where only label spaces differ."""

    @property
    def is_known(self) -> bool:
        """Whether the noise is known well enough for single numbers."""
        return not 0 < self.noise.num_pretrain_seeds < ENOUGH_SEEDS

    @property
    def cheapest(self) -> Option | None:
        """Of the options that are enough."""
        found = [option for option in self.options if option.added is not None]
        return min(found, key=lambda option: option.added.order if option.added else (), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerQuestion:
    """The options of the question; standard deviations in the unit of the metric."""

    difference: float
    transfer: str = ""
    """Only this one; empty = all."""
    like: str = ""
    """The sweep to take the noise from; empty = this one, or another one of its store."""
    std: float | None = None
    """Standard deviation of the paired difference between pretrain seeds, instead of a measurement."""
    target_power: float = TARGET_POWER


def answer_power(
    plan: Plan, question: PowerQuestion, *, accelerator: str = "", prices: PriceTable | None = None
) -> list[PowerAnswer]:
    """An answer for each transfer with at least two label spaces.

    Raises:
        UserError: the size of the noise is unknown.
        NotFoundError: there is no such transfer, or no such sweep to take the noise from.
    """
    store = open_store(plan.store_uri) if is_initialised(plan.store_uri) else None
    estimates = estimate(plan, history=history_of(plan), accelerator=accelerator, prices=prices)
    report = build_report(store, plan) if store else compute_report(plan, {})
    tables = report.headlines
    wanted = [table for table in tables if question.transfer in {"", table.transfer} and len(table.rows) > 1]
    if not wanted:
        known = ", ".join(dict.fromkeys(table.transfer for table in tables)) or "none"
        what = f"transfer {question.transfer!r}" if question.transfer else "transfer of two label spaces"
        raise NotFoundError(f"sweep {plan.sweep!r} has no {what} to compare; its transfers are: {known}")
    sweeps = _StoreSweeps(store, plan, wanted)
    answers = [_answer(plan, table, question, estimates, sweeps) for table in wanted]
    return list(_with_effects(plan, report, question, list(zip(wanted, answers, strict=True))))


def _answer(
    plan: Plan, table: Table, question: PowerQuestion, estimates: Estimates, sweeps: _StoreSweeps
) -> PowerAnswer:
    noise, source = _noise(plan, table, question, sweeps)
    comparisons, unpaired = planned_comparisons(table), _unpaired(plan, table)
    is_paired = _is_paired(plan, table)
    planned = _planned_design(plan, table, is_paired=is_paired)
    prices = _prices(plan, table, estimates)
    power, low, high = (
        power_of(planned, one, question.difference, comparisons, is_paired=is_paired) for one in (noise, *noise.ends)
    )
    return PowerAnswer(
        transfer=table.transfer,
        place=describe_transfer(table),
        difference=question.difference,
        baseline=table.baseline if comparisons.num_with_baseline else "",
        comparisons=comparisons,
        planned=planned,
        planned_power=power,
        planned_range=(high, low),
        noise=noise,
        source=source,
        target_power=question.target_power,
        options=tuple(_options(planned, noise, question, comparisons, prices, is_paired=is_paired)),
        is_paired=is_paired,
        unpaired=unpaired,
    )


def _options(
    planned: Design,
    noise: Noise,
    question: PowerQuestion,
    comparisons: Comparisons,
    prices: tuple[JobCost, JobCost],
    *,
    is_paired: bool,
) -> Iterator[Option]:
    """One for each number of transfer seeds that is not below the plan's."""
    fixed, asked = planned.num_transfer_seeds, (question.difference, comparisons)
    choices = [fixed] if noise.transfer_std is None else [fixed, *(n for n in _TRANSFER_SEEDS if n > fixed)]
    for transfers in choices:
        least, seeds, most = (
            _at_least(
                planned.num_pretrain_seeds,
                seeds_needed(
                    some, *asked, num_transfer_seeds=transfers, power=question.target_power, is_paired=is_paired
                ),
            )
            for some in (noise.ends[0], noise, noise.ends[1])
        )
        designs = [Design(num_pretrain_seeds=n or 0, num_transfer_seeds=transfers) for n in (seeds, least, most)]
        added = [_added(planned, design, prices) if design.num_pretrain_seeds else None for design in designs]
        yield Option(
            num_transfer_seeds=transfers,
            num_pretrain_seeds=seeds,
            least=least,
            most=most,
            power=None if seeds is None else power_of(designs[0], noise, *asked, is_paired=is_paired),
            added=added[0],
            least_added=added[1],
            most_added=added[2],
        )


def _at_least(planned: int, needed: int | None) -> int | None:
    """The plan's seeds are the least number."""
    return None if needed is None else max(planned, needed)


# ----------------------------------------------------------------------------------------------------------- effects


def _with_effects(
    plan: Plan, report: Report, question: PowerQuestion, answers: Sequence[tuple[Table, PowerAnswer]]
) -> Iterator[PowerAnswer]:
    """The answers, the first of each transfer with the effects of all factors."""
    layout = FactorLayout.of(plan)
    if not layout.design.has_factors:
        yield from (answer for _, answer in answers)
        return
    grouped = group_transfers(plan.jobs, layout)
    headlines, done = headline_places(grouped), set[TablePlace]()
    measured = {found.place: found.contrasts for found in report.effects} if isinstance(report, FactorReport) else {}
    for table, answer in answers:
        place = replace(table.place, pretrain="")
        if place in done:
            yield answer
            continue
        done.add(place)
        alike = [spaces for one, spaces in grouped.items() if one in headlines and replace(one, pretrain="") == place]
        rows = [next(iter(cells.values())) for spaces in alike for cells in spaces.values()]
        design = planned_design(layout, rows, seeds_of)
        is_own = question.std is None and not question.like
        own = _own_noise(design, measured.get(place, ()) if is_own else ())
        yield replace(answer, effects=tuple(_effects(design, own, answer, question.target_power)))


def _own_noise(design: FactorialDesign, measured: Sequence[Effect]) -> dict[Hashable, Noise]:
    """The noise of the sweep's own effects by what is alike, of those that lack no cell and have enough seeds."""
    planned = {(one.factors, one.values, one.references): one.num_matched for one in design.contrasts()}
    alike: dict[Hashable, list[Effect]] = {}
    for one in measured:
        is_whole = planned.get((one.factors, one.values, one.references)) == one.num_matched
        is_repeated = len(one.factors) == 1 and not design.is_asked(one)  # a difference of two that are asked for
        if is_whole and not is_repeated and one.difference.num_pretrain_seeds >= ENOUGH_SEEDS:
            alike.setdefault(_alike(one), []).append(one)
    return {key: noise for key, some in alike.items() if (noise := effect_noise(some)) is not None}


def _alike(effect: Effect) -> Hashable:
    """What contrasts share whose noise is the same but for chance."""
    return effect.factors, effect.num_matched, effect.is_paired


def _of_cells(noise: Noise, effect: Effect) -> Noise | None:
    """From the noise of a difference of two cells, if cells vary independently but for what all share of a seed."""
    if not effect.is_paired:
        return None  # what seeds do to all cells of one side stays in, and a difference of two pairs does not tell it
    return noise.times(math.sqrt(2 ** (len(effect.factors) - 1) / effect.num_matched))


def _effects(
    design: FactorialDesign, own: Mapping[Hashable, Noise], answer: PowerAnswer, target: float
) -> Iterator[EffectPower]:
    planned = [(one, design.is_asked(one)) for one in design.contrasts()]
    tested = [is_asked for one, is_asked in planned if one.difference.num_pretrain_seeds > 1]
    shares = Comparisons(num_with_baseline=sum(tested), num_others=len(tested) - sum(tested)).shares
    for effect, is_asked in planned:
        measured = own.get(_alike(effect))
        found = EffectPower(
            name=contrast_text(effect),
            factors=effect.factors,
            is_asked=is_asked,
            is_paired=effect.is_paired,
            num_matched=effect.num_matched,
            num_pretrain_seeds=effect.difference.num_pretrain_seeds,
            level=ALPHA * shares[0 if is_asked else 1],
            noise=measured or (_of_cells(answer.noise, effect) if answer.is_paired else None),
            is_measured=measured is not None,
        )
        yield _with_smallest(found, answer, target)


def _with_smallest(effect: EffectPower, answer: PowerAnswer, target: float) -> EffectPower:
    num_seeds, num_transfers = effect.num_pretrain_seeds, answer.planned.num_transfer_seeds
    if effect.noise is None or num_seeds < 2 or not effect.noise.of_seed(num_transfers):
        return effect
    stds = [one.of_seed(num_transfers) / math.sqrt(num_seeds) for one in (effect.noise, *effect.noise.ends)]
    least = least_shift(num_seeds - 1, effect.level, target, is_paired=effect.is_paired)
    return replace(
        effect,
        smallest=least * stds[0],
        smallest_range=(least * stds[1], least * stds[2]),
        power=chance_of(answer.difference / stds[0], num_seeds - 1, effect.level, is_paired=effect.is_paired),
    )


# ------------------------------------------------------------------------------------------------------------- noise


class _KnownNoise(NamedTuple):
    """The noise of a transfer, and where it was measured."""

    noise: Noise
    source: str
    is_of_target: bool = True

    @property
    def rank(self) -> tuple[bool, int]:
        """Larger is better: the same target with enough seeds, then the number of seeds."""
        num_seeds = self.noise.num_pretrain_seeds
        return self.is_of_target and num_seeds >= ENOUGH_SEEDS, num_seeds


class _StoreSweeps:
    """The noise in the sweeps of a store. Each is read once for all tables of a question, and not kept.

    Args:
        store: None = there is none.
        plan: of the question.
        tables: of its report, for which noise is wanted.
    """

    def __init__(self, store: ObjectStore | None, plan: Plan, tables: Sequence[Table]) -> None:
        self._store, self._plan, self._tables = store, plan, tables
        self._found: dict[str, dict[int, _KnownNoise]] = {}

    @cached_property
    def names(self) -> Mapping[str, None]:
        """Of all sweeps, in order."""
        return dict.fromkeys(list_sweeps(self._store) if self._store else [])

    def noise_of(self, sweep: str, table: Table) -> _KnownNoise | None:
        """What a sweep shows of one of the tables; nothing if it is damaged, which fsck reports.

        Raises:
            NotFoundError: there is no such sweep.
        """
        if self._store is None or sweep not in self.names:
            raise NotFoundError(f"the store has no sweep {sweep!r} to take the noise from")
        if sweep not in self._found:
            try:
                known = replace(load_plan(self._store, sweep), metric=self._plan.metric)
                tables = build_report(self._store, known).headlines
            except OrchestratorError:
                tables = ()
            found = {id(wanted): _of_sweep(known, tables, wanted, self._plan) for wanted in self._tables if tables}
            self._found[sweep] = {number: noise for number, noise in found.items() if noise}
        return self._found[sweep].get(id(table))


def _noise(plan: Plan, table: Table, question: PowerQuestion, sweeps: _StoreSweeps) -> tuple[Noise, str]:
    """The noise and where it comes from: what was stated, a named sweep, this sweep, or the best known other one."""
    if question.std is not None:
        stated = Noise(pretrain_std=question.std, transfer_std=None, num_pretrain_seeds=0, freedom=math.inf)
        return stated, "stated by --std"
    alike = "" if _is_paired(plan, table) else " and, as here, rows that share only the number of the seed"
    if question.like:
        found = sweeps.noise_of(question.like, table)
        if found is None:
            like = f"sweep {question.like!r} has no {table.protocol} with {plan.metric} of two pretrain seeds{alike}"
            raise UserError(f"{like} in its results, or only equal ones: name another one with --like, or state --std")
        return found.noise, found.source
    own = _of_table(plan, table)
    if own is not None and own.num_pretrain_seeds >= ENOUGH_SEEDS:
        return own, "measured in this sweep"
    others = [found for sweep in sweeps.names if sweep != plan.sweep and (found := sweeps.noise_of(sweep, table))]
    known = ([_KnownNoise(own, "measured in this sweep")] if own else []) + others
    if not known:
        raise UserError(
            f"nothing in the store shows how much {plan.metric} of {table.transfer} varies between seeds: no "
            f"sweep has results of a {table.protocol} with two pretrain seeds{alike}, or they are all equal; state the "
            "standard deviation with --std"
        )
    best = max(known, key=lambda one: one.rank)
    return best.noise, best.source


def _of_sweep(known: Plan, tables: Sequence[Table], table: Table, plan: Plan) -> _KnownNoise | None:
    """Of a sweep's transfers by the same protocol: to the same target if that has noise, else the best known one.

    What pairs vary by says nothing of independent samples, and the other way round.
    """
    is_paired = _is_paired(plan, table)
    alike = [other for other in tables if other.protocol == table.protocol and _is_paired(known, other) is is_paired]
    found = [
        _KnownNoise(
            noise, f"measured in {known.sweep}{'' if is_same else f' (on the other target {other.target})'}", is_same
        )
        for other in alike
        if (noise := _of_table(known, other))
        for is_same in [other.target == table.target]
    ]
    return max(found, key=lambda one: (one.is_of_target, one.noise.num_pretrain_seeds), default=None)


def _of_table(plan: Plan, table: Table) -> Noise | None:
    """With the baseline; without one, with the first row that is paired with another. Of paired rows, if any are."""
    rows = [row for row in table.rows if row.results]
    first, unpaired = _first_and_unpaired(plan, table, {row.label_space for row in rows})
    against = table.baseline_row or next((row for row in rows if row.label_space == first), None)
    if against is None:
        return None
    left_out = unpaired if _is_paired(plan, table) else ()
    others = [row for row in rows if row.label_space not in {against.label_space, *left_out}]
    return noise_of([values_of(row, table.metric) for row in others], values_of(against, table.metric))


def _is_paired(plan: Plan, table: Table) -> bool:
    """Whether the report compares any row with the baseline by pairs; without one, any two rows."""
    unpaired = _unpaired(plan, table)
    return not unpaired or len(unpaired) < len(table.rows) - 1


def _unpaired(plan: Plan, table: Table) -> tuple[str, ...]:
    """Rows that share only the number of the seed with the one that others are compared with."""
    return _first_and_unpaired(plan, table, {row.label_space for row in table.rows})[1]


def _first_and_unpaired(plan: Plan, table: Table, rows: Collection[str]) -> tuple[str, tuple[str, ...]]:
    """The baseline, without one the first of these rows that is paired with another; and those not paired with it."""
    names = [row.label_space for row in table.rows if row.label_space in {*rows, table.baseline}]
    if not isinstance(table, FactorTable):
        return table.baseline if table.baseline in names else next(iter(names), ""), ()
    layout = FactorLayout.of(plan)
    jobs = {row: next(iter(some.values()))[0] for row, some in group_transfers(plan.jobs, layout)[table.place].items()}
    cells = [row for row in names if row in jobs and layout.values_of(jobs[row]) is not None]
    made = {row: layout.pretraining_of(jobs[row]) for row in cells}

    def is_paired(one: str, other: str) -> bool:
        return bool(sharing_between(made[one], made[other], layout.jobs))

    if table.baseline in made:
        first = table.baseline
    else:
        pairs = ((one, other) for one, other in combinations(cells, 2) if is_paired(one, other))
        first = next(pairs, (next(iter(cells), ""),))[0]
    return first, tuple(row for row in cells if row != first and not is_paired(row, first))


# ------------------------------------------------------------------------------------------------------------- costs


def _jobs_of(plan: Plan, table: Table) -> list[Job]:
    cells = group_transfers(plan.jobs, FactorLayout.of(plan))[table.place].values()
    return [job for some in cells for jobs in some.values() for job in jobs]


def _prices(plan: Plan, table: Table, estimates: Estimates) -> tuple[JobCost, JobCost]:
    """Of one more pretrain seed without this table's transfer, and of one more transfer seed for one pretrain seed.

    A further seed gets whatever the sweep does with each: a pretrain seed its other transfers, features and searches,
    a transfer seed all checkpoints, fractions of the labels and blocks that the transfer measures.
    """
    measured = [job for job in plan.jobs if job.kind in TRANSFER_KINDS and job.facets["transfer"] == table.transfer]
    own = {job.key: job.name for job in measured}  # of several names for one result one job runs
    seeds = {job.facets["pretrain_seed"] for job in plan.jobs if "pretrain_seed" in job.facets}
    planned = _design_of(measured)
    of_seeds = {job.key: job.name for job in plan.jobs if _is_of_a_seed(plan, job) and job.key not in own}
    backbones = _sum(estimates, list(of_seeds.values()))
    transfers = _sum(estimates, sorted(own.values()))
    nothing = JobCost(cost=0.0)
    share = 1 / max(1, planned.num_pretrain_seeds * planned.num_transfer_seeds)
    return nothing.plus(backbones, 1 / max(1, len(seeds))), nothing.plus(transfers, share)


def _is_of_a_seed(plan: Plan, job: Job) -> bool:
    """Whether a job is of one pretrain seed; of features their backbone tells it.

    The search for the recipe of a transfer names the first seed, and runs for it alone.
    """
    if job.kind is JobKind.SEARCH and not makes_backbone(job):
        return False
    backbones = [plan.by_name()[need] for need in job.needs] if job.kind is JobKind.EMBED else []
    return any("pretrain_seed" in one.facets for one in (job, *backbones))


def _sum(estimates: Estimates, names: Sequence[str]) -> JobCost:
    found = [estimates.jobs[name] for name in names if name in estimates.jobs]
    known = [job.cost for job in found if job.cost is not None]
    return JobCost(
        gpu_hours=sum(job.gpu_hours for job in found),
        cpu_hours=sum(job.cpu_hours for job in found),
        cost=sum(known) if len(known) == len(found) and estimates.prices is not None else None,
    )


def _added(planned: Design, design: Design, prices: tuple[JobCost, JobCost]) -> JobCost:
    backbone, transfer = prices
    more = design.num_pretrain_seeds - planned.num_pretrain_seeds
    num_transfers = design.num_pretrain_seeds * design.num_transfer_seeds
    num_planned = planned.num_pretrain_seeds * planned.num_transfer_seeds
    return JobCost(cost=0.0).plus(backbone, more).plus(transfer, num_transfers - num_planned)


def _planned_design(plan: Plan, table: Table, *, is_paired: bool) -> Design:
    """The seeds of the comparison with the fewest, among those that the answer is about."""
    runs = group_transfers(plan.jobs, FactorLayout.of(plan))[table.place]
    seeds = {row: {seeds_of(job).pretrain for jobs in some.values() for job in jobs} for row, some in runs.items()}
    reference, unpaired = _first_and_unpaired(plan, table, set(seeds))
    own = seeds.get(reference, set())
    others = [found for row, found in seeds.items() if row != reference and (row in unpaired) is not is_paired]
    counts = [seeds_compared(found, own, is_paired=is_paired) for found in others]
    return replace(_design_of(_jobs_of(plan, table)), num_pretrain_seeds=min(counts, default=len(own)))


def _design_of(jobs: Sequence[Job]) -> Design:
    """The seeds of the transfers of one table."""
    pairs = {seeds_of(job) for job in jobs}
    return Design(
        num_pretrain_seeds=len({pair.pretrain for pair in pairs}),
        num_transfer_seeds=max(1, len({pair.transfer for pair in pairs})),
    )
