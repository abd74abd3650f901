"""A report as notebooks show it: the verdict, the tables of transfers, simulations and analyses, and the curve, which
is interactive.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from orchestrator.report.render.analyses import analysis_tables
from orchestrator.report.render.answers import headline
from orchestrator.report.render.columns import TextTable, describe_transfer, result_records, text_table
from orchestrator.report.render.curves import SPREAD, FactorAxis, curve_points, draw_curve, encode_svg, factor_lines
from orchestrator.report.render.simulations import simulation_tables
from orchestrator.report.results import FactorTable, Report, Table
from orchestrator.report.statistics.intervals import is_fraction

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure  # type: ignore[import-untyped]

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_LINE = {"mode": "lines+markers", "hovertemplate": "%{text}<br>%{y:.2f}<extra></extra>"}
_PANEL_PX = 360
_CELL = "padding: .2em .45em"
"""All columns of a report fit the 1,050 pixels that JupyterLab leaves of a screen of 1,280."""


def report_frame(report: Report) -> DataFrame:
    """One row per table and label space, as ``results.csv``; rates are fractions in [0, 1]."""
    from pandas import DataFrame

    records = result_records(report)
    return DataFrame([dict(zip(records.columns, row, strict=True)) for row in records.rows])


def report_figure(report: Report) -> Figure:
    """Error against granularity, or the first factor of the rows, with a panel per transfer of final weights on all
    labels, as a plotly figure.
    """
    from plotly.graph_objects import Figure, Scatter
    from plotly.subplots import make_subplots  # type: ignore[import-untyped]

    tables = [(table, panel) for table in report.headlines if (panel := _panel(table)).lines]
    if not tables:
        return Figure()
    figure = make_subplots(rows=1, cols=len(tables), subplot_titles=[describe_transfer(table) for table, _ in tables])
    colors: dict[str, str] = {}
    for column, (table, panel) in enumerate(tables, start=1):
        for name, line in panel.lines.items():
            is_first = name not in colors
            color = colors.setdefault(name, _COLORS[len(colors) % len(_COLORS)])
            drawn = {**_LINE, **line, "name": name, "legendgroup": name, "line": {"color": color}}
            figure.add_trace(Scatter(**drawn, showlegend=is_first), row=1, col=column)
        unit = " [%]" if is_fraction(table.metric) else ""
        figure.update_xaxes(**panel.axis, row=1, col=column)
        figure.update_yaxes(title_text=f"{table.metric}{unit}", row=1, col=column)
    figure.update_layout(height=_PANEL_PX, margin={"l": 60, "r": 20, "t": 40, "b": 50}, template="plotly_white")
    return figure


def report_html(report: Report) -> str:
    """A fragment of HTML: the verdict, a table per transfer, those of simulations and analyses, and the curve.

    The curve is a picture that plotly.js replaces by one with values under the pointer. The script comes from plotly's
    own server, and browsers check that it is the very file of the installed package.
    """
    simulations = [table for found in report.simulations for table in simulation_tables(found)]
    analyses = [table for analysis in report.analyses for table in analysis_tables(analysis)]
    is_measured = bool(analyses) or any(cell.estimates for found in report.simulations for cell in found.cells)
    told = headline(report) or ("" if is_measured else "no result yet")
    parts = [f"<h4>Report of sweep {escape(report.sweep)}</h4>"]
    parts += [f"<p><b>{escape(told)}</b></p>"] if told else []
    parts += [_table_html(table) for table in (*map(text_table, report.headlines), *simulations, *analyses)]
    parts += [f"<p>{len(report.missing)} results are missing.</p>"] if report.missing else []
    return "".join([*parts, *_curve_html(report)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """What plotly takes for the curves of one table: of its lines by name, and of its axis."""

    lines: Mapping[str, Mapping[str, Any]]
    axis: Mapping[str, Any]


def _panel(table: Table) -> _Panel:
    if isinstance(table, FactorTable):
        found = factor_lines(table)
        factor = FactorAxis.of([value for points in found.values() for value in points])
        places = dict(zip(factor.values, factor.positions, strict=True))
        lines = {
            name or table.metric: _line([(places[value], *points[value], value) for value in places if value in points])
            for name, points in found.items()
        }
        scale, ticks = "log" if factor.is_log else "linear", {"tickvals": factor.positions, "ticktext": factor.values}
        return _Panel(lines=lines, axis={"type": scale, "title_text": table.row_factors[0], **ticks})
    series = {
        name: sorted((point.granularity, point.mean, point.std, point.label_space) for point in points)
        for name, points in curve_points(table.rows, table.metric).items()
    }
    granularities = sorted({point[0] for points in series.values() for point in points})
    axis = {"type": "log", "title_text": "granularity G [classes]", "tickvals": granularities, "tickformat": "d"}
    hover = {"hovertemplate": "%{text}<br>G = %{x}<br>%{y:.2f}<extra></extra>"}
    return _Panel(lines={name: {**_line(points), **hover} for name, points in series.items()}, axis=axis)


def _line(points: Sequence[tuple[float, float, float, str]]) -> dict[str, Any]:
    """Of points on a line: position, mean, standard deviation and name."""
    x, y, std, names = zip(*points, strict=True)
    return {"x": x, "y": y, "error_y": {"type": "data", "array": std, "thickness": 1.2}, "text": names}


def _table_html(text: TextTable) -> str:
    head = "".join(f"<th style='{_CELL}'>{escape(name)}</th>" for name in text.header)
    rows = []
    for index, cells in enumerate(text.rows):
        style = ' style="font-weight: bold; background: #e5f4ec"' if index == text.best else ""
        shown = "".join(f"<td style='{_CELL}; white-space: nowrap'>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr{style}>{shown}</tr>")
    caption = f"<p style='color: #5a6675; font-size: 85%'>{escape(text.caption)}</p>" if text.caption else ""
    drawn = f"<table style='font-size: 85%'><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"<h5>{escape(text.title)}</h5><div style='overflow-x: auto'>{drawn}</div>{caption}"


def _curve_html(report: Report) -> Iterator[str]:
    from plotly.offline import get_plotlyjs, get_plotlyjs_version  # type: ignore[import-untyped]

    figure = report_figure(report)
    if not figure.data:
        return
    picture = base64.b64encode(encode_svg(draw_curve(report))).decode()
    drawn = json.dumps(json.loads(figure.to_json())).replace("<", "\\u003c")
    name = f"curve-{hashlib.sha256(drawn.encode()).hexdigest()[:12]}"
    digest = base64.b64encode(hashlib.sha256(get_plotlyjs().encode()).digest()).decode()
    filled = {
        "@@ID@@": name,
        "@@FIGURE@@": drawn,
        "@@SOURCE@@": f"https://cdn.plot.ly/plotly-{get_plotlyjs_version()}.min.js",
        "@@DIGEST@@": f"sha256-{digest}",
    }
    script = resources.files("orchestrator.report").joinpath("assets", "notebook.js").read_text(encoding="utf-8")
    for mark, text in filled.items():
        script = script.replace(mark, text)
    yield f'<div id="{name}"><img alt="curves of the report" src="data:image/svg+xml;base64,{picture}"></div>'
    yield f"<p style='color: #5a6675; font-size: 85%'>bars: {SPREAD}</p>"
    yield f"<script>{script}</script>"
