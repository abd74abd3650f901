"""The publisher: updates a tracking server from the sweeps of a store, never the other way round.

Invariants:

- It continues until nothing more is to be published, through any outage of the tracking server.
- A job that has not changed since the last round costs one comparison.
- Trials of a search are runs below the run of their job.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice

from orchestrator.core.errors import CorruptObjectError, PreconditionFailedError, StorageError
from orchestrator.planning.graph.plan import Plan
from orchestrator.report.inputs import MetricSegment
from orchestrator.storage.protocol import ObjectStore
from orchestrator.tracking.attachments import Attachments
from orchestrator.tracking.content import (
    ContentReader,
    JobContent,
    RecordCache,
    last_steps,
    read_ahead,
    read_all,
    sweep_params,
)
from orchestrator.tracking.draft import STORE_TAG, FoundRun, RunDraft, own_runs
from orchestrator.tracking.facts import (
    SWEEP_RUN,
    FactsCache,
    RunFacts,
    RunIdentity,
    RunStatus,
    Timeline,
    experiment_of,
    owner_of,
)
from orchestrator.tracking.links import shared_view
from orchestrator.tracking.memory import Memory, MemoryFile, RunMemory
from orchestrator.tracking.run_writer import RefusedRun
from orchestrator.tracking.server import TrackingError, TrackingRefusedError, TrackingServer
from orchestrator.tracking.trials import TrialRun, TrialsReader

_BATCH = 100
"""Runs whose content is read while that of as many others is written; all of a batch is announced at once."""
_SAVE_EVERY_S = 5.0
LOOK_EVERY_S = 15.0
"""Between two looks at what a running job has written: each is a listing."""


@dataclass(slots=True, kw_only=True)
class SweepSource:
    """Where a sweep's truth is read from, and what this process has done with it; lives as long as its publisher."""

    store: ObjectStore
    records: RecordCache
    facts: FactsCache
    trials: TrialsReader
    file: MemoryFile
    clock: Callable[[], float]
    is_to_be_compared: bool
    """Whether the next pass asks the server if the remembered runs are there still."""
    resent: set[str] = field(default_factory=set)
    """Runs that this process has written since then: a pass that another publisher overtakes writes them once."""
    searched_for: str | None = None
    """Etag of the memory that has all runs of the server, because this process has searched for them and everything
    that it wrote since was confirmed. Another memory is another publisher's, which may have left runs that it forgot.
    """
    damaged: dict[RunIdentity, str] = field(default_factory=dict)
    """Fingerprints of the jobs of which something is damaged, as their runs show them: they are not sent again."""
    looked_at_s: dict[RunIdentity, float] = field(default_factory=dict)
    """When the metrics and trials of a job that goes on were last looked for."""

    def rest(self) -> None:
        """Drop what can be read or made again, which is as large as the sweep."""
        self.facts, self.trials, self.looked_at_s = FactsCache(), TrialsReader(self.store), {}
        self.file.forget()


