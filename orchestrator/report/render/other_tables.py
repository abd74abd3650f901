"""Kinds of labels, grids, checkpoints, fractions, pairs of label spaces and searches as tables of text."""

from __future__ import annotations

from orchestrator.planning.estimate.power import ALPHA_TEXT
from orchestrator.report.render.columns import TextTable, describe_place, describe_transfer, family_caption, units
from orchestrator.report.render.numbers import MISSING, fixed, hours, mean_and_std, number, plus_minus
from orchestrator.report.results import (
    Ablation,
    AblationCell,
    AblationRow,
    Facet,
    FactorTable,
    Row,
    SearchReport,
    Table,
)
from orchestrator.report.statistics.summaries import PairedDifference

_MIN_KINDS, _MIN_ROWS = 2, 3
_MAX_COLUMNS = 8
_MAX_MATRIX = 15
"""Up to this number of label spaces, all pairs are shown; the CSV file always has them."""
_NAMES = {Facet.CELL: "grid", Facet.CHECKPOINT: "checkpoints", Facet.FRACTION: "label fractions"}
_STAR = "*"
_MAX_ROWS = 20
"""Trials that are shown, the best ones first; the record of the search has all."""


def kinds_table(table: Table) -> TextTable | None:
    """Kinds of labels and their numbers of classes G as the two sides of a table; G goes down where there are many.

    None where there is nothing to arrange: fewer than two kinds with at least three label spaces each, or rows that are
    combinations of factors.
    """
    if isinstance(table, FactorTable):
        return None
    kinds: dict[str, dict[int, list[Row]]] = {}
    for row in table.rows:
        if row.granularity is not None:
            kinds.setdefault(row.series, {}).setdefault(row.granularity, []).append(row)
    large = [found for found in kinds.values() if sum(map(len, found.values())) >= _MIN_ROWS]
    if len(large) < _MIN_KINDS:
        return None
    sizes = sorted({size for found in kinds.values() for size in found})
    cells = {
        kind: [" / ".join(_kinds_cell(row, table) for row in found.get(size, ())) for size in sizes]
        for kind, found in kinds.items()
    }
    title = f"{describe_transfer(table)}: {table.metric}{units(table.metric)[0]} by kind of labels and G"
    if len(sizes) <= _MAX_COLUMNS:
        header = ("labels", *map(str, sizes))
        rows = [(kind, *some) for kind, some in cells.items()]
    else:
        header = ("G", *cells)
        rows = [(str(size), *some) for size, some in zip(sizes, zip(*cells.values(), strict=True), strict=True)]
    return TextTable(title=title, header=header, rows=tuple(rows), caption=_kinds_caption(table))


def _kinds_cell(row: Row, table: Table) -> str:
    if row.summary is None:
        found = MISSING
    else:
        lacks = lacking(row.num_values, row.num_expected)
        found = f"{plus_minus(row.summary, table.metric)}{lacks}"
    if row.published is None:
        return found
    return f"{found} (published {mean_and_std(row.published.value, row.published.std, table.metric)})"


def _kinds_caption(table: Table) -> str:
    return f"baseline: {table.baseline}" if table.baseline else ""


def ablation_table(ablation: Ablation) -> TextTable:
    """Label spaces down, values across, or the other way round where there are too many values."""
    unit = units(ablation.metric)[0]
    title = f"{describe_place(ablation.place)}: {_NAMES[ablation.facet]}, {ablation.metric}{unit}"
    cells = [[_ablation_cell(cell, ablation.metric) for cell in row.cells] for row in ablation.rows]
    if len(ablation.values) <= _MAX_COLUMNS or len(ablation.values) <= len(ablation.rows):
        header = ("pretrained on", "G", *ablation.values)
        rows = [(row.label_space, _granularity(row), *some) for row, some in zip(ablation.rows, cells, strict=True)]
    else:
        header = (ablation.facet.value, *(f"{row.label_space} (G = {_granularity(row)})" for row in ablation.rows))
        rows = [(value, *some) for value, some in zip(ablation.values, zip(*cells, strict=True), strict=True)]
    return TextTable(title=title, header=header, rows=tuple(rows), caption=_ablation_caption(ablation))


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
        caption="; ".join([f"{_STAR} = established, corrected p < {ALPHA_TEXT}", *family_caption(table)]),
    )


