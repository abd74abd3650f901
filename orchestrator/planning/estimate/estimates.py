"""What a plan will take: seconds, GPU-hours, bytes and money per job and in all. Pure.

Each job's work (``volumes``) becomes seconds by the model of speed (``flops``) times a correction from results that the
store already holds (``history``). Jobs named in ``skip`` have their result and take nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache

from orchestrator.core.contract import JobKind, Spot
from orchestrator.planning.estimate.accelerators import CPU, DEFAULT_ACCELERATOR, PEAKS, Machine, find_accelerator
from orchestrator.planning.estimate.costs import PriceTable
from orchestrator.planning.estimate.flops import start_s, steady_s
from orchestrator.planning.estimate.history import FAR_LARGER, Correction, History, Source
from orchestrator.planning.estimate.volumes import DatasetSize, Volume, Volumes
from orchestrator.planning.graph.plan import Job, Plan

__all__ = ["Estimates", "JobEstimate", "Source", "estimate"]

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEstimate:
    """Of one job, from its launch to its commit, without waiting for room."""

    seconds: float
    gpus: float = 0.0
    cpus: float = 0.0
    accelerator: str = CPU
    """What its GPUs are taken for."""
    kept_bytes: int = 0
    checkpoint_bytes: int = 0
    """At most, while it runs."""
    cost: float | None = None
    """None without a price."""
    source: Source = Source.MODEL
    num_results: int = 0
    """That the correction comes from."""
    note: str = ""
    """What had to be assumed."""

    @property
    def gpu_hours(self) -> float:
        """GPUs x hours."""
        return self.gpus * self.seconds / _HOUR_S

    @property
    def cpu_hours(self) -> float:
        """Cores x hours of jobs that use no GPU."""
        return 0.0 if self.gpus else self.cpus * self.seconds / _HOUR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Of a whole plan."""

    jobs: Mapping[str, JobEstimate]
    """By name, without those that need not run."""
    assumed_accelerator: str = ""
    """What GPUs were taken for where nothing says what they are; empty if nothing had to be assumed."""
    prices: PriceTable | None = field(default=None, compare=False)

    def durations_s(self) -> dict[str, float]:
        """Seconds by name of the jobs that have to run."""
        return {name: job.seconds for name, job in self.jobs.items()}

    @property
    def gpu_hours(self) -> float:
        """Of all jobs."""
        return sum(job.gpu_hours for job in self.jobs.values())

    @property
    def cpu_hours(self) -> float:
        """Core-hours of all jobs without GPUs."""
        return sum(job.cpu_hours for job in self.jobs.values())

    @property
    def kept_bytes(self) -> int:
        """Of all artifacts."""
        return sum(job.kept_bytes for job in self.jobs.values())

    @property
    def cost(self) -> float | None:
        """None if there is no price for a job."""
        costs = [job.cost for job in self.jobs.values()]
        known = [cost for cost in costs if cost is not None]
        return sum(known) if len(known) == len(costs) and self.prices is not None else None

    @property
    def sources(self) -> Mapping[Source, int]:
        """Number of jobs by where their estimate comes from, best first."""
        counts = Counter(job.source for job in self.jobs.values())
        return {source: counts[source] for source in Source if counts[source]}

    @property
    def notes(self) -> Mapping[str, int]:
        """What had to be assumed, with the number of jobs."""
        return Counter(job.note for job in self.jobs.values() if job.note)

    def unpriced(self) -> list[str]:
        """Accelerators that the table of prices lacks."""
        return sorted({job.accelerator or "cpu" for job in self.jobs.values() if job.cost is None})


