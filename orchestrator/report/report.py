"""The report of a sweep: read its committed records, compute, render, save."""

from __future__ import annotations

import json
from collections.abc import Mapping

from orchestrator.contract import JobKind
from orchestrator.errors import NotFoundError
from orchestrator.plan.graph import Plan
from orchestrator.report.curves import draw_curve, encode_png, encode_svg
from orchestrator.report.render_csv import render_results_csv, render_runs_csv
from orchestrator.report.render_markdown import render_markdown
from orchestrator.report.results import Report
from orchestrator.report.tables import TRANSFER_KINDS, Metrics, build_tables
from orchestrator.storage.artifacts import Record, read_record
from orchestrator.storage.layout import report_name
from orchestrator.storage.protocol import ObjectStore

REPORTED_KINDS = TRANSFER_KINDS | {JobKind.LABELS, JobKind.PRETRAIN}

MARKDOWN, RESULTS, RUNS, DOCUMENT = "report.md", "results.csv", "runs.csv", "report.json"
PNG, SVG = "curve.png", "curve.svg"
REPORT_FILES = (MARKDOWN, RESULTS, RUNS, DOCUMENT, PNG, SVG)


def build_report(store: ObjectStore, plan: Plan) -> Report:
    """Compute the report of what is committed at this moment; needs nothing but the store."""
    return compute_report(plan, load_records(store, plan))


def load_records(store: ObjectStore, plan: Plan) -> dict[str, Record]:
    """Committed records of the plan's label spaces, backbones and transfers by job name."""
    records = {}
    for job in plan.jobs:
        if job.kind in REPORTED_KINDS:
            try:
                records[job.name] = read_record(store, job.key)
            except NotFoundError:
                continue  # not committed (yet): the report says so
    return records


def compute_report(plan: Plan, records: Mapping[str, Record]) -> Report:
    """The report as a pure function of the plan and its records by job name."""
    metrics: Metrics = {job: record.metrics for job, record in records.items()}
    reported = [job for job in plan.jobs if job.kind in REPORTED_KINDS]
    return Report(
        sweep=plan.sweep,
        metric=plan.metric,
        baseline=plan.baseline,
        tables=build_tables(plan, metrics),
        missing=tuple(job.name for job in reported if job.name not in records),
        notes=tuple(_notes(plan, records)),
    )


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
    figure = draw_curve(report)
    return {
        MARKDOWN: render_markdown(report).encode(),
        RESULTS: render_results_csv(report).encode(),
        RUNS: render_runs_csv(report).encode(),
        PNG: encode_png(figure),
        SVG: encode_svg(figure),
        DOCUMENT: json.dumps(report.to_json(), indent=1, sort_keys=True).encode(),
    }


def _notes(plan: Plan, records: Mapping[str, Record]) -> list[str]:
    """What a reader must know beside the numbers."""
    notes = []
    without = [
        job.name
        for job in plan.jobs
        if job.kind in TRANSFER_KINDS and job.name in records and plan.metric not in records[job.name].metrics
    ]
    if without:
        notes.append(f"{len(without)} committed runs have no metric {plan.metric!r} (first: {without[0]})")
    spaces = {job.facets["label_space"] for job in plan.jobs if job.kind in TRANSFER_KINDS}
    if plan.baseline and plan.baseline not in spaces:
        notes.append(f"no run pretrains on the baseline {plan.baseline}: nothing is compared")
    changed = [name for name, record in records.items() if record.summary.get("fingerprint_changes")]
    if changed:
        notes.append(
            f"{len(changed)} runs were resumed under other numerics, no longer bit-exact (first: {changed[0]})"
        )
    return notes
