"""Estimates of a plan: seconds, GPU-hours, bytes and money per job and in total. Pure.

Each job's work (``volumes``) becomes seconds by the model of speed (``flops``) times a correction from results that the
store already holds (``history``). Jobs named in ``skip`` have their result and take nothing.

The budget guard compares the sums with what the plan's policy allows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache

from orchestrator.core.contract import Spot
from orchestrator.core.job_kinds import JobKind
from orchestrator.core.units import format_duration, format_money
from orchestrator.planning.estimate.eta import Makespan
from orchestrator.planning.estimate.flops import (
    CPU,
    DEFAULT_ACCELERATOR,
    PEAKS,
    Machine,
    find_accelerator,
    start_s,
    steady_s,
)
from orchestrator.planning.estimate.history import FAR_LARGER, Correction, EstimateSource, SpeedHistory
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.planning.estimate.volumes import DatasetSize, Volume, Volumes
from orchestrator.planning.graph.plan import Job, Plan

_HOUR_S = 3600.0
_SHORT_BLOCK_S = 5.0
"""A job of less is mostly its own start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEstimate:
    """Of one job, from its launch to its commit, without waiting for room."""

    seconds: float
    gpus: float = 0.0
    cpus: float = 0.0
    accelerator: str = CPU
    """The assumed or known type of its GPUs."""
    price_name: str = ""
    """Of its entry in a table of prices."""
    kept_bytes: int = 0
    checkpoint_bytes: int = 0
    """At most, while it runs."""
    read_bytes: int = 0
    """Of the images that it reads, once."""
    gradient_bytes: int = 0
    """That its workers exchange at each update."""
    num_steps: int = 0
    """Updates."""
    cost: float | None = None
    """None without a price."""
    source: EstimateSource = EstimateSource.MODEL
    num_results: int = 0
    """That the correction comes from."""
    note: str = ""
    """Assumptions that were necessary."""

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
    """The assumed GPU type where none is given; empty if nothing had to be assumed."""
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
    def sources(self) -> Mapping[EstimateSource, int]:
        """Number of jobs by where their estimate comes from, best first."""
        counts = Counter(job.source for job in self.jobs.values())
        return {source: counts[source] for source in EstimateSource if counts[source]}

    @property
    def notes(self) -> Mapping[str, int]:
        """What had to be assumed, with the number of jobs."""
        return Counter(job.note for job in self.jobs.values() if job.note)

    def unpriced(self) -> list[str]:
        """Accelerators that the table of prices lacks."""
        return sorted({job.price_name or "cpu" for job in self.jobs.values() if job.cost is None})


