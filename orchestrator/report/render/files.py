"""The files of a report, and the forms of a table that they share."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, cast

from orchestrator.core.errors import NotFoundError
from orchestrator.report.render.analyses import analysis_figures, analysis_records, analysis_tables
from orchestrator.report.render.answers import ReportAnswer, answers
from orchestrator.report.render.columns import (
    Records,
    TextTable,
    Value,
    ablation_records,
    caveats,
    comparison_records,
    effect_records,
    effect_table,
    result_records,
    run_records,
    text_table,
)
from orchestrator.report.render.curves import draw_curve, draw_effects, encode_png, encode_svg
from orchestrator.report.render.figures import sheet
from orchestrator.report.render.label_efficiency import label_efficiency_figures
from orchestrator.report.render.other_tables import ablation_table, kinds_table, pairs_table, search_table
from orchestrator.report.render.simulations import (
    SIMULATIONS_METHOD,
    draw_simulations,
    expectation_records,
    simulation_records,
    simulation_tables,
)
from orchestrator.report.results import OPTIONAL_FIELDS, FactorReport, Report, Table
from orchestrator.storage.layout import report_name
from orchestrator.storage.protocol import ObjectStore

PAGE = "report.html"
"""Only where somebody asked for it."""
MARKDOWN, RESULTS, RUNS, DOCUMENT = "report.md", "results.csv", "runs.csv", "report.json"
COMPARISONS, ABLATIONS = "comparisons.csv", "ablations.csv"
ANALYSES, ANALYSES_SVG = "analyses.csv", "analyses.svg"
"""Of sweeps that have analyses."""
LABEL_EFFICIENCY_SVG = "label-efficiency.svg"
"""Of sweeps whose transfers have several fractions of the labelled data."""
RESULTS_PARQUET, RUNS_PARQUET = "results.parquet", "runs.parquet"
PNG, SVG = "curve.png", "curve.svg"
_COSTS = frozenset({"cost", "is_cost_partial", "currency"})
"""Of ``Compute``, which depend on the prices that are known where a report is computed."""
SIMULATIONS, EXPECTATIONS = "simulations.csv", "expectations.csv"
SIMULATIONS_PNG, SIMULATIONS_SVG = "simulations.png", "simulations.svg"
SIMULATION_FILES = (SIMULATIONS, EXPECTATIONS, SIMULATIONS_PNG, SIMULATIONS_SVG)
"""Only of sweeps with simulations."""
_METHOD = (
    "± is the sample standard deviation over all (pretrain seed, transfer seed) pairs, n their number. The relative "
    "improvement is (baseline - value) / baseline of the means; differences are paired: value - baseline over equal "
    "seeds. All intervals and tests are Student's t over the means of the pretrain seeds, so transfers of one backbone "
    "count once. Corrected intervals and p-values hold for all pairs of label spaces of a table at once (Bonferroni). "
    "A difference is established where its corrected interval excludes 0. A label space is possibly the best unless "
    "another is established to be lower. Pooled p-values need equal variances of all label spaces and are not part of "
    "the verdict."
)
EFFECTS, EFFECTS_PARQUET, EFFECTS_SVG = "effects.csv", "effects.parquet", "effects.svg"
"""Written in addition if the sweep compares more than label spaces."""
_LEFT_OUT_IF_FALSE = frozenset({"has_one_search"})
"""Fields that reports of earlier versions lack: where they say nothing, equal results keep their bytes."""
_NOT_ALWAYS = frozenset(
    {EFFECTS, EFFECTS_PARQUET, EFFECTS_SVG, ANALYSES, ANALYSES_SVG, LABEL_EFFICIENCY_SVG, *SIMULATION_FILES, PAGE}
)
"""Files that only some reports have: a later one of the sweep may be without them."""
_FACTOR_METHOD = (
    "The effect of a value is the mean of its differences to another value over matched cells (equal values of all "
    "other factors), averaged within each pretraining seed, with Student's t over seeds; an interaction is the "
    "difference of two such differences. Corrected intervals hold for all effects of a transfer at once (Bonferroni). "
    "Values whose runs share only the seed number are independent samples, in rows of tables, too (Welch's t). F tests "
    "assume sphericity."
)


def json_ready(document: Any) -> Any:  # noqa: ANN401 - JSON is any of these
    """The document with ``null`` for numbers that JSON does not have (RFC 8259 knows neither NaN nor infinity)."""
    if isinstance(document, float):
        return document if math.isfinite(document) else None
    if isinstance(document, Mapping):
        return {key: json_ready(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [json_ready(value) for value in document]
    if is_dataclass(document):
        return json_ready(fields_of(document))
    return document


def json_text(document: Any, **form: Any) -> str:  # noqa: ANN401 - JSON is any of these
    """``json_ready(document)`` as text, in the ``form`` that ``json.dumps`` knows; dataclasses are mappings."""
    try:
        # Almost always: ten times as fast as to look at every number first.
        return json.dumps(document, default=fields_of, allow_nan=False, **form)
    except ValueError:
        return json.dumps(json_ready(document), allow_nan=False, **form)


def fields_of(value: Any) -> dict[str, Any]:  # noqa: ANN401 - of any dataclass
    """The fields of a dataclass (or items of a mapping) by name, themselves as they are.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(value, Mapping):
        return dict(value)
    found = {name: getattr(value, name) for name in _names(cast("Hashable", type(value)))}
    return {name: each for name, each in found.items() if name not in _LEFT_OUT_IF_FALSE or each}


