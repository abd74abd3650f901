"""Kinds of labels against numbers of classes, as papers print them."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.planning.graph.plan import Published
from orchestrator.report.render.files import markdown_table
from orchestrator.report.render.other_tables import kinds_table
from orchestrator.report.results import FactorTable, Row, Table
from orchestrator.report.statistics.summaries import SeedPair, summarize_runs


def row(series: str, size: int | None, value: float | None = None, published: Published | None = None) -> Row:
    seeds = {SeedPair(pretrain=0, transfer=seed): value + 0.001 * seed for seed in (0, 1, 2)} if value else {}
    return Row(
        label_space=f"{series}/{size}",
        series=series,
        granularity=size,
        num_expected=3,
        results=(),
        summary=summarize_runs(seeds) if seeds else None,
        subsets={},
        improvement=None,
        difference=None,
        published=published,
    )


def table(*rows: Row) -> Table:
    return Table(
        transfer="top",
        protocol="finetune",
        target="manual/11",
        metric="val_error",
        baseline="manual/11",
        rows=rows,
    )


def test_kinds_stand_beside_their_sizes_with_the_printed_numbers() -> None:
    printed = Published(transfer="top", label_space="manual/11", value=0.0525, std=0.00051)
    manual = [row("manual", 11, 0.05, printed), row("manual", 13), row("manual", 51, 0.04)]
    random = [row("random", size, 0.06) for size in (11, 22, 51)]
    found = kinds_table(table(*manual, *random))
    assert found is not None
    assert found.title == "top (finetune on manual/11): val_error [%] by kind of labels and G"
    assert found.header == ("labels", "11", "13", "22", "51")
    assert found.rows == (
        ("manual", "5.10 ± 0.10 (published 5.25 ± 0.05)", "-", "", "4.10 ± 0.10"),
        ("random", "6.10 ± 0.10", "", "6.10 ± 0.10", "6.10 ± 0.10"),
    )
    assert "| random | 6.10 ± 0.10 |  | 6.10 ± 0.10 | 6.10 ± 0.10 |" in markdown_table(found)


def test_kinds_say_which_numbers_lack_runs() -> None:
    printed = Published(transfer="top", label_space="manual/2", value=0.0525, std=None)
    manual = [replace(row("manual", 2, 0.05, printed), num_expected=6), *(row("manual", size, 0.05) for size in (4, 8))]
    found = kinds_table(table(*manual, *(row("random", size, 0.06) for size in (2, 4, 8))))
    assert found is not None
    assert found.rows[0] == ("manual", "5.10 ± 0.10 (3/6) (published 5.25)", "5.10 ± 0.10", "5.10 ± 0.10")


def test_many_sizes_go_down_and_kinds_across() -> None:
    rows = [row("manual", size, 0.05) for size in range(2, 8)] + [row("random", size, 0.06) for size in range(20, 24)]
    found = kinds_table(table(*rows))
    assert found is not None
    assert found.header == ("G", "manual", "random")
    assert [line[0] for line in found.rows] == [*map(str, range(2, 8)), "20", "21", "22", "23"]
    assert found.rows[0][1:] == ("5.10 ± 0.10", "")


def test_two_label_spaces_of_one_kind_and_size_share_a_cell() -> None:
    rows = [row("rebalanced", size, value) for size, value in ((8, 0.05), (8, 0.04), (16, 0.03))]
    found = kinds_table(table(*rows, *(row("manual", size, 0.06) for size in (2, 4, 8))))
    assert found is not None
    assert found.rows[0] == ("rebalanced", "", "", "5.10 ± 0.10 / 4.10 ± 0.10", "3.10 ± 0.10")


def test_nothing_is_arranged_without_two_kinds_of_three_label_spaces() -> None:
    manual = [row("manual", size, 0.05) for size in (2, 4, 8)]
    assert kinds_table(table(*manual, row("random", 2, 0.06), row("random", 4, 0.06))) is None
    assert kinds_table(table(*manual, *(row("random", None) for _ in range(3)))) is None


def test_combinations_of_factors_are_no_kinds_of_labels() -> None:
    rows = tuple(row(series, size, 0.05) for series in ("manual", "random") for size in (2, 4, 8))
    assert kinds_table(table(*rows)) is not None
    values = tuple((str(number),) for number in range(len(rows)))
    combined = FactorTable(
        transfer="top",
        protocol="finetune",
        target="manual/11",
        metric="val_error",
        baseline="",
        rows=rows,
        row_factors=("rate",),
        row_values=values,
    )
    assert kinds_table(combined) is None
