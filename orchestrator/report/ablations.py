"""Whole grids, all checkpoints and all label fractions side by side; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from orchestrator.report.grouping import Cells, Grouped, facet_rank, headline_places
from orchestrator.report.results import Ablation, AblationCell, AblationRow, Facet, Place, Row, Table
from orchestrator.report.selection import SELECT_METRIC, mean_metric
from orchestrator.report.tables import TableBuilder

_ABSENT = AblationCell(num_expected=0, summary=None)
FINAL, ALL = "final", "all"
"""What checkpoints and fractions without a name are called."""


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
    builder: TableBuilder, place: Place, row: Row, value: str, cells: Cells, *, is_headline: bool
) -> AblationCell:
    results = builder.results(cells.get(value, ()))
    return AblationCell(
        num_expected=len(cells.get(value, ())),
        summary=builder.summarize(results),
        select_error=mean_metric(results, SELECT_METRIC),
        is_selected=row.selected_by is not None and value == row.cell,
        published=builder.published.find(place, row.label_space, is_headline=is_headline, cell=value),
    )


def _along(tables: Sequence[Table], facet: Facet) -> list[Ablation]:
    """Tables that differ in nothing but the facet, side by side."""
    alike: dict[Place, list[Table]] = {}
    for table in tables:
        alike.setdefault(_without(table.place, facet), []).append(table)
    return [_side_by_side(place, some, facet) for place, some in alike.items() if len(some) > 1]


def _side_by_side(place: Place, tables: Sequence[Table], facet: Facet) -> Ablation:
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


def _value(place: Place, facet: Facet) -> str:
    return place.checkpoint if facet is Facet.CHECKPOINT else place.fraction


def _without(place: Place, facet: Facet) -> Place:
    return replace(place, checkpoint="") if facet is Facet.CHECKPOINT else replace(place, fraction="")
