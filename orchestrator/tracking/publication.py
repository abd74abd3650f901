"""The publisher: updates a tracking server from the sweeps of a store, never the other way round.

Invariants:

- It continues until nothing more is to be published, through any outage of the tracking server.
- A job that has not changed since the last round costs one comparison.
- Trials of a search are runs below the run of their job.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Protocol

from orchestrator.core.errors import PreconditionFailedError
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.report.inputs import MetricSegment
from orchestrator.state.snapshot import JobView, Snapshot
from orchestrator.state.transitions import JobState
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.trials import Trial, TrialState, read_trials
from orchestrator.tracking.attachments import Attachments
from orchestrator.tracking.content import (
    ContentReader,
    JobContent,
    RecordCache,
    analysed_backbone,
    last_steps,
    read_all,
    sweep_params,
)
from orchestrator.tracking.draft import FoundRun, MetricPoint, RunDraft
from orchestrator.tracking.facts import (
    SWEEP_RUN,
    RunFacts,
    RunIdentity,
    RunStatus,
    Timeline,
    TimelineReader,
    job_facts,
    superseded_facts,
    sweep_facts,
)
from orchestrator.tracking.links import shared_view
from orchestrator.tracking.memory import Memory, MemoryFile, RunMemory
from orchestrator.tracking.server import TrackingError, TrackingRefusedError, TrackingServer

_MARK = "#"
"""Between the name of a search job and the number of a trial; no job's name holds one."""
_STATUS = {
    TrialState.RUNNING: RunStatus.RUNNING,
    TrialState.COMPLETED: RunStatus.FINISHED,
    TrialState.STOPPED: RunStatus.KILLED,
    TrialState.FAILED: RunStatus.FAILED,
}
_BATCH = 200
"""Runs whose content is in memory at once; what is published is remembered in the store after some of these."""
_SAVE_EVERY_S = 5.0
_LOG = logging.getLogger(__name__)
_MAX_BACKOFF_S = 60.0
_SOON_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRun:
    """A trial and its job."""

    job: Job
    facts: RunFacts
    trial: Trial

    def content(self, run: RunMemory | None) -> JobContent:
        """What its run is to say and does not say yet."""
        params = {name: str(value) for name, value in {**self.job.facets, **self.trial.params}.items()}
        begun = str(self.trial.started_s)  # another log of the search may have another trial of this number
        num_said = 0 if run is None else run.said.get(begun, 0)
        return JobContent(
            params={} if run is not None and run.described else params,
            points=tuple(
                MetricPoint(name=name, value=value, step=point.step, at_s=point.at_s)
                for point in self.trial.points[num_said:]
                for name, value in point.metrics.items()
                if math.isfinite(value)
            ),
            is_complete=True,
            said={begun: len(self.trial.points)},
        )


def owner_of(identity: RunIdentity) -> RunIdentity:
    """The job that a trial's run belongs to; any other run's own identity."""
    name, key = identity
    return name.partition(_MARK)[0], key


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
    name = f"{job.name}{_MARK}{trial.number}"
    content = sha256(repr(trial.points).encode()).hexdigest()[:16]
    tags = {"sweep": sweep, "job": name, "key": job.key, "kind": "trial", "state": trial.state.value}
    tags |= {"reason": trial.reason, "content": content}  # so that new points are news
    return RunFacts(job=name, key=job.key, status=status, start_s=trial.started_s, end_s=end_s, tags=tags)


def _is_news(facts: RunFacts, runs: Mapping[RunIdentity, RunMemory]) -> bool:
    run = runs.get(facts.identity)
    return run is None or run.fingerprint != facts.fingerprint


