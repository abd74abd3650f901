"""Everything that ``orchestrator plan`` prints about a sweep before it runs."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from rich.table import Table

from orchestrator.core.contract import Resources, Spot
from orchestrator.core.errors import UsageError
from orchestrator.core.job_kinds import KINDS, RESULT_KINDS, JobKind
from orchestrator.core.units import format_bytes, format_duration
from orchestrator.planning.estimate.estimates import Estimates, estimate, known_accelerator, refusals
from orchestrator.planning.estimate.eta import (
    CriticalPath,
    Fleet,
    Makespan,
    critical_path,
    list_schedule,
    shortages,
    without_twins,
)
from orchestrator.planning.estimate.flops import PEAKS
from orchestrator.planning.estimate.history import EstimateSource, ModelError
from orchestrator.planning.estimate.power import weak_designs
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.planning.estimate.volumes import DatasetSize
from orchestrator.planning.graph.data_checks import (
    cut_shards,
    lenient_mixtures,
    long_clusterings,
    miscounted,
    missing_datasets,
    sorted_shards,
)
from orchestrator.planning.graph.design import PlanDesign
from orchestrator.planning.graph.diff import Change, PlanDiff
from orchestrator.planning.graph.pairing import makes_backbone
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.planning.graph.recipe_checks import doubtful_settings
from orchestrator.planning.graph.reuse import Disposition, repeated_jobs
from orchestrator.services.artifact_lookup import ArtifactStatus, history_of, lookup_artifacts
from orchestrator.state.nodes import Node
from orchestrator.sweepfile.values import ResolvedSweep

_VAL_SHARE = 0.05
"""Of the training split, of data sets that do not say how large their validation split is."""
_MAX_NAMED = 5
_LABEL_WIDTH = 11
_ROUNDING: Final = 1e-6
_SOURCES = {
    EstimateSource.HISTORY: "from results of the same model here",
    EstimateSource.CALIBRATED: "from the model of speed, corrected by other results here",
    EstimateSource.MODEL: "from the model of speed alone",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """Jobs that can never run on a cluster that is known to stay as it is, and what to change for them."""

    jobs: tuple[Job, ...]
    asks: str
    """What the first of them asks for and the cluster does not have: ``64 CPUs``."""
    remedy: str

    def __str__(self) -> str:
        more = len(self.jobs) - 1
        others = f" and {more} more job{'s' * (more > 1)} ask" if more else " asks"
        return f"{self.jobs[0].name}{others} for {self.asks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """A plan beside its store and a cluster."""

    plan: Plan
    found: ArtifactStatus
    estimates: Estimates
    path: CriticalPath
    fleet: Fleet | None
    """None = no cluster is known."""
    makespan: Makespan | None
    model_error: ModelError | None
    """None while the store holds no measurements."""
    shortfalls: tuple[Shortfall, ...] = ()
    """Empty where the cluster is unknown, or may get other nodes."""
    refusals: tuple[str, ...] = ()
    """Of the budget guard, and where the file contradicts what is committed."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Of the data: what committed indexes say that training will suffer from. Of the file: what is hardly meant. Of the
    design: what it cannot find.
    """

    @property
    def counts(self) -> Mapping[Disposition, int]:
        """Number of jobs by what becomes of them."""
        counts = Counter(self.found.dispositions.values())
        return {disposition: counts[disposition] for disposition in Disposition}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form: the plan's own document, with what becomes of each job and what it takes."""
        document = self.plan.to_json()
        jobs = [{**job, **self._job(job["name"])} for job in document["jobs"]]
        return {**document, "jobs": jobs, "summary": self.summary()}

    def summary(self) -> dict[str, Any]:
        """The totals."""
        estimates, makespan = self.estimates, self.makespan
        design = summarize_design(self.plan, self.found.dispositions, estimates)
        return {
            "counts": {disposition.value: number for disposition, number in self.counts.items()},
            "gpu_hours": estimates.gpu_hours,
            "cpu_hours": estimates.cpu_hours,
            "kept_bytes": estimates.kept_bytes,
            "cost": estimates.cost,
            "currency": estimates.prices.currency if estimates.prices else "",
            "critical_path": asdict(self.path),
            "cluster": self.fleet.name if self.fleet else "",
            "wall_clock_s": makespan.seconds if makespan else None,
            "wall_clock_bound_s": makespan.bound_s if makespan else None,
            "never": list(makespan.never) if makespan else [],
            "sources": {source.value: number for source, number in estimates.sources.items()},
            "assumed_accelerator": estimates.assumed_accelerator,
            "model_error": asdict(self.model_error) if self.model_error else None,
            "refusals": list(self.refusals),
            "problems": list(self.found.problems),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            **({"design": asdict(design)} if design else {}),
        }

    def _job(self, name: str) -> dict[str, Any]:
        estimated = self.estimates.jobs.get(name)
        return {
            "disposition": self.found.dispositions[name].value,
            "estimate": None if estimated is None else asdict(estimated),
        }


