"""A Gantt chart as a page: which attempt was on which GPU of which node, and when."""

from __future__ import annotations

import html
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

from orchestrator.backends.simulated import Span

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Paul Tol's bright scheme, which colour-blind people can distinguish, too."""
INTERRUPTED = "#000000"
_KEPT = frozenset({"committed", "preempted"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A rectangle: some neighbouring rows for some time."""

    row: int
    """From 0 at the top."""
    num_rows: int
    start_s: float
    """From the beginning of the sweep."""
    worked_from_s: float
    end_s: float
    kind: str
    """Of the job."""
    job: str
    ending: str

    @property
    def is_interrupted(self) -> bool:
        """Whether the attempt ended without a result, and not because it was asked to."""
        return self.ending not in _KEPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Bars, and where the rows of each node begin."""

    bars: tuple[Bar, ...]
    nodes: tuple[tuple[str, int], ...]
    num_rows: int
    end_s: float

    @property
    def kinds(self) -> list[str]:
        """Kinds of jobs in the order of their first bar."""
        return list(dict.fromkeys(bar.kind for bar in self.bars))


def make_chart(spans: Sequence[Span], started_at_s: float) -> Chart:
    """Lay the spans of attempts out: a row per GPU, and rows for jobs without GPUs where there are some."""
    by_node: dict[str, list[tuple[Span, float]]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.placed_at_s, span.attempt_id)):
        for node, gpus in zip(span.nodes, span.gpus, strict=True):
            by_node[node].append((span, gpus))
    bars: list[Bar] = []
    nodes: list[tuple[str, int]] = []
    top = 0
    for node in sorted(by_node):
        nodes.append((node, top))
        lanes: list[float] = []
        for span, gpus in by_node[node]:
            bars += _bars(span, gpus, lanes, top, started_at_s)
        top += len(lanes)
    end_s = max((bar.end_s for bar in bars), default=0.0)
    return Chart(bars=tuple(bars), nodes=tuple(nodes), num_rows=top, end_s=end_s)


def _bars(span: Span, gpus: float, lanes: list[float], top: int, started_at_s: float) -> Iterator[Bar]:
    """Bars of a span on one node, whose ``lanes`` are free from those times on."""
    wanted = max(1, math.ceil(gpus - 1e-6))
    free = [lane for lane, free_at_s in enumerate(lanes) if free_at_s <= span.placed_at_s + 1e-6][:wanted]
    while len(free) < wanted:
        free.append(len(lanes))
        lanes.append(0.0)
    for lane in free:
        lanes[lane] = span.ended_at_s
    for first, count in _runs(free):
        yield Bar(
            row=top + first,
            num_rows=count,
            start_s=span.placed_at_s - started_at_s,
            worked_from_s=span.worked_from_s - started_at_s,
            end_s=span.ended_at_s - started_at_s,
            kind=span.job.partition("/")[0],
            job=span.job,
            ending=span.ending,
        )


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges of neighbouring numbers: ``[0, 1, 4]`` -> ``(0, 2), (4, 1)``."""
    start = previous = numbers[0]
    for number in numbers[1:]:
        if number != previous + 1:
            yield start, previous - start + 1
            start = number
        previous = number
    yield start, previous - start + 1


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


def colour_of(number: int) -> str:
    """Colour of the n-th kind."""
    return COLOURS[number % len(COLOURS)]
