"""Time and cost of a plan on a hypothetical cluster: the real controller in virtual time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

from orchestrator.backends.simulated import (
    Alarm,
    ClusterSpec,
    Hazards,
    JobWork,
    SimulatedBackend,
    SimulatedCluster,
    Span,
    VirtualClock,
)
from orchestrator.backends.simulated.clock import START_S
from orchestrator.controller.attempt_tracker import AttemptLimits, PreflightRule
from orchestrator.controller.controller import Controller
from orchestrator.core.clocks import young_interval_s
from orchestrator.core.contract import JobRequest
from orchestrator.core.errors import ControllerError, UserError
from orchestrator.core.job_kinds import TRAINING_KINDS, JobKind
from orchestrator.planning.estimate.eta import Fleet
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps import client
from orchestrator.sweeps.progress import read_progress
from orchestrator.testing.memory_store import MemoryStore

_SAVING = TRAINING_KINDS | {JobKind.EMBED, JobKind.SEARCH, JobKind.THEORY}
"""Kinds whose attempts lose only what follows their newest checkpoint, part, trial or seed."""
CLUSTER = "forecast"
_PATIENCE_S = 3600.0
"""After so long without an attempt no job starts any more: longer than any wait before one is tried again."""
_MAX_ROUNDS_OF_A_SWEEP = 20_000
"""Jobs wait half a pause for a round, so a sweep of so many pauses becomes longer by about one part in as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Delays that are not in the durations of jobs. Seconds."""

    cold_start_s: float = 15.0
    """From placement to the first step of a job with GPUs where a process, or each worker of a gang, starts: imports,
    data, compilation. The durations of jobs contain it once."""
    cpu_start_s: float = 1.0
    """The same of a job without GPUs."""
    warm_start_s: float = 1.0
    """The same on a runner that is up."""
    checkpoint_stall_s: float = 0.5
    """For how long a checkpoint holds up training: one copy of the state in memory, 0.1 s per GB. Small states take
    less: never more than a hundredth of the interval."""
    stop_s: float = 5.0
    """From a stop to the end of an attempt."""
    read_bytes_per_s: float = 1e9
    """At which a node reads a data set that it does not hold yet."""
    network_bytes_per_s: float = 12.5e9
    """Of a node, for gradients that go to other nodes."""
    mtbf_s: float = 0.0
    """Above 0: attempts save at the interval of Young's formula for this mean time between failures of one node,
    unless their job has its own interval.
    """


_BACKWARD_SHARE = 2 / 3
"""Of a step, during which gradients are sent while others are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a job reads and exchanges, in bytes."""

    reads: str = ""
    """Its data set; empty = none."""
    read_bytes: int = 0
    """Of that, once."""
    gradient_bytes: int = 0
    """Of the gradients of an update."""
    num_steps: int = 0
    """Updates."""


class Workload:
    """The work of every job of a plan."""

    def __init__(
        self,
        plan: Plan,
        durations_s: Mapping[str, float],
        assumptions: Assumptions,
        traffic: Mapping[str, Traffic] | None = None,
    ) -> None:
        self._traffic = traffic or {}
        self._jobs = plan.by_name()
        self._durations_s = durations_s
        self._assumptions = assumptions
        self._done: frozenset[str] = frozenset()

    def leave_out(self, keys: Collection[str]) -> None:
        """Jobs that are done take no time."""
        self._done = frozenset(keys)

    def work_of(self, request: JobRequest) -> JobWork:
        """The work of an attempt; its checkpoint interval follows the request's mean time between failures."""
        assumed, duration_s = self._assumptions, self._durations_s.get(request.job, 0.0)
        every_s = self._saves_every_s(request, duration_s) if request.kind in _SAVING else 0.0
        job, traffic = self._jobs[request.job], self._traffic.get(request.job, Traffic())
        start_s = self._start_s(job)
        epochs = max(1, round(_recipe_number(job, "epochs"))) if job.kind in TRAINING_KINDS else 1
        return JobWork(
            work_s=duration_s - start_s,
            checkpoint_every_s=every_s,
            checkpoint_stall_s=0.0 if job.kind is JobKind.THEORY else min(assumed.checkpoint_stall_s, 0.01 * every_s),
            cold_start_s=start_s,
            warm_start_s=min(assumed.warm_start_s, start_s),
            reads=traffic.reads,
            read_s=traffic.read_bytes / assumed.read_bytes_per_s,
            epochs=epochs,
            data_groups=max(1, int(_recipe_number(job, "data_groups"))),
            border_speed=self._border_speed(request.job, duration_s - start_s),
            stop_s=assumed.stop_s,
            num_workers=job.execution.num_workers,
        )

    def _saves_every_s(self, request: JobRequest, duration_s: float) -> float:
        """Seconds of work that an interruption loses at most."""
        job, assumed = self._jobs[request.job], self._assumptions
        parameters = job.identity.get("parameters", {})
        if job.kind is JobKind.THEORY:
            num_seeds: int = parameters["seeds"]["stop"] - parameters["seeds"]["first"]
            return duration_s / max(1, num_seeds)
        # The log of a search keeps the trials that have ended. Those that run have checkpoints, so they lose no more.
        num_trials: int = parameters["trials"] if job.kind is JobKind.SEARCH else 1
        most_s = duration_s / max(1, num_trials)
        mtbf_s = request.execution.checkpoint_mtbf_s or assumed.mtbf_s
        own_s = young_interval_s(assumed.checkpoint_stall_s, mtbf_s) if mtbf_s else _epochs_interval_s(job, duration_s)
        every, total = job.execution.checkpoint_every_steps, self._traffic.get(request.job, Traffic()).num_steps
        if every and total:  # its own interval
            own_s = duration_s * min(1.0, every / total)
        return min(own_s, most_s)

    def lower_bound_s(self, spec: ClusterSpec) -> float:
        """Lower bound of every schedule in seconds, on a cluster that never fails and where every runner is warm."""
        left = [job for job in self._jobs.values() if job.key not in self._done]
        bounds = [self._critical_path_s(left)]
        groups = spec.groups
        for resource in ("gpus", "cpus"):
            has = sum(group.count * getattr(group.shape, resource) for group in groups)
            # Jobs with one key run once.
            demand_by_key = {job.key: self._least_use_s(job, getattr(job.resources, resource)) for job in left}
            bounds.append(sum(demand_by_key.values()) / has if has else 0.0)
        return max(bounds)

    def _critical_path_s(self, jobs: list[Job]) -> float:
        ends: dict[str, float] = {}
        for job in jobs:
            begin_s = max((ends.get(need, 0.0) for need in job.needs), default=0.0)
            ends[job.name] = begin_s + self._least_s(job)
        return max(ends.values(), default=0.0)

    def _border_speed(self, name: str, work_s: float) -> float:
        """A ring sends every gradient twice over each node's network, as far as possible in the backward pass."""
        traffic = self._traffic.get(name, Traffic())
        if not traffic.num_steps or not work_s:
            return 1.0
        step_s = work_s / traffic.num_steps
        exchange_s = 2.0 * traffic.gradient_bytes / self._assumptions.network_bytes_per_s
        return step_s / max(step_s, (1.0 - _BACKWARD_SHARE) * step_s + exchange_s)

    def _start_s(self, job: Job) -> float:
        """Start-up part of a job's duration if no process is running."""
        assumed = self._assumptions
        cold_s = assumed.cold_start_s if job.resources.gpus else assumed.cpu_start_s
        return min(cold_s, self._durations_s.get(job.name, 0.0))

    def _least_s(self, job: Job) -> float:
        """Least duration of a job."""
        return self._durations_s[job.name] - self._start_s(job) + self._least_start_s(job)

    def _least_use_s(self, job: Job, amount: float) -> float:
        """Least resource-seconds of a job with so much of a resource: an elastic one may start on less."""
        part = _fewest_workers(job) / job.execution.num_workers
        return amount * (self._least_s(job) - (1.0 - part) * self._least_start_s(job))

    def _least_start_s(self, job: Job) -> float:
        """Least start-up of a job: gangs always start new processes, other jobs may use a warm runner."""
        start_s = self._start_s(job)
        return start_s if _fewest_workers(job) > 1 else min(self._assumptions.warm_start_s, start_s)


