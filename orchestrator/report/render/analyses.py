"""What analyses found as tables of text, as records for files, as figures, and as a section of the page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape

from orchestrator.report.render.columns import Records, TextTable, Value
from orchestrator.report.render.figures import FIGURES_STYLE, Figure, Point, hue, line_figure, shortened, text_at
from orchestrator.report.render.numbers import MISSING, fixed, mean_interval, plus_minus
from orchestrator.report.results import AnalysisPicture, AnalysisReport, AnalysisRow, Report

_OVER_EPOCHS = ("nc1", "nc2", "cdnv", "msdr")
_MAX_TEXT_MATRIX = 12
"""Rows of a matrix that is printed as text; larger ones are figures alone."""
_MAX_TEXT_LAYERS, _MAX_TEXT_LINES = 24, 6
"""Layers and label spaces of activity that is printed as text; more are figures alone."""
EXPLORATORY = "exploratory: no test, and no correction for their number"


def analysis_tables(analysis: AnalysisReport) -> Iterator[TextTable]:
    """The numbers, the similarity of backbones, activity by layer, and the correlations with transfers."""
    if analysis.rows:
        yield _rows_table(analysis)
    for picture in analysis.pictures:
        if picture.kind == "cka" and len(picture.names) <= _MAX_TEXT_MATRIX:
            yield _matrix_table(analysis, picture)
        if (
            picture.kind == "layers"
            and len(picture.names) <= _MAX_TEXT_LAYERS
            and len(picture.lines) <= _MAX_TEXT_LINES
        ):
            yield _layers_table(analysis, picture)
    if analysis.correlations:
        yield _correlations_table(analysis)


def analysis_records(report: Report) -> Records:
    """One line per analysis, backbones of a label space, checkpoint and metric."""
    names = ("analysis", "pretrain", "label_space", "checkpoint", "metric", "num_expected", "num_runs", "mean", "std")
    lines = [
        (
            *(analysis.name, row.pretrain, row.label_space, row.checkpoint, row.metric, row.num_expected),
            *(row.summary.num_values, row.summary.mean, row.summary.std, row.summary.low, row.summary.high),
        )
        for analysis in report.analyses
        for row in analysis.rows
    ]
    rows: tuple[tuple[Value, ...], ...] = tuple(lines)
    return Records(columns=(*names, "mean_ci_low", "mean_ci_high"), rows=rows)


def _rows_table(analysis: AnalysisReport) -> TextTable:
    has_blocks = any(row.pretrain for row in analysis.rows)
    rows = tuple(
        (
            row.label_space or "all compared",
            *([row.pretrain] if has_blocks else []),
            row.checkpoint or "final",
            row.metric,
            plus_minus(row.summary, row.metric),
            mean_interval(row.summary, row.metric),
            _count(row),
        )
        for row in analysis.rows
    )
    header = ("pretrained on", *(["pretrain"] if has_blocks else []), "checkpoint", "metric", "mean")
    return TextTable(
        title=f"analysis {analysis.name}",
        header=(*header, "95 % CI of the mean", "n"),
        rows=rows,
        expendable=((len(header),),),
        caption="n: pretrain seeds; accuracies in percent",
    )


def _count(row: AnalysisRow) -> str:
    found = row.summary.num_values
    return str(found) if found == row.num_expected else f"{found}/{row.num_expected} runs"


def _matrix_table(analysis: AnalysisReport, picture: AnalysisPicture) -> TextTable:
    rows = tuple(
        (name, *(MISSING if value is None else fixed(value, 2) for value in values))
        for name, values in zip(picture.names, picture.values, strict=True)
    )
    title = f"analysis {analysis.name}: debiased CKA, {picture.title}"
    caption = f"mean over {picture.num_seeds} jobs; 1 = the same up to rotation and scale, 0 = unrelated"
    return TextTable(title=title, header=("", *picture.names), rows=rows, caption=caption)


def _layers_table(analysis: AnalysisReport, picture: AnalysisPicture) -> TextTable:
    shares = zip(*picture.values, strict=True)
    rows = tuple(
        (str(number), name, *(MISSING if value is None else fixed(100 * value, 1) for value in values))
        for number, (name, values) in enumerate(zip(picture.names, shares, strict=True), start=1)
    )
    return TextTable(
        title=f"analysis {analysis.name}: active units by layer [%], {picture.title}",
        header=("", "layer", *picture.lines),
        rows=rows,
        caption=f"activations above 0 behind each activation function; mean over {picture.num_seeds} pretrain seeds",
    )


def _correlations_table(analysis: AnalysisReport) -> TextTable:
    has_blocks = any(found.pretrain for found in analysis.correlations)
    rows = tuple(
        (
            *(found.metric, found.transfer, *([found.pretrain or "all"] if has_blocks else [])),
            *(fixed(found.coefficient, 2, sign="+"), str(found.num_backbones)),
        )
        for found in analysis.correlations
    )
    return TextTable(
        title=f"analysis {analysis.name}: rank correlation with the error of transfers",
        header=("metric", "transfer", *(["pretrain"] if has_blocks else []), "Spearman", "backbones"),
        rows=rows,
        caption=f"{EXPLORATORY}; over all blocks, what they differ in is a part of it" if has_blocks else EXPLORATORY,
    )


# ------------------------------------------------------------------------------------------------------------- the page


def analyses_html(report: Report) -> str:
    """The section of all analyses; empty without any."""
    if not report.analyses:
        return ""
    parts = ['  <section id="analyses-section">', f"<style>{FIGURES_STYLE}</style>", "<h2>Analyses</h2>"]
    for analysis in report.analyses:
        parts.append(f"<h3>{escape(analysis.name)}</h3>")
        if figures := "".join(figure.svg() for figure in analysis_figures(analysis)):
            parts.append(f'<div class="figures">{figures}</div>')
        parts += [_html_table(table) for table in analysis_tables(analysis)]
    return "\n".join([*parts, "  </section>", ""])


def _html_table(table: TextTable) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return (
        f'<details open><summary>{escape(table.title)}</summary><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f'<tbody>{body}</tbody></table></div><p class="caption">{escape(table.caption)}</p></details>'
    )


def analysis_figures(analysis: AnalysisReport) -> Iterator[Figure]:
    """Collapse over epochs, then what the analysis has pictures of."""
    names = [*map(_line_name, analysis.rows), *(name for picture in analysis.pictures for name in picture.lines)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    for metric in _OVER_EPOCHS:
        yield from _over_epochs(analysis, metric, numbers)
    for picture in analysis.pictures:
        if picture.kind == "layers":
            yield _over_layers(picture, numbers)
        elif picture.kind == "embedding":
            yield _scatter(picture, column=2, coloured_by="original class")
            if any(point[3] != -1 for point in picture.values):
                yield _scatter(picture, column=3, coloured_by="trained class")
        else:
            yield _heatmap(picture)


def _line_name(row: AnalysisRow) -> str:
    return ", ".join(filter(None, (row.pretrain, row.label_space)))


def _over_epochs(analysis: AnalysisReport, metric: str, numbers: Mapping[str, int]) -> Iterator[Figure]:
    """A line for each label space, mean with its standard deviation; nothing with a single checkpoint."""
    rows = [row for row in analysis.rows if row.metric == metric and row.checkpoint]
    epochs = sorted({_epoch(row) for row in rows})
    if len(epochs) < 2:
        return
    lines: dict[str, list[Point]] = {}
    for row in sorted(rows, key=_epoch):
        lines.setdefault(_line_name(row), []).append((_epoch(row), row.summary.mean, row.summary.std or 0.0))
    lines = dict(sorted(lines.items(), key=lambda line: numbers[line[0]]))
    yield line_figure(f"{metric} over epochs", {epoch: str(epoch) for epoch in epochs}, lines, numbers=numbers)


def _over_layers(picture: AnalysisPicture, numbers: Mapping[str, int]) -> Figure:
    """From the first layer to the last."""
    lines = {
        name: [(number, value, 0.0) for number, value in enumerate(values) if value is not None]
        for name, values in zip(picture.lines, picture.values, strict=True)
    }
    every = math.ceil(len(picture.names) / 12)
    ticks: dict[float, str] = {number: str(number + 1) for number in range(0, len(picture.names), every)}
    title = f"activation sparsity per layer: share of active units, {picture.title}"
    return line_figure(title, ticks, lines, numbers=numbers)


def _epoch(row: AnalysisRow) -> int:
    return int(row.checkpoint.removeprefix("epoch"))


_CELLS = 300
"""Side of a matrix in pixels."""


def _heatmap(picture: AnalysisPicture) -> Figure:
    """Darker = larger; similarity from 0 to 1, distances from 0 to the largest one."""
    there = [value for row in picture.values for value in row if value is not None]
    top = 1.0 if picture.kind == "cka" else max(there, default=1.0) or 1.0
    num, margin = max(1, len(picture.names)), 116
    side = _CELLS / num
    title = f"{'debiased CKA' if picture.kind == 'cka' else 'squared class distances'}: {picture.title}"
    parts = [text_at(4, 14, f"{title} (white 0, darkest {top:.3g})")]
    for row, values in enumerate(picture.values):
        for column, value in enumerate(values):
            share = 0.0 if value is None or not math.isfinite(value) else min(1.0, max(0.0, value / top))
            name = f"{picture.names[row]}, {picture.names[column]}: {MISSING if value is None else f'{value:.4g}'}"
            parts.append(
                f'<rect x="{margin + column * side:.2f}" y="{24 + row * side:.2f}" width="{side:.2f}" '
                f'height="{side:.2f}" fill="#0072b2" fill-opacity="{share:.3f}"><title>{escape(name)}</title></rect>'
            )
    every = math.ceil(num / 25)
    for number in range(0, num, every):
        at = (number + 0.5) * side
        parts.append(text_at(margin - 4, 28 + at, shortened(picture.names[number], 18), anchor="end"))
        turned = f'transform="rotate(-45 {margin + at:.1f} {_CELLS + 38:.1f})"'
        parts.append(text_at(margin + at, _CELLS + 38, shortened(picture.names[number], 18), anchor="end", more=turned))
    parts.append(f'<rect x="{margin}" y="24" width="{_CELLS}" height="{_CELLS}" fill="none" stroke="#d8dee6"/>')
    return Figure(label=title, width=margin + _CELLS + 12, height=_CELLS + 116, parts=tuple(parts))


def _scatter(picture: AnalysisPicture, *, column: int, coloured_by: str) -> Figure:
    points = [tuple(float(value or 0.0) for value in point) for point in picture.values]
    lows = [min(point[axis] for point in points) for axis in (0, 1)]
    sizes = [max(point[axis] for point in points) - low or 1.0 for axis, low in zip((0, 1), lows, strict=True)]
    title = f"{picture.title}, by {coloured_by}"
    parts = [text_at(4, 14, title)]
    for point in points:
        at_x, at_y = (8 + 264 * (point[axis] - lows[axis]) / sizes[axis] for axis in (0, 1))
        number = int(point[column])
        name = picture.names[number] if column == 2 else str(number)
        place = f'cx="{at_x:.1f}" cy="{20 + at_y:.1f}" r="2.4"'
        parts.append(f'<circle {place} fill="{hue(number)}"><title>{escape(name)}</title></circle>')
    return Figure(label=title, width=280, height=300, parts=tuple(parts))
