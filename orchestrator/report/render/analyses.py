"""What analyses found as tables of text, as records for files, and as a section of the page with figures.

Figures are SVG inside the page, drawn here: they need no script, and equal reports give equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

from orchestrator.report.render.columns import Records, TextTable, Value
from orchestrator.report.render.numbers import MISSING, fixed, mean_interval, plus_minus
from orchestrator.report.results import AnalysisPicture, AnalysisReport, AnalysisRow, Report

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999", "#000000")  # Okabe and Ito
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

_STYLE = (
    "#analyses-section svg { max-width: 100%; height: auto; } #analyses-section text { font: 11px sans-serif; "
    "fill: var(--ink); } #analyses-section .figures { display: flex; flex-wrap: wrap; gap: 1rem; }"
)


def analyses_html(report: Report) -> str:
    """The section of all analyses; empty without any."""
    if not report.analyses:
        return ""
    parts = ['  <section id="analyses-section">', f"<style>{_STYLE}</style>", "<h2>Analyses</h2>"]
    for analysis in report.analyses:
        parts.append(f"<h3>{escape(analysis.name)}</h3>")
        if figures := "".join(_figures(analysis)):
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


def _figures(analysis: AnalysisReport) -> Iterator[str]:
    for metric in _OVER_EPOCHS:
        yield from _over_epochs(analysis, metric)
    for picture in analysis.pictures:
        if picture.kind == "layers":
            yield _over_layers(picture)
        elif picture.kind == "embedding":
            yield _scatter(picture, column=2, coloured_by="original class")
            if any(point[3] != -1 for point in picture.values):
                yield _scatter(picture, column=3, coloured_by="trained class")
        else:
            yield _heatmap(picture)


_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 420, 280, 56, 28, 60


def _over_epochs(analysis: AnalysisReport, metric: str) -> Iterator[str]:
    """A line for each label space, mean with its standard deviation; nothing with a single checkpoint."""
    rows = [row for row in analysis.rows if row.metric == metric and row.checkpoint]
    epochs = sorted({_epoch(row) for row in rows})
    if len(epochs) < 2:
        return
    lines: dict[str, list[_Point]] = {}
    for row in sorted(rows, key=lambda row: (row.pretrain, row.label_space, _epoch(row))):
        name = ", ".join(filter(None, (row.pretrain, row.label_space)))
        lines.setdefault(name, []).append((_epoch(row), row.summary.mean, row.summary.std or 0.0))
    yield _line_figure(f"{metric} over epochs", {epoch: str(epoch) for epoch in epochs}, lines)


def _over_layers(picture: AnalysisPicture) -> str:
    """From the first layer to the last."""
    lines = {
        name: [(number, value, 0.0) for number, value in enumerate(values) if value is not None]
        for name, values in zip(picture.lines, picture.values, strict=True)
    }
    every = math.ceil(len(picture.names) / 12)
    ticks = {number: str(number + 1) for number in range(0, len(picture.names), every)}
    return _line_figure(f"activation sparsity per layer: share of active units, {picture.title}", ticks, lines)


def _epoch(row: AnalysisRow) -> int:
    return int(row.checkpoint.removeprefix("epoch"))


_Point = tuple[float, float, float]
"""Where it stands on the horizontal axis, its value, and the length of its bar to each side."""


def _line_figure(title: str, ticks: Mapping[int, str], lines: Mapping[str, Sequence[_Point]]) -> str:
    """Lines by name, from 0 upwards; ``ticks`` name places of the horizontal axis."""
    points = [point for line in lines.values() for point in line]
    first, last = min(point[0] for point in points), max(point[0] for point in points)
    top = max(value + spread for _, value, spread in points) * 1.05 or 1.0

    def x(at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 12) * (at - first) / ((last - first) or 1.0)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * max(0.0, value) / top

    parts = [_text(_WIDTH / 2, 16, title, anchor="middle"), *_axes((first, last), ticks, top, x, y)]
    for number, (name, line) in enumerate(lines.items()):
        color = _hue(number)
        places = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value, _ in line)
        parts.append(f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="2"/>')
        for at, value, spread in line:
            if spread:
                low, high = y(value - spread), y(value + spread)
                parts.append(f'<path d="M{x(at):.1f} {low:.1f}V{high:.1f}" stroke="{color}"/>')
            parts.append(f'<circle cx="{x(at):.1f}" cy="{y(value):.1f}" r="3" fill="{color}"/>')
        at_x, at_y = _LEFT + (number % 3) * 120, _HEIGHT - 26 + 14 * (number // 3)
        parts.append(f'<rect x="{at_x}" y="{at_y - 8}" width="9" height="9" fill="{color}"/>')
        parts.append(_text(at_x + 13, at_y, name))
    return _svg(_WIDTH, _HEIGHT + 14 * ((len(lines) - 1) // 3), parts, title)


def _axes(
    ends: tuple[float, float],
    ticks: Mapping[int, str],
    top: float,
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> Iterator[str]:
    left, right, zero = x(ends[0]), x(ends[1]), y(0.0)
    yield f'<path d="M{left:.1f} {y(top):.1f}V{zero:.1f}H{right:.1f}" fill="none" stroke="var(--soft, #888)"/>'
    for at, text in ticks.items():
        yield _text(x(at), zero + 14, text, anchor="middle")
    for share in (0.0, 0.5, 1.0):
        yield _text(left - 5, y(share * top) + 4, f"{share * top:.3g}", anchor="end")


_CELLS = 300
"""Side of a matrix in pixels."""


def _heatmap(picture: AnalysisPicture) -> str:
    """Darker = larger; similarity from 0 to 1, distances from 0 to the largest one."""
    there = [value for row in picture.values for value in row if value is not None]
    top = 1.0 if picture.kind == "cka" else max(there, default=1.0) or 1.0
    num, margin = max(1, len(picture.names)), 110
    side = _CELLS / num
    title = f"{'debiased CKA' if picture.kind == 'cka' else 'squared class distances'}: {picture.title}"
    parts = [_text(4, 14, title)]
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
        parts.append(_text(margin - 4, 28 + at, _short(picture.names[number]), anchor="end"))
        turned = f'transform="rotate(-45 {margin + at:.1f} {_CELLS + 38:.1f})"'
        parts.append(_text(margin + at, _CELLS + 38, _short(picture.names[number]), anchor="end", more=turned))
    parts.append(
        f'<rect x="{margin}" y="24" width="{_CELLS}" height="{_CELLS}" fill="none" stroke="var(--line, #888)"/>'
    )
    return _svg(margin + _CELLS + 12, _CELLS + 110, parts, title)


def _scatter(picture: AnalysisPicture, *, column: int, coloured_by: str) -> str:
    points = [tuple(float(value or 0.0) for value in point) for point in picture.values]
    lows = [min(point[axis] for point in points) for axis in (0, 1)]
    sizes = [max(point[axis] for point in points) - low or 1.0 for axis, low in zip((0, 1), lows, strict=True)]
    title = f"{picture.title}, by {coloured_by}"
    parts = [_text(4, 14, title)]
    for point in points:
        at_x, at_y = (8 + 264 * (point[axis] - lows[axis]) / sizes[axis] for axis in (0, 1))
        number = int(point[column])
        name = picture.names[number] if column == 2 else str(number)
        place = f'cx="{at_x:.1f}" cy="{20 + at_y:.1f}" r="2.4"'
        parts.append(f'<circle {place} fill="{_hue(number)}"><title>{escape(name)}</title></circle>')
    return _svg(280, 300, parts, title)


def _hue(number: int) -> str:
    """Eight colours that colour-blind readers tell apart, then others by the golden angle."""
    return _COLORS[number] if number < len(_COLORS) else f"hsl({number * 137.508 % 360:.0f} 60% 45%)"


def _short(name: str) -> str:
    return name if len(name) <= 16 else f"{name[:15]}…"


def _text(x: float, y: float, text: str, *, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    inside = "".join(parts)
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}" {size}>{inside}</svg>'
