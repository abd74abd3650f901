"""A Gantt chart as one file for browsers, without anything to load."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib.resources import files

from orchestrator.simulation.gantt import Chart
from orchestrator.simulation.gantt_png import INTERRUPTED, colour_of


def render_html(chart: Chart, title: str, lines: Sequence[str]) -> bytes:
    """The chart, with zoom and names under the pointer, below a title and some lines of text."""
    jobs = {job: number for number, job in enumerate(dict.fromkeys(bar.job for bar in chart.bars))}
    kinds = {kind: number for number, kind in enumerate(chart.kinds)}
    document = {
        "bars": [
            [
                *(bar.row, bar.num_rows, round(bar.start_s, 1), round(bar.worked_from_s, 1), round(bar.end_s, 1)),
                *(kinds[bar.kind], jobs[bar.job], bar.ending if bar.is_interrupted else ""),
            ]
            for bar in chart.bars
        ],
        "jobs": list(jobs),
        "kinds": [[kind, colour_of(number)] for kind, number in kinds.items()],
        "nodes": chart.nodes,
        "rows": chart.num_rows,
        "end": chart.end_s,
        "interrupted": INTERRUPTED,
    }
    # "</" could end the script that the document stands in.
    content = json.dumps(document, separators=(",", ":")).replace("</", "<\\/")
    page = files("orchestrator.simulation").joinpath("gantt.html").read_text(encoding="utf-8")
    return (
        page.replace("@title@", html.escape(title))
        .replace("@lines@", "".join(f"<li>{html.escape(line)}</li>" for line in lines))
        .replace("@document@", content)
        .encode()
    )
