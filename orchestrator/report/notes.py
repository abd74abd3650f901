"""What a reader must know beside the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from orchestrator.core.job_kinds import TIMED_KINDS, TRANSFER_KINDS
from orchestrator.planning.estimate.costs import PriceTable
from orchestrator.planning.graph.plan import Job, Plan, Published
from orchestrator.report.inputs import Committed
from orchestrator.report.results import Criterion, Facet, Report, Table
from orchestrator.state.snapshot import JobView

_UNPRICED = (
    "cost unknown: what was used has no price, neither by a node's label nor by the table of prices (where nobody "
    "recorded whether a machine was spot, only by an entry that is the same for both)"
)
_FAILED = frozenset({"failed", "skipped", "cancelled"})


def notes_on_costs(report: Report, prices: PriceTable | None) -> Iterator[str]:
    """Why prices were given and no cost is shown."""
    found = [row.compute for table in report.headlines for row in table.rows if row.compute]
    if prices is not None and found and all(compute.cost is None for compute in found):
        yield _UNPRICED


def notes_on(
    plan: Plan, committed: Mapping[str, Committed], views: Mapping[str, JobView], unused: Sequence[Published]
) -> Iterator[str]:
    """Notes on the runs themselves."""
    transfers = [job for job in plan.jobs if job.kind in TRANSFER_KINDS]
    yield from _metric_notes(plan.metric, transfers, committed)
    spaces = {job.facets["label_space"] for job in transfers}
    if plan.baseline and transfers and plan.baseline not in spaces:
        yield f"no run pretrains on the baseline {plan.baseline}: nothing is compared; add it to pretrain.labels"
    changed = [name for name, found in committed.items() if found.has_changed_numerics]
    if changed:
        yield f"{len(changed)} runs were resumed under other numerics, no longer bit-exact (first: {changed[0]})"
    uncompiled = [name for name, found in committed.items() if found.is_uncompiled]
    if uncompiled:
        yield (
            f"{len(uncompiled)} runs fell back to code that is not compiled, although compute.compile asked for it "
            f"(first: {uncompiled[0]}); their records say why: see `notes`"
        )
    yield from _data_notes(committed)
    failed = [job.name for job in plan.jobs if job.name not in committed and _has_failed(views.get(job.name))]
    is_whole = all(job.name in committed for job in plan.jobs if job.kind in TIMED_KINDS)
    if failed and not is_whole:  # of kinds that no report reads, nobody has looked for artifacts
        view = views[failed[0]]
        reason = f": {view.reason}" if view.reason else ""
        yield f"{len(failed)} jobs {view.state.value} (first: {failed[0]}{reason}); their cells lack these runs"
    for entry in unused:
        yield (
            f"the published number of {entry.label_space or 'one-pass'} under {entry.transfer} "
            f"({entry.source or 'no source'}) stands beside nothing: the sweep has no such row"
        )


def _data_notes(committed: Mapping[str, Committed]) -> Iterator[str]:
    """Which runs did not see the very samples that others saw."""
    rewound = {name: found.num_rewinds for name, found in committed.items() if found.num_rewinds}
    if rewound:
        yield (
            f"{len(rewound)} runs went back after a NaN, an infinity or a spike and left out the batches before it, "
            f"{sum(rewound.values())} times in all (first: {next(iter(rewound))}); their records name the samples"
        )
    bad = {name: found.num_bad_samples for name, found in committed.items() if found.num_bad_samples}
    if bad:
        yield (
            f"{len(bad)} runs met samples that cannot be decoded, up to {max(bad.values())} of them, and replaced them "
            f"in training or left them out of validation (first: {next(iter(bad))}); their records name them"
        )


def _has_failed(view: JobView | None) -> bool:
    return view is not None and view.state.value in _FAILED


def notes_on_statistics(report: Report) -> Iterator[str]:
    """Notes on what the tables can and cannot say."""
    tables = report.headlines
    singles = [table.transfer for table in tables if _num_pretrain_seeds(table) == 1]
    if singles:
        yield (
            f"one pretrain seed only ({', '.join(dict.fromkeys(singles))}): no interval says how other backbones of "
            "the same label space would do, and nothing is tested"
        )
    elif any(_num_pretrain_seeds(table) == 2 for table in tables):
        yield "two pretrain seeds leave one degree of freedom: paired tests find hardly anything; a third seed helps"
    if any(Criterion.VALIDATION in table.criteria for table in report.tables):
        yield (
            "grid cells marked as selected on validation were chosen by the very numbers shown: their errors are "
            "optimistic, more so for larger grids"
        )
    for ablation in report.ablations:
        cells = [cell for row in ablation.rows for cell in row.cells]
        lacking = sum(cell.num_expected - (cell.summary.num_values if cell.summary else 0) for cell in cells)
        if ablation.facet is Facet.CELL and lacking and ablation.selected_by:
            yield f"the grid of {ablation.place.transfer} lacks {lacking} runs: another cell may be selected later"


def _metric_notes(metric: str, transfers: Sequence[Job], committed: Mapping[str, Committed]) -> Iterator[str]:
    there = [(job.name, committed[job.name].metrics) for job in transfers if job.name in committed]
    without = [name for name, metrics in there if metric not in metrics]
    if without:
        known = ", ".join(sorted({name for _, metrics in there for name in metrics})) or "none"
        what = "no committed run has" if len(without) == len(there) else f"{len(without)} committed runs have no"
        yield f"{what} metric {metric!r} (first: {without[0]}); reported metrics: {known}"
    invalid = [name for name, metrics in there if not math.isfinite(metrics.get(metric, 0.0))]
    if invalid:
        yield f"{len(invalid)} runs report {metric} = nan or infinity and are left out (first: {invalid[0]})"


def _num_pretrain_seeds(table: Table) -> int:
    return max((row.summary.num_pretrain_seeds for row in table.rows if row.summary), default=0)
