"""What analyses found as tables of text, as records for files, as figures, and as a section of the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby

from orchestrator.report.render.columns import Records, TextTable, Value
from orchestrator.report.render.figures import (
    FIGURES_STYLE,
    Figure,
    Point,
    hue,
    line_figure,
    shortened,
    side_by_side,
    text_at,
)
from orchestrator.report.render.numbers import MEAN_INTERVAL, MISSING, fixed, mean_interval, plus_minus
from orchestrator.report.results import AnalysisPicture, AnalysisReport, AnalysisRow, Report
from orchestrator.report.statistics.intervals import bounds_of, is_fraction

_OVER_EPOCHS = ("nc1", "nc2", "cdnv", "msdr")
_WIDE = 30.0
"""Ratio of values from which an axis is logarithmic: on a linear one the smaller ones could not be told from 0."""
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
    """By metric, so that label spaces are beside each other: a column for each checkpoint, all else about the last."""
    has_blocks = any(row.pretrain for row in analysis.rows)
    grouped: dict[tuple[str, str, str], dict[str, AnalysisRow]] = {}
    for row in analysis.rows:
        grouped.setdefault((row.metric, row.label_space, row.pretrain), {})[row.checkpoint] = row
    checkpoints = sorted({row.checkpoint for row in analysis.rows}, key=_epoch)
    shown = {metric: _printed_as(metric, analysis.rows) for metric in {metric for metric, _, _ in grouped}}
    lines = []
    for (metric, space, block), found in sorted(grouped.items(), key=lambda group: group[0][0]):
        last, shown_as = found[max(found, key=_epoch)], shown[metric]
        means = [plus_minus(found[one].summary, shown_as) if one in found else MISSING for one in checkpoints]
        named = [metric, space or "all compared", *([block] if has_blocks else [])]
        lines.append(
            (
                *named,
                *means,
                mean_interval(last.summary, shown_as),
                _counts(found[one] for one in checkpoints if one in found),
            )
        )
    first = 3 if has_blocks else 2
    means = [f"{one or 'final weights'}: mean ± std" for one in checkpoints]
    return TextTable(
        title=f"analysis {analysis.name}",
        header=("metric", "pretrained on", *(["pretrain"] if has_blocks else []), *means, MEAN_INTERVAL, "n"),
        rows=tuple(lines),
        expendable=((first + len(checkpoints) + 1,), *((first + number,) for number in range(len(checkpoints) - 1))),
        caption="; ".join(_row_captions(shown, len(checkpoints))),
    )


def _printed_as(metric: str, rows: Sequence[AnalysisRow]) -> str:
    """The metric by whose unit values are printed; empty, so not percent, for what is a rate by its name alone.

    Measures of other packages call theirs as they like.
    """
    name = _SHOWN_AS.get(metric, metric)
    is_rate = bounds_of(name, (row.summary.mean for row in rows if row.metric == metric)) is not None
    return name if is_rate or not is_fraction(name) else ""


_SHOWN_AS = {"clp_std": "clp_accuracy"}
"""Spreads of other metrics, in the unit of these."""
_MEANINGS = (
    (("nc1", "nc2", "cdnv"), "nc1, nc2, cdnv: of the classes trained on, 0 = collapsed"),
    (("original_nc1",), "original_: the same of the original classes"),
    (("msdr",), "msdr: distance_same / distance_self, 1 = no structure below the classes trained on"),
    (("distance_root",), "distance_LEVEL: by the deepest common level of two classes"),
    (("clp_accuracy",), "clp: cluster-and-linear-probe, lpo: probe of the original labels, raw: on pixels"),
    (("clp_chance_accuracy",), "clp_chance: the same with predictions permuted within each class trained on"),
    (("clp_std",), "clp_std: over seeds of the measure"),
    (("purity_class",), "purity: minus that of random samples"),
)


def _row_captions(shown: Mapping[str, str], num_checkpoints: int) -> Iterator[str]:
    """Explanations of metrics; ``shown``: of each the one that it is printed as."""
    yield f"n: pretrain seeds{', with the interval of the last checkpoint' if num_checkpoints > 1 else ''}"
    if any(map(is_fraction, shown.values())):
        yield "accuracies in percent"
    yield from (meaning for names, meaning in _MEANINGS if not shown.keys().isdisjoint(names))


def _counts(rows: Iterable[AnalysisRow]) -> str:
    """``3`` where no run is missing, else by checkpoint: ``2/3, 3/3 runs``."""
    found = [(row.summary.num_values, row.num_expected) for row in rows]
    if all(num == expected for num, expected in found):
        return str(found[-1][0])
    return f"{', '.join(dict.fromkeys(f'{num}/{expected}' for num, expected in found))} runs"


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
        if figures := side_by_side(list(analysis_figures(analysis))):
            parts.append(figures)
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
            if _is_other_partition(picture):
                yield _scatter(picture, column=3, coloured_by="trained class")
        else:
            yield _heatmap(picture)


def _line_name(row: AnalysisRow) -> str:
    return ", ".join(filter(None, (row.pretrain, row.label_space)))


def _over_epochs(analysis: AnalysisReport, metric: str, numbers: Mapping[str, int]) -> Iterator[Figure]:
    """A line for each label space, mean with its standard deviation; nothing with a single checkpoint."""
    rows = [row for row in analysis.rows if row.metric == metric and row.checkpoint]
    epochs = sorted({int(_epoch(row.checkpoint)) for row in rows})
    if len(epochs) < 2:
        return
    lines: dict[str, list[Point]] = {}
    for row in sorted(rows, key=lambda row: _epoch(row.checkpoint)):
        point = (_epoch(row.checkpoint), row.summary.mean, row.summary.std or 0.0)
        lines.setdefault(_line_name(row), []).append(point)
    lines = dict(sorted(lines.items(), key=lambda line: numbers[line[0]]))
    above = [value for line in lines.values() for _, value, _ in line if value > 0]
    is_wide = bool(above) and max(above) > _WIDE * min(above)
    ticks: dict[float, str] = {epoch: str(epoch) for epoch in epochs}
    title = f"{metric} over epochs{', logarithmic' if is_wide else ''}"
    has_bars = any(spread for line in lines.values() for _, _, spread in line)
    note = "bars: ± standard deviation over pretraining seeds, not a confidence interval" if has_bars else ""
    yield line_figure(title, ticks, lines, is_log_upwards=is_wide, numbers=numbers, note=note)


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


def _epoch(checkpoint: str) -> float:
    """``epoch5`` is 5; the final weights, which have no name, come last."""
    return float(checkpoint.removeprefix("epoch")) if checkpoint else math.inf


_CELLS = 260
"""Side of a matrix in pixels."""
_MAX_NAMED_CELLS = 40
"""Rows of a matrix whose cells show their value to the pointer: those of larger ones would be megabytes of the page."""
_MAX_WRITTEN_CELLS = 8
"""Rows of a matrix of similarities whose values are written into the cells."""
_SHADES = 64


def _heatmap(picture: AnalysisPicture) -> Figure:
    """Darker = larger; similarity from 0 to 1, distances from 0 to the largest one."""
    there = [value for row in picture.values for value in row if value is not None]
    top = 1.0 if picture.kind == "cka" else max(there, default=1.0) or 1.0
    num, margin = max(1, len(picture.names)), 116
    side = _CELLS / num
    title = f"{'debiased CKA' if picture.kind == 'cka' else 'squared class distances'}: {picture.title}"
    shares = [[_share(value, top) for value in row] for row in picture.values]
    cells = _named_cells(picture, shares, side) if num <= _MAX_NAMED_CELLS else _shaded_cells(shares, side)
    place = f'transform="translate({margin} 24)" fill="#0072b2" shape-rendering="crispEdges"'
    parts = [text_at(4, 14, f"{title} (white 0, darkest {top:.3g})"), f"<g {place}>", *cells, "</g>"]
    if picture.kind == "cka" and num <= _MAX_WRITTEN_CELLS:
        parts += _written_values(picture, side, margin)
    every = math.ceil(num / 25)
    for number in range(0, num, every):
        at = (number + 0.5) * side
        parts.append(text_at(margin - 4, 28 + at, shortened(picture.names[number], 18), anchor="end"))
        turned = f'transform="rotate(-45 {margin + at:.1f} {_CELLS + 38:.1f})"'
        parts.append(text_at(margin + at, _CELLS + 38, shortened(picture.names[number], 18), anchor="end", more=turned))
    parts.append(f'<rect x="{margin}" y="24" width="{_CELLS}" height="{_CELLS}" fill="none" stroke="#d8dee6"/>')
    return Figure(label=title, width=margin + _CELLS + 12, height=_CELLS + 116, parts=tuple(parts))


def _share(value: float | None, top: float) -> float:
    """Of the darkest shade; 0 for no value."""
    return 0.0 if value is None or not math.isfinite(value) else min(1.0, max(0.0, value / top))


def _named_cells(picture: AnalysisPicture, shares: Sequence[Sequence[float]], side: float) -> Iterator[str]:
    for row, values in enumerate(picture.values):
        for column, value in enumerate(values):
            name = f"{picture.names[row]}, {picture.names[column]}: {MISSING if value is None else f'{value:.4g}'}"
            yield (
                f'<rect x="{column * side:.2f}" y="{row * side:.2f}" width="{side:.2f}" height="{side:.2f}" '
                f'fill-opacity="{shares[row][column]:.3f}"><title>{escape(name)}</title></rect>'
            )


def _shaded_cells(shares: Sequence[Sequence[float]], side: float) -> Iterator[str]:
    """One shape for each of some shades: a few bytes for a run of equal cells."""
    runs: dict[int, list[str]] = {}
    for row, values in enumerate(shares):
        column = 0
        for shade, cells in groupby(round(share * _SHADES) for share in values):
            length = len(list(cells))
            runs.setdefault(shade, []).append(f"M{column} {row}h{length}v1h-{length}z")
            column += length
    scale = f'transform="scale({side:.4f})"'
    yield from (
        f'<path {scale} fill-opacity="{shade / _SHADES:.3f}" d="{"".join(some)}"/>'
        for shade, some in sorted(runs.items())
        if shade
    )


def _written_values(picture: AnalysisPicture, side: float, margin: int) -> Iterator[str]:
    for row, values in enumerate(picture.values):
        for column, value in enumerate(values):
            text = MISSING if value is None else fixed(value, 2)
            more = 'style="fill: #ffffff"' if _share(value, 1.0) > 0.5 else 'style="fill: #1c2430"'
            at_x, at_y = margin + (column + 0.5) * side, 28 + (row + 0.5) * side
            yield text_at(at_x, at_y, text, anchor="middle", more=more)


_SIDE = 264
"""Of a picture of samples, in pixels."""
_MAX_LEGEND = 10
"""Classes that are named below a picture of samples, and have colours that can be told apart."""


def _scatter(picture: AnalysisPicture, *, column: int, coloured_by: str) -> Figure:
    """Samples in two dimensions, coloured by one of their classes; those trained on belong beside the original ones."""
    points = [tuple(float(value or 0.0) for value in point) for point in picture.values]
    names = picture.names if column == 2 else picture.trained_names
    colors = _class_colors(points, column)
    lows = [min(point[axis] for point in points) for axis in (0, 1)]
    sizes = [max(point[axis] for point in points) - low or 1.0 for axis, low in zip((0, 1), lows, strict=True)]
    title = f"{picture.title}, by {coloured_by}"
    parts = [text_at(4, 14, title)]
    for point in points:
        at_x, at_y = (8 + _SIDE * (point[axis] - lows[axis]) / sizes[axis] for axis in (0, 1))
        number = int(point[column])
        place = f'cx="{at_x:.1f}" cy="{20 + at_y:.1f}" r="2.4"'
        parts.append(f'<circle {place} fill="{colors[number]}"><title>{escape(_name(names, number))}</title></circle>')
    height = _SIDE + 36
    if len(colors) <= _MAX_LEGEND:
        for place_of, (number, color) in enumerate(colors.items()):
            at_x, at_y = 8 + (place_of % 4) * 68, height + 12 + 14 * (place_of // 4)
            parts.append(f'<rect x="{at_x}" y="{at_y - 8}" width="9" height="9" fill="{color}"/>')
            parts.append(text_at(at_x + 13, at_y, shortened(_name(names, number), 9)))
        height += 4 + 14 * math.ceil(len(colors) / 4)
    return Figure(label=title, width=_SIDE + 16, height=height, parts=tuple(parts), is_second=column == 3)


def _name(names: Sequence[str], number: int) -> str:
    return names[number] if 0 <= number < len(names) else str(number)


def _class_colors(points: Sequence[Sequence[float]], column: int) -> dict[int, str]:
    """A few classes: colours apart. Many: in the order of the classes trained on, relatives have similar ones."""
    trained = {int(point[column]): int(point[3]) for point in points}
    ordered = sorted(trained) if len(trained) <= _MAX_LEGEND else sorted(trained, key=lambda one: (trained[one], one))
    if len(ordered) <= _MAX_LEGEND:
        return {number: hue(place) for place, number in enumerate(ordered)}
    return {number: f"hsl({330 * place / len(ordered):.0f} 65% 45%)" for place, number in enumerate(ordered)}


def _is_other_partition(picture: AnalysisPicture) -> bool:
    """Whether the classes that the backbone was trained on are there, and not the original ones by other numbers."""
    pairs = {(point[2], point[3]) for point in picture.values}
    trained = {own for _, own in pairs}
    return trained != {-1} and not len({number for number, _ in pairs}) == len(trained) == len(pairs)