def estimate(
    plan: Plan,
    *,
    history: SpeedHistory | None = None,
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
        accelerator: name in ``flops.PEAKS`` of GPUs of which ``resources`` does not say what they are.
        prices: for ``cost``.
        skip: names of jobs that need not run.
    """
    known = history or SpeedHistory()
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


def price_name_of(prices: PriceTable | None, named: str, assumed: str) -> str:
    """The entry of GPUs that a sweep names, as it writes them, or as ``PEAKS`` does; of others, of the assumed ones."""
    known = {name.lower(): name for name in (prices.prices if prices else ())}
    if not named:  # perhaps as a device calls itself: NVIDIA RTX A6000
        words = f" {assumed.replace('-', ' ')} ".lower()
        return known.get(assumed.lower()) or next((known[name] for name in known if f" {name} " in words), assumed)
    found = (known.get(name.lower()) for name in (named, known_accelerator(named)) if name)
    return next(filter(None, found), named)


class _Estimator:
    """Thousands of jobs share a few corrections, each of which is computed once."""

    def __init__(self, history: SpeedHistory, prices: PriceTable | None) -> None:
        self._history, self._prices = history, prices
        self._brief_s = history.brief_model_s()
        self._corrections: dict[tuple[JobKind, str, Machine, str, int], Correction] = {}

    def of(self, job: Job, volume: Volume, accelerator: str) -> JobEstimate:
        machine = machine_of(job, accelerator)
        correction = self._correction(job.kind, volume, machine)
        seconds, prices = _seconds(volume, machine, correction), self._prices
        is_spot = job.resources.spot is Spot.REQUIRE
        price_name = machine.accelerator and price_name_of(prices, job.resources.accelerator, accelerator)
        return JobEstimate(
            seconds=seconds,
            gpus=job.resources.gpus,
            cpus=job.resources.cpus,
            accelerator=machine.accelerator,
            price_name=price_name,
            kept_bytes=volume.kept_bytes,
            checkpoint_bytes=volume.checkpoint_bytes,
            read_bytes=volume.read_bytes,
            gradient_bytes=volume.gradient_bytes,
            num_steps=volume.work.num_steps,
            cost=prices.cost(seconds, job.resources, price_name, is_spot=is_spot) if prices else None,
            source=correction.source,
            num_results=correction.num_results,
            note=_note(job, volume, seconds, correction),
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


def _note(job: Job, volume: Volume, seconds: float, correction: Correction) -> str:
    """Notes about assumptions and possible improvements."""
    is_measured = correction.source is EstimateSource.HISTORY
    if job.kind is JobKind.THEORY and correction.num_results:
        if seconds >= _SHORT_BLOCK_S:
            return ""
        return "blocks of seeds take so little that starting jobs counts; raise seeds.per_job, which changes all keys"
    # Results of the same network correct what the table does not know.
    return "" if is_measured and "network" in volume.caveat else volume.caveat


def machine_of(job: Job, accelerator: str) -> Machine:
    """The hardware of an attempt at a job, for GPUs of the given type."""
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


def _indexed(plan: Plan, history: SpeedHistory) -> dict[str, DatasetSize]:
    return {job.name: history.sizes[job.key] for job in plan.jobs if job.key in history.sizes}


def refusals(plan: Plan, estimates: Estimates, makespan: Makespan | None, *, now: float) -> list[str]:
    """Why the plan must not start, each with its arithmetic; empty if it may.

    ``now`` is in unix seconds; without a ``makespan`` (no cluster is known) the deadline is checked against nothing.
    """
    return [*_over_gpu_hours(plan, estimates), *_over_cost(plan, estimates), *_too_late(plan, makespan, now)]


def _over_gpu_hours(plan: Plan, estimates: Estimates) -> Iterator[str]:
    allowed = plan.policy.gpu_hours
    if allowed is not None and estimates.gpu_hours > allowed:
        over = estimates.gpu_hours - allowed
        yield (
            f"policy.budget.gpu_hours allows {allowed:,.1f} GPU-hours; {len(estimates.jobs)} jobs to run take about "
            f"{estimates.gpu_hours:,.1f}, {over:,.1f} too many; raise the budget or plan less"
        )


def _over_cost(plan: Plan, estimates: Estimates) -> Iterator[str]:
    allowed, price, prices = plan.policy.cost, plan.policy.gpu_hour_price, estimates.prices
    if allowed is None or not estimates.jobs:
        return
    arithmetic = f"{estimates.gpu_hours:,.1f} GPU-hours"
    cost = estimates.cost
    if prices is None and price:
        cost, arithmetic = estimates.gpu_hours * price, f"{arithmetic} at {price:g}"
    show = prices.show if prices else format_money
    if cost is None:
        lacking = f" (the table has no price of {', '.join(estimates.unpriced())})" if prices else ""
        yield f"policy.budget.cost allows {show(allowed)}, but the price is not known: give --prices FILE{lacking}"
    elif cost > allowed:
        yield (
            f"policy.budget.cost allows {show(allowed)}; the jobs to run cost about {show(cost)} ({arithmetic}), "
            f"{show(cost - allowed)} too much; raise it or plan less"
        )


def _too_late(plan: Plan, makespan: Makespan | None, now: float) -> Iterator[str]:
    policy = plan.policy
    ends_s = [policy.deadline_s] if policy.deadline_s is not None else []
    ends_s += [now + policy.time_limit_s] if policy.time_limit_s is not None else []
    if not ends_s:
        return
    deadline_s = min(ends_s)
    if deadline_s <= now:
        yield f"policy's deadline, {_moment(deadline_s)}, has passed; move it"
        return
    if makespan is None:
        return
    end_s = now + makespan.seconds
    if end_s > deadline_s:
        left, takes = format_duration(max(0.0, deadline_s - now)), format_duration(makespan.seconds)
        yield (
            f"policy's deadline is {_moment(deadline_s)}, in {left}; the jobs to run take about {takes} here, "
            f"until {_moment(end_s)}; ask for more GPUs (the critical path alone takes "
            f"{format_duration(makespan.critical_s)}), plan less, or move the deadline"
        )


def _moment(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
