"""What a plan would cost in time and money on a cluster that does not exist: the product itself, on virtual time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

from orchestrator.backends.simulated import (
    ClusterSpec,
    Hazards,
    SimulatedBackend,
    SimulatedCluster,
    Span,
    VirtualClock,
)
from orchestrator.backends.simulated.clock import START_S
from orchestrator.controller.attempt_tracker import AttemptLimits, PreflightRule
from orchestrator.controller.controller import Controller
from orchestrator.core.errors import ControllerError
from orchestrator.planning.graph.plan import Plan
from orchestrator.simulation.loop import ControllerLoop, Pace
from orchestrator.simulation.precommit import commit_jobs
from orchestrator.simulation.works import Assumptions, Workload
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.sweeps import client
from orchestrator.testing.memory_store import MemoryStore

__all__ = ["Assumptions", "Forecast", "forecast"]

CLUSTER = "forecast"
_MAX_ROUNDS_OF_A_SWEEP = 20_000
"""What waits for the next round waits half a pause: a sweep becomes longer by about one part in as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """How a sweep went in one simulated run; times in seconds from its submission, rates in [0, 1]."""

    sweep: str
    seed: int
    num_jobs: int
    num_reused: int
    state: SweepState
    job_states: Mapping[str, int]
    reasons: Mapping[str, str]
    """Why jobs failed, by name; empty if none did."""
    num_gpus: int
    resource: str
    """What is counted below: ``GPU``, or ``CPU`` on a cluster without GPUs."""
    makespan_s: float
    lower_bound_s: float
    """The critical path, or all work by all resources, whichever is longer."""
    utilisation: float
    """Held by attempts, of all that was up."""
    goodput: float
    """Work that was kept, of all that attempts held."""
    hours: Mapping[str, float]
    """Resource-hours by purpose."""
    lost_hours: Mapping[str, float]
    """Resource-hours lost, by cause."""
    num_attempts: int
    num_ends: Mapping[str, int]
    """Attempts by how they ended."""
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
    committed: Collection[str] = (),
    seed: int = 0,
    now: float = START_S,
    on_round: Callable[[float], None] = lambda _now_s: None,
) -> Forecast:
    """Run a plan to its end on a simulated cluster. Deterministic in ``seed``.

    ``durations_s`` are seconds by job; ``committed`` are keys whose artifacts are there already; ``now`` is when the
    sweep is submitted, which deadlines are compared with.

    Raises:
        ControllerError: the sweep does not end, which is a bug.
    """
    done = frozenset(committed)
    simulated = _Simulated(plan, cluster_spec, hazards or Hazards(), seed, now)
    workload = Workload(plan, durations_s, assumptions or Assumptions())
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
        # Simulated attempts say nothing of their steps, so that nothing could tell when a preflight is over.
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
        while not (loop.num_rounds and controller.is_idle):
            if not self.clock.step():
                raise ControllerError(f"sweep {self._plan.sweep} waits for nothing and has not ended: this is a bug")
        cluster.measure()
        return client.load_snapshot(self.store, self._plan.sweep)

    def outcome(self, snapshot: Snapshot, lower_bound_s: float) -> Forecast:
        """What there is to say of the run."""
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
            available_hours=account.available_s / 3600.0,
            num_rounds=self._loop.num_rounds,
            spans=tuple(account.spans),
            started_at_s=snapshot.accepted_at_s,
        )


def _pace(lower_bound_s: float) -> Pace:
    """Rounds as often as matters for a sweep of this length."""
    coarse_s = lower_bound_s / _MAX_ROUNDS_OF_A_SWEEP
    return Pace(busy_s=max(0.05, min(10.0, coarse_s)), idle_s=max(1.0, min(60.0, 20.0 * coarse_s)))
