"""A report as Markdown with GitHub's tables."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.report.ablation_text import ablation_table, pairs_table
from orchestrator.report.answers import Answer, answers
from orchestrator.report.kinds_text import kinds_table
from orchestrator.report.results import Report, Table
from orchestrator.report.search_text import search_table
from orchestrator.report.text import TextTable, caveats, text_table

_METHOD = (
    "± is the sample standard deviation over all (pretrain seed, transfer seed) pairs, n their number. The relative "
    "improvement is (baseline - value) / baseline of the means; differences are paired: value - baseline over equal "
    "seeds. All intervals and tests are Student's t over the means of the pretrain seeds, so transfers of one backbone "
    "count once. Corrected intervals and p-values hold for all pairs of label spaces of a table at once (Bonferroni). "
    "A difference is established where its corrected interval excludes 0. A label space can be best unless another is "
    "established to be lower. Pooled p-values need equal variances of all label spaces and are no part of the verdict."
)


def render_markdown(report: Report) -> str:
    """The whole report; the curve is linked as ``curve.png`` beside it."""
    sections = [f"# Report of sweep {report.sweep}"]
    sections += [_answer(answer) for answer in answers(report)]
    sections += ["![granularity curve](curve.png)"] if report.tables else []
    for table in report.headlines:
        sections += _sections(table)
    sections += [markdown_table(ablation_table(ablation)) for ablation in report.ablations]
    sections += [markdown_table(search_table(search)) for search in report.searches]
    sections.append(_METHOD if report.tables else "The sweep has no transfer to report on.")
    sections += [f"**Note:** {caveat}" for caveat in caveats(report)]
    return "\n\n".join(sections) + "\n"


def markdown_table(table: TextTable) -> str:
    """A section with the table's title, the table and its caption."""
    alignment = [":--", *("--:" for _ in table.header[1:])]
    rows = [_bold(row) if index == table.best else row for index, row in enumerate(map(_escaped, table.rows))]
    caption = ["", table.caption.replace("*", "\\*")] if table.caption else []
    lines = [_line(row) for row in (_escaped(table.header), alignment, *rows)]
    return "\n".join([f"## {table.title}", "", *lines, *caption])


def _sections(table: Table) -> list[str]:
    tables = (text_table(table), kinds_table(table), pairs_table(table))
    return [markdown_table(found) for found in tables if found is not None]


def _answer(answer: Answer) -> str:
    return "\n".join([f"**{answer.title}**", "", *(f"- {sentence}" for sentence in answer.sentences)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(cells: Sequence[str]) -> tuple[str, ...]:
    return tuple(cell.replace("|", "\\|").replace("*", "\\*") for cell in cells)


def _bold(cells: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"**{cell}**" if cell else cell for cell in cells)
