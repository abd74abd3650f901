"""Trials of searches: what is new of them, as runs below the runs of their jobs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256

from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.transitions import JobState
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.trials import Trial, TrialState, read_trials
from orchestrator.tracking.content import JobContent
from orchestrator.tracking.draft import MetricPoint
from orchestrator.tracking.facts import TRIAL_MARK, RunFacts, RunIdentity, RunStatus
from orchestrator.tracking.memory import RunMemory

_STATUS = {
    TrialState.RUNNING: RunStatus.RUNNING,
    TrialState.COMPLETED: RunStatus.FINISHED,
    TrialState.STOPPED: RunStatus.KILLED,
    TrialState.FAILED: RunStatus.FAILED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRun:
    """A trial and its job."""

    job: Job
    facts: RunFacts
    trial: Trial

    @property
    def begun(self) -> str:
        """Its start: another log of the search may have another trial of this number."""
        return str(self.trial.started_s)

    def replaces(self, run: RunMemory | None) -> bool:
        """Whether a run shows the trial of this number of a former log, which the search has begun anew."""
        return run is not None and bool(run.shown) and self.begun not in run.shown

    def content(self, run: RunMemory | None) -> JobContent:
        """What its run is to say and does not say yet."""
        params = {name: str(value) for name, value in {**self.job.facets, **self.trial.params}.items()}
        num_said = 0 if run is None else run.said.get(self.begun, 0)
        return JobContent(
            params={} if run is not None and run.described else params,
            points=tuple(
                MetricPoint(name=name, value=value, step=point.step, at_s=point.at_s)
                for point in self.trial.points[num_said:]
                for name, value in point.metrics.items()
                if math.isfinite(value)
            ),
            is_complete=True,
            said={self.begun: len(self.trial.points)},
        )


def changed_trials(
    store: ObjectStore, plan: Plan, snapshot: Snapshot, runs: Mapping[RunIdentity, RunMemory]
) -> list[TrialRun]:
    """Trials that are not shown as they are, of all search jobs that have begun."""
    jobs = [job for job in plan.jobs if job.kind is JobKind.SEARCH]
    begun = [job for job in jobs if snapshot.jobs[job.name].num_attempts or snapshot.jobs[job.name].state.is_done]
    found = [run for job in begun for run in _runs_of(store, plan.sweep, job, snapshot.jobs[job.name].state)]
    return [run for run in found if _is_news(run.facts, runs)]


def _runs_of(store: ObjectStore, sweep: str, job: Job, state: JobState) -> Iterable[TrialRun]:
    for trial in read_trials(store, job.key):
        yield TrialRun(job=job, trial=trial, facts=_facts(sweep, job, trial, state))


def _facts(sweep: str, job: Job, trial: Trial, state: JobState) -> RunFacts:
    status, end_s = _STATUS[trial.state], trial.ended_s
    if state.is_final and not status.is_final:
        # The search died before it could say how this one ended: nothing runs any more.
        status, end_s = RunStatus.KILLED, max([trial.started_s, *(point.at_s for point in trial.points)])
    name = f"{job.name}{TRIAL_MARK}{trial.number}"
    content = sha256(repr(trial.points).encode()).hexdigest()[:16]
    tags = {"sweep": sweep, "job": name, "key": job.key, "kind": "trial", "state": trial.state.value}
    tags |= {"reason": trial.reason, "content": content}  # so that new points are news
    return RunFacts(job=name, key=job.key, status=status, start_s=trial.started_s, end_s=end_s, tags=tags)


def _is_news(facts: RunFacts, runs: Mapping[RunIdentity, RunMemory]) -> bool:
    run = runs.get(facts.identity)
    return run is None or run.fingerprint != facts.fingerprint