def _fewest_workers(job: Job) -> int:
    return min(job.execution.num_workers, int(job.resources.min_gpus) or job.execution.num_workers)


def _epochs_interval_s(job: Job, duration_s: float) -> float:
    """Seconds between checkpoints at the ends of epochs."""
    epochs = _recipe_number(job, "epochs")
    if not epochs:
        return duration_s / 10.0
    return duration_s * min(1.0, job.execution.checkpoint_every_epochs / epochs)


def _recipe_number(job: Job, field: str) -> float:
    """A number of its recipe; 0 without any."""
    recipe = job.identity.get("parameters", {}).get("recipe") or {}
    value = recipe.get(field) or 0.0
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds between two rounds: ``busy_s`` after one that changed something, and longer and longer after others."""

    busy_s: float = 0.05
    """Seconds; also from news of the backend to the round that handles it."""
    idle_s: float = 1.0
    growth: float = 2.0

    def after(self, pause_s: float, *, has_changed: bool) -> float:
        """The pause after a round that followed a pause of ``pause_s``."""
        return self.busy_s if has_changed else min(self.idle_s, max(self.busy_s, pause_s * self.growth))


class ControllerLoop:
    """One controller and its rounds. Pass ``news`` to the cluster as ``on_news``."""

    def __init__(
        self,
        clock: VirtualClock,
        controller: Controller,
        pace: Pace,
        *,
        on_round: Callable[[], None] = lambda: None,
    ) -> None:
        self._clock = clock
        self._controller = controller
        self._pace = pace
        self._on_round = on_round
        self._pause_s = pace.busy_s
        self._alarm: Alarm | None = None
        self.num_rounds = 0
        self._arm()

    def news(self) -> None:
        """There is news: schedule the next round soon."""
        self._pause_s = self._pace.busy_s
        if self._alarm is None or self._alarm.at_s > self._clock() + self._pause_s:
            self._arm()

    def stop(self) -> None:
        """No further rounds."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _arm(self) -> None:
        self.stop()
        self._alarm = self._clock.after(self._pause_s, self._turn)

    def _turn(self) -> None:
        self.num_rounds += 1
        has_changed = self._controller.tick()
        self._pause_s = self._pace.after(self._pause_s, has_changed=has_changed)
        self._arm()
        self._on_round()