class FactsCache:
    """Of one sweep; views are values, so the same view has the same facts."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[JobView, RunFacts | None]] = {}
        self._superseded: dict[RunIdentity, RunFacts] = {}

    def all(self, timeline: Timeline, plan: Plan, runs: Mapping[RunIdentity, RunMemory]) -> list[RunFacts]:
        """The sweep's facts first, then those of its jobs that have begun, then of runs of earlier revisions' jobs."""
        jobs = plan.by_name()
        known: dict[str, tuple[JobView, RunFacts | None]] = {}
        for name, view in timeline.snapshot.jobs.items():
            old = self._known.get(name)
            is_same = old is not None and old[0] is view
            known[name] = old if old and is_same else (view, job_facts(timeline, view, jobs[name].kind))
        self._known = known
        told = [facts for _, facts in known.values() if facts is not None]
        return [sweep_facts(timeline), *told, *self._earlier(timeline, runs)]

    def _earlier(self, timeline: Timeline, runs: Mapping[RunIdentity, RunMemory]) -> list[RunFacts]:
        """Runs whose jobs the plan no longer has."""
        snapshot = timeline.snapshot
        current = {(view.name, view.key) for view in snapshot.jobs.values()} | {SWEEP_RUN}
        found: dict[RunIdentity, RunFacts] = {}
        for identity, run in runs.items():
            if owner_of(identity) not in current:
                known = self._superseded.get(identity)
                # After this update, the run's own status is that of the facts.
                found[identity] = known or _superseded(timeline, identity, run.status)
        self._superseded = found
        return list(found.values())


def _superseded(timeline: Timeline, identity: RunIdentity, status: RunStatus | None) -> RunFacts:
    snapshot = timeline.snapshot
    return superseded_facts(snapshot.sweep, identity, status, snapshot.accepted_at_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSource:
    """Where a sweep's truth is read from; lives as long as its publisher."""

    store: ObjectStore
    records: RecordCache
    facts: FactsCache
    file: MemoryFile


