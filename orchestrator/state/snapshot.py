"""The state of a sweep from its journal: jobs, attempts and failures, their table, and the stored form.

Invariants:

- A snapshot and all in it is never changed; ``orchestrator.state.fold`` returns new ones, which share what is equal.
- A job has a live attempt exactly while it is running. Attempts at jobs that are no longer wanted are in ``leaving``.
- ``decode_snapshot(encode_snapshot(s), s.plan) == s``. If the fold gives another result for the same events,
  ``SNAPSHOT_VERSION`` is raised: stored snapshots of other versions are ignored, and the journal is read instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, Self

from orchestrator.core.contract import Resources, Timings
from orchestrator.core.errors import ControllerError, FailureKind
from orchestrator.planning.graph.plan import Plan
from orchestrator.state.codec import decode_value, encode_value
from orchestrator.state.events import Running
from orchestrator.state.spending import PricedAllocation, ResourceUse, added, uses_of
from orchestrator.state.transitions import JobState, SweepState

KEPT_NUMERICS = 4
_CHUNK = 64
"""Jobs per chunk: a change copies one chunk and the list of chunks, 64 + 160 entries for 10,000 jobs."""
SNAPSHOT_VERSION = 10
"""Raise it whenever the fold of the same events gives another state, or a state another meaning."""
_APART = {"plan", "jobs"}


# -------------------------------------------------------------------------------------------------------------- one job


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A live attempt: launched, and not known to have ended."""

    attempt_id: str
    job: str
    key: str
    number: int
    epoch: int
    launched_at_s: float
    resources: Resources
    """Its resources, which may be less than its job requests."""
    num_workers: int = 1
    """Its number of ranks."""
    nodes: tuple[str, ...] = ()
    """Names of its chosen nodes; without any, of those on which it was placed; empty = not placed, or not known."""
    lots: tuple[PricedAllocation, ...] = ()
    """Types and prices of its nodes; empty = not known (yet)."""
    preempting_at_s: float | None = None
    """When it was asked to write a checkpoint and end; None = it was not."""
    grace_s: float = 0.0
    """Seconds after that until it is ended by force."""
    awaits_room: bool = False
    """Whether it waits for the autoscaler: until then it costs nothing."""
    exclude: tuple[str, ...] = ()
    """Names of nodes that it must not use while it waits."""
    aging: int = 0
    """See ``AttemptLaunched``."""
    placed_at_s: float | None = None
    """When it got its resources; None = with its launch, or not yet."""

    @property
    def began_at_s(self) -> float | None:
        """Since when it holds its resources (unix seconds); None = it waits for them."""
        if self.awaits_room:
            return None
        return self.launched_at_s if self.placed_at_s is None else self.placed_at_s

    def ran_s(self, until_s: float) -> float:
        """Seconds for which it has held its resources at a time (unix seconds)."""
        began_at_s = self.began_at_s
        return 0.0 if began_at_s is None else max(0.0, until_s - began_at_s)

    def uses(self, until_s: float) -> tuple[ResourceUse, ...]:
        """Its use until a time (unix seconds), by type of node."""
        ran_s = self.ran_s(until_s)
        return uses_of(self.lots, self.resources, self.num_workers, ran_s) if ran_s else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an attempt ended without a commit."""

    attempt_id: str
    kind: FailureKind
    message: str
    at_s: float
    traceback: str = ""
    node: str = ""
    """Node at fault, where that is known."""
    rank: int | None = None
    """Of a gang, the rank at fault."""
    gpus: tuple[str, ...] = ()
    """UUIDs of its GPUs."""
    step: int | None = None
    """Of a failure of numerics in training, the number of updates before the wrong one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job of the current plan, with its state from the journal."""

    name: str
    key: str
    state: JobState = JobState.PENDING
    attempt: Attempt | None = None
    """The live attempt; there is one exactly while the job is running."""
    num_attempts: int = 0
    last_attempt_id: str = ""
    failures: Mapping[FailureKind, int] = field(default_factory=dict)
    """Attempts that ended without a commit, by kind, since a client last reopened the job; compared with limits."""
    num_deaths: int = 0
    """Attempts that died at a random time, over the job's whole life; see ``failure_policy.FailureRule.is_deadly``."""
    ran_s: float = 0.0
    """Seconds of all its ended attempts."""
    used: tuple[ResourceUse, ...] = ()
    """Resources that these held, by type of node: a gang may hold less than its job requests."""
    last_failure: Failure | None = None
    numerics: tuple[Failure, ...] = ()
    """The latest failures of numerics, at most ``KEPT_NUMERICS``: a replay from the checkpoint shows their cause."""
    reason: str = ""
    """Why the job failed, or which job it was skipped because of."""
    counts_for_breaker: bool = True
    """Whether the circuit breaker counts its failure: not once the sweep has ended, and other jobs are retried."""
    queued_s: float = 0.0
    """From the moment the job was ready to its first launch."""
    launched_at_s: float | None = None
    """Launch of the latest attempt."""
    room_s: float = 0.0
    """Seconds for which the latest attempt waited for its resources."""
    ended_at_s: float | None = None
    """End of the latest attempt, or of the job where it ended without one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings: Timings | None = None
    resumed_from_step: int | None = None
    quarantined: tuple[str, ...] = ()
    """Samples that its training could not read and replaced."""

    @property
    def gpu_s(self) -> float:
        """GPU-seconds of all its ended attempts."""
        return sum(use.gpu_s for use in self.used)

    @property
    def cpu_s(self) -> float:
        """Core-seconds of the same."""
        return sum(use.cpu_s for use in self.used)

    def full_size_s(self, full: Resources) -> float:
        """Seconds that its ended attempts would have taken at full size, by which durations are estimated and measured:
        an elastic job may have held less.
        """
        return self.gpu_s / full.gpus if full.min_gpus else self.ran_s

    @property
    def overhead_s(self) -> float | None:
        """Seconds in which the successful attempt had its resources and neither imported nor worked."""
        if self.timings is None or self.launched_at_s is None or self.ended_at_s is None:
            return None
        spent_s = self.timings.import_s + self.timings.work_s
        return max(0.0, self.ended_at_s - self.launched_at_s - self.room_s - spent_s)


# ------------------------------------------------------------------------------------------------------------- all jobs


class JobTable(Mapping[str, JobView]):
    """Jobs by name, in plan order. Never changed: ``with_changes`` returns a new one."""

    __slots__ = ("_chunks", "_counts", "_places", "_running")
    _chunks: tuple[tuple[JobView, ...], ...]
    _places: dict[str, int]
    """Position by name; shared by all tables of a plan."""
    _counts: dict[JobState, int]
    _running: dict[str, None]

    def __init__(self, views: Iterable[JobView] = (), *, counts: Mapping[JobState, int] | None = None) -> None:
        jobs = tuple(views)
        self._chunks = tuple(jobs[start : start + _CHUNK] for start in range(0, len(jobs), _CHUNK))
        self._places = {view.name: place for place, view in enumerate(jobs)}
        self._counts = dict.fromkeys(JobState, 0)
        for view in jobs:
            self._counts[view.state] += 1
        if counts is not None:  # of all jobs, where only some are given: see ``condensed``
            self._counts = dict(counts)
        self._running = {view.name: None for view in jobs if view.attempt is not None}

    @property
    def counts(self) -> Mapping[JobState, int]:
        """Number of jobs by state, zeros included."""
        return self._counts

    @property
    def running(self) -> Iterable[str]:
        """Names of the jobs with a live attempt, in plan order."""
        return sorted(self._running, key=self._places.__getitem__)

    def with_changes(self, changed: Mapping[str, JobView]) -> Self:
        """A table with changed views of some of its jobs. Raises ``KeyError`` for a job that it does not have."""
        new = object.__new__(type(self))
        new._places, new._counts, new._running = self._places, dict(self._counts), dict(self._running)
        chunks = list(self._chunks)
        by_chunk: dict[int, list[JobView]] = {}
        for name, view in changed.items():
            place, slot = divmod(self._places[name], _CHUNK)
            chunk = by_chunk.setdefault(place, list(chunks[place]))
            new._count(chunk[slot], view)
            chunk[slot] = view
        for place, chunk in by_chunk.items():
            chunks[place] = tuple(chunk)
        new._chunks = tuple(chunks)
        return new

    def condensed(self) -> Self:
        """All its counts, but of the jobs only those that failed, by name and reason."""
        failed = (view for view in self.values() if view.state is JobState.FAILED)
        views = (JobView(name=view.name, key="", state=view.state, reason=view.reason) for view in failed)
        return type(self)(views, counts=self._counts)

    def changed_since(self, older: JobTable) -> Iterator[JobView]:
        """The views that are not those of an older table, in plan order: all if that one had another plan's jobs."""
        if older._places is not self._places:
            yield from self.values()
            return
        for mine, theirs in zip(self._chunks, older._chunks, strict=True):
            if mine is not theirs:
                yield from (view for view, other in zip(mine, theirs, strict=True) if view is not other)

    def _count(self, old: JobView, new: JobView) -> None:
        self._counts[old.state] -= 1
        self._counts[new.state] += 1
        if new.attempt is None:
            self._running.pop(new.name, None)
        else:
            self._running[new.name] = None

    def __getitem__(self, name: str) -> JobView:
        place, slot = divmod(self._places[name], _CHUNK)
        return self._chunks[place][slot]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def values(self) -> Iterator[JobView]:  # type: ignore[override]  # an iterator is all that is asked for
        """All views in plan order."""
        return chain.from_iterable(self._chunks)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, JobTable):
            return self._chunks == other._chunks
        return isinstance(other, Mapping) and dict(self) == dict(other)

    __hash__ = None  # type: ignore[assignment]  # as any mapping

    def __repr__(self) -> str:
        return f"JobTable({dict(self)!r})"


