"""A report as Markdown with GitHub's tables."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.report.results import Report
from orchestrator.report.text import Answer, TextTable, answers, caveats, text_table

_METHOD = (
    "± is the sample standard deviation over all (pretrain seed, transfer seed) pairs, n their number. The relative "
    "improvement is (baseline - value) / baseline of the means; differences are paired: value - baseline over equal "
    "seeds, and their Student t interval counts every pretrain seed once."
)


def render_markdown(report: Report) -> str:
    """The whole report; the curve is linked as ``curve.png`` beside it."""
    sections = [f"# Report of sweep {report.sweep}"]
    sections += [_answer(answer) for answer in answers(report)]
    sections += ["![granularity curve](curve.png)"] if report.tables else []
    sections += [_section(text_table(table)) for table in report.tables]
    sections.append(_METHOD if report.tables else "The sweep has no transfer to report on.")
    sections += [f"**Note:** {caveat}" for caveat in caveats(report)]
    return "\n\n".join(sections) + "\n"


def _answer(answer: Answer) -> str:
    return "\n".join([f"**{answer.title}**", "", *(f"- {sentence}" for sentence in answer.sentences)])


def _section(table: TextTable) -> str:
    alignment = [":--", *("--:" for _ in table.header[1:])]
    rows = [_bold(row) if index == table.best else row for index, row in enumerate(table.rows)]
    return "\n".join([f"## {table.title}", "", *(_line(row) for row in (table.header, alignment, *rows))])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _bold(cells: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"**{cell}**" for cell in cells)
