"""From the committed results of a sweep to its report: tables, ablations, searches and notes for the reader; pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace

from orchestrator.core.job_kinds import REPORTED_KINDS, TIMED_KINDS, TRANSFER_KINDS
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.report.analyses import build_analyses
from orchestrator.report.factors import FactorLayout, effect_tables
from orchestrator.report.inputs import Committed, read_committed
from orchestrator.report.results import (
    Ablation,
    AblationCell,
    AblationRow,
    Criterion,
    Facet,
    FactorReport,
    Report,
    Result,
    Row,
    Table,
    TablePlace,
    build_searches,
)
from orchestrator.report.simulations import build_simulations, notes_on_simulations
from orchestrator.report.statistics.summaries import SeedPair
from orchestrator.report.tables import (
    BEST_METRIC,
    SELECT_METRIC,
    Cells,
    Grouped,
    PublishedIndex,
    TableBuilder,
    facet_rank,
    group_transfers,
    headline_places,
    mean_metric,
    seeds_of,
    with_backbone_metric,
)
from orchestrator.state.snapshot import JobView
from orchestrator.storage.protocol import ObjectStore

_ABSENT = AblationCell(num_expected=0, summary=None)
FINAL, ALL = "final", "all"
"""Names of checkpoints and fractions that have none."""
_UNPRICED = (
    "cost unknown: neither labels of nodes nor the table of prices give a price for the nodes that were used (if it is "
    "not recorded whether a node was spot, only an entry with one price for both applies)"
)
_FAILED = ("failed", "skipped", "cancelled")
"""States that end a job without a result, causes before what follows from them."""


def build_ablations(builder: TableBuilder, grouped: Grouped, tables: Sequence[Table]) -> tuple[Ablation, ...]:
    """The grids in the order of the plan, then checkpoints, then fractions."""
    by_place = {table.place: table for table in tables}
    headlines = headline_places(grouped)
    grids = [
        _grid(builder, by_place[place], spaces, is_headline=place in headlines)
        for place, spaces in grouped.items()
        if any("" not in cells for cells in spaces.values())
    ]
    return (*grids, *_along(tables, Facet.CHECKPOINT), *_along(tables, Facet.FRACTION))


def _grid(builder: TableBuilder, table: Table, spaces: Mapping[str, Cells], *, is_headline: bool) -> Ablation:
    values = tuple(dict.fromkeys(cell for cells in spaces.values() for cell in cells))
    rows = []
    for row in table.rows:
        cells = spaces[row.label_space]
        found = [_grid_cell(builder, table.place, row, value, cells, is_headline=is_headline) for value in values]
        rows.append(_ablation_row(row, found))
    return Ablation(
        place=table.place,
        facet=Facet.CELL,
        metric=table.metric,
        values=values,
        rows=tuple(rows),
        selected_by=table.criteria,
    )


def _grid_cell(
    builder: TableBuilder, place: TablePlace, row: Row, value: str, cells: Cells, *, is_headline: bool
) -> AblationCell:
    results, first = builder.results(cells.get(value, ())), next(iter(cells.values()))[0]
    return AblationCell(
        num_expected=builder.num_expected(cells.get(value, ())),
        summary=builder.summarize(results),
        select_error=mean_metric(results, SELECT_METRIC),
        is_selected=row.selected_by is not None and value == row.cell,
        published=builder.published_of(place, first, is_headline=is_headline, cell=value),
    )


def _along(tables: Sequence[Table], facet: Facet) -> list[Ablation]:
    """Tables that differ in nothing but the facet, side by side."""
    alike: dict[TablePlace, list[Table]] = {}
    for table in tables:
        alike.setdefault(_without(table.place, facet), []).append(table)
    return [_side_by_side(place, some, facet) for place, some in alike.items() if len(some) > 1]


def _side_by_side(place: TablePlace, tables: Sequence[Table], facet: Facet) -> Ablation:
    ordered = sorted(tables, key=lambda table: facet_rank(_value(table.place, facet)))
    spaces: dict[str, dict[str, Row]] = {}
    for table in ordered:
        for row in table.rows:
            spaces.setdefault(row.label_space, {})[_value(table.place, facet)] = row
    values = [_value(table.place, facet) for table in ordered]
    unnamed = FINAL if facet is Facet.CHECKPOINT else ALL
    return Ablation(
        place=place,
        facet=facet,
        metric=ordered[0].metric,
        values=tuple(value or unnamed for value in values),
        rows=tuple(
            _ablation_row(next(iter(found.values())), [_cell(found.get(value)) for value in values])
            for found in spaces.values()
        ),
        selected_by=tuple(dict.fromkeys(criterion for table in ordered for criterion in table.criteria)),
    )


def _cell(row: Row | None) -> AblationCell:
    if row is None:
        return _ABSENT
    return AblationCell(num_expected=row.num_expected, summary=row.summary, published=row.published)


def _ablation_row(row: Row, cells: Sequence[AblationCell]) -> AblationRow:
    return AblationRow(label_space=row.label_space, series=row.series, granularity=row.granularity, cells=tuple(cells))


def _value(place: TablePlace, facet: Facet) -> str:
    return place.checkpoint if facet is Facet.CHECKPOINT else place.fraction


def _without(place: TablePlace, facet: Facet) -> TablePlace:
    return replace(place, checkpoint="") if facet is Facet.CHECKPOINT else replace(place, fraction="")


def notes_on_costs(report: Report, prices: PriceTable | None) -> Iterator[str]:
    """Why prices were given and no cost is shown."""
    found = [row.compute for table in report.headlines for row in table.rows if row.compute]
    if prices is not None and found and all(compute.cost is None for compute in found):
        yield _UNPRICED


def notes_on(
    plan: Plan, committed: Mapping[str, Committed], views: Mapping[str, JobView], published: PublishedIndex
) -> Iterator[str]:
    """Notes on the runs themselves, and on published numbers that are not beside any."""
    transfers = [job for job in plan.jobs if job.kind in TRANSFER_KINDS]
    yield from _metric_notes(plan.metric, transfers, committed)
    spaces = {job.facets["label_space"] for job in transfers}
    if plan.baseline and transfers and plan.baseline not in spaces:
        yield f"no run pretrains on the baseline {plan.baseline}: nothing is compared; add it to pretrain.labels"
    changed = [name for name, found in committed.items() if found.has_changed_numerics]
    if changed:
        yield f"{len(changed)} runs were resumed under other numerics, no longer bit-exact (first: {changed[0]})"
    uncompiled = [name for name, found in committed.items() if found.is_uncompiled]
    if uncompiled:
        yield (
            f"{len(uncompiled)} runs fell back to code that is not compiled, although compute.compile asked for it "
            f"(first: {uncompiled[0]}); their records say why: see `notes`"
        )
    yield from _data_notes(committed)
    ended = [view for job in plan.jobs if job.name not in committed and (view := views.get(job.name)) is not None]
    by_state = {state: found for state in _FAILED if (found := [view for view in ended if view.state.value == state])}
    is_whole = all(job.name in committed for job in plan.jobs if job.kind in TIMED_KINDS)
    if by_state and not is_whole:  # artifacts of kinds that no report reads were not looked up
        (state, [first, *others]), *rest = by_state.items()
        reason = f": {first.reason}" if first.reason else ""
        more = "".join(f", {len(found)} {other}" for other, found in rest)
        yield f"{1 + len(others)} jobs {state} (first: {first.name}{reason}){more}; their cells lack these runs"
    reasons = ((published.unused, "the sweep has no such row"), (published.repeated, "a later one is of the same row"))
    for entry, why in ((entry, why) for entries, why in reasons for entry in entries):
        yield (
            f"the published number of {entry.label_space or 'direct training'} under {entry.transfer} "
            f"({entry.source or 'no source'}) is not shown: {why}"
        )


def _data_notes(committed: Mapping[str, Committed]) -> Iterator[str]:
    """Which runs did not see the very samples that others saw."""
    rewound = {name: found.num_rewinds for name, found in committed.items() if found.num_rewinds}
    if rewound:
        yield (
            f"{len(rewound)} runs were rewound after a NaN, an infinity or a spike, and skipped the batches before it, "
            f"{sum(rewound.values())} times in all (first: {next(iter(rewound))}); their records name the samples, and "
            "their curves may show, between the two steps of a rewind, values from before it"
        )
    bad = {name: found.num_bad_samples for name, found in committed.items() if found.num_bad_samples}
    if bad:
        yield (
            f"{len(bad)} runs found samples that cannot be decoded, up to {max(bad.values())} per run; training "
            f"replaced them and validation left them out (first: {next(iter(bad))}); their records name them"
        )


def notes_on_statistics(report: Report) -> Iterator[str]:
    """Notes on what the tables can and cannot say."""
    tables = report.headlines
    singles = [table.transfer for table in tables if _num_pretrain_seeds(table) == 1]
    if singles:
        yield (
            f"one pretrain seed only ({', '.join(dict.fromkeys(singles))}): no interval says how other backbones of "
            "the same label space would do, and nothing is tested"
        )
    elif any(_num_pretrain_seeds(table) == 2 for table in tables):
        yield "two pretrain seeds leave one degree of freedom: paired tests find hardly anything; a third seed helps"
    yield from _notes_on_repeated_seeds(report)
    yield from notes_on_selection(report)


def _notes_on_repeated_seeds(report: Report) -> Iterator[str]:
    """Rows whose runs are not told apart: of several backbones of one seed, only the last one is in the numbers."""
    for table in report.headlines:
        for row in table.rows:
            first: dict[SeedPair, Result] = {}
            for result in row.results:
                if first.setdefault(result.seeds, result).key != result.key:
                    yield (
                        f"{row.label_space} under {table.transfer} has several runs of equal seeds (first: "
                        f"{first[result.seeds].job} and {result.job}), and only the last one counts: their blocks "
                        "state equal values of all factors; state what they differ in as a factor, too"
                    )
                    break


def notes_on_selection(report: Report) -> Iterator[str]:
    """What was chosen by looking at the validation images, and what may still be chosen otherwise."""
    if any(Criterion.VALIDATION in table.criteria for table in report.tables):
        yield (
            "rows marked as selected on validation have a grid cell, or the trial of a search, that was chosen by its "
            "error on the same validation images: their errors are optimistic, more so the more was tried"
        )
    if report.metric == BEST_METRIC and any(table.ranked for table in report.tables):
        yield (
            f"{BEST_METRIC} is the lowest error of all evaluations of a run on the same validation images: of runs "
            "with several it is optimistic, which neither intervals nor the binomial standard error cover"
        )
    for ablation in report.ablations:
        cells = [cell for row in ablation.rows for cell in row.cells]
        lacking = sum(cell.num_expected - (cell.summary.num_values if cell.summary else 0) for cell in cells)
        if ablation.facet is Facet.CELL and lacking and ablation.selected_by:
            yield f"the grid of {ablation.place.transfer} lacks {lacking} runs: another cell may be selected later"


def _metric_notes(metric: str, transfers: Sequence[Job], committed: Mapping[str, Committed]) -> Iterator[str]:
    there = [(job.name, committed[job.name].metrics) for job in transfers if job.name in committed]
    without = [name for name, metrics in there if metric not in metrics]
    if without:
        known = ", ".join(sorted({name for _, metrics in there for name in metrics})) or "none"
        what = "no committed run has" if len(without) == len(there) else f"{len(without)} committed runs have no"
        yield f"{what} metric {metric!r} (first: {without[0]}); reported metrics: {known}"
    invalid = [name for name, metrics in there if not math.isfinite(metrics.get(metric, 0.0))]
    if invalid:
        yield f"{len(invalid)} runs report {metric} = nan or infinity and are left out (first: {invalid[0]})"


def _num_pretrain_seeds(table: Table) -> int:
    return max((row.summary.num_pretrain_seeds for row in table.rows if row.summary), default=0)


def build_report(
    store: ObjectStore, plan: Plan, views: Mapping[str, JobView] | None = None, prices: PriceTable | None = None
) -> Report:
    """Compute the report of what is committed at this moment; needs nothing but the store.

    ``views`` (``Snapshot.jobs``) tell failed jobs from those that are still to come, and what the attempts took
    and what their nodes cost; ``prices`` are for nodes that said no price.
    """
    return compute_report(plan, read_committed(store, plan.jobs), views, prices)


def compute_report(
    plan: Plan,
    committed: Mapping[str, Committed],
    views: Mapping[str, JobView] | None = None,
    prices: PriceTable | None = None,
) -> Report:
    """The report as a pure function of the plan, what is committed by job name, and the jobs' states."""
    states = views or {}
    committed = with_backbone_metric(plan, committed, states)
    layout = FactorLayout.of(plan)
    grouped = group_transfers(plan.jobs, layout)
    builder = TableBuilder(plan, committed, states, grouped, layout=layout, prices=prices)
    tables = builder.build()
    report = Report(
        sweep=plan.sweep,
        metric=plan.metric,
        baseline=plan.baseline,
        tables=tables,
        missing=tuple(job.name for job in plan.jobs if job.kind in REPORTED_KINDS and job.name not in committed),
        absent=builder.absent(),
        backbones=builder.backbones(),
        ablations=build_ablations(builder, grouped, tables),
        searches=build_searches(plan.jobs, {name: found.search for name, found in committed.items()}),
        simulations=build_simulations(plan, committed),
        analyses=build_analyses(plan, committed, tables),
    )
    if layout.design.has_factors:
        report = FactorReport(
            **{field.name: getattr(report, field.name) for field in fields(report)},
            factors={name: layout.design.factors[name] for name in layout.design.varied},
            effects=effect_tables(layout, report.headlines, grouped, seeds_of),
            cells=tuple(
                tuple(layout.design.columns_of(next(iter(cells.values()))[0]) for cells in spaces.values())
                for spaces in grouped.values()
            ),
        )
    notes = (
        *notes_on(plan, committed, states, builder.published),
        *notes_on_costs(report, prices),
        *notes_on_statistics(report),
        *notes_on_simulations(plan, committed),
    )
    return replace(report, notes=notes)
