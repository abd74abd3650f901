"""The part of a report that is about simulations: means over seeds by cell, and what papers claim of them; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job, Plan, PlannedSimulation
from orchestrator.report.inputs import Committed
from orchestrator.report.statistics.expectations import (
    JudgedExpectation,
    Judgement,
    SimulationRuns,
    are_outcomes,
    ends_of_share,
    judge,
)
from orchestrator.report.statistics.intervals import Estimate, Floats, estimate_columns
from orchestrator.sweepfile.values import Level, cell_name

SEED_COLUMN = "seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationCell:
    """One combination of factors."""

    factors: Mapping[str, Level]
    estimates: Mapping[str, Estimate]
    """By metric: mean and 95 % interval over seeds; metrics that no seed of the cell has are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """One simulation of the sweep."""

    name: str
    run: str
    metric: str
    factors: Mapping[str, tuple[Level, ...]]
    """In the order of the sweep file."""
    num_expected: int
    """Seeds of each cell that the plan asks for."""
    cells: tuple[SimulationCell, ...]
    expectations: tuple[JudgedExpectation, ...]

    @property
    def ordered_factor(self) -> str:
        """The factor along which curves are drawn: the first whose levels are several numbers; empty without one."""
        for factor, levels in self.factors.items():
            if len(levels) > 1 and not any(isinstance(level, bool | str) for level in levels):
                return factor
        return ""


def build_simulations(plan: Plan, committed: Mapping[str, Committed]) -> tuple[SimulationReport, ...]:
    """The simulations of a plan, as far as their blocks are committed."""
    return tuple(_report(planned, _as_written(plan, planned), jobs, committed) for planned, jobs in _with_jobs(plan))


def notes_on_simulations(plan: Plan, committed: Mapping[str, Committed]) -> Iterator[str]:
    """Which runs are in no mean because they have no such metric; single cells where none has it say so themselves."""
    for planned, jobs in _with_jobs(plan):
        asked: dict[str, set[int]] = {planned.metric: set(range(len(planned.cells)))}
        for claim in planned.expectations:
            covered = {index for index, cell in enumerate(planned.cells) if claim.covers(cell)}
            for metric in filter(None, (claim.metric or planned.metric, claim.other_metric)):
                asked.setdefault(metric, set()).update(covered)
        for metric, cells in asked.items():
            counts = {index: _num_with(metric, jobs[index], committed) for index in sorted(cells)}
            lacking = {index: total - there for index, (there, total) in counts.items() if 0 < there < total}
            if any(total for _, total in counts.values()) and not any(there for there, _ in counts.values()):
                known = _metrics_of(jobs, committed)
                yield f"simulation {planned.name}: no run has a metric {metric}; they have {known}"
            if lacking:
                first = cell_name(planned.cells[next(iter(lacking))])
                where = f" (first: {first})" if first else ""
                yield (
                    f"simulation {planned.name}: {sum(lacking.values())} of {sum(counts[i][1] for i in lacking)} runs "
                    f"have no {metric}{where}; means and expectations leave them out, and are biased if that depends "
                    "on the result"
                )


def _metrics_of(jobs: Sequence[Sequence[Job]], committed: Mapping[str, Committed]) -> str:
    runs = (committed[job.name].runs for blocks in jobs for job in blocks if job.name in committed)
    return ", ".join(sorted({metric for some in runs for metric in some} - {SEED_COLUMN})) or "none"


def _num_with(metric: str, blocks: Sequence[Job], committed: Mapping[str, Committed]) -> tuple[int, int]:
    """The committed runs of a cell that have a metric, and all of them."""
    runs = [committed[job.name].runs for job in blocks if job.name in committed]
    there = sum(int(np.isfinite(some[metric]).sum()) for some in runs if metric in some)
    return there, sum(len(some[SEED_COLUMN]) for some in runs)


def _with_jobs(plan: Plan) -> Iterator[tuple[PlannedSimulation, list[list[Job]]]]:
    """The simulations of a plan with the blocks of each cell."""
    jobs: dict[tuple[str, str], list[Job]] = {}
    for job in plan.jobs:
        if job.kind is JobKind.THEORY:
            jobs.setdefault((str(job.facets["simulation"]), str(job.facets["cell"])), []).append(job)
    for planned in plan.simulations:
        yield planned, [jobs.get((planned.name, cell_name(cell)), []) for cell in planned.cells]


def _as_written(plan: Plan, planned: PlannedSimulation) -> dict[str, tuple[Level, ...]]:
    """The factors in the order of the sweep file, which a stored plan does not keep.

    Its jobs do: they are those of all combinations in turn, and the later a factor stands in the file, the sooner its
    level changes.
    """
    cells = {cell_name(cell): cell for cell in planned.cells}
    theories = (job for job in plan.jobs if job.kind is JobKind.THEORY and job.facets["simulation"] == planned.name)
    ran = [cells[name] for name in dict.fromkeys(str(job.facets["cell"]) for job in theories) if name in cells]

    def first_change(factor: str) -> int:
        return next((place for place, cell in enumerate(ran) if cell[factor] != ran[0][factor]), 0)

    return dict(sorted(planned.factors.items(), key=lambda item: -first_change(item[0])))


def _report(
    planned: PlannedSimulation,
    factors: Mapping[str, tuple[Level, ...]],
    jobs: Sequence[Sequence[Job]],
    committed: Mapping[str, Committed],
) -> SimulationReport:
    runs = SimulationRuns(cells=planned.cells, values=_values(planned, jobs, committed))
    estimates = {metric: list(_estimates(values_SC)) for metric, values_SC in runs.values.items()}
    cells = tuple(
        SimulationCell(
            factors=cell,
            estimates={metric: found[index] for metric, found in estimates.items() if found[index].num_values},
        )
        for index, cell in enumerate(planned.cells)
    )
    return SimulationReport(
        name=planned.name,
        run=planned.run,
        metric=planned.metric,
        factors=factors,
        num_expected=planned.num_seeds,
        cells=cells,
        expectations=tuple(judge(claim, runs, planned.metric) for claim in planned.expectations),
    )


def _estimates(values_SC: Floats) -> Iterator[Estimate]:
    """Means of the cells with their intervals, those of shares of trials as expectations have them."""
    are_trials = are_outcomes(values_SC)
    for found in estimate_columns(values_SC, range(len(values_SC))):
        if are_trials and found.low is not None:
            low, high = ends_of_share(round(found.mean * found.num_values), found.num_values)
            yield replace(found, low=low, high=high, p_value=None)  # Student's p does not belong to this interval
        else:
            yield found


def _values(
    planned: PlannedSimulation, jobs: Sequence[Sequence[Job]], committed: Mapping[str, Committed]
) -> dict[str, Floats]:
    """By metric (S, C); NaN where a seed has none, or its block is not committed."""
    found: dict[str, Floats] = {}
    for index, blocks in enumerate(jobs):
        for runs in (committed[job.name].runs for job in blocks if job.name in committed):
            rows = runs[SEED_COLUMN].astype(np.int64) - planned.first_seed
            for metric in runs.keys() - {SEED_COLUMN}:
                if metric not in found:
                    found[metric] = np.full((planned.num_seeds, len(jobs)), np.nan)
                found[metric][rows, index] = runs[metric]
    return {metric: found[metric] for metric in sorted(found)}


def unmet(simulations: Sequence[SimulationReport]) -> list[tuple[SimulationReport, JudgedExpectation]]:
    """Expectations that do not hold, are undefined or have too few seeds, each with its simulation."""
    return [(found, one) for found in simulations for one in found.expectations if one.judgement is not Judgement.HOLDS]
