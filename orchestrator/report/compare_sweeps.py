"""The same cells of several sweeps side by side, with their differences; pure.

Whether runs of equal seeds are subtracted is decided as in tables of combinations: by what the backbones of the two
cells share (``planning.graph.pairing``). If that is only the number of the seed, the seed is no block. Then the two
cells are independent samples and compared by Welch's t, and so are cells without a common pretrain seed. Backbones
that searches found are pairs by what their trials share; tables of combinations take those for independent samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.core.errors import UsageError, UserError
from orchestrator.planning.graph.pairing import Sharing, backbone_identity, sharing_of
from orchestrator.planning.graph.plan import Plan
from orchestrator.report.build import notes_on_selection
from orchestrator.report.comparisons import subtracted_mean, values_of
from orchestrator.report.render.columns import (
    DIFFERENCE_COLUMNS,
    PLACE_COLUMNS,
    TEST_COLUMNS,
    Records,
    TextTable,
    describe_place,
    units,
    values,
)
from orchestrator.report.render.numbers import (
    CORRECTED_INTERVAL,
    MISSING,
    count,
    family_interval,
    number,
    p_text,
    plus_minus,
)
from orchestrator.report.results import Report, Row, TablePlace
from orchestrator.report.statistics.corrections import corrected, family_method, within
from orchestrator.report.statistics.effects import independent_difference
from orchestrator.report.statistics.intervals import bounds_of
from orchestrator.report.statistics.summaries import PairedDifference, paired_difference

SAME = "same runs"
UNPAIRED = "no pairs"
"""In place of the number of pairs."""
_Cell = tuple[TablePlace, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedCell:
    """One label space under one transfer, in every sweep."""

    label_space: str
    granularity: int | None
    rows: tuple[Row | None, ...]
    """By sweep; None where the sweep has no such cell."""
    differences: tuple[PairedDifference | None, ...]
    """Every sweep but the first, minus the first; corrected over all cells of all sweeps."""
    are_same: tuple[bool, ...]
    """Whether all common runs of that sweep and the first are the very same artifacts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepComparison:
    """Several sweeps, the first of which the others are compared with."""

    sweeps: tuple[str, ...]
    metric: str
    places: Mapping[TablePlace, tuple[ComparedCell, ...]]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        tables = [{**asdict(place), "cells": [asdict(cell) for cell in some]} for place, some in self.places.items()]
        return {"sweeps": self.sweeps, "metric": self.metric, "tables": tables, "notes": self.notes}


def check_different(sweeps: Sequence[str]) -> None:
    """Raise ``UsageError`` for fewer than two names, or one twice."""
    if len(set(sweeps)) < max(2, len(sweeps)):
        raise UsageError(f"compare needs at least two different sweeps and got {', '.join(sweeps) or 'none'}")


def compare_sweeps(reports: Sequence[Report], plans: Sequence[Plan]) -> SweepComparison:
    """Compare what the reports have in common: cells by transfer and label space, runs by their seeds.

    Args:
        reports: the first is the one that the others are compared with.
        plans: those that the reports were computed from.

    Raises:
        UsageError: fewer than two sweeps, or one sweep twice.
        UserError: different metrics.
    """
    names = tuple(report.sweep for report in reports)
    check_different(names)
    metrics = {report.sweep: report.metric for report in reports}
    if len(set(metrics.values())) > 1:
        told = ", ".join(f"{sweep}: {metric}" for sweep, metric in metrics.items())
        raise UserError(f"the sweeps report different metrics ({told}): name the one to compare with --metric")
    rows = [_rows(report) for report in reports]
    shared = [cell for cell in dict.fromkeys(cell for some in rows for cell in some) if _num_having(rows, cell) > 1]
    cells = _compared(rows, shared, reports[0].metric, plans)
    places: dict[TablePlace, tuple[ComparedCell, ...]] = {}
    for (place, _), cell in zip(shared, cells, strict=True):
        places[place] = (*places.get(place, ()), cell)
    selection = [f"report of {report.sweep}: {note}" for report in reports for note in notes_on_selection(report)]
    notes = (*_notes(names, rows, shared), *(selection if shared else ()))
    return SweepComparison(sweeps=names, metric=reports[0].metric, places=places, notes=notes)


def comparison_tables(comparison: SweepComparison) -> list[TextTable]:
    """One table of text per transfer."""
    return [_text_table(comparison, place, cells) for place, cells in comparison.places.items()]


def sweep_records(comparison: SweepComparison) -> Records:
    """One line per cell and sweep; the first sweep's have no difference."""
    lines = [
        (
            *values(PLACE_COLUMNS, place),
            *(cell.label_space, cell.granularity, sweep, comparison.metric),
            *((row.summary.num_values, row.summary.mean, row.summary.std) if row and row.summary else (0, None, None)),
            *values(DIFFERENCE_COLUMNS, found),
            int(is_same),
            *values(TEST_COLUMNS, found),
        )
        for place, cells in comparison.places.items()
        for cell in cells
        for sweep, row, found, is_same in zip(
            comparison.sweeps, cell.rows, (None, *cell.differences), (False, *cell.are_same), strict=True
        )
    ]
    names = ("label_space", "granularity", "sweep", "metric", "num_runs", "mean", "std")
    return Records(columns=(*PLACE_COLUMNS, *names, *DIFFERENCE_COLUMNS, "is_same", *TEST_COLUMNS), rows=tuple(lines))


def _rows(report: Report) -> dict[_Cell, Row]:
    return {(table.place, row.label_space): row for table in report.tables for row in table.rows}


def _num_having(rows: Sequence[Mapping[_Cell, Row]], cell: _Cell) -> int:
    return sum(cell in some for some in rows)


