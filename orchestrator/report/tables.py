"""From a plan and the metrics of its committed runs to tables; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from orchestrator.contract import JobKind
from orchestrator.plan.graph import Job, Plan
from orchestrator.report.results import Result, Row, Table
from orchestrator.report.statistics import SeedPair, paired_difference, relative_improvement, summarize

TRANSFER_KINDS = frozenset({JobKind.FINETUNE, JobKind.PROBE})

Metrics = Mapping[str, Mapping[str, float]]
"""Final metrics by job name, of the committed jobs only."""


def build_tables(plan: Plan, metrics: Metrics) -> tuple[Table, ...]:
    """One table per transfer, in the order of the plan."""
    jobs_by_transfer: dict[str, list[Job]] = {}
    for job in plan.jobs:
        if job.kind in TRANSFER_KINDS:
            jobs_by_transfer.setdefault(str(job.facets["transfer"]), []).append(job)
    return tuple(_build_table(plan, transfer, jobs, metrics) for transfer, jobs in jobs_by_transfer.items())


def _build_table(plan: Plan, transfer: str, jobs: Sequence[Job], metrics: Metrics) -> Table:
    spaces = dict.fromkeys(str(job.facets["label_space"]) for job in jobs)
    labels = {job.name.partition("/")[2]: job for job in plan.jobs if job.kind is JobKind.LABELS}
    rows = [_build_row(plan, space, labels.get(space), _of_space(jobs, space), metrics) for space in spaces]
    table = Table(
        transfer=transfer,
        protocol=str(jobs[0].facets["protocol"]),
        target=str(jobs[0].facets["target"]),
        metric=plan.metric,
        baseline=plan.baseline,
        rows=tuple(rows),
    )
    return _compared(table)


def _build_row(plan: Plan, space: str, labels: Job | None, jobs: Sequence[Job], metrics: Metrics) -> Row:
    results = tuple(_result(job, metrics[job.name]) for job in jobs if plan.metric in metrics.get(job.name, {}))
    values = [result.metrics[plan.metric] for result in results]
    return Row(
        label_space=space,
        series=_series(space, labels),
        granularity=_granularity(labels, jobs, metrics),
        num_expected=len(jobs),
        results=results,
        summary=summarize(values) if values else None,
        subsets={
            name: summarize([result.metrics[metric] for result in results if metric in result.metrics])
            for name, metric in _subset_metrics(plan.metric, results).items()
        },
        improvement=None,
        difference=None,
    )


def _compared(table: Table) -> Table:
    """The table with every row but the baseline's compared with the baseline."""
    baseline = table.baseline_row
    if baseline is None:
        return table
    return replace(table, rows=tuple(_compared_row(row, baseline, table.metric) for row in table.rows))


def _compared_row(row: Row, baseline: Row, metric: str) -> Row:
    if row is baseline or row.summary is None or baseline.summary is None:
        return row
    return replace(
        row,
        improvement=relative_improvement(row.summary.mean, baseline.summary.mean),
        difference=paired_difference(_by_seeds(row, metric), _by_seeds(baseline, metric)),
    )


def _by_seeds(row: Row, metric: str) -> dict[SeedPair, float]:
    return {result.seeds: result.metrics[metric] for result in row.results}


def _result(job: Job, metrics: Mapping[str, float]) -> Result:
    seeds = SeedPair(pretrain=int(job.facets["pretrain_seed"]), transfer=int(job.facets["transfer_seed"]))
    return Result(job=job.name, key=job.key, seeds=seeds, metrics=dict(metrics))


def _of_space(jobs: Sequence[Job], space: str) -> list[Job]:
    return [job for job in jobs if job.facets["label_space"] == space]


def _subset_metrics(metric: str, results: Sequence[Result]) -> dict[str, str]:
    """Metric by subset name: ``{"hard": "val_error_hard"}``."""
    prefix = f"{metric}_"
    names = dict.fromkeys(name for result in results for name in sorted(result.metrics) if name.startswith(prefix))
    return {name.removeprefix(prefix): name for name in names}


def _granularity(labels: Job | None, jobs: Sequence[Job], metrics: Metrics) -> int | None:
    """What the committed label space counted; what the planner knew before that."""
    if labels is not None and "num_classes" in metrics.get(labels.name, {}):
        return int(metrics[labels.name]["num_classes"])
    planned = jobs[0].facets.get("granularity")
    return None if planned is None else int(planned)


def _series(space: str, labels: Job | None) -> str:
    """Levels and sizes of one entry share a line; single label spaces share one with others of their rule."""
    entry, slash, _ = space.partition("/")
    if slash or labels is None:
        return entry
    rule = labels.identity["parameters"]["space"]
    return str(next(iter(rule), entry))
