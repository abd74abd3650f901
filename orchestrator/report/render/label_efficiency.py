"""Label efficiency: error after transfer over the share of the labelled data, a curve for each pretraining."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from orchestrator.report.build import ALL
from orchestrator.report.render.columns import describe_place
from orchestrator.report.render.curves import SPREAD
from orchestrator.report.render.figures import FIGURES_STYLE, Figure, Point, line_figure
from orchestrator.report.render.numbers import in_brackets
from orchestrator.report.results import Ablation, Facet, Report
from orchestrator.report.statistics.intervals import is_fraction


def label_efficiency_figures(report: Report) -> Iterator[Figure]:
    """One for each transfer, pretrain block and checkpoint with several fractions; bands are standard deviations."""
    for ablation in report.ablations:
        if ablation.facet is Facet.FRACTION and (lines := _lines(ablation)):
            shares = {1.0 if value == ALL else float(value) for value in ablation.values}
            ticks = {share: f"{100 * share:g} %" for share in sorted(shares)}
            title = f"{describe_place(ablation.place)}: {ablation.metric}{in_brackets(ablation.metric)}"
            has_spread = any(spread for line in lines.values() for _, _, spread in line)
            note = f"bands: {SPREAD}" if has_spread else ""
            yield line_figure(title, ticks, lines, is_log=True, has_bands=True, note=note)


def _lines(ablation: Ablation) -> dict[str, list[Point]]:
    scale = 100 if is_fraction(ablation.metric) else 1
    shares = [1.0 if value == ALL else float(value) for value in ablation.values]
    lines = {
        row.label_space: [
            (share, scale * cell.summary.mean, scale * (cell.summary.std or 0.0))
            for share, cell in sorted(zip(shares, row.cells, strict=True), key=lambda placed: placed[0])
            if cell.summary is not None
        ]
        for row in ablation.rows
    }
    return {name: line for name, line in lines.items() if line}


def label_efficiency_html(report: Report) -> str:
    """The section of the page; empty for sweeps without fractions."""
    figures = "".join(figure.svg() for figure in label_efficiency_figures(report))
    if not figures:
        return ""
    caption = "Over the share of the labelled data that a transfer is given."
    return (
        f'  <section id="label-efficiency-section"><style>{FIGURES_STYLE}</style><h2>Label efficiency</h2>'
        f'<div class="figures">{figures}</div><p class="caption">{escape(caption)}</p></section>\n'
    )
