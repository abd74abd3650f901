"""One pass of the publisher over one sweep: bring the tracking server from what it shows to what is true."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.core.errors import PreconditionFailedError
from orchestrator.planning.graph.plan import Plan
from orchestrator.report.inputs import Segment
from orchestrator.storage.protocol import ObjectStore
from orchestrator.tracking.attachments import Attachments
from orchestrator.tracking.content import ContentReader, JobContent, RecordCache, last_steps, read_all
from orchestrator.tracking.draft import Experiment, RunDraft
from orchestrator.tracking.facts import SWEEP_RUN, RunFacts, RunStatus
from orchestrator.tracking.facts_cache import FactsCache
from orchestrator.tracking.memory import Memory, MemoryFile, RunMemory
from orchestrator.tracking.params import sweep_params
from orchestrator.tracking.server import TrackingServer
from orchestrator.tracking.timeline import RunIdentity, Timeline
from orchestrator.tracking.trial_runs import TrialRun, changed_trials
from orchestrator.tracking.views import shared_view

_BATCH = 500
"""Runs per transaction: larger ones are hardly faster, and keep other writers waiting."""
_SAVE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a sweep's truth is read from; lives as long as its publisher."""

    store: ObjectStore
    records: RecordCache
    facts: FactsCache
    file: MemoryFile


class Publication:
    """Use once. ``run`` may stop anywhere: a later pass goes on from what is in the store and on the server."""

    def __init__(self, source: Source, server: TrackingServer, timeline: Timeline, plan: Plan) -> None:
        self._source, self._server, self._timeline, self._plan = source, server, timeline, plan
        self._jobs = plan.by_name()
        self._reader = ContentReader(source.store, plan, source.records)
        self._attachments = Attachments(source.store, server, timeline, plan)
        self._memory = Memory()
        self._runs: dict[RunIdentity, RunMemory] = {}
        self._segments: dict[RunIdentity, list[Segment]] = {}
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
        return [run for run in facts if self._has_news(run)]

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

    def _list_segments(self, facts: RunFacts) -> list[Segment]:
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
        if waiting := self._memory.condemned:
            # Remembered before they are deleted: a crash in between must not let them be adopted again.
            self._save()
            self._server.delete_runs(waiting)
            self._memory.num_deleted = len(self._memory.discarded)

    # -------------------------------------------------------------------------------------------------------- publish
    def _publish(self, changed: list[RunFacts], trials: list[TrialRun]) -> bool:
        experiment = self._server.ensure_experiment(self._plan.experiment or self._plan.sweep)
        is_new_plan = self._memory.submission != self._timeline.submission
        if self._memory.experiment_id != experiment.experiment_id or is_new_plan:
            self._server.tag_experiment(experiment, shared_view(self._plan))
            self._memory.experiment_id = experiment.experiment_id
        found_more = self._adopt(experiment, [*changed, *(trial.facts for trial in trials)])
        sweep = [facts for facts in changed if facts.identity == SWEEP_RUN]
        if SWEEP_RUN not in self._runs:  # first: it is the parent of the others
            self._write(experiment, [self._unfinished(sweep[0])], {})
            self._save()
        jobs = [facts for facts in changed if facts.identity != SWEEP_RUN]
        batches = [jobs[start : start + _BATCH] for start in range(0, len(jobs), _BATCH)]
        # Last, the sweep: its end says that all is there. Stops at nothing but errors.
        is_all_there = all(
            [
                *(self._publish_jobs(experiment, batch) for batch in batches),
                self._publish_trials(experiment, trials),
                self._publish_sweep(experiment, sweep),
            ]
        )
        return is_all_there and not found_more

    def _adopt(self, experiment: Experiment, changed: list[RunFacts]) -> bool:
        """Find runs that a crash, between making them and saving the memory, left to their tags alone.

        True if there are others as well, of earlier revisions: the next pass says so of them.
        """
        missing = {facts.identity for facts in changed} - self._runs.keys()
        if not missing:
            return False
        found = self._server.find_runs(experiment, self._plan.sweep)
        discarded = set(self._memory.discarded)
        unknown = [run for run in found if run[:2] not in self._runs and run[2] not in discarded]
        for job, key, run_id in unknown:
            self._runs.setdefault((job, key), RunMemory(job=job, key=key, run_id=run_id))
        return any(run[:2] not in missing for run in unknown)

    def _write(
        self, experiment: Experiment, drafts: Sequence[RunDraft], contents: Mapping[RunIdentity, JobContent]
    ) -> bool:
        """Write runs and remember them; False if one was deleted meanwhile, so that the next pass makes it anew."""
        all_there = True
        # Remembered one by one as the server confirms them: after an error, those before it are not told again.
        for draft, run_id in self._server.write(experiment, drafts):
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
            if facts.identity in contents:
                run.described = contents[facts.identity].is_complete
                run.said = last_steps(self._list_segments(facts))
        return all_there

    # ----------------------------------------------------------------------------------------------------------- jobs
    def _publish_jobs(self, experiment: Experiment, some: Sequence[RunFacts]) -> bool:
        found = dict(zip([facts.identity for facts in some], read_all(self._content, some), strict=True))
        contents = {identity: content for identity, content in found.items() if content is not None}
        drafts = [self._job_draft(facts, contents.get(facts.identity)) for facts in some]
        all_there = self._write(experiment, drafts, contents)
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

    def _job_draft(self, facts: RunFacts, content: JobContent | None) -> RunDraft:
        run, given = self._runs.get(facts.identity), content or JobContent()
        return RunDraft(
            name=facts.job,
            facts=facts,
            run_id="" if run is None else run.run_id,
            # An earlier revision's is there; that of a trial is a job's.
            parent_run_id="" if facts.is_superseded else self._runs[SWEEP_RUN].run_id,
            params=given.params,
            tags=given.tags,
            points=given.points,
            datasets=given.datasets,
        )

    def _publish_trials(self, experiment: Experiment, trials: Sequence[TrialRun]) -> bool:
        there = [(trial, self._runs.get((trial.job.name, trial.job.key))) for trial in trials]
        drafts = [trial.draft(self._runs.get(trial.facts.identity), parent) for trial, parent in there if parent]
        return self._write(experiment, drafts, {}) and len(drafts) == len(trials)

    # ---------------------------------------------------------------------------------------------------------- sweep
    def _unfinished(self, facts: RunFacts) -> RunDraft:
        """The sweep's run as it is made: whatever became of the sweep, its jobs are not there yet."""
        return RunDraft(name=self._plan.sweep, facts=replace(facts, status=RunStatus.RUNNING, end_s=None))

    def _publish_sweep(self, experiment: Experiment, sweep: Sequence[RunFacts]) -> bool:
        if not sweep or SWEEP_RUN not in self._runs:
            return not sweep
        run = self._runs[SWEEP_RUN]
        params = {} if run.described else sweep_params(self._plan)
        tags = self._attachments.tags()
        draft = RunDraft(name=self._plan.sweep, facts=sweep[0], run_id=run.run_id, params=params, tags=tags)
        if not self._write(experiment, [draft], {}):
            return False
        run.described = True
        # Last: a server that takes no files still shows how every job ended.
        self._attachments.publish(run.run_id, self._memory)
        self._attachments.register(self._runs, self._memory)
        return True
