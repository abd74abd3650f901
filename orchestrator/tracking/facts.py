"""The state of a sweep or job for its run on the tracking server, read from the journal; pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from hashlib import sha256

from orchestrator.planning.graph.plan import FACTOR_PREFIX, Job, Plan
from orchestrator.state.events import AttemptLaunched, Event, PlanAccepted, decode_event
from orchestrator.state.fold import apply
from orchestrator.state.snapshot import JobView, Snapshot
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.journal import Journal
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.ledger import read_plan

RunIdentity = tuple[str, str]
"""Name and key of a job: what one run on the tracking server stands for."""
SWEEP_JOB = "(sweep)"
"""In place of a job's name, the run of the sweep itself; no job can be called so."""
SWEEP_RUN: RunIdentity = (SWEEP_JOB, "")
TRIAL_MARK = "#"
"""Between the name of a search job and the number of a trial; no job's name holds one."""
_MAX_TAG_CHARACTERS = 4000
SUPERSEDED = "superseded"
"""In the tag ``state``, instead of the job's state: a later revision of the sweep has no such job, or another key."""


def owner_of(identity: RunIdentity) -> RunIdentity:
    """The job that a trial's run belongs to; any other run's own identity."""
    name, key = identity
    return name.partition(TRIAL_MARK)[0], key


def experiment_of(plan: Plan) -> str:
    """Name of the experiment that holds a sweep's runs."""
    return plan.experiment or plan.sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A sweep at one point of its journal."""

    snapshot: Snapshot
    submitted_at_s: float | None = None
    """First acceptance of a plan."""
    submission: str = ""
    """Id of the message with the latest plan that was accepted."""
    first_launches_s: dict[RunIdentity, float] = field(default_factory=dict)


class TimelineReader:
    """Follows one sweep's journal; every ``read`` opens only the segments written since the one before."""

    def __init__(self, store: ObjectStore, sweep: str) -> None:
        self._store = store
        self._sweep = sweep
        self._timeline = Timeline(snapshot=Snapshot(sweep=sweep))
        self._is_whole = False
        """Whether the journal was read to its end once, and no segment before that was missing."""
        self._begin()

    @property
    def next_sequence(self) -> int:
        """Number of the first segment that the latest ``read`` did not find."""
        return self._journal.next_sequence

    def read(self) -> Timeline:
        """The sweep as its journal tells it at this moment.

        Raises:
            JournalDamagedError: a segment is damaged or missing: a journal that seems to end there would be published
                as a sweep that still runs.
        """
        try:
            documents = self._journal.read_new() if self._is_whole else self._journal.read_whole()
            self._is_whole = True
            events = [decode_event(document) for document in documents]
            if events:
                self._timeline = self._extended(self._timeline, events)
        except Exception:
            # The journal's reader may have moved past events that are not in the timeline: read all again.
            self._begin()
            raise
        return self._timeline

    def _begin(self) -> None:
        self._journal = Journal(self._store, self._sweep)
        self._is_whole = False
        self._timeline = Timeline(snapshot=Snapshot(sweep=self._sweep))

    def _extended(self, timeline: Timeline, events: Iterable[Event]) -> Timeline:
        events = list(events)
        launches, submitted_at_s = dict(timeline.first_launches_s), timeline.submitted_at_s
        submission = timeline.submission
        for event in events:
            if isinstance(event, AttemptLaunched):
                launches.setdefault((event.job, event.key), event.at_s)
            elif isinstance(event, PlanAccepted):
                submission = event.message_id
                submitted_at_s = event.at_s if submitted_at_s is None else submitted_at_s
        return Timeline(
            snapshot=apply(timeline.snapshot, events, self._plan),
            submitted_at_s=submitted_at_s,
            submission=submission,
            first_launches_s=launches,
        )

    def _plan(self, event: PlanAccepted) -> Plan:
        return read_plan(self._store, self._sweep, event.revision, event.documents)


class RunStatus(StrEnum):
    """MLflow's statuses of a run."""

    SCHEDULED = "SCHEDULED"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    KILLED = "KILLED"

    @property
    def is_final(self) -> bool:
        """Whether a run with this status has an end."""
        return self not in {RunStatus.SCHEDULED, RunStatus.RUNNING}