def lacking(num_values: int, num_expected: int) -> str:
    """`` (4/6)`` behind a mean of 4 of 6 planned runs; empty where none is missing."""
    return "" if num_values == num_expected else f" ({num_values}/{num_expected})"


def _ablation_cell(cell: AblationCell, metric: str) -> str:
    if cell.num_expected == 0:
        return ""
    if cell.summary is None:
        return MISSING
    lacks = lacking(cell.summary.num_values, cell.num_expected)
    printed = ""
    if cell.published is not None:
        printed = f" (published {mean_and_std(cell.published.value, cell.published.std, metric)})"
    held_out = "" if cell.select_error is None else f" [{fixed(100 * cell.select_error, 2)}]"
    star = _STAR if cell.is_selected else ""
    return f"{plus_minus(cell.summary, metric)}{held_out}{lacks}{printed}{star}"


def _ablation_caption(ablation: Ablation) -> str:
    if not ablation.selected_by:
        return ""
    chosen = f"{_STAR} = selected: " if ablation.facet is Facet.CELL else "selection: "
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


def search_table(search: SearchReport) -> TextTable:
    """Trials down, their values across; below, what was saved and the risk."""
    fields = parameter_names(search)
    header = ("trial", *fields, "state", "epochs", f"{search.metric} [%]")
    shown = search.trials[:_MAX_ROWS]
    rows = tuple(
        (
            str(trial.number),
            *(_parameter_text(trial.params.get(field, MISSING)) for field in fields),
            trial.state,
            f"{trial.epoch:g}",
            MISSING if trial.value is None else fixed(100 * trial.value, 2),
        )
        for trial in shown
    )
    more = len(search.trials) - len(shown)
    caption = " ".join([*sentences(search), *([f"{more} more trials are in its record."] if more else [])])
    best = next((index for index, trial in enumerate(shown) if trial.number == search.best), None)
    title = f"{search.job}: {search.algorithm} over {search.over}, by {search.metric}"
    return TextTable(title=title, header=header, rows=rows, best=best, caption=caption)


def parameter_names(search: SearchReport) -> list[str]:
    """What was searched over, in the order of the search space."""
    return list(dict.fromkeys(name for trial in search.trials for name in trial.params))


def hours_unit(search: SearchReport) -> tuple[str, float]:
    """Unit of its cost (``GPU`` or ``CPU`` hours), and how many of them one hour of a trial takes."""
    return ("GPU", search.gpus) if search.gpus else ("CPU", search.cpus)


def sentences(search: SearchReport) -> list[str]:
    """Whether the best one is alone, what was saved, and the risk, in words."""
    return [*_ties(search), *_saving(search)]


def _ties(search: SearchReport) -> list[str]:
    """Trials whose value is that of the best one."""
    values = {trial.number: trial.value for trial in search.trials if trial.state == "completed"}
    equal = sorted(number for number, value in values.items() if value is not None and value == values.get(search.best))
    if len(equal) < 2:
        return []
    return [f"{len(equal)} trials tie for the best ({', '.join(map(str, equal))}); trial {search.best} was selected."]


def _saving(search: SearchReport) -> list[str]:
    unit, each = hours_unit(search)
    stopped = sum(trial.state == "stopped" for trial in search.trials)
    spent, full = hours(search.spent_hours * each), hours(search.full_hours * each)
    failed = sum(trial.state == "failed" for trial in search.trials)
    if not stopped:
        who = f"{failed} of {len(search.trials)} trials failed, all others" if failed else "All trials"
        return [f"{who} ran to the end: {spent} {unit}-hours."]
    epochs = f"{search.epochs:g} of {search.full_epochs:g} epochs were trained, {spent} {unit}-hours of {full} that "
    saved = f"all trials would have taken: {fixed(100 * search.saved_share, 0)} % saved."
    risk = f"Risk: {stopped} of {len(search.trials)} trials were stopped early; one of them might have been the best."
    told = [epochs + saved, risk]
    for rung in search.risks:
        if rung.num_stopped and rung.num_pairs:
            swapped = f"{rung.num_swapped} of {rung.num_pairs} pairs of the remaining trials"
            told.append(f"After epoch {rung.rung:g} ({rung.num_stopped} were stopped), {swapped} changed their order.")
        elif rung.num_stopped:
            told.append(
                f"At epoch {rung.rung:g}, {rung.num_stopped} were stopped; too few trials remain to estimate the risk."
            )
    return told


def _parameter_text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