# ------------------------------------------------------------------------------------------------------------ the sweep
@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """A node that attempts should avoid until ``until_s`` (unix seconds)."""

    node: str
    reason: str
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A sweep at one point of its journal. Never changed: ``fold.apply`` returns a new one."""

    sweep: str
    state: SweepState = SweepState.SUBMITTED
    plan: Plan | None = None
    revision: int = 0
    documents: Mapping[str, str] = field(default_factory=dict)
    """Sha256 by object name of the plans, specs and provenances of all revisions, as far as the journal tells."""
    cluster: str = ""
    epoch: int = 0
    holder: str = ""
    jobs: JobTable = field(default_factory=JobTable)
    """In plan order; any mapping is turned into a table."""
    leaving: Mapping[str, Attempt] = field(default_factory=dict)
    """Live attempts, by id, at jobs that a later plan revision no longer has; their results count for nothing here."""
    spent_gpu_s: float = 0.0
    """GPU-seconds of ended attempts at jobs that later plan revisions no longer have: a budget does not start anew."""
    spent_cpu_s: float = 0.0
    """Core-seconds of the same."""
    spent: tuple[ResourceUse, ...] = ()
    """The same by sort of node."""
    handled: frozenset[str] = frozenset()
    """Ids of the clients' messages that are handled."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Reasons by id of the messages that were refused."""
    accepted_at_s: float = 0.0
    """When the sweep was last (re)submitted."""
    finished_at_s: float | None = None
    num_events: int = 0
    priority: int | None = None
    """Priority that a client set instead of the plan's."""
    pause: Running | None = None
    """While paused: what the running attempts do."""
    pauses: tuple[float, ...] = ()
    """When it was paused and when that ended, in turn, since it was last (re)submitted."""
    tripped: str = ""
    """Why the circuit breaker stopped the sweep; empty = it did not."""
    excluded: Mapping[str, Exclusion] = field(default_factory=dict)
    """Exclusions by node, also expired ones."""
    nodes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Hardware of the nodes on which its attempts ran, by name; see ``NodeDescribed``."""

    def __post_init__(self) -> None:
        jobs: Mapping[str, JobView] = self.jobs
        if not isinstance(jobs, JobTable):
            object.__setattr__(self, "jobs", JobTable(jobs.values()))

    def condensed(self) -> Self:
        """What people and other sweeps may still want to know of an ended sweep: how it ended, its channels and its
        exclusions of nodes. No event can be folded into it.
        """
        plan = self.plan and replace(self.plan, jobs=())
        jobs, nothing = self.jobs.condensed(), MappingProxyType[str, Any]({})
        return replace(
            self, plan=plan, jobs=jobs, documents=nothing, nodes=nothing, refusals=nothing, handled=frozenset()
        )

    @property
    def live_attempts(self) -> list[Attempt]:
        """All attempts that occupy resources; takes time by their number, not by that of the jobs."""
        running = [self.jobs[name].attempt for name in self.jobs.running]
        return [*(attempt for attempt in running if attempt), *self.leaving.values()]

    def unpaused_s(self, since_s: float, now: float) -> float:
        """Seconds from a time (unix seconds) until now in which the sweep was not paused."""
        turns = (*self.pauses, now)  # the end of a pause that lasts
        pauses = zip(turns[::2], turns[1::2], strict=False)
        return now - since_s - sum(max(0.0, end_s - max(start_s, since_s)) for start_s, end_s in pauses)

    def uses(self, now: float) -> tuple[ResourceUse, ...]:
        """Use of all attempts by type of node, including running ones and those of earlier revisions."""
        ended = (use for view in self.jobs.values() for use in view.used)
        live = (use for attempt in self.live_attempts for use in attempt.uses(now))
        return added(self.spent, (*ended, *live))

    @property
    def counts(self) -> dict[JobState, int]:
        """Number of jobs in each state that occurs."""
        return {state: self.jobs.counts[state] for state in JobState if self.jobs.counts.get(state)}

    @property
    def outcome(self) -> str:
        """The state as shown to people: jobs that were cancelled on purpose did not fail.

        ``cancelled``, or ``succeeded (5 cancelled, 2 skipped)``, of a sweep whose state is ``failed`` although none of
        its jobs failed; else the state.
        """
        counts = self.counts
        is_on_purpose = JobState.CANCELLED in counts and JobState.FAILED not in counts and not self.tripped
        if self.state is not SweepState.FAILED or not is_on_purpose:
            return self.state.value
        if not any(state.is_done for state in counts):
            return SweepState.CANCELLED.value
        left_out = (
            f"{counts[state]} {state.value}" for state in (JobState.CANCELLED, JobState.SKIPPED) if state in counts
        )
        return f"{SweepState.SUCCEEDED.value} ({', '.join(left_out)})"


# ------------------------------------------------------------------------------------------------------ the stored form


def encode_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    """Plain JSON form. Jobs to which nothing has happened yet are left out."""
    plain = {
        item.name: encode_value(getattr(snapshot, item.name)) for item in fields(snapshot) if item.name not in _APART
    }
    jobs = {view.name: encode_value(view) for view in snapshot.jobs.values() if view != _untouched(view)}
    return {"version": SNAPSHOT_VERSION, **plain, "jobs": jobs}


def decode_snapshot(document: Mapping[str, Any], plan: Plan | None) -> Snapshot:
    """Inverse of ``encode_snapshot``; ``plan`` is that of the document's ``revision``, none for revision 0.

    Raises:
        ControllerError: another version wrote it: the journal must be read instead.
    """
    if document["version"] != SNAPSHOT_VERSION:
        found = document["version"]
        message = f"the snapshot is of version {found}, this program knows {SNAPSHOT_VERSION}; it is ignored"
        raise ControllerError(message)
    stored = document["jobs"]
    plain = decode_value(Snapshot, {name: value for name, value in document.items() if name not in _APART})
    planned = {job.name: job.key for job in plan.jobs} if plan else {}
    views = (
        decode_value(JobView, stored[name]) if name in stored else JobView(name=name, key=key)
        for name, key in planned.items()
    )
    return replace(plain, plan=plan, jobs=JobTable(views))


def _untouched(view: JobView) -> JobView:
    return JobView(name=view.name, key=view.key)