def _compared(
    rows: Sequence[Mapping[_Cell, Row]], shared: Sequence[_Cell], metric: str, plans: Sequence[Plan]
) -> list[ComparedCell]:
    others = range(1, len(rows))
    both = [(rows[other].get(cell), rows[0].get(cell)) for other in others for cell in shared]
    of_rows = [plans[other] for other in others for _ in shared]
    # All cells of all sweeps are one family: whoever looks at the table looks at all of them.
    found = corrected([_difference(*some, metric, (plan, plans[0])) for some, plan in zip(both, of_rows, strict=True)])
    possible = [_possible(difference, *rows, metric) for difference, rows in zip(found, both, strict=True)]
    families = [possible[start * len(shared) : (start + 1) * len(shared)] for start in range(len(others))]
    return [
        ComparedCell(
            label_space=cell[1],
            granularity=next((row.granularity for some in rows if (row := some.get(cell)) and row.granularity), None),
            rows=tuple(some.get(cell) for some in rows),
            differences=tuple(family[index] for family in families),
            are_same=tuple(_are_same(some.get(cell), rows[0].get(cell)) for some in rows[1:]),
        )
        for index, cell in enumerate(shared)
    ]


def _difference(row: Row | None, first: Row | None, metric: str, plans: tuple[Plan, Plan]) -> PairedDifference | None:
    if row is None or first is None:
        return None
    of_row, of_first = values_of(row, metric), values_of(first, metric)
    has_common_seed = bool({pair.pretrain for pair in of_row} & {pair.pretrain for pair in of_first})
    find = paired_difference if has_common_seed and _is_paired(row, first, plans) else independent_difference
    return find(of_row, of_first)


def _is_paired(row: Row, first: Row, plans: tuple[Plan, Plan]) -> bool:
    """Whether backbones of equal seeds share more than the number of the seed; seen at the first of these."""
    by_seeds = {result.seeds: result for result in first.results}
    common = ((one, by_seeds[one.seeds]) for one in row.results if one.seeds in by_seeds)
    found = next(common, None) or next(zip(row.results, first.results, strict=False), None)
    if found is None:
        return True  # one of them has no result: there is nothing to compare
    jobs = (plan.by_name() for plan in plans)
    one, other = (backbone_identity(some[result.job], some) for result, some in zip(found, jobs, strict=True))
    return one is not None and other is not None and sharing_of(one, other) is not Sharing.NOTHING


def _possible(
    found: PairedDifference | None, row: Row | None, first: Row | None, metric: str
) -> PairedDifference | None:
    if found is None or row is None or first is None:
        return found
    values, subtracted = values_of(row, metric), values_of(first, metric)
    bounds = bounds_of(metric, [*values.values(), *subtracted.values()])
    return within(found, bounds, subtracted_mean(found, values, subtracted))


def _are_same(row: Row | None, first: Row | None) -> bool:
    if row is None or first is None:
        return False
    keys = {result.seeds: result.key for result in first.results}
    common = [(result.key, keys[result.seeds]) for result in row.results if result.seeds in keys]
    return bool(common) and all(key == other for key, other in common)


def _notes(names: Sequence[str], rows: Sequence[Mapping[_Cell, Row]], shared: Sequence[_Cell]) -> list[str]:
    if not shared:
        return [
            f"{', '.join(names)} have no cell in common: transfers are matched by name, protocol, target and facets"
        ]
    kept = set(shared)
    alone = [(name, [cell for cell in some if cell not in kept]) for name, some in zip(names, rows, strict=True)]
    return [
        f"{len(cells)} cells are in {name} only (first: {cells[0][1]} under {cells[0][0].transfer})"
        for name, cells in alone
        if cells
    ]


def _text_table(comparison: SweepComparison, place: TablePlace, cells: Sequence[ComparedCell]) -> TextTable:
    percent, points = units(comparison.metric)
    first, *others = comparison.sweeps
    header = ["pretrained on", "G"]
    for sweep in comparison.sweeps:
        header += [f"{sweep}{percent}", "n"]
    for sweep in others:
        header += [f"{sweep} - {first}{points}", "pairs", CORRECTED_INTERVAL, "corrected p"]
    return TextTable(
        title=f"{describe_place(place)}: {comparison.metric}",
        header=tuple(header),
        rows=tuple(_text_row(cell, comparison.metric) for cell in cells),
        caption=_caption(comparison),
    )


def _caption(comparison: SweepComparison) -> str:
    found = [one for some in comparison.places.values() for cell in some for one in cell.differences if one is not None]
    tested = sum(one.p_family is not None for one in found)
    pairs = f"{tested} comparison{'s' * (tested > 1)}"
    method = f"corrected: simultaneous over {pairs}, all cells of all sweeps ({family_method(found)})"
    unpaired = f"{UNPAIRED}: their backbones share no seed, or only its number, so Welch's t compares them"
    return "; ".join([*([method] if tested else []), *([unpaired] if not all(one.is_paired for one in found) else [])])


def _text_row(cell: ComparedCell, metric: str) -> tuple[str, ...]:
    texts = [cell.label_space, MISSING if cell.granularity is None else str(cell.granularity)]
    for row in cell.rows:
        texts += [plus_minus(row.summary, metric) if row and row.summary else MISSING, count(row) if row else MISSING]
    for found, is_same in zip(cell.differences, cell.are_same, strict=True):
        if is_same or found is None:
            texts += [SAME if is_same else MISSING, MISSING, MISSING, MISSING]
        else:
            pairs = str(found.num_pairs) if found.is_paired else UNPAIRED
            texts += [number(found.mean, metric, sign="+"), pairs]
            texts += [family_interval(found, metric), p_text(found.p_family)]
    return tuple(texts)