class Publication:
    """Use once. ``run`` may stop anywhere: a later pass goes on from what is in the store and on the server."""

    def __init__(self, source: SweepSource, server: TrackingServer, timeline: Timeline, plan: Plan) -> None:
        self._source, self._server, self._timeline, self._plan = source, server, timeline, plan
        self._jobs = plan.by_name()
        self._reader = ContentReader(source.store, plan, source.records, timeline.snapshot.jobs)
        self._attachments = Attachments(source.store, server, timeline, plan)
        self._memory = Memory()
        self._runs: dict[RunIdentity, RunMemory] = {}
        self._lost: set[str] = set()
        """Runs that were remembered until this pass."""
        self._is_searched = False
        self._found: dict[str, list[FoundRun]] = {}
        """What a search of this pass has found, by experiment, until it is used."""
        self._looked_at_s: dict[RunIdentity, float] = {}
        self._due: set[RunIdentity] = set()
        """Jobs that this pass looks at although their state has not changed."""
        self._segments: dict[RunIdentity, list[MetricSegment]] = {}
        self._outdated: list[RunIdentity] = []
        """See ``ContentReader.outdated``."""
        self._refused: list[tuple[RunDraft, RefusedRun]] = []
        self._unreadable: dict[RunIdentity, CorruptObjectError] = {}
        """Jobs of which the store holds something damaged: their runs show only their states."""
        self._unsaved: list[str] = []
        """Runs made since the memory was last saved."""
        self._saved_at_s = time.monotonic()

    def run(self) -> bool:
        """Publish; True if everything known at this moment is published.

        Raises:
            TrackingError: the server cannot be reached, or refuses something; what it did accept is remembered.
            PreconditionFailedError: another publisher is at work on this sweep and server.
        """
        source = self._source
        self._memory = source.file.load()
        self._runs = self._memory.by_identity()
        self._is_searched = source.file.etag is not None and source.file.etag == source.searched_for
        if source.is_to_be_compared:
            self._compare_with_server()
        changed, trials = self._news()
        is_complete = True
        if changed or trials or self._memory.condemned:
            source.file.forget()
            if self._has_lost_its_runs():
                self._forget_runs()
                changed, trials = self._news()
            is_complete = self._publish_and_remember(changed, trials)
        # Only now: after an error, the next pass looks at everything.
        source.is_to_be_compared = False
        if self._refused or self._unreadable:
            # The next pass looks at them again: it would find nothing new otherwise, and end without this error.
            failed = {draft.facts.identity for draft, _ in self._refused} | self._unreadable.keys()
            owners = {owner_of(identity) for identity in failed}
            source.looked_at_s = {run: at_s for run, at_s in self._looked_at_s.items() if run not in owners}
            raise self._server.refusal(self._refused) if self._refused else self._damage()
        source.looked_at_s = self._looked_at_s
        return is_complete

    def _publish_and_remember(self, changed: list[RunFacts], trials: list[TrialRun]) -> bool:
        self._source.searched_for = None  # until everything that this pass writes is confirmed
        try:
            is_complete = self._publish(changed, trials)
        except PreconditionFailedError:
            raise
        except Exception:
            self._save()  # whatever the server accepted before it failed is remembered
            raise
        self._save()
        self._source.searched_for = self._source.file.etag if self._is_searched else None
        return is_complete

    # ---------------------------------------------------------------------------------------------------------- facts
    def _news(self) -> tuple[list[RunFacts], list[TrialRun]]:
        changed, views = self._changed(), self._timeline.snapshot.jobs
        looked_at = self._due | {facts.identity for facts in changed}
        trials = self._source.trials.changed(
            self._plan, views, self._runs, looked_at=looked_at, unreadable=self._unreadable
        )
        return changed, trials

    def _changed(self) -> list[RunFacts]:
        """What is to be told anew; the sweep's own run first."""
        facts = self._source.facts.all(
            self._timeline, self._plan, {identity: run.status for identity, run in self._runs.items()}
        )
        self._look_at_running(facts)
        has_news = {run.identity for run in facts if self._has_news(run)}
        self._outdated = self._reader.outdated(self._runs.values())
        has_news |= self._reader.backbones_of(has_news) | set(self._outdated)
        return [run for run in facts if run.identity in has_news]

    def _look_at_running(self, facts: Sequence[RunFacts]) -> None:
        """List what jobs have written that run as they did: many at once, and each job only now and then."""
        # All segments were there before an end was on record: of a job that has ended there is nothing to look for.
        running = [run for run in facts if run.identity != SWEEP_RUN and not run.status.is_final and self._is_told(run)]
        now, looked_at_s = self._source.clock(), self._source.looked_at_s
        due = [run for run in running if now - looked_at_s.get(run.identity, -math.inf) >= LOOK_EVERY_S]
        read_all(self._list_segments, due)
        before = {run.identity: looked_at_s[run.identity] for run in running if run.identity in looked_at_s}
        self._due = {run.identity for run in due}
        self._looked_at_s = before | dict.fromkeys(self._due, now)

    def _is_told(self, facts: RunFacts) -> bool:
        run, is_of_plan = self._runs.get(facts.identity), self._memory.submission == self._timeline.submission
        return run is not None and facts.are_told_by(run.fingerprint, of_this_plan=is_of_plan)

    def _has_news(self, facts: RunFacts) -> bool:
        if not self._is_told(facts):
            return True
        if facts.identity == SWEEP_RUN:
            return self._attachments.has_news(self._memory)
        segments = None if facts.status.is_final else self._segments.get(facts.identity)
        return last_steps(segments or ()) not in ({}, self._runs[facts.identity].said)

    def _list_segments(self, facts: RunFacts) -> list[MetricSegment]:
        job = self._jobs.get(facts.job)
        if job is None or job.key != facts.key:
            return []
        if facts.identity not in self._segments:
            self._segments[facts.identity] = []
            try:
                self._segments[facts.identity] = self._reader.segments(job)
            except CorruptObjectError as error:
                self._unreadable[facts.identity] = error
        return self._segments[facts.identity]

    # --------------------------------------------------------------------------------------------------------- memory
    def _save(self) -> None:
        self._memory.runs = list(self._runs.values())
        try:
            self._source.file.save(self._memory)
        except PreconditionFailedError as overtaken:
            try:
                self._withdraw()
            except (TrackingError, StorageError) as error:
                raise overtaken from error  # what is left is found by its tags; nothing of this pass may be remembered
            raise
        self._unsaved, self._saved_at_s = [], time.monotonic()

    def _withdraw(self) -> None:
        """Delete the runs that this pass made and that the publisher which was faster did not take over."""
        taken = self._stored_runs()
        unused = [run_id for run_id in self._unsaved if run_id not in taken]
        if unused:
            self._server.delete_runs(unused)
            # It remembers runs before it writes them: whatever it wrote between our look and their end is restored.
            self._server.restore_runs(sorted(self._stored_runs().intersection(unused)))

    def _stored_runs(self) -> set[str]:
        self._source.file.forget()
        return {run.run_id for run in self._source.file.load().runs}

    def _has_lost_its_runs(self) -> bool:
        """Whether the server does not have the sweep's run (any more), and so none that belongs to it."""
        sweep_run = self._runs.get(SWEEP_RUN)
        return sweep_run is not None and not self._server.is_active(sweep_run.run_id)

    def _forget_runs(self) -> None:
        """All of the sweep is published anew; runs that are there still are found again, below the lost ones too."""
        self._lost |= {run.run_id for run in self._runs.values()}
        self._runs, self._is_searched, self._source.damaged = {}, False, {}
        self._memory.experiment_id = ""
        self._forget_attachments()

    def _forget_attachments(self) -> None:
        self._source.file.forget()
        self._memory.attached, self._memory.submission, self._memory.registered = {}, "", ""

    def _compare_with_server(self) -> None:
        """Forget what the server does not have, or may not have as remembered: it may be another one, or older.

        A run that had ended, and has the same status there, is taken to be whole.
        """
        if not self._runs:
            return
        self._source.damaged.clear()
        found = self._server.find_runs(self._memory.experiment_id, self._plan.sweep)
        self._found[self._memory.experiment_id] = found
        status = {run.run_id: run.status for run in found}
        if status.keys() & set(self._memory.discarded):
            self._memory.num_deleted = 0  # an older backup has them again
        if SWEEP_RUN not in self._runs or self._runs[SWEEP_RUN].run_id not in status:
            self._forget_runs()
            return
        current = {(view.name, view.key) for view in self._timeline.snapshot.jobs.values()} | {SWEEP_RUN}
        for identity, run in tuple(self._runs.items()):
            if run.run_id not in status:
                del self._runs[identity]
                self._lost.add(run.run_id)
                continue
            is_resent = run.run_id in self._source.resent and run.status == status[run.run_id]
            if owner_of(identity) in current and not is_resent and not run.has_ended_as(status[run.run_id]):
                # It shows no more than is remembered: steps that were superseded are in runs that were replaced.
                self._runs[identity] = run.unsent()
                if identity == SWEEP_RUN:
                    self._forget_attachments()

    def _discard_superseded(self, changed: Sequence[RunFacts], trials: Sequence[TrialRun]) -> None:
        """Replace runs that show steps which a later attempt repeated, what an analysis found before it was changed, or
        a trial of a log that is gone: MLflow cannot take a metric back. Files of the model registry, and so their runs,
        stay.
        """
        known = [facts for facts in changed if facts.identity in self._runs and not facts.is_superseded]
        told = [facts for facts in known if (run := self._runs[facts.identity]).doubtful or run.shown]
        read_all(self._list_segments, told)
        mixed = [*self._outdated, *(facts.identity for facts in told if self._shows_superseded(facts))]
        mixed += [trial.facts.identity for trial in trials if trial.replaces(self._runs.get(trial.facts.identity))]
        registered = self._server.registered_runs(self._plan.sweep) if mixed else set()
        for identity in dict.fromkeys(mixed):
            self._runs[identity].analyses = {}
            if self._runs[identity].run_id not in registered:
                self._memory.discarded.append(self._drop(identity))
        self._delete_discarded()

    def _shows_superseded(self, facts: RunFacts) -> bool:
        segments, run = self._list_segments(facts), self._runs[facts.identity]
        valid = last_steps(segments) or run.shown  # of a forgotten sweep they are collected, and its runs stay
        # How far an attempt was told that others followed is not known of a run that was found.
        is_doubtful = run.doubtful and any(segment.attempt > 1 for segment in segments)
        return is_doubtful or any(step > valid.get(attempt, 0) for attempt, step in run.shown.items())

    def _delete_discarded(self) -> None:
        if waiting := self._memory.condemned:
            # Remembered before they are deleted: a crash in between must not let them be adopted again, and another
            # publisher that remembers one of them stops this one here.
            self._save()
            self._server.delete_runs(waiting)
            self._memory.num_deleted = len(self._memory.discarded)

    # -------------------------------------------------------------------------------------------------------- publish
    def _publish(self, changed: list[RunFacts], trials: list[TrialRun]) -> bool:
        name = experiment_of(self._plan)
        experiment_id = self._find_or_make_experiment(name)
        if self._runs and experiment_id != self._memory.experiment_id:
            self._forget_runs()  # MLflow cannot move them
            changed, trials = self._news()
        self._memory.experiment_id, self._memory.experiment = experiment_id, name
        found_more = self._adopt(experiment_id, changed, trials)
        self._discard_superseded(changed, trials)
        sweep = [facts for facts in changed if facts.identity == SWEEP_RUN]
        if is_new := SWEEP_RUN not in self._runs:  # first: it is the parent of the others
            self._write(experiment_id, [self._unfinished(sweep[0])], {})
            self._save()
            if SWEEP_RUN not in self._runs:
                return False  # refused, or deleted in this moment
        jobs = [facts for facts in changed if facts.identity != SWEEP_RUN]
        # Last, the sweep: its end says that all is there. Stops at nothing but errors.
        is_all_there = all(
            [
                self._publish_jobs(experiment_id, jobs),
                self._publish_trials(experiment_id, trials),
                self._publish_sweep(experiment_id, sweep, is_new=is_new),
            ]
        )
        return is_all_there and not found_more

    def _find_or_make_experiment(self, name: str) -> str:
        """Its id; it has the sweep's view."""
        known, told = self._memory.experiment_id, self._memory.submission
        found = self._server.find_experiment(name, known_id=known, known_as=self._memory.experiment)
        if not found and (made := self._server.make_experiment(name, shared_view(self._plan))):
            self._is_searched = True  # nobody had the time to make a run in there
            return made
        found = found or self._server.find_experiment(name)  # another publisher was first
        if (known, told) != (found, self._timeline.submission):
            self._server.tag_experiment(found, shared_view(self._plan))
        return found

    def _adopt(self, experiment_id: str, changed: list[RunFacts], trials: list[TrialRun]) -> bool:
        """Find runs that a crash, between making them and saving the memory, left to their tags alone.

        True if there are others as well, of earlier revisions: the next pass says so of them.
        """
        wanted = {facts.identity for facts in changed} | {trial.facts.identity for trial in trials}
        attempts = {facts.identity: facts.tags.get("attempts") for facts in changed if facts.identity != SWEEP_RUN}
        missing = wanted - self._runs.keys()
        if not missing or self._is_searched:
            return False
        found = self._find(experiment_id)
        unknown = [run for run in found if run.identity not in self._runs]
        for run in unknown:
            # Whoever wrote that a job has succeeded knew all of its attempts until then.
            is_whole = run.status == RunStatus.FINISHED and run.attempts == attempts.get(run.identity)
            is_doubtful = run.identity in attempts and not is_whole
            known = RunMemory(job=run.job, key=run.key, run_id=run.run_id, doubtful=is_doubtful)
            self._runs.setdefault(run.identity, known)
        self._remove_doubles(found)
        self._is_searched = True
        if unknown:
            self._save()  # before they are written: the publisher that made them must not delete them as unused
        return any(run.identity not in missing for run in unknown)

    def _find(self, experiment_id: str) -> list[FoundRun]:
        """The sweep's runs on the server: those of other stores with a sweep of this name are not among them."""
        found = self._found.pop(experiment_id, None)
        if found is None:
            found = self._server.find_runs(experiment_id, self._plan.sweep)
        discarded = set(self._memory.discarded)
        own = own_runs(
            found,
            stores=(self._source.store.uri, self._plan.store_uri),
            known={*self._lost, *discarded, *(run.run_id for run in self._runs.values())},
            look_up=self._server.find_run,
        )
        return [run for run in own if run.run_id not in discarded]

    def _remove_doubles(self, found: Sequence[FoundRun]) -> None:
        """Delete second runs of a job: made by requests whose answers came too late for whoever sent them.

        Only runs below the same parent: of others nobody knows why they are there.
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
        self,
        experiment_id: str,
        drafts: Iterable[RunDraft | None],
        contents: MutableMapping[RunIdentity, JobContent | None],
    ) -> bool:
        """Write runs and remember them; False if one was deleted meanwhile, so that the next pass makes it anew, or is
        refused. See ``TrackingServer.write`` for ``drafts``.
        """
        all_there = True
        # Remembered one by one as the server confirms them: after an error, those before it are not told again.
        for draft, answer in self._server.write(experiment_id, drafts):
            content = contents.pop(draft.facts.identity, None)
            if isinstance(answer, RefusedRun):
                self._keep_refused(draft, answer)
                all_there = False
            elif answer:
                self._remember(draft, answer, content)
            else:
                self._drop(draft.facts.identity)
                self._is_searched = all_there = False  # the job may have another run
        return all_there

    def _damage(self) -> TrackingRefusedError:
        first, error = next(iter(self._unreadable.items()))
        more = f" (and {len(self._unreadable) - 1} more)" if len(self._unreadable) > 1 else ""
        return TrackingRefusedError(
            f"{owner_of(first)[0]}{more} is published without what cannot be read: {error}. Training goes on, and all "
            "else is published"
        )

    def _keep_refused(self, draft: RunDraft, answer: RefusedRun) -> None:
        self._refused.append((draft, answer))
        if answer.run_id and not draft.run_id:  # it is there: tried again, and not made again
            self._make(draft, answer.run_id)
        elif draft.run_id:  # else it may count as told once the sweep's run has told the present plan
            self._runs[draft.facts.identity].fingerprint = ""

    def _drop(self, identity: RunIdentity) -> str:
        """Forget a run, which is to be made anew; its id, empty if there is none."""
        run = self._runs.pop(identity, None)
        self._source.damaged.pop(identity, None)
        self._looked_at_s.pop(owner_of(identity), None)  # trials are read with their search
        return "" if run is None else run.run_id

    def _make(self, draft: RunDraft, run_id: str) -> None:
        self._runs[draft.facts.identity] = RunMemory(job=draft.facts.job, key=draft.facts.key, run_id=run_id)
        self._unsaved.append(run_id)

    def _remember(self, draft: RunDraft, run_id: str, content: JobContent | None) -> None:
        if not draft.run_id:
            self._make(draft, run_id)
        run = self._runs[draft.facts.identity]
        is_whole = draft.facts.identity not in self._unreadable  # else it is told again by the next pass
        run.status, run.fingerprint = draft.facts.status, draft.facts.fingerprint if is_whole else ""
        if not is_whole:
            self._source.damaged[draft.facts.identity] = draft.facts.fingerprint
        if self._source.is_to_be_compared:
            self._source.resent.add(run_id)
        if content is not None:
            run.described, run.said, run.sending = content.is_complete, dict(content.said), {}
            run.analyses, run.doubtful = {**run.analyses, **content.analyses}, False

    # ----------------------------------------------------------------------------------------------------------- jobs
    def _publish_jobs(self, experiment_id: str, jobs: Sequence[RunFacts]) -> bool:
        contents: dict[RunIdentity, JobContent | None] = {}
        with closing(self._job_drafts(jobs, contents)) as drafts:  # after an error, nothing more is read
            return self._write(experiment_id, drafts, contents)

    def _job_drafts(
        self, jobs: Sequence[RunFacts], contents: MutableMapping[RunIdentity, JobContent | None]
    ) -> Generator[RunDraft | None, None, None]:
        """Drafts of the runs of jobs, each once its content is among ``contents``.

        Before the memory is saved comes a None, see ``TrackingServer.write``: a publisher that notices there that
        another one was faster knows all runs that it has made.
        """
        read = read_ahead(self._content, jobs, _BATCH)
        # The run of a job of an earlier revision is there; that of a trial is a job's.
        parent = self._runs[SWEEP_RUN].run_id
        while some := list(islice(read, _BATCH)):
            if self._announce(some) or time.monotonic() - self._saved_at_s > _SAVE_EVERY_S:
                yield None
                self._save()
            for facts, content in some:
                if facts.identity in self._unreadable and self._source.damaged.get(facts.identity) == facts.fingerprint:
                    continue
                contents[facts.identity] = content
                yield self._draft(facts, content, "" if facts.is_superseded else parent)

    def _announce(self, some: Iterable[tuple[RunFacts, JobContent | None]]) -> bool:
        """Note what runs may show from now on: this process may die before it notes what they do show. True if that
        must be saved before they are written.
        """
        is_ahead = False
        for facts, content in some:
            run = self._runs.get(facts.identity)
            # Of a doubtful run nobody needs to know it: once there are several attempts, it is replaced.
            if content is None or not content.points or run is None or run.doubtful:
                continue
            analyses = {**run.analyses, **content.analyses}
            if analyses != run.analyses or content.said not in (run.said, run.sending):
                run.analyses, run.sending, is_ahead = analyses, dict(content.said), True
        return is_ahead

    def _content(self, facts: RunFacts) -> JobContent | None:
        """None for a job that the plan no longer has, or of which something is damaged."""
        job = self._jobs.get(facts.job)
        if job is None or job.key != facts.key:
            return None
        segments = self._list_segments(facts)
        if facts.identity in self._unreadable:
            return None  # without its curve, its last values would stand at a step that they are not of
        try:
            return self._reader.read(
                job,
                self._timeline.snapshot.jobs[job.name],
                segments=segments,
                run=self._runs.get(facts.identity),
                is_told=self._is_told(facts),
            )
        except CorruptObjectError as error:
            self._unreadable[facts.identity] = error
            return None

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
            only_points=self._is_told(facts),
            is_revised=self._timeline.snapshot.revision > 1 and self._memory.submission != self._timeline.submission,
        )

    def _publish_trials(self, experiment_id: str, trials: Sequence[TrialRun]) -> bool:
        contents: dict[RunIdentity, JobContent | None] = {}
        drafts: list[RunDraft] = []
        for trial in trials:
            identity, parent = trial.facts.identity, self._runs.get((trial.job.name, trial.job.key))
            if parent is not None:
                content = contents[identity] = trial.content(self._runs.get(identity))
                drafts.append(self._draft(trial.facts, content, parent.run_id))
        return self._write(experiment_id, drafts, contents) and len(drafts) == len(trials)

    # ---------------------------------------------------------------------------------------------------------- sweep
    def _unfinished(self, facts: RunFacts) -> RunDraft:
        """The sweep's run as it is made: whatever became of the sweep, its jobs are not there yet."""
        facts = replace(facts, status=RunStatus.RUNNING, end_s=None)
        return RunDraft(name=self._plan.sweep, facts=facts, tags=self._store_tag())

    def _store_tag(self) -> dict[str, str]:
        # Not among the facts: runs of earlier versions are not told anew for it.
        return {STORE_TAG: self._source.store.uri}

    def _publish_sweep(self, experiment_id: str, sweep: Sequence[RunFacts], *, is_new: bool) -> bool:
        if not sweep or SWEEP_RUN not in self._runs:
            return not sweep
        run = self._runs[SWEEP_RUN]
        if self._is_told(sweep[0]) and self._attachments.lacks_report(self._memory):
            if self._unreadable:
                return False  # a report of what cannot be read would fail as it did
            # Before the report is made, which takes requests for each job: a place that was refused is refused again.
            self._server.place_of(run.run_id)
        if sweep[0].status.is_final:
            self._remove_doubles(self._find(experiment_id))
        error: CorruptObjectError | None = None
        params, tags = {} if run.described else sweep_params(self._plan), self._store_tag()
        try:
            tags |= self._attachments.tags()
        except CorruptObjectError as damage:
            error = damage
        draft = RunDraft(
            name=self._plan.sweep, facts=sweep[0], run_id=run.run_id, params=params, tags=tags, is_bare=is_new
        )
        if not self._write(experiment_id, [draft], {}):
            return False
        run.described = True
        if error is not None:
            self._unreadable[SWEEP_RUN] = error  # only now: how it ended is told, and not told again
            return False
        # Last: a server that takes no files still shows how every job ended.
        self._attachments.publish(run.run_id, self._memory)
        is_registered = self._attachments.register(self._runs, self._memory)
        self._is_searched &= is_registered  # or else the backbone's run was deleted, and it may have another
        return is_registered