class Publication:
    """Use once. ``run`` may stop anywhere: a later pass goes on from what is in the store and on the server."""

    def __init__(self, source: SweepSource, server: TrackingServer, timeline: Timeline, plan: Plan) -> None:
        self._source, self._server, self._timeline, self._plan = source, server, timeline, plan
        self._jobs = plan.by_name()
        self._reader = ContentReader(source.store, plan, source.records, timeline.snapshot.jobs)
        self._attachments = Attachments(source.store, server, timeline, plan)
        self._memory = Memory()
        self._runs: dict[RunIdentity, RunMemory] = {}
        self._segments: dict[RunIdentity, list[MetricSegment]] = {}
        self._unsaved: list[str] = []
        """Runs made since the memory was last saved."""
        self._saved_at_s = time.monotonic()

    def run(self) -> bool:
        """Publish; True if everything known at this moment is published.

        Raises:
            TrackingError: the server cannot be reached; what it did accept is remembered.
            PreconditionFailedError: another publisher is at work on this sweep and server.
        """
        self._memory = self._source.file.load()
        self._runs = self._memory.by_identity()
        changed = self._changed()
        if changed and self._has_lost_its_runs():
            self._runs, self._memory.attached, self._memory.submission = {}, {}, ""
            self._memory.registered = ""
            changed = self._changed()
        trials = changed_trials(self._source.store, self._plan, self._timeline.snapshot, self._runs)
        if not changed and not trials and not self._memory.condemned:
            return True
        self._source.file.forget()
        self._discard_superseded(changed)
        try:
            all_there = self._publish(changed, trials)
        except PreconditionFailedError:
            raise
        except Exception:
            self._save()  # whatever the server accepted before it failed is remembered
            raise
        self._save()
        return all_there

    # ---------------------------------------------------------------------------------------------------------- facts
    def _changed(self) -> list[RunFacts]:
        """What is to be told anew; the sweep's own run first."""
        facts = self._source.facts.all(self._timeline, self._plan, self._runs)
        has_news = {run.identity for run in facts if self._has_news(run)}
        # The run of a backbone shows its analyses too, which end long after it.
        for name, key in tuple(has_news):
            job = self._jobs.get(name)
            backbone = None if job is None or job.key != key else analysed_backbone(job, self._jobs)
            if backbone is not None:
                has_news.add((backbone.name, backbone.key))
        return [run for run in facts if run.identity in has_news]

    def _has_news(self, facts: RunFacts) -> bool:
        run = self._runs.get(facts.identity)
        if run is None or run.fingerprint != facts.fingerprint:
            return True
        if facts.identity == SWEEP_RUN:
            return self._attachments.has_news(self._memory)
        if facts.status.is_final:
            return False  # all segments were there before the end was on record: nothing to look for
        return last_steps(self._list_segments(facts)) != run.said

    def _has_lost_its_runs(self) -> bool:
        """Whether the server does not have the sweep's run (any more), and so none that belongs to it."""
        sweep_run = self._runs.get(SWEEP_RUN)
        return sweep_run is not None and not self._server.is_active(sweep_run.run_id)

    def _list_segments(self, facts: RunFacts) -> list[MetricSegment]:
        job = self._jobs.get(facts.job)
        if job is None or job.key != facts.key:
            return []
        if facts.identity not in self._segments:
            self._segments[facts.identity] = self._reader.segments(job)
        return self._segments[facts.identity]

    # --------------------------------------------------------------------------------------------------------- memory
    def _save(self) -> None:
        self._memory.runs = list(self._runs.values())
        try:
            self._source.file.save(self._memory)
        except PreconditionFailedError:
            self._withdraw()
            raise
        self._unsaved, self._saved_at_s = [], time.monotonic()

    def _withdraw(self) -> None:
        """Delete the runs that this pass made and that the publisher which was faster did not take over."""
        self._source.file.forget()
        taken = {run.run_id for run in self._source.file.load().runs}
        self._server.delete_runs([run_id for run_id in self._unsaved if run_id not in taken])

    def _discard_superseded(self, changed: list[RunFacts]) -> None:
        """Replace runs that show steps which a later attempt repeated: MLflow cannot take a metric back."""
        known = [facts for facts in changed if facts.identity in self._runs and not facts.is_superseded]
        told = [facts for facts in known if self._runs[facts.identity].said]
        read_all(self._list_segments, told)
        for facts in told:
            valid = last_steps(self._list_segments(facts))
            if any(step > valid.get(attempt, 0) for attempt, step in self._runs[facts.identity].said.items()):
                self._memory.discarded.append(self._runs.pop(facts.identity).run_id)
        self._delete_discarded()

    def _delete_discarded(self) -> None:
        if waiting := self._memory.condemned:
            # Remembered before they are deleted: a crash in between must not let them be adopted again, and another
            # publisher that remembers one of them stops this one here.
            self._save()
            self._server.delete_runs(waiting)
            self._memory.num_deleted = len(self._memory.discarded)

    # -------------------------------------------------------------------------------------------------------- publish
    def _publish(self, changed: list[RunFacts], trials: list[TrialRun]) -> bool:
        experiment_id = self._server.ensure_experiment(self._plan.experiment or self._plan.sweep)
        is_new_plan = self._memory.submission != self._timeline.submission
        if self._memory.experiment_id != experiment_id or is_new_plan:
            self._server.tag_experiment(experiment_id, shared_view(self._plan))
            self._memory.experiment_id = experiment_id
        found_more = self._adopt(experiment_id, [*changed, *(trial.facts for trial in trials)])
        sweep = [facts for facts in changed if facts.identity == SWEEP_RUN]
        if SWEEP_RUN not in self._runs:  # first: it is the parent of the others
            self._write(experiment_id, [self._unfinished(sweep[0])], {})
            self._save()
        jobs = [facts for facts in changed if facts.identity != SWEEP_RUN]
        batches = [jobs[start : start + _BATCH] for start in range(0, len(jobs), _BATCH)]
        # Last, the sweep: its end says that all is there. Stops at nothing but errors.
        is_all_there = all(
            [
                *(self._publish_jobs(experiment_id, batch) for batch in batches),
                self._publish_trials(experiment_id, trials),
                self._publish_sweep(experiment_id, sweep),
            ]
        )
        return is_all_there and not found_more

    def _adopt(self, experiment_id: str, changed: list[RunFacts]) -> bool:
        """Find runs that a crash, between making them and saving the memory, left to their tags alone.

        True if there are others as well, of earlier revisions: the next pass says so of them.
        """
        missing = {facts.identity for facts in changed} - self._runs.keys()
        if not missing:
            return False
        found = self._find(experiment_id)
        unknown = [run for run in found if run.identity not in self._runs]
        for run in unknown:
            self._runs.setdefault(run.identity, RunMemory(job=run.job, key=run.key, run_id=run.run_id))
        self._remove_doubles(found)
        return any(run.identity not in missing for run in unknown)

    def _find(self, experiment_id: str) -> list[FoundRun]:
        discarded = set(self._memory.discarded)
        return [run for run in self._server.find_runs(experiment_id, self._plan.sweep) if run.run_id not in discarded]

    def _remove_doubles(self, found: Sequence[FoundRun]) -> None:
        """Delete second runs of a job: made by requests whose answers came too late for whoever sent them.

        Only runs below the same parent: other stores may publish sweeps of this name to the same server.
        """
        parents = {run.run_id: run.parent_run_id for run in found}
        known = [(run, self._runs.get(run.identity)) for run in found if run.parent_run_id]
        self._memory.discarded += [
            run.run_id
            for run, first in known
            if first is not None and first.run_id != run.run_id and parents.get(first.run_id) == run.parent_run_id
        ]
        self._delete_discarded()

    def _write(
        self, experiment_id: str, drafts: Sequence[RunDraft], contents: Mapping[RunIdentity, JobContent | None]
    ) -> bool:
        """Write runs and remember them; False if one was deleted meanwhile, so that the next pass makes it anew."""
        all_there = True
        # Remembered one by one as the server confirms them: after an error, those before it are not told again.
        for draft, run_id in self._server.write(experiment_id, drafts):
            facts = draft.facts
            if not run_id:
                del self._runs[facts.identity]
                all_there = False
                continue
            if not draft.run_id:
                self._runs[facts.identity] = RunMemory(job=facts.job, key=facts.key, run_id=run_id)
                self._unsaved.append(run_id)
            run = self._runs[facts.identity]
            run.status, run.fingerprint = facts.status, facts.fingerprint
            content = contents.get(facts.identity)
            if content is not None:
                run.described, run.said = content.is_complete, dict(content.said)
        return all_there

    # ----------------------------------------------------------------------------------------------------------- jobs
    def _publish_jobs(self, experiment_id: str, some: Sequence[RunFacts]) -> bool:
        contents = dict(zip([facts.identity for facts in some], read_all(self._content, some), strict=True))
        # The run of a job of an earlier revision is there; that of a trial is a job's.
        parent = self._runs[SWEEP_RUN].run_id
        drafts = [self._draft(facts, contents[facts.identity], "" if facts.is_superseded else parent) for facts in some]
        all_there = self._write(experiment_id, drafts, contents)
        if time.monotonic() - self._saved_at_s > _SAVE_EVERY_S:
            self._save()
        return all_there

    def _content(self, facts: RunFacts) -> JobContent | None:
        """None for a job that the plan no longer has."""
        job = self._jobs.get(facts.job)
        if job is None or job.key != facts.key:
            return None
        run = self._runs.get(facts.identity)
        return self._reader.read(
            job,
            self._timeline.snapshot.jobs[job.name],
            segments=self._list_segments(facts),
            said={} if run is None else run.said,
            is_described=run is not None and run.described,
        )

    def _draft(self, facts: RunFacts, content: JobContent | None, parent_run_id: str) -> RunDraft:
        run, given = self._runs.get(facts.identity), content or JobContent()
        return RunDraft(
            name=facts.job,
            facts=facts,
            run_id="" if run is None else run.run_id,
            parent_run_id=parent_run_id,
            params=given.params,
            tags=given.tags,
            points=given.points,
            datasets=given.datasets,
            only_points=run is not None and run.fingerprint == facts.fingerprint,
        )

    def _publish_trials(self, experiment_id: str, trials: Sequence[TrialRun]) -> bool:
        contents: dict[RunIdentity, JobContent] = {}
        drafts: list[RunDraft] = []
        for trial in trials:
            identity, parent = trial.facts.identity, self._runs.get((trial.job.name, trial.job.key))
            if parent is not None:
                contents[identity] = trial.content(self._runs.get(identity))
                drafts.append(self._draft(trial.facts, contents[identity], parent.run_id))
        return self._write(experiment_id, drafts, contents) and len(drafts) == len(trials)

    # ---------------------------------------------------------------------------------------------------------- sweep
    def _unfinished(self, facts: RunFacts) -> RunDraft:
        """The sweep's run as it is made: whatever became of the sweep, its jobs are not there yet."""
        return RunDraft(name=self._plan.sweep, facts=replace(facts, status=RunStatus.RUNNING, end_s=None))

    def _publish_sweep(self, experiment_id: str, sweep: Sequence[RunFacts]) -> bool:
        if not sweep or SWEEP_RUN not in self._runs:
            return not sweep
        if sweep[0].status.is_final:
            self._remove_doubles(self._find(experiment_id))
        run = self._runs[SWEEP_RUN]
        params = {} if run.described else sweep_params(self._plan)
        tags = self._attachments.tags()
        draft = RunDraft(name=self._plan.sweep, facts=sweep[0], run_id=run.run_id, params=params, tags=tags)
        if not self._write(experiment_id, [draft], {}):
            return False
        run.described = True
        # Last: a server that takes no files still shows how every job ended.
        self._attachments.publish(run.run_id, self._memory)
        self._attachments.register(self._runs, self._memory)
        return True