def estimate(
    plan: Plan,
    *,
    history: History | None = None,
    sizes: Mapping[str, DatasetSize] | None = None,
    accelerator: str = "",
    prices: PriceTable | None = None,
    skip: Collection[str] = (),
) -> Estimates:
    """Estimate the jobs of a plan that are not in ``skip``.

    Args:
        plan: in topological order.
        history: what results of the store measured.
        sizes: samples of data sets by name of the ``index`` job, where the plan does not tell; the history's go first.
        accelerator: name in ``accelerators.PEAKS`` of GPUs of which ``resources`` does not say what they are.
        prices: for ``cost``.
        skip: names of jobs that need not run.
    """
    known = history or History()
    volumes = Volumes(plan, {**(sizes or {}), **_indexed(plan, known)})
    usual = accelerator or known.usual_accelerator()
    estimator, estimates, assumed = _Estimator(known, prices), {}, False
    for job in plan.jobs:
        if job.name in skip:
            continue
        named = known_accelerator(job.resources.accelerator) or usual
        assumed = assumed or (job.resources.gpus > 0 and not named)
        estimates[job.name] = estimator.of(job, volumes.of(job), named or DEFAULT_ACCELERATOR)
    return Estimates(jobs=estimates, assumed_accelerator=DEFAULT_ACCELERATOR if assumed else "", prices=prices)


@cache
def known_accelerator(name: str) -> str:
    """The name in ``PEAKS`` that a user's spelling means (``a100``, ``H100-80G``); empty if none."""
    exact = {known.lower(): known for known in PEAKS}
    return exact.get(name.lower()) or find_accelerator(name)


class _Estimator:
    """Jobs by the thousand share a few corrections, which are found once."""

    def __init__(self, history: History, prices: PriceTable | None) -> None:
        self._history, self._prices = history, prices
        self._brief_s = history.brief_model_s()
        self._corrections: dict[tuple[JobKind, str, Machine, str, int], Correction] = {}

    def of(self, job: Job, volume: Volume, accelerator: str) -> JobEstimate:
        machine = machine_of(job, accelerator)
        correction = self._correction(job.kind, volume, machine)
        seconds, prices = _seconds(volume, machine, correction), self._prices
        is_spot = job.resources.spot is Spot.REQUIRE
        is_measured = correction.source is Source.HISTORY
        return JobEstimate(
            seconds=seconds,
            gpus=job.resources.gpus,
            cpus=job.resources.cpus,
            accelerator=machine.accelerator,
            kept_bytes=volume.kept_bytes,
            checkpoint_bytes=volume.checkpoint_bytes,
            cost=prices.cost(seconds, job.resources, accelerator, is_spot=is_spot) if prices else None,
            source=correction.source,
            num_results=correction.num_results,
            # Results of the very network correct what the table does not know.
            note="" if is_measured and "network" in volume.caveat else volume.caveat,
        )

    def _correction(self, kind: JobKind, volume: Volume, machine: Machine) -> Correction:
        if not volume.is_measured:
            return Correction()
        # The larger the work, the fewer of the brief results count for it.
        num_too_brief = bisect_left(self._brief_s, steady_s(volume.work, machine) / FAR_LARGER)
        setting = (kind, volume.subject, machine, volume.work.precision, num_too_brief)
        if setting not in self._corrections:
            self._corrections[setting] = self._history.correction(kind, volume.subject, machine, volume.work)
        return self._corrections[setting]


def machine_of(job: Job, accelerator: str) -> Machine:
    """What an attempt at a job computes on, if its GPUs are such ones."""
    return Machine(
        accelerator=accelerator if job.resources.gpus else CPU,
        num_workers=job.execution.num_workers,
        num_cores=max(1.0, job.resources.cpus),
    )


def _seconds(volume: Volume, machine: Machine, correction: Correction) -> float:
    begin_s = start_s(machine) if correction.setup_s is None else correction.setup_s
    # Measured rates include evaluation.
    is_measured = correction.num_results > 0
    work = volume.work.without_evaluation() if is_measured else volume.work
    return begin_s + correction.ratio * steady_s(work, machine)


def _indexed(plan: Plan, history: History) -> dict[str, DatasetSize]:
    return {job.name: history.sizes[job.key] for job in plan.jobs if job.key in history.sizes}
