"""One pass of the publisher over one sweep: bring the tracking server from what it shows to what is true."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from orchestrator.contract import JobKind
from orchestrator.errors import NotFoundError, PreconditionFailedError
from orchestrator.plan.graph import Job, Plan
from orchestrator.report.history import MetricLine, Segment, list_segments, read_segment
from orchestrator.report.report import build_report, render_files, save_files
from orchestrator.state.snapshot import JobView
from orchestrator.storage.artifacts import Record, read_record
from orchestrator.storage.protocol import ObjectStore
from orchestrator.tracking.errors import RunGoneError
from orchestrator.tracking.facts import (
    SWEEP_JOB,
    RunFacts,
    RunStatus,
    dropped_facts,
    job_facts,
    job_params,
    sweep_facts,
    sweep_params,
)
from orchestrator.tracking.memory import Memory, MemoryFile, RunMemory
from orchestrator.tracking.server import MetricPoint, TrackingServer
from orchestrator.tracking.timeline import RunIdentity, Timeline

_SWEEP_RUN: RunIdentity = (SWEEP_JOB, "")
_PARENT_TAG = "mlflow.parentRunId"
_REUSED_TAG = "reused_from"


class RecordCache:
    """Committed records never change, so each is read once per process."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._records: dict[str, Record] = {}

    def get(self, key: str) -> Record | None:
        """The record, or None while the key is not committed."""
        if key not in self._records:
            try:
                self._records[key] = read_record(self._store, key)
            except NotFoundError:
                return None
        return self._records[key]