class Publisher:
    """Needs the store and the tracking server, no cluster. ``tracking_uri``: see ``TrackingServer``."""

    def __init__(self, store: ObjectStore, tracking_uri: str) -> None:
        self._store = store
        self._server = TrackingServer(tracking_uri, artifact_root=store.uri)
        self._records = RecordCache(store)
        self._readers: dict[str, TimelineReader] = {}
        self._sources: dict[str, SweepSource] = {}
        self._published: dict[str, Timeline] = {}
        """Of ended sweeps, as they were when all of them was published."""

    def publish_once(self, sweep: str) -> bool:
        """Publish what is new; True if everything known at this moment is published.

        Any number of calls, crashes in between, and other publishers at the same time lead to the same runs.

        Raises:
            TrackingError: the tracking server cannot be reached or refuses; call again later.
            StorageError: the store cannot be read.
        """
        timeline = self._reader(sweep).read()
        if timeline.snapshot.plan is None:
            return True  # no controller has accepted the sweep yet: there is nothing to tell
        if timeline is self._published.get(sweep):
            return True  # it had ended and nothing happened since: whoever polls many old sweeps pays nothing for them
        publication = Publication(self._source(sweep), self._server, timeline, timeline.snapshot.plan)
        try:
            published = publication.run()
        except PreconditionFailedError:
            return False  # another publisher remembered something meanwhile: the next pass starts from that
        if published and timeline.snapshot.state.is_final:
            self._published[sweep] = timeline
        return published

    @property
    def num_written(self) -> int:
        """Runs that the tracking server took so far, each time it took them."""
        return self._server.num_written

    def has_ended(self, sweep: str) -> bool:
        """Whether nothing will happen to the sweep unless a client asks for it."""
        return self._reader(sweep).read().snapshot.state.is_final

    def _source(self, sweep: str) -> SweepSource:
        if sweep not in self._sources:
            self._sources[sweep] = SweepSource(
                store=self._store,
                records=self._records,
                facts=FactsCache(),
                file=MemoryFile(self._store, sweep, self._server.uri),
            )
        return self._sources[sweep]

    def _reader(self, sweep: str) -> TimelineReader:
        return self._readers.setdefault(sweep, TimelineReader(self._store, sweep))


