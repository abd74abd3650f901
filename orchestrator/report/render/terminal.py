"""A report on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from orchestrator.report.render.analyses import analysis_tables
from orchestrator.report.render.answers import answers
from orchestrator.report.render.columns import TextTable, caveats, columns_left, effect_table, text_table
from orchestrator.report.render.other_tables import ablation_table, kinds_table, search_table
from orchestrator.report.render.simulations import simulation_tables
from orchestrator.report.results import FactorReport, Report

_UNLIMITED = 10_000
"""Width in characters at which a table is measured."""


def render_terminal(report: Report) -> Group:
    """Something ``rich.console.Console.print`` prints: the tables, then the answer in words, then what is missing."""
    tables = [text_table(table) for table in report.headlines]
    tables += [kinds for table in report.headlines if (kinds := kinds_table(table)) is not None]
    tables += [effect_table(found) for found in report.effects] if isinstance(report, FactorReport) else []
    tables += [ablation_table(ablation) for ablation in report.ablations]
    tables += [search_table(search) for search in report.searches]
    tables += [table for found in report.simulations for table in simulation_tables(found)]
    tables += [table for analysis in report.analyses for table in analysis_tables(analysis)]
    parts: list[RenderableType] = [FittingTable(table=table) for table in tables]
    for answer in answers(report):
        parts += [Text(answer.title, style="bold"), *(Text(f"  {sentence}") for sentence in answer.sentences)]
    parts += [Text(f"Note: {caveat}", style="yellow") for caveat in caveats(report)]
    if not (report.tables or report.simulations):
        parts.append(Text(f"Sweep {report.sweep} has no transfer to report on.", style="yellow"))
    return Group(*parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingTable:
    """A table that leaves out what it can where the terminal is too narrow; the saved report has it all."""

    table: TextTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(width=_UNLIMITED)
        for turns in range(len(self.table.expendable) + 1):
            columns = columns_left(self.table, self.table.expendable[:turns])
            rich_table = _rich_table(self.table, columns)
            if Measurement.get(console, unlimited, rich_table).maximum <= options.max_width:
                break
        yield rich_table
        gone = [name for index, name in enumerate(self.table.header) if index not in columns]
        if gone:
            yield Text(f"left out for width: {', '.join(gone)}; all are in -o json", style="yellow")


def _rich_table(table: TextTable, columns: Sequence[int]) -> RichTable:
    rich_table = RichTable(title=Text(table.title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        header = Text(table.header[column].replace(" [", "\n["))  # the unit below the name
        rich_table.add_column(header, justify="right" if column else "left", no_wrap=column == 0)
    for index, row in enumerate(table.rows):
        # Text, not markup: a label space may be called anything.
        style = "bold green" if index == table.best else None
        rich_table.add_row(*(Text(row[column]) for column in columns), style=style)
    if table.caption:
        rich_table.caption, rich_table.caption_justify = Text(table.caption), "left"
    return rich_table