def make_preview(
    sweep: ResolvedSweep,
    plan: Plan,
    *,
    fleet: Fleet | None,
    accelerator: str = "",
    prices: PriceTable | None = None,
) -> Preview:
    """Ask the store of a plan, estimate what it has to run, and schedule that on a cluster. Changes nothing.

    Args:
        sweep: what the plan was made of.
        plan: the plan.
        fleet: the cluster to schedule on; None = no wall clock.
        accelerator: what GPUs are where ``resources`` does not say; a name of ``planning.estimate.flops.PEAKS``.
        prices: for the cost.
    """
    found = lookup_artifacts(plan)
    history = history_of(plan, found)
    repeated = repeated_jobs(plan)
    skip = found.reused | repeated.keys()
    estimates = estimate(
        plan, history=history, sizes=declared_sizes(sweep), accelerator=accelerator, prices=prices, skip=skip
    )
    durations_s, run_once = estimates.durations_s(), without_twins(plan, repeated)
    shortfalls = tuple(_shortfalls(plan, durations_s, fleet)) if fleet and fleet.is_fixed else ()
    barred = [job.name for shortfall in shortfalls for job in shortfall.jobs]
    makespan = list_schedule(run_once, durations_s, fleet, barred=barred) if fleet else None
    return Preview(
        plan=plan,
        found=found,
        estimates=estimates,
        path=critical_path(run_once, durations_s),
        fleet=fleet,
        makespan=makespan,
        model_error=history.model_error(),
        shortfalls=shortfalls,
        refusals=(
            *miscounted(plan, {key: record.metrics for key, record in found.records.items()}),
            *refusals(plan, estimates, makespan, now=time.time()),
        ),
        notes=(
            *missing_datasets(sweep),
            *(note for dataset in sweep.datasets.values() for note in dataset.notes),
            *long_clusterings(sweep),
        ),
        warnings=(
            *_index_warnings(plan, found),
            *_absent_weights(found),
            *lenient_mixtures(sweep),
            *doubtful_settings(sweep),
            *weak_designs(plan),
        ),
    )


def _absent_weights(found: ArtifactStatus) -> Iterator[str]:
    for key in found.absent:
        yield (
            f"the store has no result {key}, from which jobs take their initial weights (init.artifact): correct the "
            "key, or let its sweep finish first; a job waits about ten minutes for it before it fails"
        )


def _index_warnings(plan: Plan, found: ArtifactStatus) -> Iterator[str]:
    for job in plan.jobs:
        if job.kind is JobKind.INDEX and job.key in found.records:
            yield from (f"{job.name}: {warning}" for warning in found.records[job.key].summary.get("warnings", ()))
    summaries = {key: record.summary for key, record in found.records.items()}
    yield from sorted_shards(plan, summaries)
    yield from cut_shards(plan, summaries)


def declared_sizes(sweep: ResolvedSweep) -> dict[str, DatasetSize]:
    """Samples of external data sets by name of their index job, as far as the sweep.yaml or their description tells."""
    sizes = {}
    for name, dataset in sweep.datasets.items():
        if dataset.location and dataset.num_train:
            declared = dataset.location.get("num_samples", {})
            num_val = declared.get("val") or round(_VAL_SHARE * dataset.num_train) * dataset.has_val
            sizes[f"index/{name}"] = DatasetSize(
                num_train=dataset.num_train, num_val=num_val, num_classes=dataset.num_classes
            )
    return sizes