class PublishesSweeps(Protocol):
    """What the loop needs of a ``Publisher``."""

    @property
    def num_written(self) -> int:
        """Runs that the tracking server took so far."""

    def publish_once(self, sweep: str) -> bool:
        """Publish what is new; True if everything known at this moment is published."""

    def has_ended(self, sweep: str) -> bool:
        """Whether nothing more will happen to the sweep."""


def publish_until_done(
    publisher: PublishesSweeps,
    sweep: str,
    *,
    poll_s: float = 2.0,
    give_up_s: float | None = None,
    wait: Callable[[float], object] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Publish until the sweep has ended and all of it is published.

    Args:
        publisher: what to publish with.
        sweep: its name.
        poll_s: pause between two looks at the journal.
        give_up_s: longest outage of the tracking server to sit out; None for any. A server that refuses is given up at
            once, unless it is None.
        wait: sleeps for some seconds (replaced in tests; may raise to end the loop).
        clock: seconds, monotonic.

    Raises:
        TrackingError: an outage lasted longer than ``give_up_s``.
    """
    pause = wait or threading.Event().wait
    outage_since: float | None = None
    backoff_s, told, num_written = poll_s, "", publisher.num_written
    while True:
        try:
            # Asked first: what happens after the answer may be missed, what happened before it is published.
            ended = publisher.has_ended(sweep)
            published = publisher.publish_once(sweep)
        except TrackingError as error:
            now = clock()
            if publisher.num_written > num_written:  # it works now and then: this is another outage
                outage_since, backoff_s, num_written = None, poll_s, publisher.num_written
            outage_since = now if outage_since is None else outage_since
            if give_up_s is not None and (isinstance(error, TrackingRefusedError) or now - outage_since >= give_up_s):
                raise
            if str(error) != told:
                _LOG.warning("%s; trying again", error)
            told = str(error)
            pause(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            continue
        if ended and published:
            return
        outage_since, backoff_s, told = None, poll_s, ""
        pause(poll_s if published else _SOON_S)
