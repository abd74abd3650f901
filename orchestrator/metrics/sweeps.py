"""Metrics of a controller's sweeps, and how well their attempts use their resources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from orchestrator.core.contract import Progress
from orchestrator.core.errors import FailureKind
from orchestrator.metrics import catalog
from orchestrator.metrics.catalog import Metric
from orchestrator.metrics.exporter import Exporter
from orchestrator.planning.graph.plan import Plan
from orchestrator.scheduling.sweep_index import SweepIndex
from orchestrator.state.snapshot import Attempt, JobView, Snapshot
from orchestrator.state.transitions import JobState, SweepState

SUCCEEDED = "succeeded"
"""The outcome of a successful attempt, beside the kinds of failure."""
MAX_SWEEPS: Final = 200
"""Sweeps that are shown: those that have not ended, then the ones that ended last."""
SHOWN_AFTER_END_S: Final = 3600.0
_OUTCOMES: Final = (SUCCEEDED, *(kind.value for kind in FailureKind))


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """GPU-seconds that the ended attempts of one job held, and what of them counts for goodput at present."""

    gpu_s: float = 0.0
    held_s: float = 0.0
    """GPU-seconds, or core-seconds in sweeps without GPUs."""
    useful_s: float = 0.0
    """The useful part of ``held_s``."""


_NONE = Share()


class SweepAccount:
    """One sweep; ``follow`` takes time by the number of jobs that changed."""

    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None
        self._shares: dict[str, Share] = {}
        """Use of jobs with ended attempts."""
        self._held_s = self._useful_s = self._gpu_s = 0.0
        self._steps: dict[str, Progress] = {}
        """Furthest known step of jobs that are not done."""
        self._has_gpus = False

    def follow(self, snapshot: Snapshot) -> dict[str, int]:
        """Take the sweep as it is now; returns how many attempts ended since the last call, by outcome."""
        before, self._snapshot = self._snapshot, snapshot
        if before is snapshot or snapshot.plan is None:
            return {}
        if before is None or before.plan is not snapshot.plan:
            self._begin(snapshot.plan)
            for view in snapshot.jobs.values():
                self._add_ended(view)
            return {}
        ended: dict[str, int] = {}
        for view in snapshot.jobs.changed_since(before.jobs):
            self._add_ended(view)
            outcome = _outcome(before.jobs[view.name], view)
            if outcome:
                ended[outcome] = ended.get(outcome, 0) + 1
        return ended

    def see(self, progress: Mapping[str, Progress]) -> None:
        """Take the latest progress of running attempts, by job."""
        self._steps.update((job, one) for job, one in progress.items() if one.step and one.step_s and one.total_steps)

    def gpu_hours(self, now: float) -> float:
        """GPU-hours of all attempts, live ones as far as they are at ``now``; of former revisions' jobs, too."""
        live_s = sum(
            attempt.resources.gpus * attempt.ran_s(now)
            for attempt in (self._snapshot.live_attempts if self._snapshot else ())
        )
        earlier_s = self._snapshot.spent_gpu_s if self._snapshot else 0.0
        return (earlier_s + self._gpu_s + live_s) / 3600.0

    def goodput(self, now: float) -> float | None:
        """Share in [0, 1] of the time held that made progress which was kept; ``None`` before there is any.

        Kept is the time of the steps that a job has behind it, whichever attempt made them, and the work of jobs
        without steps that succeeded. Not kept: starting, steps made again after a loss, and all that failed. What
        running jobs without steps hold does not count yet.
        """
        held_s, useful_s = self._held_s, self._useful_s
        for name in self._snapshot.jobs.running if self._snapshot else ():
            share = self._running(name, now)
            held_s, useful_s = held_s + share.held_s, useful_s + share.useful_s
        return useful_s / held_s if held_s > 0.0 else None

    def _begin(self, plan: Plan) -> None:
        self._has_gpus = any(job.resources.gpus for job in plan.jobs)
        self._shares, self._held_s, self._useful_s, self._gpu_s = {}, 0.0, 0.0, 0.0
        self._steps = {name: one for name, one in self._steps.items() if name in plan.by_name()}

    def _add_ended(self, view: JobView) -> None:
        """Replace the job's use by that of its present ended attempts."""
        old = self._shares.get(view.name, _NONE)
        if not view.ran_s and old is _NONE:
            return
        # A running job is evaluated as a whole in ``goodput``: its steps include those of earlier attempts.
        share = Share(gpu_s=view.gpu_s) if view.state is JobState.RUNNING else self._ended(view)
        self._held_s += share.held_s - old.held_s
        self._useful_s += share.useful_s - old.useful_s
        self._gpu_s += share.gpu_s - old.gpu_s
        self._shares[view.name] = share
        if view.state.is_final:
            self._steps.pop(view.name, None)

    def _ended(self, view: JobView) -> Share:
        useful_s, steps = 0.0, self._steps.get(view.name)
        if view.state is JobState.SUCCEEDED and view.timings is not None:
            useful_s = view.timings.work_s - view.timings.setup_s
            resumed = view.resumed_from_step or 0
            if steps is not None and resumed < steps.total_steps:
                useful_s *= steps.total_steps / (steps.total_steps - resumed)
        elif not view.state.is_final and steps is not None:
            useful_s = steps.step * steps.step_s
        return _share(view.gpu_s, view.gpu_s if self._has_gpus else view.cpu_s, useful_s, view.ran_s)

    def _running(self, name: str, now: float) -> Share:
        view, steps = self._view(name), self._steps.get(name)
        if view.attempt is None or steps is None:
            return _NONE
        live_s, held = view.attempt.ran_s(now), view.attempt.resources
        gpu_s, cpu_s = view.gpu_s + live_s * held.gpus, view.cpu_s + live_s * held.cpus
        return _share(gpu_s, gpu_s if self._has_gpus else cpu_s, steps.step * steps.step_s, view.ran_s + live_s)

    def _view(self, name: str) -> JobView:
        assert self._snapshot is not None  # noqa: S101 - for the type checker
        return self._snapshot.jobs[name]