def preview_lines(preview: Preview) -> Iterator[str]:
    """Totals, and what they rest upon."""
    estimates = preview.estimates
    yield from _design_lines(preview)
    if estimates.jobs:
        yield _labelled("to run", _work(estimates))
        yield from _wall_clock(preview)
        yield _labelled("critical", f"{format_duration(preview.path.seconds)}: {_chain(preview.path.jobs)}")
        yield _labelled("storage", _storage(estimates))
        yield from _cost(estimates)
        yield from _sources(preview)
    stale = preview.counts[Disposition.STALE]
    if stale:
        yield _labelled(
            "stale", f"{stale} results were made by other code of the same code_version (an edit or another release)"
        )
        yield _labelled("", "and are reused: bump the kind's code_version if the change alters results")
    yield from preview.notes


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorCost:
    """What a factor costs: the work of all cells that do not have its first value."""

    factor: str
    values: tuple[str, ...]
    gpu_hours: float
    cpu_hours: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignSummary:
    """The cells of a plan, and what each factor adds to its work."""

    num_cells: int
    num_shared: int
    """Cells all of whose backbones are there already, or are pretrained once for several cells."""
    factors: tuple[FactorCost, ...]


def summarize_design(plan: Plan, dispositions: Mapping[str, Disposition], estimates: Estimates) -> DesignSummary | None:
    """The design of a plan that compares more than label spaces; None for others."""
    design = PlanDesign.of(plan)
    if not design.has_factors:
        return None
    repeated = repeated_jobs(plan)
    cells: dict[tuple[str, ...], bool] = {}
    hours = {name: [0.0, 0.0] for name in design.varied}
    for job in plan.jobs:
        is_backbone = makes_backbone(job)
        values = design.values_of(job) if is_backbone or job.kind in RESULT_KINDS else None
        if values is None:
            continue
        if is_backbone and "baseline" not in job.facets:
            cell, is_shared = tuple(values.values()), dispositions[job.name].is_reused or job.name in repeated
            cells[cell] = cells.get(cell, True) and is_shared
        if (estimated := estimates.jobs.get(job.name)) is None:
            continue
        for name in design.varied:
            if values[name] != design.factors[name][0]:
                hours[name][0] += estimated.gpu_hours
                hours[name][1] += estimated.cpu_hours
    return DesignSummary(
        num_cells=len(cells),
        num_shared=sum(cells.values()),
        factors=tuple(
            FactorCost(factor=name, values=design.factors[name], gpu_hours=gpu, cpu_hours=cpu)
            for name, (gpu, cpu) in hours.items()
        ),
    )


def _design_lines(preview: Preview) -> Iterator[str]:
    """Cells, what they share, and which part of the work each factor is."""
    design = summarize_design(preview.plan, preview.found.dispositions, preview.estimates)
    if design is None:
        return
    sizes = " x ".join(f"{factor.factor} {len(factor.values)}" for factor in design.factors)
    whole = 1
    for factor in design.factors:
        whole *= len(factor.values)
    part = "" if whole == design.num_cells else f" of {whole}"
    shared = f", {design.num_shared} of them shared with results or cells that are there" if design.num_shared else ""
    yield _labelled("design", f"{design.num_cells}{part} cells ({sizes}){shared}")
    estimates = preview.estimates
    for factor in design.factors:
        unit, hours, total = "GPU-hours", factor.gpu_hours, estimates.gpu_hours
        if not total:
            unit, hours, total = "core-hours", factor.cpu_hours, estimates.cpu_hours
        if total:
            values = f"{len(factor.values) - 1} further value{'s' * (len(factor.values) > 2)}"
            yield _labelled("", f"{factor.factor}: {hours:,.2f} of {total:,.2f} {unit} for its {values}")


def _labelled(label: str, text: str) -> str:
    return f"{label:{_LABEL_WIDTH}}{text}"


def _work(estimates: Estimates) -> str:
    number = len(estimates.jobs)
    parts = [f"{estimates.gpu_hours:,.1f} GPU-hours"] if estimates.gpu_hours else []
    parts += [f"{estimates.cpu_hours:,.2f} core-hours of jobs without GPUs"] if estimates.cpu_hours else []
    return f"{number} jobs, {' and '.join(parts)}"