_JOB_STATUS = {
    JobState.PENDING: RunStatus.SCHEDULED,
    JobState.RUNNING: RunStatus.RUNNING,
    JobState.SUCCEEDED: RunStatus.FINISHED,
    JobState.REUSED: RunStatus.FINISHED,
    JobState.FAILED: RunStatus.FAILED,
    JobState.SKIPPED: RunStatus.KILLED,
    JobState.CANCELLED: RunStatus.KILLED,
}
_SWEEP_STATUS = {
    SweepState.SUBMITTED: RunStatus.SCHEDULED,
    SweepState.SUCCEEDED: RunStatus.FINISHED,
    SweepState.FAILED: RunStatus.FAILED,
    SweepState.CANCELLED: RunStatus.KILLED,
}
"""Whatever else a sweep is, it is running."""


@dataclass(frozen=True, kw_only=True)  # no slots: it remembers its fingerprint
class RunFacts:
    """Everything about a run but its metrics and parameters, which never change once they are known."""

    job: str
    key: str
    status: RunStatus
    start_s: float
    end_s: float | None
    """Of the latest attempt; None unless the status is final."""
    tags: Mapping[str, str]
    keeps_ending: bool = False
    """Whether the run that is there knows better how and when it ended."""

    @property
    def identity(self) -> RunIdentity:
        """What the run is found by."""
        return self.job, self.key

    @property
    def is_superseded(self) -> bool:
        """Whether the plan no longer has the job under this key."""
        return self.tags.get("state") == SUPERSEDED

    @cached_property
    def fingerprint(self) -> str:
        """Changes whenever the run's status, times or tags do."""
        return self._digest(self.tags)

    def are_told_by(self, fingerprint: str, *, of_this_plan: bool) -> bool:
        """Whether a run with this fingerprint says all of it; ``of_this_plan``: whether the present plan was told.

        Fingerprints of earlier versions are without factors: what these told of the present plan is not told anew.
        """
        return fingerprint == self.fingerprint or (of_this_plan and fingerprint == self._without_factors)

    @cached_property
    def _without_factors(self) -> str:
        factors = factors_in(self.tags)
        return self._digest({name: text for name, text in self.tags.items() if name not in factors})

    def _digest(self, tags: Mapping[str, str]) -> str:
        # Superseded once, superseded whenever: a third revision is no news.
        times = [] if self.is_superseded else [self.start_s, self.end_s]
        said = [self.job, self.key, self.status, *times, sorted(tags.items())]
        return sha256(json.dumps(said).encode()).hexdigest()[:16]


def sweep_facts(timeline: Timeline) -> RunFacts:
    """The run that stands for a sweep; its children are the jobs."""
    snapshot = timeline.snapshot
    status = _SWEEP_STATUS.get(snapshot.state, RunStatus.RUNNING)
    # Zeros too: a tag that is not said again would keep its old value.
    counts = {f"num_{state.value}": str(snapshot.counts.get(state, 0)) for state in JobState}
    return RunFacts(
        job=SWEEP_JOB,
        key="",
        status=status,
        start_s=timeline.submitted_at_s or snapshot.accepted_at_s,
        end_s=snapshot.finished_at_s if snapshot.state.is_final else None,
        tags={
            **_identity_tags(snapshot.sweep, SWEEP_JOB, ""),
            "kind": "sweep",
            "state": snapshot.state.value,
            "revision": str(snapshot.revision),
            **counts,
        },
    )


def job_facts(timeline: Timeline, view: JobView, job: Job) -> RunFacts | None:
    """The run of a job; None while there is nothing to tell, because it waits for its first attempt."""
    started_s = timeline.first_launches_s.get((view.name, view.key), view.ended_at_s)
    if started_s is None:
        return None
    tags = {
        **_identity_tags(timeline.snapshot.sweep, view.name, view.key),
        "kind": job.kind.value,
        "state": view.state.value,
        "attempts": str(view.num_attempts),
        "attempt_states": attempt_states(view),
        **_failure_tags(view),
        # A later revision may have other factors, or call their values otherwise; a parameter of MLflow is final.
        **factors_in({name: str(value) for name, value in job.facets.items()}),
    }
    return RunFacts(
        job=view.name,
        key=view.key,
        status=_JOB_STATUS[view.state],
        start_s=started_s,
        end_s=view.ended_at_s if view.state.is_final else None,
        tags=tags,
    )