def _share(gpu_s: float, held_s: float, useful_s: float, ran_s: float) -> Share:
    """``useful_s`` of the ``ran_s`` seconds were useful; attempts of other sizes count by their mean."""
    part = min(max(0.0, useful_s), ran_s) / ran_s if ran_s else 0.0
    return Share(gpu_s=gpu_s, held_s=held_s, useful_s=held_s * part)


def _outcome(before: JobView, view: JobView) -> str:
    """How an attempt ended between two views of a job; empty if none did."""
    if view.last_failure is not None and view.last_failure is not before.last_failure:
        return view.last_failure.kind.value
    if view.state is JobState.SUCCEEDED and before.state is not JobState.SUCCEEDED:
        return SUCCEEDED
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """The slowest rank of a running gang, as its first rank reports it."""

    rank: int
    node: str
    """Empty = not known."""
    slowdown: float
    compute_s: float
    data_wait_s: float

    @classmethod
    def of(cls, progress: Progress, worker_nodes: Sequence[str]) -> SlowRank | None:
        """From the counters of ``workloads.train.step``; None for one worker, or before they have it."""
        counters = progress.counters
        if "slow_rank" not in counters:
            return None
        rank = int(counters["slow_rank"])
        return cls(
            rank=rank,
            node=worker_nodes[rank] if rank < len(worker_nodes) else "",
            slowdown=counters["slow_rank_slowdown"],
            compute_s=counters["slow_rank_compute_s"],
            data_wait_s=counters["slow_rank_data_wait_s"],
        )

    def __str__(self) -> str:
        where = f" on node {self.node}" if self.node else ""
        return (
            f"rank {self.rank}{where} takes {self.slowdown:.1f} times as long as the others for a step "
            f"(computes {self.compute_s:.3g} s, waits {self.data_wait_s:.3g} s for data), and all wait for it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A sweep's values for the exported metrics."""

    snapshot: Snapshot
    index: SweepIndex | None = None
    """Of a sweep that the scheduler serves."""
    progress: Mapping[str, Progress]
    """Of running attempts, by job."""
    silent_s: Mapping[str, float]
    """By live attempt: how long it has made no step."""
    slowest: Mapping[str, SlowRank] = field(default_factory=dict)
    """The slowest rank of each gang, by job."""


class SweepMetrics:
    """Follows all sweeps of a controller. ``follow`` every round, ``show`` now and then; from one thread."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._accounts: dict[str, SweepAccount] = {}
        self._begun: set[str] = set()
        """Sweeps whose counters are exported; exported counters are never removed."""
        self._num_events: dict[str, int] = {}
        self._moved_at_s: dict[str, float] = {}

    def follow(self, snapshots: Sequence[Snapshot], now: float) -> None:
        """Count the attempts that have ended; takes time by what changed. ``now`` in unix seconds."""
        names = {snapshot.sweep for snapshot in snapshots}
        for snapshot in snapshots:
            sweep = snapshot.sweep
            if sweep not in self._accounts:
                self._accounts[sweep] = SweepAccount()
            if sweep not in self._begun and not snapshot.state.is_final:  # a store may hold thousands that have ended
                self._begun.add(sweep)
                for outcome in _OUTCOMES:
                    self._exporter.add(catalog.ATTEMPTS, 0, {"sweep": sweep, "outcome": outcome})
            if self._num_events.get(sweep) != snapshot.num_events:
                self._num_events[sweep], self._moved_at_s[sweep] = snapshot.num_events, now
            for outcome, count in self._accounts[sweep].follow(snapshot).items():
                self._exporter.add(catalog.ATTEMPTS, count, {"sweep": sweep, "outcome": outcome})
        for gone in self._accounts.keys() - names:
            del self._accounts[gone], self._num_events[gone], self._moved_at_s[gone]

    def show(self, observed: Iterable[Observed], now: float) -> None:
        """Export the sweeps' states; sweeps that ended long ago, or are too many, are left out."""
        for one in _shown(observed, now):
            account = self._accounts.get(one.snapshot.sweep)
            if account is not None:
                account.see(one.progress)
                self._show(one, account, now)

    def _show(self, one: Observed, account: SweepAccount, now: float) -> None:
        snapshot = one.snapshot
        labels = {"sweep": snapshot.sweep}
        for state in JobState:
            self._exporter.set(catalog.JOBS, snapshot.jobs.counts.get(state, 0), {**labels, "state": state.value})
        running = _running(snapshot)
        num_ready, queue_age_s = _queue(one, now)
        values: dict[Metric, float | None] = {
            catalog.READY_JOBS: num_ready,
            catalog.QUEUE_AGE: queue_age_s,
            catalog.PROGRESS_AGE: self._progress_age_s(one, now),
            catalog.LIVE: float(snapshot.state.is_live),
            catalog.LIVE_ATTEMPTS: len(running),
            catalog.GPUS: sum(attempt.resources.gpus for attempt in running),
            catalog.CPUS: sum(attempt.resources.cpus for attempt in running),
            catalog.GPU_HOURS: account.gpu_hours(now),
            catalog.GOODPUT: account.goodput(now),
            catalog.BUDGET: snapshot.plan.policy.gpu_hour_budget if snapshot.plan else None,
        }
        for metric, value in values.items():
            if value is not None:
                self._exporter.set(metric, value, labels)
        slowest = max(one.slowest.values(), key=lambda rank: rank.slowdown, default=None)
        if slowest is not None:
            place = {"rank": str(slowest.rank), "node": slowest.node}
            self._exporter.set(catalog.SLOWDOWN, slowest.slowdown, labels | place)

    def _progress_age_s(self, one: Observed, now: float) -> float:
        snapshot = one.snapshot
        if not snapshot.state.is_live or snapshot.state is SweepState.PAUSED:
            return 0.0
        running = _running(snapshot)
        if snapshot.live_attempts and not running:  # all wait for nodes
            return 0.0
        silent_s = [one.silent_s[each.attempt_id] for each in running if each.attempt_id in one.silent_s]
        return max(0.0, min([now - self._moved_at_s.get(snapshot.sweep, now), *silent_s]))


def _shown(observed: Iterable[Observed], now: float) -> list[Observed]:
    def ended_s(one: Observed) -> float:
        is_over = one.snapshot.state.is_final and one.snapshot.finished_at_s is not None
        return now - (one.snapshot.finished_at_s or now) if is_over else 0.0

    found = sorted((one for one in observed if one.snapshot.plan is not None), key=ended_s)
    return [one for one in found[:MAX_SWEEPS] if ended_s(one) <= SHOWN_AFTER_END_S]


def _running(snapshot: Snapshot) -> list[Attempt]:
    """The live attempts that hold resources: not those that wait for nodes of the autoscaler."""
    return [attempt for attempt in snapshot.live_attempts if not attempt.awaits_room]


def _queue(one: Observed, now: float) -> tuple[int, float]:
    """Ready jobs that do not run, and how long the first in line of some shape has been ready at most."""
    if one.index is None or one.snapshot.state is not SweepState.RUNNING:
        return 0, 0.0
    index = one.index
    jobs = index.snapshot.jobs
    without_room = [
        index.places[name]
        for name in jobs.running
        if (attempt := jobs[name].attempt) is not None and attempt.awaits_room
    ]
    heads = [*without_room, *(queue[0][1] for queue in index.queues.values())]
    ages_s = [now - max(index.ready_since_s(place), index.not_before_s.get(place, 0.0)) for place in heads]
    return len(without_room) + sum(map(len, index.queues.values())), max(0.0, *ages_s) if ages_s else 0.0