class Publication:
    """Use once. ``run`` may stop anywhere: a later pass goes on from what is in the store and on the server."""

    def __init__(
        self,
        *,
        store: ObjectStore,
        server: TrackingServer,
        records: RecordCache,
        timeline: Timeline,
        plan: Plan,
        file: MemoryFile,
    ) -> None:
        self._store, self._server, self._records, self._file = store, server, records, file
        self._timeline, self._plan = timeline, plan
        self._jobs = plan.by_name()
        self._memory = Memory()
        self._runs: dict[RunIdentity, RunMemory] = {}
        self._segments: dict[RunIdentity, list[Segment]] = {}

    def run(self) -> bool:
        """Publish; True if everything known at this moment is published.

        Raises:
            TrackingError: the server cannot be reached; what it did accept is remembered.
            PreconditionFailedError: another publisher is at work on this sweep and server.
        """
        self._recall()
        facts = [*self._all_facts(), *self._dropped()]
        changed = [run for run in facts if self._has_news(run)]
        if not changed:
            return True
        self._discard_superseded(changed)
        created = self._ensure_runs(changed)
        try:
            # The memory knows of discarded runs before they are deleted: a crash must not let them be adopted again.
            self._save()
        except PreconditionFailedError:
            self._withdraw(created)
            raise
        for run_id in self._memory.discarded:
            self._server.delete_run(run_id)
        try:
            return self._publish_all(changed)
        finally:
            # Whatever the server accepted before it failed is remembered.
            self._save()

    # --------------------------------------------------------------------------------------------------------- memory
    def _recall(self) -> None:
        """Load the memory; forget it where the server does not have the sweep's run (any more)."""
        self._memory = self._file.load()
        self._runs = self._memory.by_identity()
        sweep_run = self._runs.get(_SWEEP_RUN)
        if sweep_run is not None and not self._server.is_active(sweep_run.run_id):
            self._runs, self._memory.attached = {}, {}

    def _save(self) -> None:
        self._memory.runs = list(self._runs.values())
        self._file.save(self._memory)

    # ---------------------------------------------------------------------------------------------------------- facts
    def _all_facts(self) -> list[RunFacts]:
        views = self._timeline.snapshot.jobs.values()
        jobs = [job_facts(self._timeline, view, self._jobs[view.name].kind) for view in views]
        return [sweep_facts(self._timeline), *(facts for facts in jobs if facts is not None)]

    def _dropped(self) -> list[RunFacts]:
        """Runs without an end whose jobs the plan no longer has."""
        snapshot = self._timeline.snapshot
        current = {(view.name, view.key) for view in snapshot.jobs.values()} | {_SWEEP_RUN}
        return [
            dropped_facts(snapshot.sweep, identity, snapshot.accepted_at_s)
            for identity, run in self._runs.items()
            if identity not in current and not (run.status and run.status.is_final)
        ]

    def _has_news(self, facts: RunFacts) -> bool:
        run = self._runs.get(facts.identity)
        if run is None or run.fingerprint != facts.fingerprint:
            return True
        if facts.status.is_final or facts.identity == _SWEEP_RUN:
            return False  # all segments were there before the end was on record: nothing to look for
        return {segment.name: segment.valid_to_step for segment in self._list_segments(facts)} != run.segments

    def _list_segments(self, facts: RunFacts) -> list[Segment]:
        if facts.identity == _SWEEP_RUN:
            return []
        if facts.identity not in self._segments:
            self._segments[facts.identity] = list_segments(self._store, facts.key)
        return self._segments[facts.identity]

    # ----------------------------------------------------------------------------------------------------------- runs
    def _discard_superseded(self, changed: list[RunFacts]) -> None:
        """Forget runs that show steps which a later attempt repeated: MLflow cannot take a metric back."""
        for facts in changed:
            run = self._runs.get(facts.identity)
            valid = {segment.name: segment.valid_to_step for segment in self._list_segments(facts)}
            if run is not None and any(step > valid.get(name, 0) for name, step in run.segments.items()):
                self._memory.discarded.append(self._runs.pop(facts.identity).run_id)

    def _ensure_runs(self, changed: list[RunFacts]) -> list[str]:
        """Give every changed sweep or job its run, the sweep first: it is the parent of the others.

        Returns the ids of runs made for this.
        """
        missing = [facts for facts in changed if facts.identity not in self._runs]
        if not missing:
            return []
        experiment = self._server.ensure_experiment(self._plan.experiment or self._plan.sweep)
        # A crash between making a run and saving the memory leaves runs that only their tags remember.
        found: dict[RunIdentity, str] = {}
        for job, key, run_id in self._server.find_runs(experiment, self._plan.sweep):
            if run_id not in self._memory.discarded:
                found.setdefault((job, key), run_id)
        for facts in missing:
            run_id = found.get(facts.identity) or self._create_run(experiment, facts)
            self._runs[facts.identity] = RunMemory(job=facts.job, key=facts.key, run_id=run_id)
        return [self._runs[facts.identity].run_id for facts in missing if facts.identity not in found]

    def _withdraw(self, created: list[str]) -> None:
        """Delete the runs that this pass made and that the publisher which was faster did not take over."""
        taken = {run.run_id for run in self._file.load().runs}
        for run_id in created:
            if run_id not in taken:
                self._server.delete_run(run_id)

    def _create_run(self, experiment: str, facts: RunFacts) -> str:
        name = self._plan.sweep if facts.identity == _SWEEP_RUN else facts.job
        return self._server.create_run(experiment, facts, name, self._parent_tag(facts))

    def _parent_tag(self, facts: RunFacts) -> dict[str, str]:
        return {} if facts.identity == _SWEEP_RUN else {_PARENT_TAG: self._runs[_SWEEP_RUN].run_id}

    # -------------------------------------------------------------------------------------------------------- content
    def _publish_all(self, changed: list[RunFacts]) -> bool:
        gone = [facts for facts in changed if _SWEEP_RUN in self._runs and not self._publish(facts)]
        return not gone

    def _publish(self, facts: RunFacts) -> bool:
        """Publish one run; False if it was deleted meanwhile, so that the next pass makes it anew."""
        run = self._runs[facts.identity]
        try:
            if facts.identity == _SWEEP_RUN:
                self._publish_sweep(run, facts)
            else:
                self._publish_job(run, facts)
            if run.status is not facts.status or facts.status.is_final:
                self._server.set_status(run.run_id, facts)
        except RunGoneError:
            del self._runs[facts.identity]
            return False
        # Remembered last: a crash before this line repeats calls that change nothing the second time.
        run.status, run.fingerprint = facts.status, facts.fingerprint
        return True

    def _publish_sweep(self, run: RunMemory, facts: RunFacts) -> None:
        params = {} if run.described else sweep_params(self._timeline.snapshot)
        self._server.log(run.run_id, points=[], params=params, tags=facts.tags)
        run.described = True
        if facts.status.is_final:
            self._attach_report(run)

    def _attach_report(self, run: RunMemory) -> None:
        """Compute, save and attach the report, unless the run has this very one."""
        files = render_files(build_report(self._store, self._plan))
        digests = {name: sha256(content).hexdigest() for name, content in files.items()}
        if digests == self._memory.attached:
            return
        save_files(self._store, self._plan.sweep, files)
        with tempfile.TemporaryDirectory(prefix="orchestrator-report-") as folder:
            for name, content in files.items():
                Path(folder, name).write_bytes(content)
            self._server.attach(run.run_id, Path(folder))
        self._memory.attached = digests

    def _publish_job(self, run: RunMemory, facts: RunFacts) -> None:
        job = self._jobs.get(facts.job)
        if job is None or job.key != facts.key:
            self._server.log(run.run_id, points=[], params={}, tags=facts.tags)
            return
        segments = self._list_segments(facts)
        lines = {segment.name: self._unpublished(run, segment) for segment in segments}
        points = [point for some in lines.values() for line in some for point in _points(line)]
        tags = {**facts.tags, **self._parent_tag(facts)}
        if facts.status is RunStatus.FINISHED:
            points += self._final_points(job, segments)
            tags |= self._reused_tag(job)
        granularity = self._granularity(job)
        params = {} if run.described else job_params(job, granularity)
        self._server.log(run.run_id, points=points, params=params, tags=tags)
        run.segments = {segment.name: segment.valid_to_step for segment in segments}
        run.described = granularity is not None or not _counts_classes(job)

    def _unpublished(self, run: RunMemory, segment: Segment) -> list[MetricLine]:
        done = run.segments.get(segment.name, segment.from_step)
        if done >= segment.valid_to_step:
            return []
        return [line for line in read_segment(self._store, segment) if line.step > done]

    def _final_points(self, job: Job, segments: list[Segment]) -> list[MetricPoint]:
        """The committed metrics at the last step, without those that the last line said already."""
        view = self._timeline.snapshot.jobs[job.name]
        record = self._records.get(job.key)
        metrics, at_s = _event_metrics(view) if record is None else (record.metrics, record.created_at_s)
        last = read_segment(self._store, segments[-1])[-1:] if segments else []
        step = last[0].step if last else 0
        said = dict(last[0].metrics) if last else {}
        return [
            MetricPoint(name=name, value=value, step=step, at_s=at_s)
            for name, value in metrics.items()
            if math.isfinite(value) and said.get(name) != value
        ]

    def _reused_tag(self, job: Job) -> dict[str, str]:
        record = self._records.get(job.key)
        if record is None or record.sweep == self._plan.sweep:
            return {}
        return {_REUSED_TAG: f"{record.sweep}/{record.job}"}

    def _granularity(self, job: Job) -> int | None:
        """Number of classes of the label space that a job makes or was pretrained on, once it is known."""
        if "granularity" in job.facets:
            return int(job.facets["granularity"])
        labels = job if job.kind is JobKind.LABELS else self._jobs.get(f"labels/{job.facets.get('label_space')}")
        record = None if labels is None else self._records.get(labels.key)
        return int(record.metrics["num_classes"]) if record and "num_classes" in record.metrics else None


def _counts_classes(job: Job) -> bool:
    return job.kind is JobKind.LABELS or "label_space" in job.facets


def _points(line: MetricLine) -> list[MetricPoint]:
    metrics = {**line.metrics, "epoch": line.epoch}
    return [
        MetricPoint(name=name, value=value, step=line.step, at_s=line.at_s)
        for name, value in metrics.items()
        if math.isfinite(value)
    ]


def _event_metrics(view: JobView) -> tuple[Mapping[str, float], float]:
    """What the journal says of an artifact that is no longer there."""
    return view.metrics, view.ended_at_s or 0.0
