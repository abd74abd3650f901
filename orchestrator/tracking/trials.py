"""Trials of searches: what is new of them, as runs below the runs of their jobs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from orchestrator.core.errors import CorruptObjectError
from orchestrator.core.job_kinds import JobKind
from orchestrator.core.units import printable
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state.snapshot import JobView
from orchestrator.state.transitions import JobState
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.trials import Trial, TrialState, list_trials, read_trial
from orchestrator.tracking.content import Found, Given, JobContent, read_all
from orchestrator.tracking.draft import points_of
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
                shown
                for point in self.trial.points[num_said:]
                for shown in points_of(point.metrics, step=point.step, at_s=point.at_s)
            ),
            is_complete=True,
            said={self.begun: len(self.trial.points)},
        )


class TrialsReader:
    """The trials of one sweep's searches. Those of a search that has ended are read until all of them are shown."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._ended: dict[RunIdentity, dict[RunIdentity, str]] = {}
        """Fingerprints of their trials, by search that had ended when these were read: they change no more."""

    def changed(
        self,
        plan: Plan,
        views: Mapping[str, JobView],
        runs: Mapping[RunIdentity, RunMemory],
        *,
        looked_at: Collection[RunIdentity],
        unreadable: MutableMapping[RunIdentity, CorruptObjectError],
    ) -> list[TrialRun]:
        """Trials that are not shown as they are.

        Args:
            plan: of the sweep.
            views: the states of its jobs.
            runs: what is shown.
            looked_at: jobs that have changed, or that nobody has looked at for a while: of other searches that go on
                nothing is read.
            unreadable: gets an error for each search some of whose trials cannot be read, under the name of such a run.
        """
        searches = [job for job in plan.jobs if job.kind is JobKind.SEARCH and _has_begun(views[job.name])]
        due = [job for job in searches if _identity(job) in looked_at or self._lacks_some(job, views[job.name], runs)]
        listed = _read(lambda job: list_trials(self._store, job.key), [(job, job) for job in due], unreadable)
        documents = [(job, name) for job, names in listed for name in names]
        read = _read(lambda name: read_trial(self._store, name), documents, unreadable)
        found = [
            TrialRun(job=job, trial=trial, facts=_facts(plan.sweep, job, trial, views[job.name].state))
            for job, trial in read
        ]
        for job in due:
            self._ended.pop(_identity(job), None)
            if views[job.name].state.is_final and _trials_of(job) not in unreadable:
                own = [run.facts for run in found if run.job is job]
                self._ended[_identity(job)] = {facts.identity: facts.fingerprint for facts in own}
        return [run for run in found if not _is_shown(run.facts.identity, run.facts.fingerprint, runs)]

    def _lacks_some(self, job: Job, view: JobView, runs: Mapping[RunIdentity, RunMemory]) -> bool:
        """Whether a search has ended, and not all of its trials are known to be shown."""
        known = self._ended.get(_identity(job))
        is_shown = known is not None and all(_is_shown(*trial, runs) for trial in known.items())
        return view.state.is_final and not is_shown


def _read(
    read: Callable[[Given], Found],
    of_jobs: Sequence[tuple[Job, Given]],
    unreadable: MutableMapping[RunIdentity, CorruptObjectError],
) -> list[tuple[Job, Found]]:
    """What can be read, in order, with its job; several at once."""

    def attempt(one: tuple[Job, Given]) -> tuple[Job, Found] | None:
        try:
            return one[0], read(one[1])
        except CorruptObjectError as error:
            unreadable[_trials_of(one[0])] = error
            return None

    return [found for found in read_all(attempt, of_jobs) if found is not None]


def _identity(job: Job) -> RunIdentity:
    return job.name, job.key


def _trials_of(job: Job) -> RunIdentity:
    return f"{job.name}{TRIAL_MARK}", job.key


def _has_begun(view: JobView) -> bool:
    return bool(view.num_attempts) or view.state.is_done


def _facts(sweep: str, job: Job, trial: Trial, state: JobState) -> RunFacts:
    status, end_s = _STATUS[trial.state], trial.ended_s
    if state.is_final and not status.is_final:
        # The search died before it could say how this one ended: nothing runs any more.
        status, end_s = RunStatus.KILLED, max([trial.started_s, *(point.at_s for point in trial.points)])
    name = f"{job.name}{TRIAL_MARK}{trial.number}"
    content = sha256(repr(trial.points).encode()).hexdigest()[:16]
    tags = {"sweep": sweep, "job": name, "key": job.key, "kind": "trial", "state": trial.state.value}
    tags |= {"reason": printable(trial.reason), "content": content}  # so that new points are news
    return RunFacts(job=name, key=job.key, status=status, start_s=trial.started_s, end_s=end_s, tags=tags)


def _is_shown(trial: RunIdentity, fingerprint: str, runs: Mapping[RunIdentity, RunMemory]) -> bool:
    run = runs.get(trial)
    return run is not None and run.fingerprint == fingerprint