def factors_in(said: Mapping[str, str]) -> dict[str, str]:
    """Of some facets or parameters, those that name the values of factors."""
    return {name: value for name, value in said.items() if name.startswith(FACTOR_PREFIX)}


def superseded_facts(sweep: str, identity: RunIdentity, status: RunStatus | None, ended_at_s: float) -> RunFacts:
    """The run of a job that a later revision of the plan no longer has; ``status`` is the run's own so far.

    A run that has ended keeps its status, its times and all its other tags, and so does one of which nobody remembers
    the status. Any other ends with the revision.
    """
    job, key = identity
    is_open = status is not None and not status.is_final
    return RunFacts(
        job=job,
        key=key,
        status=RunStatus.KILLED if status is None or is_open else status,
        start_s=ended_at_s,
        end_s=ended_at_s,
        tags={**_identity_tags(sweep, job, key), "state": SUPERSEDED},
        keeps_ending=not is_open,
    )


class FactsCache:
    """Of one sweep; views and jobs are values, so the same ones have the same facts."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[JobView, Job, RunFacts | None]] = {}
        self._superseded: dict[RunIdentity, RunFacts] = {}

    def all(self, timeline: Timeline, plan: Plan, runs: Mapping[RunIdentity, RunStatus | None]) -> list[RunFacts]:
        """The sweep's facts first, then those of its jobs that have begun, then of runs of earlier revisions' jobs.

        ``runs``: the status that each published run has on the server, as far as it is known.
        """
        jobs = plan.by_name()
        known: dict[str, tuple[JobView, Job, RunFacts | None]] = {}
        for name, view in timeline.snapshot.jobs.items():
            old, job = self._known.get(name), jobs[name]
            is_same = old is not None and old[0] is view and old[1] is job
            known[name] = old if old and is_same else (view, job, job_facts(timeline, view, job))
        self._known = known
        told = [facts for _, _, facts in known.values() if facts is not None]
        return [sweep_facts(timeline), *told, *self._earlier(timeline.snapshot, runs)]

    def _earlier(self, snapshot: Snapshot, runs: Mapping[RunIdentity, RunStatus | None]) -> list[RunFacts]:
        """Runs whose jobs the plan no longer has."""
        current = {(view.name, view.key) for view in snapshot.jobs.values()} | {SWEEP_RUN}
        # After this update, the run's own status is that of the facts.
        self._superseded = {
            identity: self._superseded.get(identity)
            or superseded_facts(snapshot.sweep, identity, status, snapshot.accepted_at_s)
            for identity, status in runs.items()
            if owner_of(identity) not in current
        }
        return list(self._superseded.values())


def attempt_states(view: JobView) -> str:
    """How a job's attempts ended, by kind: ``2 out_of_memory, 1 succeeded``; empty while there is none."""
    ended = [f"{count} {kind}" for kind, count in sorted(view.failures.items())]
    if view.num_attempts and view.state in {JobState.RUNNING, JobState.SUCCEEDED}:
        ended.append(f"1 {view.state}")
    return ", ".join(ended)


def _identity_tags(sweep: str, job: str, key: str) -> dict[str, str]:
    """By these a run is found again whatever happened to the publisher's memory."""
    return {"sweep": sweep, "job": job, "key": key}


def _failure_tags(view: JobView) -> dict[str, str]:
    tags = {"reason": view.reason}  # empty too, so that a job that got a new chance loses the old one
    if view.last_failure is not None:
        tags["last_failure"] = f"{view.last_failure.kind}: {view.last_failure.message}"
    return {name: text[:_MAX_TAG_CHARACTERS] for name, text in tags.items()}
