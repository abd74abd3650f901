"""The report of a sweep: read its committed records, compute, render, save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.core.job_kinds import REPORTED_KINDS
from orchestrator.planning.estimate.costs import PriceTable
from orchestrator.planning.graph.plan import Plan
from orchestrator.report.ablations import build_ablations
from orchestrator.report.curves import draw_curve, encode_png, encode_svg
from orchestrator.report.grouping import group_transfers
from orchestrator.report.inputs import Committed, read_committed
from orchestrator.report.notes import notes_on, notes_on_costs, notes_on_statistics
from orchestrator.report.plain import json_text
from orchestrator.report.records import ablation_records, comparison_records, result_records, run_records
from orchestrator.report.render_csv import render_csv
from orchestrator.report.render_markdown import render_markdown
from orchestrator.report.render_parquet import render_parquet
from orchestrator.report.results import Report
from orchestrator.report.searches import build_searches
from orchestrator.report.tables import TableBuilder
from orchestrator.state.snapshot import JobView
from orchestrator.storage.layout import report_name
from orchestrator.storage.protocol import ObjectStore

MARKDOWN, RESULTS, RUNS, DOCUMENT = "report.md", "results.csv", "runs.csv", "report.json"
COMPARISONS, ABLATIONS = "comparisons.csv", "ablations.csv"
RESULTS_PARQUET, RUNS_PARQUET = "results.parquet", "runs.parquet"
PNG, SVG = "curve.png", "curve.svg"
REPORT_FILES = (
    MARKDOWN,
    RESULTS,
    RUNS,
    COMPARISONS,
    ABLATIONS,
    RESULTS_PARQUET,
    RUNS_PARQUET,
    DOCUMENT,
    PNG,
    SVG,
)
"""All but the interactive page (``orchestrator.report.page``), which is larger than all of them together."""


def build_report(
    store: ObjectStore, plan: Plan, views: Mapping[str, JobView] | None = None, prices: PriceTable | None = None
) -> Report:
    """Compute the report of what is committed at this moment; needs nothing but the store.

    ``views`` (``Snapshot.jobs``) tell failed jobs from those that are still to come, and what the attempts took
    and what their nodes cost; ``prices`` are for nodes that said no price.
    """
    return compute_report(plan, read_committed(store, plan.jobs), views, prices)


def compute_report(
    plan: Plan,
    committed: Mapping[str, Committed],
    views: Mapping[str, JobView] | None = None,
    prices: PriceTable | None = None,
) -> Report:
    """The report as a pure function of the plan, what is committed by job name, and the jobs' states."""
    states = views or {}
    grouped = group_transfers(plan.jobs)
    builder = TableBuilder(plan, committed, states, grouped, prices)
    tables = builder.build()
    report = Report(
        sweep=plan.sweep,
        metric=plan.metric,
        baseline=plan.baseline,
        tables=tables,
        missing=tuple(job.name for job in plan.jobs if job.kind in REPORTED_KINDS and job.name not in committed),
        absent=builder.absent(),
        backbones=builder.backbones(),
        ablations=build_ablations(builder, grouped, tables),
        searches=build_searches(plan.jobs, {name: found.search for name, found in committed.items()}),
    )
    notes = (
        *notes_on(plan, committed, states, builder.published.unused),
        *notes_on_costs(report, prices),
        *notes_on_statistics(report),
    )
    return replace(report, notes=notes)


def save_report(store: ObjectStore, sweep: str, report: Report) -> tuple[str, ...]:
    """Write all files of the report under the sweep and return their object names; replaces the previous report."""
    return save_files(store, sweep, render_files(report))


def save_files(store: ObjectStore, sweep: str, files: Mapping[str, bytes]) -> tuple[str, ...]:
    """Write rendered files (by name) as the sweep's report and return their object names."""
    names = []
    for file, content in files.items():
        names.append(report_name(sweep, file))
        store.put(names[-1], content)
    return tuple(names)


def render_files(report: Report) -> dict[str, bytes]:
    """Every file of a report by its name; equal reports give equal bytes."""
    figure, results, runs = draw_curve(report), result_records(report), run_records(report)
    return {
        MARKDOWN: render_markdown(report).encode(),
        RESULTS: render_csv(results).encode(),
        RUNS: render_csv(runs).encode(),
        COMPARISONS: render_csv(comparison_records(report)).encode(),
        ABLATIONS: render_csv(ablation_records(report)).encode(),
        RESULTS_PARQUET: render_parquet(results),
        RUNS_PARQUET: render_parquet(runs),
        DOCUMENT: json_text(report, sort_keys=True).encode(),
        PNG: encode_png(figure),
        SVG: encode_svg(figure),
    }
