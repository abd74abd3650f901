"""Grids, checkpoints, fractions and pairs of label spaces as tables of text."""

from __future__ import annotations

from orchestrator.report.numbers import MISSING, fixed, mean_and_std, number, plus_minus
from orchestrator.report.results import Ablation, AblationCell, AblationRow, Facet, Table
from orchestrator.report.statistics import PairedDifference
from orchestrator.report.text import TextTable, describe_place, describe_transfer, family_caption, units

_MAX_MATRIX = 15
"""Label spaces of which all pairs are shown; more are for the CSV file."""
_MAX_COLUMNS = 8
_NAMES = {Facet.CELL: "grid", Facet.CHECKPOINT: "checkpoints", Facet.FRACTION: "label fractions"}
_STAR = "*"


def ablation_table(ablation: Ablation) -> TextTable:
    """Label spaces down, values across, or the other way round where there are too many values."""
    unit = units(ablation.metric)[0]
    title = f"{describe_place(ablation.place)}: {_NAMES[ablation.facet]}, {ablation.metric}{unit}"
    cells = [[_cell(cell, ablation.metric) for cell in row.cells] for row in ablation.rows]
    if len(ablation.values) <= _MAX_COLUMNS or len(ablation.values) <= len(ablation.rows):
        header = ("pretrained on", "G", *ablation.values)
        rows = [(row.label_space, _granularity(row), *some) for row, some in zip(ablation.rows, cells, strict=True)]
    else:
        header = (ablation.facet.value, *(f"{row.label_space} (G = {_granularity(row)})" for row in ablation.rows))
        rows = [(value, *some) for value, some in zip(ablation.values, zip(*cells, strict=True), strict=True)]
    return TextTable(title=title, header=header, rows=tuple(rows), caption=_caption(ablation))


def pairs_table(table: Table) -> TextTable | None:
    """All label spaces against each other; None where that would not fit on a page."""
    names = [row.label_space for row in table.rows if row.results]
    if not 2 <= len(names) <= _MAX_MATRIX or not table.comparisons:
        return None
    found = {(pair.first, pair.second): pair.difference for pair in table.comparisons}
    rows = [(first, *(_pair(found, first, second, table.metric) for second in names)) for first in names]
    return TextTable(
        title=f"{describe_transfer(table)}: row minus column{units(table.metric)[1]}",
        header=("", *names),
        rows=tuple(rows),
        caption="; ".join([f"{_STAR} = established, corrected p < 0.05", *family_caption(table)]),
    )


def _cell(cell: AblationCell, metric: str) -> str:
    if cell.num_expected == 0:
        return ""
    if cell.summary is None:
        return MISSING
    lacks = "" if cell.summary.num_values == cell.num_expected else f" ({cell.summary.num_values}/{cell.num_expected})"
    printed = ""
    if cell.published is not None:
        printed = f" (published {mean_and_std(cell.published.value, cell.published.std, metric)})"
    held_out = "" if cell.select_error is None else f" [{fixed(100 * cell.select_error, 2)}]"
    star = _STAR if cell.is_selected else ""
    return f"{plus_minus(cell.summary, metric)}{held_out}{lacks}{printed}{star}"


def _caption(ablation: Ablation) -> str:
    if not ablation.selected_by:
        return ""
    chosen = f"{_STAR} = selected: " if ablation.facet is Facet.CELL else "grid cells: "
    told = chosen + "; ".join(criterion.value for criterion in ablation.selected_by)
    has_held_out = any(cell.select_error is not None for row in ablation.rows for cell in row.cells)
    return f"{told}. In brackets: select_error [%]" if has_held_out else told


def _pair(found: dict[tuple[str, str], PairedDifference], first: str, second: str, metric: str) -> str:
    difference, turned = found.get((first, second)), found.get((second, first))
    if difference is None and turned is not None:
        difference = turned.turned
    if difference is None:
        return ""
    star = _STAR if difference.is_established else ""
    return number(difference.mean, metric, sign="+") + star


def _granularity(row: AblationRow) -> str:
    return MISSING if row.granularity is None else str(row.granularity)