def _wall_clock(preview: Preview) -> Iterator[str]:
    makespan, fleet = preview.makespan, preview.fleet
    if makespan is None or fleet is None:
        return
    if makespan.never:
        named = _named(makespan.never, lists_jobs=False)
        yield _labelled("wall clock", f"{len(makespan.never)} jobs can never run on {fleet.name}: {named}")
        for shortfall in preview.shortfalls:
            yield _labelled("", f"{shortfall}; {shortfall.remedy}")
        # Nothing is known of the memory, market and labels of stated nodes, so none of these holds a job up there.
        unit = "gpus" if any(job.resources.gpus for job in preview.plan.jobs if job.name in makespan.never) else "cpus"
        lacks = [lack for lack in shortages(preview.plan, makespan.never, fleet) if lack != "room"] or [unit]
        stated = f"state a cluster with {' and '.join(f'--{lack} N' for lack in lacks)}"
        yield _labelled("", f"or {stated}" if preview.shortfalls else f"{stated}, or lower resources")
        return
    bound = "critical path" if makespan.critical_s >= makespan.busy_s else "all work spread evenly"
    yield _labelled(
        "wall clock", f"{format_duration(makespan.seconds)} on {fleet.name}, without failures and other sweeps"
    )
    yield _labelled(
        "", f"(list schedule, longest chains first; not below {format_duration(makespan.bound_s)}: {bound})"
    )


def never_runs(preview: Preview) -> Iterator[str]:
    """Why jobs can never run on a cluster that is known to stay as it is; nothing for others, which may grow."""
    name = preview.fleet.name if preview.fleet else ""
    for shortfall in preview.shortfalls:
        yield (
            f"{shortfall}, which {name} does not have, and nothing adds nodes; {shortfall.remedy}, or submit to a "
            "cluster (RAY_ADDRESS)"
        )


def _shortfalls(plan: Plan, to_run: Collection[str], fleet: Fleet) -> Iterator[Shortfall]:
    lacks: dict[tuple[Resources, int], str] = {}
    found: dict[tuple[str, str], list[Job]] = {}
    for job in plan.jobs:
        shape = (job.resources, job.execution.num_workers)
        if job.name not in to_run:
            continue
        if shape not in lacks:
            lacks[shape] = _lack(job, fleet)
        if lack := lacks[shape]:
            found.setdefault((lack, _remedy(job, lack)), []).append(job)
    for (lack, remedy), jobs in found.items():
        yield Shortfall(jobs=tuple(jobs), asks=_amount(jobs[0], lack), remedy=remedy)


def _remedy(job: Job, lack: str) -> str:
    """What of the file to change for a job that a cluster has too little of something for."""
    trial = job.identity["parameters"]["trial"] if job.kind is JobKind.SEARCH else None
    if trial is not None and lack == "room":
        return f"lower search.concurrent of transfer {job.facets['transfer']}"
    kind = job.kind if trial is None else JobKind(trial["kind"])
    return _LOWER[lack].format(group=KINDS[kind].resources)


_LOWER: Final = {
    "gpus": "lower resources.{group}.gpus",
    "cpus": "lower resources.{group}.cpus",
    "memory_gib": "lower resources.{group}.memory_gib",
    "kind": "change accelerator, spot or labels of resources.{group}",
    "room": "lower resources.{group}.workers",
}


def _lack(job: Job, fleet: Fleet) -> str:
    """What a cluster has too little of for a job, however idle it is; empty if the job fits.

    ``kind``: nodes of the type, market or labels that it asks for. ``room``: one worker fits, but not all at once.
    """
    share, smallest = job.resources.share(job.execution.num_workers), int(job.resources.min_gpus)
    asked = {name: getattr(share, name) for name in ("gpus", "cpus", "memory_gib") if getattr(share, name)}
    suited = [node for node in fleet.nodes if _suits(node, job.resources)]
    if not suited:
        return "kind"
    room = 0.0
    for node in suited:
        # What nobody knows of a node (0 GiB of memory) does not hold a job up.
        sizes = {name: getattr(node, name) for name in asked if name != "memory_gib" or node.memory_gib}
        room += min((size / asked[name] + _ROUNDING for name, size in sizes.items()), default=math.inf) // 1
    if room >= (smallest or job.execution.num_workers):
        return ""
    largest = {name: max(getattr(node, name) for node in suited) + _ROUNDING for name in asked}
    return next((name for name, size in asked.items() if size > largest[name]), "room")


