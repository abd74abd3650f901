"""All that planning can say about a sweep before anything runs: what ``orchestrator plan`` prints."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.core.contract import JobKind
from orchestrator.planning.estimate.costs import PriceTable
from orchestrator.planning.estimate.estimates import Estimates, estimate, refusals
from orchestrator.planning.estimate.eta import CriticalPath, Fleet, Makespan, critical_path, list_schedule
from orchestrator.planning.estimate.history import ModelError
from orchestrator.planning.estimate.power import weak_designs
from orchestrator.planning.estimate.volumes import DatasetSize
from orchestrator.planning.graph.data_checks import long_clusterings, miscounted, missing_datasets, sorted_shards
from orchestrator.planning.graph.plan import Plan
from orchestrator.planning.graph.reuse import Disposition, repeated_jobs
from orchestrator.services.look_up import Found, look_up
from orchestrator.services.measured import history_of
from orchestrator.sweepfile.values import ResolvedSweep

_VAL_SHARE = 0.05
"""Of the training split, of data sets that do not say how large their validation split is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A plan beside its store and a cluster."""

    plan: Plan
    found: Found
    estimates: Estimates
    path: CriticalPath
    fleet: Fleet | None
    """None = no cluster is known."""
    makespan: Makespan | None
    model_error: ModelError | None
    """None while the store holds no measurements."""
    refusals: tuple[str, ...] = ()
    """Of the budget guard, and where the file contradicts what is committed."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Of the data: what committed indexes say that training will suffer from. Of the design: what it cannot find."""

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
        }

    def _job(self, name: str) -> dict[str, Any]:
        estimated = self.estimates.jobs.get(name)
        return {
            "disposition": self.found.dispositions[name].value,
            "estimate": None if estimated is None else asdict(estimated),
        }


def make_outlook(
    sweep: ResolvedSweep,
    plan: Plan,
    *,
    fleet: Fleet | None,
    accelerator: str = "",
    prices: PriceTable | None = None,
    now: float | None = None,
) -> Outlook:
    """Ask the store of a plan, estimate what it has to run, and schedule that on a cluster. Changes nothing.

    Args:
        sweep: what the plan was made of.
        plan: the plan.
        fleet: the cluster to schedule on; None = no wall clock.
        accelerator: what GPUs are where ``resources`` does not say; a name of ``planning.estimate.accelerators.PEAKS``.
        prices: for the cost.
        now: unix seconds; default: the clock.
    """
    found = look_up(plan)
    history = history_of(plan, found.records)
    skip = found.reused | repeated_jobs(plan)
    estimates = estimate(
        plan, history=history, sizes=declared_sizes(sweep), accelerator=accelerator, prices=prices, skip=skip
    )
    durations_s = estimates.durations_s()
    makespan = list_schedule(plan, durations_s, fleet) if fleet else None
    return Outlook(
        plan=plan,
        found=found,
        estimates=estimates,
        path=critical_path(plan, durations_s),
        fleet=fleet,
        makespan=makespan,
        model_error=history.model_error(),
        refusals=(
            *miscounted(plan, {key: record.metrics for key, record in found.records.items()}),
            *refusals(plan, estimates, makespan, now=time.time() if now is None else now),
        ),
        notes=(*missing_datasets(sweep), *long_clusterings(sweep)),
        warnings=(*_index_warnings(plan, found), *weak_designs(plan)),
    )


def _index_warnings(plan: Plan, found: Found) -> Iterator[str]:
    for job in plan.jobs:
        if job.kind is JobKind.INDEX and job.key in found.records:
            yield from (f"{job.name}: {warning}" for warning in found.records[job.key].summary.get("warnings", ()))
    yield from sorted_shards(plan, {key: record.summary for key, record in found.records.items()})


def declared_sizes(sweep: ResolvedSweep) -> dict[str, DatasetSize]:
    """Samples of external data sets by name of their index job, as far as the sweep.yaml or their description tells."""
    sizes = {}
    for name, dataset in sweep.datasets.items():
        if dataset.location and dataset.num_train:
            declared = dataset.location.get("num_samples", {})
            num_val = declared.get("val") or round(_VAL_SHARE * dataset.num_train) * dataset.has_val
            sizes[f"index/{name}"] = DatasetSize(num_train=dataset.num_train, num_val=num_val)
    return sizes