def commit_jobs(store: ObjectStore, jobs: Sequence[Job], now_s: float) -> None:
    """Commit a tiny artifact for each job."""
    for job in jobs:
        request = JobRequest(
            attempt_id=f"{job.key}.0",
            attempt_number=0,
            sweep="earlier",
            job=job.name,
            key=job.key,
            kind=job.kind,
            identity=job.identity,
            store_uri=store.uri,
        )
        writer = ArtifactWriter(store, request)
        writer.add("payload", job.key.encode())
        writer.commit(now=now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedPlans:
    """One plan with the jobs of several; ``names`` say, for each of those plans, what its jobs are called in it."""

    plan: Plan
    names: tuple[Mapping[str, str], ...]


def join_plans(plans: Sequence[Plan]) -> JoinedPlans:
    """All jobs of some plans, those of one key once. A single plan keeps its names; else they begin with the sweep's.

    The first plan's policy counts for all of it.

    Raises:
        UserError: a sweep is named twice.
    """
    titles = [plan.sweep for plan in plans]
    if len(set(titles)) < len(titles):
        raise UserError(f"the sweeps are {', '.join(titles)}; name each once")
    by_key: dict[str, Job] = {}
    names: list[dict[str, str]] = []
    for plan in plans:
        mine: dict[str, str] = {}
        prefix = f"{plan.sweep}/" if len(plans) > 1 else ""
        for job in plan.jobs:  # every job stands after those that it needs
            known = by_key.get(job.key)
            name = known.name if known else f"{prefix}{job.name}"
            mine[job.name] = name
            if known is None:
                needs = tuple(dict.fromkeys(mine[need] for need in job.needs))
                by_key[job.key] = replace(job, name=name, needs=needs)
        names.append(mine)
    study = replace(plans[0], sweep="+".join(titles), jobs=tuple(by_key.values()))
    return JoinedPlans(plan=study, names=tuple(names))


def imagined(plan: Plan, fleet: Fleet) -> Plan:
    """A plan that reads no data, because they may be declared and not exist yet, and that asks for nothing of which
    nobody knows whether the nodes have it: a type of GPU, and memory and labels of nodes that only options describe.
    """
    unknown: dict[str, Any] = {"accelerator": ""}
    unknown |= {} if all(node.memory_gib for node in fleet.nodes) else {"memory_gib": 0.0}
    unknown |= {} if fleet.is_fixed else {"labels": ()}
    jobs = [
        replace(job, execution=replace(job.execution, data_location={}), resources=replace(job.resources, **unknown))
        for job in plan.jobs
    ]
    return replace(plan, jobs=tuple(jobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Result of one simulated run of a sweep; times in seconds from its submission, rates in [0, 1]."""

    sweep: str
    seed: int
    num_jobs: int
    num_reused: int
    state: SweepState
    job_states: Mapping[str, int]
    reasons: Mapping[str, str]
    """Why jobs failed, by name; empty if none did."""
    stopped: str = ""
    """Why no more jobs were started, such as a budget that is spent; empty if all were."""
    num_gpus: int
    resource: str
    """What is counted below: ``GPU``, or ``CPU`` on a cluster without GPUs."""
    makespan_s: float
    lower_bound_s: float
    """The critical path, or all work by all resources, whichever is longer."""
    utilisation: float
    """Share of the available resource-time that attempts held."""
    goodput: float
    """Share of the held resource-time that was useful work."""
    hours: Mapping[str, float]
    """Resource-hours by purpose."""
    lost_hours: Mapping[str, float]
    """Resource-hours lost, by cause."""
    num_attempts: int
    num_ends: Mapping[str, int]
    """Attempts by how they ended."""
    waits_s: Mapping[str, float]
    """Seconds that jobs waited for room, by name: neither held by an attempt nor waiting for what they need."""
    available_hours: float
    """Resource-hours of all nodes that were up from the submission to the end: what a rented cluster is paid for."""
    num_rounds: int = 0
    spans: tuple[Span, ...] = field(default=(), repr=False)
    started_at_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form, without the spans of single attempts."""
        document = asdict(replace(self, spans=()))
        return {name: value for name, value in document.items() if name != "spans"}


def forecast(  # noqa: PLR0913 - the world, by name
    plan: Plan,
    cluster_spec: ClusterSpec,
    durations_s: Mapping[str, float],
    *,
    hazards: Hazards | None = None,
    assumptions: Assumptions | None = None,
    traffic: Mapping[str, Traffic] | None = None,
    committed: Collection[str] = (),
    seed: int = 0,
    now: float = START_S,
    on_round: Callable[[float], None] = lambda _now_s: None,
) -> Forecast:
    """Run a plan to its end on a simulated cluster. Deterministic in ``seed``.

    ``durations_s`` are seconds by job, ``traffic`` what it reads and exchanges; ``committed`` are keys whose artifacts
    are there already; ``now`` is when the sweep is submitted, which deadlines are compared with.

    Raises:
        ControllerError: the sweep does not end, which is a bug.
    """
    done = frozenset(committed)
    simulated = _Simulated(plan, cluster_spec, hazards or Hazards(), seed, now)
    workload = Workload(plan, durations_s, assumptions or Assumptions(), traffic)
    workload.leave_out(done)
    commit_jobs(simulated.store, [job for job in plan.jobs if job.key in done], simulated.clock())
    lower_bound_s = workload.lower_bound_s(cluster_spec)
    snapshot = simulated.run(workload, lower_bound_s, on_round)
    return simulated.outcome(snapshot, lower_bound_s)


class _Simulated:
    """A store, a clock, a cluster and a controller for one sweep."""

    def __init__(self, plan: Plan, spec: ClusterSpec, hazards: Hazards, seed: int, now: float) -> None:
        self.clock = VirtualClock(now)
        self.store = MemoryStore(now=self.clock)
        self._plan = replace(plan, store_uri=self.store.uri)
        self._spec, self._hazards, self._seed = spec, hazards, seed
        self._cluster: SimulatedCluster | None = None
        self._loop: ControllerLoop | None = None

    def run(self, workload: Workload, lower_bound_s: float, on_round: Callable[[float], None]) -> Snapshot:
        """From the submission to the end of the sweep."""
        random = Random(self._seed)  # noqa: S311 - a simulation
        cluster = SimulatedCluster(self._spec, self.clock, self.store, workload.work_of, random, hazards=self._hazards)
        # Simulated attempts do not report steps, so the end of a preflight would not be known.
        limits = AttemptLimits(preflight=PreflightRule.NEVER)
        backend = SimulatedBackend(cluster)
        controller = Controller(self.store, backend, CLUSTER, "simulated", self.clock, limits=limits)
        client.submit(self.store, self._plan, "", CLUSTER, now=self.clock())
        began_s = self.clock()
        loop = ControllerLoop(
            self.clock, controller, _pace(lower_bound_s), on_round=lambda: on_round(self.clock() - began_s)
        )
        cluster.on_news = loop.news
        self._cluster, self._loop = cluster, loop
        busy_at_s, patience_s = began_s, _PATIENCE_S + self._hazards.replace_s
        while not (loop.num_rounds and controller.is_idle):
            if not self.clock.step():
                raise ControllerError(f"sweep {self._plan.sweep} waits for nothing and has not ended: this is a bug")
            busy_at_s = self.clock() if cluster.attempts else busy_at_s
            if self.clock() > busy_at_s + patience_s:
                raise UserError(self._why_it_never_ends())
        cluster.measure()
        return client.load_snapshot(self.store, self._plan.sweep)

    def _why_it_never_ends(self) -> str:
        waits = read_progress(self.store, self._plan.sweep)
        reasons = "; ".join(f"{job}: {wait.progress.phase}" for job, wait in waits.items())
        return (
            f"sweep {self._plan.sweep} would never end here, because jobs wait and nothing runs ({reasons}); raise the "
            "limits that keep them waiting"
        )

    def outcome(self, snapshot: Snapshot, lower_bound_s: float) -> Forecast:
        """The result of the run."""
        assert self._cluster is not None  # noqa: S101 - ``run`` comes first
        assert self._loop is not None  # noqa: S101 - see above
        account = self._cluster.account
        hours = {purpose.value: amount_s / 3600.0 for purpose, amount_s in account.seconds.items()}
        views = list(snapshot.jobs.values())
        return Forecast(
            sweep=snapshot.sweep,
            seed=self._seed,
            num_jobs=len(snapshot.jobs),
            num_reused=sum(view.state is JobState.REUSED for view in views),
            state=snapshot.state,
            job_states={state.value: number for state, number in snapshot.counts.items()},
            reasons={view.name: view.reason for view in views if view.state is JobState.FAILED},
            stopped=snapshot.tripped,
            num_gpus=self._spec.num_gpus,
            resource="GPU" if self._spec.num_gpus else "CPU",
            makespan_s=(snapshot.finished_at_s or self.clock()) - snapshot.accepted_at_s,
            lower_bound_s=lower_bound_s,
            utilisation=account.utilisation,
            goodput=account.goodput,
            hours=hours,
            lost_hours={cause: amount_s / 3600.0 for cause, amount_s in sorted(account.lost_by_cause.items())},
            num_attempts=len(account.spans),
            num_ends=dict(sorted(account.num_ends.items())),
            waits_s=_waits_s(self._plan, account.spans, snapshot.accepted_at_s),
            available_hours=account.available_s / 3600.0,
            num_rounds=self._loop.num_rounds,
            spans=tuple(account.spans),
            started_at_s=snapshot.accepted_at_s,
        )


def _waits_s(plan: Plan, spans: Sequence[Span], accepted_at_s: float) -> dict[str, float]:
    """From the moment when all that a job needs is there to its end, less what its attempts held."""
    ended_s: dict[str, float] = {}
    held_s: dict[str, float] = defaultdict(float)
    for span in spans:
        ended_s[span.job] = max(ended_s.get(span.job, 0.0), span.ended_at_s)
        held_s[span.job] += span.ended_at_s - span.placed_at_s
    return {
        job.name: max(0.0, ended_s[job.name] - ready_s - held_s[job.name])
        for job in plan.jobs
        if job.name in ended_s
        for ready_s in [max((ended_s.get(need, accepted_at_s) for need in job.needs), default=accepted_at_s)]
    }


def _pace(lower_bound_s: float) -> Pace:
    """Rounds as often as matters for a sweep of this length."""
    coarse_s = lower_bound_s / _MAX_ROUNDS_OF_A_SWEEP
    return Pace(busy_s=max(0.05, min(10.0, coarse_s)), idle_s=max(1.0, min(60.0, 20.0 * coarse_s)))
