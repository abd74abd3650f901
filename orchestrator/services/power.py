"""How many seeds a difference needs, and what they cost: from a plan and what its store measured. Changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from orchestrator.core.contract import JobKind
from orchestrator.core.errors import NotFoundError, OrchestratorError, UserError
from orchestrator.planning.estimate.estimates import Estimates, estimate
from orchestrator.planning.estimate.power import TARGET_POWER, Comparisons, Design, Noise, power_of, seeds_needed
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.report.build import build_report, compute_report
from orchestrator.report.comparisons import values_of
from orchestrator.report.factors import FactorLayout
from orchestrator.report.render.columns import describe_transfer
from orchestrator.report.results import Table
from orchestrator.report.statistics.summaries import noise_of
from orchestrator.report.tables import group_transfers, seeds_of
from orchestrator.services.artifact_lookup import history_of
from orchestrator.storage.open import is_initialised, open_store
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import list_sweeps, load_plan

ENOUGH_SEEDS = 3
"""With fewer pretrain seeds the noise is known too badly for a single number."""
_TRANSFER_SEEDS = (1, 2, 3, 5, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCost:
    """What some jobs take; the cost is None where there is no price."""

    gpu_hours: float = 0.0
    cpu_hours: float = 0.0
    cost: float | None = None

    def plus(self, other: JobCost, times: float = 1.0) -> JobCost:
        """Both, the other one so many times."""
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
    """By the noise as it was measured; None = more than are looked at."""
    least: int | None
    """By the lower end of what the noise may be."""
    most: int | None
    """By its upper end."""
    power: float | None
    added: JobCost | None
    """For the seeds that the plan does not have."""
    least_added: JobCost | None
    most_added: JobCost | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerAnswer:
    """What one transfer of a sweep needs."""

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
    """What is asked; stds in the unit of the metric."""

    difference: float
    transfer: str = ""
    """Only this one; empty = all."""
    like: str = ""
    """The sweep to take the noise from; empty = this one, or another one of its store."""
    std: float | None = None
    """Of the paired difference between pretrain seeds, where nothing was measured."""
    target_power: float = TARGET_POWER


def answer_power(
    plan: Plan, question: PowerQuestion, *, accelerator: str = "", prices: PriceTable | None = None
) -> list[PowerAnswer]:
    """An answer for each transfer with at least two label spaces.

    Raises:
        UserError: nothing tells how large the noise is.
        NotFoundError: there is no such transfer, or no such sweep to take the noise from.
    """
    store = open_store(plan.store_uri) if is_initialised(plan.store_uri) else None
    estimates = estimate(plan, history=history_of(plan), accelerator=accelerator, prices=prices)
    tables = (build_report(store, plan) if store else compute_report(plan, {})).headlines
    wanted = [table for table in tables if question.transfer in {"", table.transfer} and len(table.rows) > 1]
    if not wanted:
        known = ", ".join(dict.fromkeys(table.transfer for table in tables)) or "none"
        what = f"transfer {question.transfer!r}" if question.transfer else "transfer of two label spaces"
        raise NotFoundError(f"sweep {plan.sweep!r} has no {what} to compare; its transfers are: {known}")
    return [_answer(plan, table, question, estimates, store) for table in wanted]


def _answer(
    plan: Plan, table: Table, question: PowerQuestion, estimates: Estimates, store: ObjectStore | None
) -> PowerAnswer:
    noise, source = _noise(plan, table, question, store)
    has_baseline = any(row.label_space == table.baseline for row in table.rows)
    comparisons = Comparisons.of_spaces(len(table.rows), has_baseline=has_baseline)
    planned = _design_of(_jobs_of(plan, table))
    low, high = noise.ends
    prices = _prices(plan, table, estimates)
    return PowerAnswer(
        transfer=table.transfer,
        place=describe_transfer(table),
        difference=question.difference,
        baseline=table.baseline if has_baseline else "",
        comparisons=comparisons,
        planned=planned,
        planned_power=power_of(planned, noise, question.difference, comparisons),
        planned_range=(
            power_of(planned, high, question.difference, comparisons),
            power_of(planned, low, question.difference, comparisons),
        ),
        noise=noise,
        source=source,
        target_power=question.target_power,
        options=tuple(_options(planned, noise, question, comparisons, prices)),
    )


def _options(
    planned: Design,
    noise: Noise,
    question: PowerQuestion,
    comparisons: Comparisons,
    prices: tuple[JobCost, JobCost],
) -> Iterator[Option]:
    """One for each number of transfer seeds that is not below the plan's."""
    fixed = planned.num_transfer_seeds
    choices = [fixed] if noise.transfer_std is None else [fixed, *(n for n in _TRANSFER_SEEDS if n > fixed)]
    for transfers in choices:
        least, seeds, most = (
            _at_least(
                planned.num_pretrain_seeds,
                seeds_needed(
                    some, question.difference, comparisons, num_transfer_seeds=transfers, power=question.target_power
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
            power=None if seeds is None else power_of(designs[0], noise, question.difference, comparisons),
            added=added[0],
            least_added=added[1],
            most_added=added[2],
        )


def _at_least(planned: int, needed: int | None) -> int | None:
    """Seeds that the plan has already are not taken away."""
    return None if needed is None else max(planned, needed)


# ------------------------------------------------------------------------------------------------------------- noise


def _noise(plan: Plan, table: Table, question: PowerQuestion, store: ObjectStore | None) -> tuple[Noise, str]:
    """The noise and where it comes from: what was stated, a named sweep, this sweep, or the best known other one."""
    if question.std is not None:
        stated = Noise(pretrain_std=question.std, transfer_std=None, num_pretrain_seeds=0, freedom=math.inf)
        return stated, "stated by --std"
    if question.like:
        found = _of_sweep(store, question.like, table, plan.metric)
        if found is None:
            like = f"sweep {question.like!r} has no {table.protocol} with {plan.metric} of two pretrain seeds"
            raise UserError(f"{like} in its results: name another one with --like, or state --std")
        return found
    own = _of_table(table)
    if own is not None and own.num_pretrain_seeds >= ENOUGH_SEEDS:
        return own, "measured in this sweep"
    others = [
        found
        for sweep in (list_sweeps(store) if store else [])
        if sweep != plan.sweep and (found := _of_sweep(store, sweep, table, plan.metric))
    ]
    known = ([(own, "measured in this sweep")] if own else []) + others
    if not known:
        raise UserError(
            f"nothing in the store shows how much {plan.metric} of {table.transfer} varies between seeds: no "
            f"sweep has results of a {table.protocol} with two pretrain seeds; state the standard deviation with --std"
        )
    return max(known, key=lambda one: one[0].num_pretrain_seeds)


def _of_sweep(store: ObjectStore | None, sweep: str, table: Table, metric: str) -> tuple[Noise, str] | None:
    """Of a sweep's transfers by the same protocol: to the same target if it has such, else the best known one."""
    if store is None or sweep not in list_sweeps(store):
        raise NotFoundError(f"the store has no sweep {sweep!r} to take the noise from")
    try:
        report = build_report(store, replace(load_plan(store, sweep), metric=metric))
    except OrchestratorError:  # a damaged sweep tells nothing; fsck says why
        return None
    alike = [other for other in report.headlines if other.protocol == table.protocol]
    same = [other for other in alike if other.target == table.target]
    found = [(noise, other.target) for other in same or alike if (noise := _of_table(other))]
    if not found:
        return None
    noise, target = max(found, key=lambda one: one[0].num_pretrain_seeds)
    return noise, f"measured in {sweep}{'' if same else f' (on the other target {target})'}"


def _of_table(table: Table) -> Noise | None:
    """With the baseline if there is one; else with the first row."""
    rows = [row for row in table.rows if row.results]
    against = table.baseline_row or (rows[0] if rows else None)
    if against is None:
        return None
    others = [values_of(row, table.metric) for row in rows if row.label_space != against.label_space]
    return noise_of(others, values_of(against, table.metric))


# ------------------------------------------------------------------------------------------------------------- costs


def _jobs_of(plan: Plan, table: Table) -> list[Job]:
    cells = group_transfers(plan.jobs, FactorLayout.of(plan))[table.place].values()
    return [job for some in cells for jobs in some.values() for job in jobs]


def _prices(plan: Plan, table: Table, estimates: Estimates) -> tuple[JobCost, JobCost]:
    """Of one more pretrain seed without this table's transfers, and of one more transfer seed for one pretrain seed.

    A further pretrain seed gets whatever the sweep does with each: its other transfers, features, searches.
    """
    own = {job.name for job in _jobs_of(plan, table)}
    seeds = {job.facets["pretrain_seed"] for job in plan.jobs if "pretrain_seed" in job.facets}
    planned = _design_of(_jobs_of(plan, table))
    of_seeds = [job.name for job in plan.jobs if _is_of_a_seed(plan, job) and job.name not in own]
    backbones = _sum(estimates, of_seeds)
    transfers = _sum(estimates, sorted(own))
    nothing = JobCost(cost=0.0)
    share = 1 / max(1, planned.num_pretrain_seeds * planned.num_transfer_seeds)
    return nothing.plus(backbones, 1 / max(1, len(seeds))), nothing.plus(transfers, share)


def _is_of_a_seed(plan: Plan, job: Job) -> bool:
    """Whether a job is of one pretrain seed; of features their backbone tells it."""
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


def _design_of(jobs: Sequence[Job]) -> Design:
    """The seeds of the transfers of one table."""
    pairs = {seeds_of(job) for job in jobs}
    return Design(
        num_pretrain_seeds=len({pair.pretrain for pair in pairs}),
        num_transfer_seeds=max(1, len({pair.transfer for pair in pairs})),
    )