def _suits(node: Resources, asked: Resources) -> bool:
    if node.gpus and not node.accelerator:  # nobody knows its type
        asked = replace(asked, accelerator="")
    described = Node(
        resources=node, labels=dict(node.labels), accelerator=node.accelerator, is_spot=node.spot is Spot.REQUIRE
    )
    return described.suits(asked)


def _amount(job: Job, lack: str) -> str:
    resources = job.resources
    if lack == "room":
        return f"{job.execution.num_workers} {'trials' if job.kind is JobKind.SEARCH else 'workers'} at once"
    if lack == "kind":
        return f"a node of its kind ({replace(resources, cpus=0.0, gpus=0.0, memory_gib=0.0)})".replace("(0 CPU, ", "(")
    if lack == "memory_gib":
        return f"{resources.memory_gib:g} GiB of memory"
    number, unit = getattr(resources, lack), lack.upper()[:-1]
    return f"{number:g} {unit}{'s' * (number != 1)}"


def _chain(jobs: Sequence[str]) -> str:
    return " > ".join(jobs) or "nothing"


def _storage(estimates: Estimates) -> str:
    largest = max((job.checkpoint_bytes for job in estimates.jobs.values()), default=0)
    while_running = f", and up to {format_bytes(largest)} of checkpoints per running job" if largest else ""
    return f"{format_bytes(estimates.kept_bytes)} of artifacts{while_running}"


def _cost(estimates: Estimates) -> Iterator[str]:
    if estimates.prices is None:
        return
    cost = estimates.cost
    if cost is None:
        yield _labelled("cost", f"unknown: the table has no price of {', '.join(estimates.unpriced())}")
    else:
        yield _labelled("cost", estimates.prices.show(cost))


def _sources(preview: Preview) -> Iterator[str]:
    estimates, error = preview.estimates, preview.model_error
    parts = [f"{number} {_SOURCES[source]}" for source, number in estimates.sources.items()]
    yield _labelled("estimates", "; ".join(parts))
    if estimates.assumed_accelerator:
        yield _labelled(
            "", f"GPUs are assumed to be {estimates.assumed_accelerator}: name their type with --accelerator"
        )
    if error is not None:
        yield _labelled(
            "",
            f"of {error.num_results} results here nine of ten lie within a factor of {error.within:.1f} of the model, "
            f"{error.within_calibrated:.1f} once corrected",
        )
    elif set(estimates.sources) == {EstimateSource.MODEL}:
        yield _labelled(
            "", "nothing was measured here yet: the estimate may be wrong by a factor of 3 in both directions"
        )
    for note, number in estimates.notes.items():
        yield _labelled("", f"{number} jobs: {note}")


def check_accelerator(name: str) -> str:
    """The table's name of an accelerator. Raises ``UsageError`` for one that it does not have."""
    found = known_accelerator(name) if name else ""
    if name and not found:
        raise UsageError(f"--accelerator {name!r} is not known; known are {', '.join(sorted(PEAKS))}")
    return found


def diff_table(diff: PlanDiff, title: str) -> Table:
    """Counts by kind."""
    table = Table(title=f"Difference of plans: {title}", title_justify="left")
    table.add_column("kind")
    for change in Change:
        table.add_column(change.value, justify="right")
    by_kind: dict[str, Counter[Change]] = {}
    for job in diff.jobs:
        by_kind.setdefault(job.kind, Counter())[job.change] += 1
    for kind, counts in by_kind.items():
        table.add_row(kind, *(str(counts[change] or "-") for change in Change))
    return table


def diff_lines(diff: PlanDiff, *, lists_jobs: bool) -> Iterator[str]:
    """Why jobs got other keys, and which jobs came and went."""
    for cause, jobs in diff.by_cause().items():
        yield f"{len(jobs)} rekeyed by {cause}: {_named([job.name for job in jobs], lists_jobs=lists_jobs)}"
    for change in (Change.ADDED, Change.REMOVED, Change.RENAMED):
        names = [job.name for job in diff.jobs if job.change is change]
        if names:
            yield f"{len(names)} {change.value}: {_named(names, lists_jobs=lists_jobs)}"
    if not diff.has_new_keys:
        yield "Nothing has to run again."


def _named(names: Sequence[str], *, lists_jobs: bool) -> str:
    shown = names if lists_jobs else names[:_MAX_NAMED]
    return ", ".join(shown) + (", ..." if len(shown) < len(names) else "")