@cache
def _names(kind: Any) -> tuple[str, ...]:  # noqa: ANN401 - of any dataclass
    return tuple(field.name for field in fields(kind))


def render_csv(records: Records) -> str:
    """A header and a line per record."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(records.columns)
    writer.writerows(records.rows)
    return file.getvalue()


def render_parquet(records: Records) -> bytes:
    """The records with a typed column each; the same bytes for the same records and version of pyarrow."""
    import pyarrow as pa  # type: ignore[import-untyped]  # 0.2 s to import: only who saves a report pays for it
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    columns = zip(*records.rows, strict=True) if records.rows else [()] * len(records.columns)
    arrays = [pa.array(column, type=_type(column)) for column in columns]
    file = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, names=list(records.columns)), file, compression="zstd")
    return file.getvalue()


def _type(column: tuple[Value, ...]) -> object:
    """Of the values, which may all be None: then a float, as nearly all columns are."""
    import pyarrow as pa

    there = {type(value) for value in column if value is not None}
    if str in there:
        return pa.string()
    return pa.int64() if there == {int} else pa.float64()


def render_markdown(report: Report) -> str:
    """The whole report; the curve is linked as ``curve.png`` in the same folder."""
    sections = [f"# Report of sweep {report.sweep}"]
    sections += [_answer(answer) for answer in answers(report)]
    sections += ["![granularity curve](curve.png)"] if report.tables else []
    for table in report.headlines:
        sections += _sections(table)
    if isinstance(report, FactorReport):
        sections += [markdown_table(effect_table(found)) for found in report.effects]
        sections.append(_FACTOR_METHOD)
    sections += [markdown_table(ablation_table(ablation)) for ablation in report.ablations]
    sections += [markdown_table(search_table(search)) for search in report.searches]
    sections += _simulations(report)
    sections += [markdown_table(table) for analysis in report.analyses for table in analysis_tables(analysis)]
    if report.tables or not report.simulations:
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


def _simulations(report: Report) -> list[str]:
    if not report.simulations:
        return []
    tables = [markdown_table(table) for found in report.simulations for table in simulation_tables(found)]
    return [*tables, "![simulations](simulations.png)", SIMULATIONS_METHOD]


def _answer(answer: ReportAnswer) -> str:
    return "\n".join([f"**{answer.title}**", "", *(f"- {sentence}" for sentence in answer.sentences)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(cells: Sequence[str]) -> tuple[str, ...]:
    return tuple(cell.replace("|", "\\|").replace("*", "\\*") for cell in cells)


def _bold(cells: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"**{cell}**" if cell else cell for cell in cells)


def save_report(store: ObjectStore, sweep: str, report: Report) -> tuple[str, ...]:
    """Write all files of the report under the sweep and return their object names; replaces the previous report."""
    return save_files(store, sweep, render_files(report))


def save_files(
    store: ObjectStore, sweep: str, files: Mapping[str, bytes], *, keeps_costs: bool = False
) -> tuple[str, ...]:
    """Write rendered files (by name) as the sweep's report and return their object names.

    A file that only an earlier report with other results has, such as its page, is deleted. With ``keeps_costs``, a
    saved report that differs in its costs alone stays: whoever saved it knew a table of prices.
    """
    saved = _saved_document(store, sweep)
    if keeps_costs and _differs_in_costs(saved, files[DOCUMENT]):
        return ()
    is_alike = saved == files[DOCUMENT] or _differs_in_costs(saved, files[DOCUMENT])
    left = {} if is_alike else _left_over(store, sweep, files)
    for file, content in files.items():
        if file != DOCUMENT:
            store.put(report_name(sweep, file), content)
    _delete_unchanged(store, left)
    # Last: after an interruption the saved one is still another one, and the next save deletes what is left.
    store.put(report_name(sweep, DOCUMENT), files[DOCUMENT])
    return tuple(report_name(sweep, file) for file in files)


def _saved_document(store: ObjectStore, sweep: str) -> bytes:
    """Empty if there is none."""
    try:
        return store.get(report_name(sweep, DOCUMENT))
    except NotFoundError:
        return b""


def _left_over(store: ObjectStore, sweep: str, files: Mapping[str, bytes]) -> dict[str, str]:
    """Etags of saved files that are none of these, by object name."""
    unwanted = {report_name(sweep, file) for file in _NOT_ALWAYS - files.keys()}
    return {stat.name: stat.etag for stat in store.list_objects(report_name(sweep, "")) if stat.name in unwanted}


def _delete_unchanged(store: ObjectStore, etags: Mapping[str, str]) -> None:
    """Delete these objects, but none that somebody else wrote meanwhile."""
    for name, etag in etags.items():
        with suppress(NotFoundError):
            if store.stat(name).etag == etag:
                store.delete(name)


def _differs_in_costs(saved: bytes, document: bytes) -> bool:
    try:
        return saved != document and _without_costs(saved) == _without_costs(document)
    except ValueError:  # none yet, or a damaged one
        return False


def _without_costs(document: bytes) -> Any:  # noqa: ANN401 - JSON is any of these
    return json.loads(document, object_hook=lambda some: {name: some[name] for name in some.keys() - _COSTS})


def render_files(report: Report) -> dict[str, bytes]:
    """Every file of a report by its name; equal reports give equal bytes."""
    figure, results, runs = draw_curve(report), result_records(report), run_records(report)
    return _of_factors(report) | {
        MARKDOWN: render_markdown(report).encode(),
        RESULTS: render_csv(results).encode(),
        RUNS: render_csv(runs).encode(),
        COMPARISONS: render_csv(comparison_records(report)).encode(),
        ABLATIONS: render_csv(ablation_records(report)).encode(),
        RESULTS_PARQUET: render_parquet(results),
        RUNS_PARQUET: render_parquet(runs),
        DOCUMENT: json_text(_document(report), sort_keys=True).encode(),
        PNG: encode_png(figure),
        SVG: encode_svg(figure),
        **_figure_files(report),
        **(_simulation_files(report) if report.simulations else {}),
    }


def _figure_files(report: Report) -> dict[str, bytes]:
    """Of sweeps with analyses or label fractions: their numbers and figures."""
    analysed = [figure for analysis in report.analyses for figure in analysis_figures(analysis)]
    labelled = list(label_efficiency_figures(report))
    return {
        **({ANALYSES: render_csv(analysis_records(report)).encode()} if report.analyses else {}),
        **({ANALYSES_SVG: sheet(analysed)} if analysed else {}),
        **({LABEL_EFFICIENCY_SVG: sheet(labelled)} if labelled else {}),
    }


def _simulation_files(report: Report) -> dict[str, bytes]:
    figure = draw_simulations(report.simulations)
    return {
        SIMULATIONS: render_csv(simulation_records(report.simulations)).encode(),
        EXPECTATIONS: render_csv(expectation_records(report.simulations)).encode(),
        SIMULATIONS_PNG: encode_png(figure),
        SIMULATIONS_SVG: encode_svg(figure),
    }


def _document(report: Report) -> dict[str, Any]:
    """The fields of a report; those that a sweep without analyses or simulations lacks are left out, as in its JSON."""
    return {name: value for name, value in fields_of(report).items() if name not in OPTIONAL_FIELDS or value}


def _of_factors(report: Report) -> dict[str, bytes]:
    """The files of a sweep that compares more than label spaces."""
    if not isinstance(report, FactorReport):
        return {}
    effects = effect_records(report)
    return {
        EFFECTS: render_csv(effects).encode(),
        EFFECTS_PARQUET: render_parquet(effects),
        EFFECTS_SVG: encode_svg(draw_effects(report)),
    }
