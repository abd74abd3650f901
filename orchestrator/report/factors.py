"""Factors of a report: rows of tables that are combinations of values, and the effects of each factor; pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.core.errors import UserError
from orchestrator.core.suggest import did_you_mean
from orchestrator.planning.graph.design import PlanDesign
from orchestrator.planning.graph.pairing import Sharing, pretraining_of, sharing_between
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.report.results import (
    EffectTable,
    Pairing,
    Report,
    Table,
    TablePlace,
    counted_seeds,
    values_by_seeds,
)
from orchestrator.report.statistics.effects import DesignCell, FactorialDesign, balanced_means
from orchestrator.report.statistics.intervals import bounds_of
from orchestrator.report.statistics.summaries import SeedPair
from orchestrator.sweepfile.values import LABELS_FACTOR

Values = tuple[str, ...]
Address = tuple[TablePlace, str]
"""Of a row: its table and its name."""
SeedsOf = Callable[[Job], SeedPair]
JobsOfRows = Mapping[str, Mapping[str, Sequence[Job]]]
"""The transfers of a table, by row and by cell of its grid (``""`` without one)."""


@dataclass(frozen=True, kw_only=True)
class FactorLayout:
    """How the factors of a plan lie in its tables. Made by ``of``."""

    design: PlanDesign
    rows: tuple[str, ...]
    """Factors of the rows; ``labels`` alone for the tables of a sweep without other factors."""
    baseline: Mapping[str, str]
    """Of every factor the value that others are compared with; of ``labels`` only where the sweep names one."""
    jobs: Mapping[str, Job]
    """Of the plan, by name."""

    @classmethod
    def of(cls, plan: Plan) -> FactorLayout:
        """The layout that the sweep asks for, or the default: rows of the factors that its blocks declare."""
        design = PlanDesign.of(plan)
        return cls(
            design=design,
            rows=design.rows_of(plan),
            baseline=design.baseline_of(plan),
            jobs=plan.by_name(),
        )

    @property
    def has_factor_rows(self) -> bool:
        """Whether rows are combinations of values and not label spaces."""
        return self.rows != (LABELS_FACTOR,)

    def address_of(self, job: Job, place: TablePlace) -> Address | None:
        """Table and row of a transfer, where rows are combinations; None for one that is no part of the design."""
        values = self.design.values_of(job) if self.has_factor_rows else None
        if values is None:
            return None
        rest = [name for name in self.design.varied if name not in self.rows]
        if not self.is_cell(values) and LABELS_FACTOR not in (*rest, *self.rows):
            rest.append(LABELS_FACTOR)  # or runs of a baseline's backbones would stand in rows of the design's
        text = ", ".join(f"{name} {values[name]}" for name in rest)
        return replace(place, pretrain=text), self.name_of(values)

    def name_of(self, values: Mapping[str, str]) -> str:
        """Of the row with these values."""
        return " + ".join(values[name] for name in self.rows)

    @property
    def baseline_row(self) -> str:
        """Name of the row that others are compared with; empty without one."""
        return self.name_of(self.baseline) if set(self.rows) <= self.baseline.keys() else ""

    def values_of(self, job: Job) -> Mapping[str, str] | None:
        """The values of a job's cell by factor."""
        return self.design.values_of(job)

    def is_cell(self, values: Mapping[str, str]) -> bool:
        """Whether the values are of the design: backbones that only a baseline of a transfer needs are not."""
        return all(value in self.design.factors[name] for name, value in values.items())

    def pretraining_of(self, transfer: Job) -> Job | None:
        """The pretraining behind a transfer, by which its row or cell shares something with others; None where a search
        found the backbone.
        """
        return pretraining_of(transfer, self.jobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """A row of a table as a cell of the design."""

    values: Mapping[str, str]
    """By factor."""
    runs: Mapping[SeedPair, float]
    planned: Collection[SeedPair]
    transfer: Job
    """The first one."""


def effect_tables(
    layout: FactorLayout, tables: Iterable[Table], jobs: Mapping[TablePlace, JobsOfRows], seeds: SeedsOf
) -> tuple[EffectTable, ...]:
    """Of each transfer of final weights on all labels, what its factors do; nothing where only label spaces differ.

    Args:
        layout: of the plan.
        tables: of the report.
        jobs: the transfers of each table.
        seeds: those of a transfer.
    """
    if not layout.design.has_factors:
        return ()
    metric, cells = "", dict[TablePlace, list[_Cell]]()
    for table in tables:
        for row in (row for row in table.rows if row.results):
            some = jobs[table.place][row.label_space][row.cell]
            values = layout.values_of(some[0])
            if values is not None and layout.is_cell(values):
                runs, metric = values_by_seeds(row.results, table.metric), table.metric
                planned = {counted_seeds(seeds(job), metric) for job in some}
                cell = _Cell(values=values, runs=runs, planned=planned, transfer=some[0])
                cells.setdefault(replace(table.place, pretrain=""), []).append(cell)
    return tuple(_effect_table(layout, place, metric, found) for place, found in cells.items())


def _effect_table(layout: FactorLayout, place: TablePlace, metric: str, found: Sequence[_Cell]) -> EffectTable:
    names = layout.design.varied
    unique = {tuple(cell.values[name] for name in names): cell for cell in found}
    cells = [DesignCell(values=values, runs=cell.runs) for values, cell in unique.items()]
    shared = _Shared(layout, [(cell.values, cell.transfer) for cell in unique.values()])
    bounds = bounds_of(metric, (value for cell in cells for value in cell.runs.values()))
    effects = _factorial(layout, cells, shared).effects(bounds)
    main = [effect for effect in effects.contrasts if len(effect.factors) == 1]
    return EffectTable(
        place=place,
        metric=metric,
        factors={name: layout.design.factors[name] for name in names},
        cells=tuple(cell.values for cell in cells),
        means=tuple(balanced_means(cells, [cell.planned for cell in unique.values()])),
        contrasts=effects.contrasts,
        tests=effects.tests,
        pairings=tuple(
            Pairing(
                factor=effect.factors[0],
                value=effect.values[0],
                reference=effect.references[0],
                shared=str(shared.of(effect.factors[0], effect.values[0], effect.references[0])),
            )
            for effect in main
        ),
    )


def _factorial(layout: FactorLayout, cells: Sequence[DesignCell], shared: _Shared) -> FactorialDesign:
    return FactorialDesign(
        layout.design.varied,
        cells,
        levels=layout.design.factors,
        references=layout.baseline,
        is_paired=lambda factor, one, other: shared.of(factor, one, other) is not Sharing.NOTHING,
    )


def planned_design(layout: FactorLayout, jobs: Iterable[Sequence[Job]], seeds: SeedsOf) -> FactorialDesign:
    """What the report will test of one transfer once all of it is there; every run has the value 0.

    Args:
        layout: of the plan.
        jobs: the transfers of each row.
        seeds: those of a transfer.
    """
    found = {}
    for some in jobs:
        values = layout.values_of(some[0])
        if values is not None and layout.is_cell(values):
            found[tuple(values[name] for name in layout.design.varied)] = (values, some)
    cells = [DesignCell(values=cell, runs=dict.fromkeys(map(seeds, some), 0.0)) for cell, (_, some) in found.items()]
    return _factorial(layout, cells, _Shared(layout, [(values, some[0]) for values, some in found.values()]))


class _Shared:
    """What all matched cells of two values of a factor share."""

    def __init__(self, layout: FactorLayout, cells: Iterable[tuple[Mapping[str, str], Job]]) -> None:
        """``cells`` are the values of each by factor, and a transfer of it."""
        self._jobs = layout.jobs
        self._known: dict[tuple[str, str, str], Sharing] = {}
        self._backbones: dict[str, dict[str, dict[Values, Job | None]]] = {}
        backbones = [(values, layout.pretraining_of(transfer)) for values, transfer in cells]
        for name in layout.design.varied:
            by_value = self._backbones.setdefault(name, {})
            for values, backbone in backbones:
                rest = tuple(value for other, value in values.items() if other != name)
                by_value.setdefault(values[name], {})[rest] = backbone

    def of(self, factor: str, first: str, second: str) -> Sharing:
        """Between two values, whatever the other factors."""
        low, high = sorted((first, second))
        key = (factor, low, high)
        if key not in self._known:
            self._known[key] = self._find(*key)
        return self._known[key]

    def _find(self, factor: str, first: str, second: str) -> Sharing:
        one, other = self._backbones[factor].get(first, {}), self._backbones[factor].get(second, {})
        found, is_matched = Sharing.all_of_it(), False
        for rest in one.keys() & other.keys():
            found, is_matched = found & sharing_between(one[rest], other[rest], self._jobs), True
        return found if is_matched else Sharing.NOTHING


# ------------------------------------------------------------------------------------------------- matched over sweeps


def check_factors(plan: Plan, names: Sequence[str]) -> None:
    """Raise ``UserError`` for a name that is not a factor of a plan."""
    known = PlanDesign.of(plan).factors
    for name in names:
        if name not in known:
            message = f"'{name}' is not a factor of sweep {plan.sweep}: {did_you_mean(name, known)}"
            raise UserError(f"{message}; match by factors that all sweeps have")


def matched_by(report: Report, names: Sequence[str]) -> Report:
    """The report of a plan with these rows, whose tables are called alike in every sweep: by their transfer alone.

    Raises:
        UserError: several cells of the sweep have the same values, so that it is not clear which one is meant.
    """
    tables: dict[TablePlace, Table] = {}
    for table in report.tables:
        place = replace(table.place, pretrain="")
        if place in tables:
            raise UserError(
                f"sweep {report.sweep} has several cells with equal {', '.join(names)} under {table.transfer} "
                f"({tables[place].pretrain}; {table.pretrain}): name the factors that they differ in, too"
            )
        tables[place] = table
    return replace(report, tables=tuple(replace(table, pretrain="") for table in tables.values()))
