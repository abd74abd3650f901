"""Parts of a job's run other than its state: parameters, tags, data sets, results and metrics.

Parameters, tags and data sets, by which people filter, group and compare runs, follow from the plan alone. Results and
metrics are read from records and metric segments, many jobs at once.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from orchestrator.core.errors import NotFoundError
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.report.inputs import MetricLine, MetricSegment, list_segments, read_segment
from orchestrator.state.snapshot import JobView
from orchestrator.storage.artifacts import Record, read_record
from orchestrator.storage.layout import artifact_folder, checkpoints_folder
from orchestrator.storage.protocol import ObjectStore
from orchestrator.tracking.draft import DatasetUse, MetricPoint, generated_digest, points_of
from orchestrator.tracking.facts import RunIdentity, factors_in
from orchestrator.tracking.memory import RunMemory

_MAX_PARAM_CHARACTERS = 6000
_BACKBONE = "backbone.safetensors"
_SPLIT = "num_train"
_NUM_READERS = 16
"""Objects read at once: on S3 each takes tens of milliseconds, whatever its size."""
_REUSED_TAG = "reused_from"
_SYSTEM_METRICS = frozenset(
    {
        "images_per_s",
        "data_wait",
        "data_wait_ms",
        "cache_hit_rate",
        "store_gib_per_epoch",
        "mfu",
        "gpu_memory_gib",
        "gpu_memory",
        "gpu_utilization",
        "cpu_s",
        "memory_gib",
    }
)
"""Shown on the page `System metrics` of a run: about the machine, not about the result."""
_MEASURED = ("setup_s", "train_s", "work_s", "compile_s")
Given = TypeVar("Given")
Found = TypeVar("Found")


def sweep_params(plan: Plan) -> dict[str, str]:
    """Parameters of the sweep's run. ``transfer`` has it found with the runs of transfers, by the view of levels."""
    transfers = ", ".join(dict.fromkeys(str(job.facets["transfer"]) for job in plan.jobs if "transfer" in job.facets))
    params = {"baseline": plan.baseline, "metric": plan.metric, "store": plan.store_uri}
    params["transfer"] = f"all: {transfers}"[:_MAX_PARAM_CHARACTERS] if transfers else ""
    return {name: value for name, value in params.items() if value}


def job_params(job: Job, granularity: int | None, digest: str = "") -> dict[str, str]:
    """Parameters of a job's run: what people compare by, the recipe's fields, and the key.

    ``granularity`` and the data set's ``digest`` are left out while they are not known.
    """
    parameters = dict(job.identity["parameters"])
    model, recipe = parameters.pop("model", {}), parameters.pop("recipe", {})
    if job.kind is JobKind.THEORY:
        recipe = parameters.pop("parameters")
    found: dict[str, Any] = {**parameters, **recipe, **_model_params(model), **_label_space(job), **job.facets}
    found |= {"key": job.key, "dataset_digest": digest}
    if granularity is not None:
        found["granularity"] = granularity
    return {name: _text(value)[:_MAX_PARAM_CHARACTERS] for name, value in found.items() if value not in (None, "")}


def counts_classes(job: Job) -> bool:
    """Whether a job has a granularity: it makes a label space, or is about a backbone of one."""
    return job.kind is JobKind.LABELS or "label_space" in job.facets


def artifact_tags(job: Job, record: Record, store_uri: str) -> dict[str, str]:
    """Where a job's results lie in the store."""
    folder = f"{store_uri}/{artifact_folder(job.key)}"
    tags = {"artifact": folder}
    if job.kind is JobKind.PRETRAIN:
        tags["checkpoints"] = f"{store_uri}/{checkpoints_folder(job.key)}"
    if _BACKBONE in record.parts:
        tags["backbone"] = f"{folder}/{record.parts[_BACKBONE].path}"
    return tags


def dataset_use(index: Job, record: Record, dataset: Job | None, store_uri: str) -> DatasetUse:
    """The data set behind an index.

    Args:
        index: the job that scanned it.
        record: what that job committed.
        dataset: the job that generated it; None for an external one.
        store_uri: where generated shards are.
    """
    name = str(index.facets.get("dataset") or index.name.partition("/")[2])
    return DatasetUse(
        name=name,
        digest=dataset_digest(record) or generated_digest(dict(index.identity["parameters"])),
        source=_location(index) if dataset is None else f"{store_uri}/{artifact_folder(dataset.key)}",
        num_samples=int(record.metrics[_SPLIT]) if _SPLIT in record.metrics else None,
    )


def dataset_digest(record: Record) -> str:
    """Sha256 over a data set's shards, as its index found them; empty in records that have none."""
    return str(record.summary.get("dataset_digest", ""))


def _location(index: Job) -> str:
    """The first URI of an external data set."""
    location = index.execution.data_location
    splits: Mapping[str, Any] = location.get("splits") or {}
    first = next((uris[0] for uris in splits.values() if uris), "")
    return str(location.get("dataset") or first)


def _label_space(job: Job) -> dict[str, str]:
    """Of a job that makes one: its facets name none."""
    if job.kind is not JobKind.LABELS:
        return {}
    name = job.name.partition("/")[2]
    return {"label_space": name, "level": name.partition("/")[2]}


def _model_params(model: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {"name": "model", "kwargs": "model_kwargs"}
    return {renamed.get(name, name): value for name, value in model.items() if value != {}}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


class RecordCache:
    """Committed records never change: those that many runs refer to are read once per process."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._records: dict[str, Record] = {}

    def get(self, key: str) -> Record | None:
        """The record of a data set's index or a label space, or None while the key is not committed."""
        if key not in self._records:
            record = self.read(key)
            if record is None:
                return None
            self._records[key] = record
        return self._records[key]

    def read(self, key: str) -> Record | None:
        """A record that one run alone is about: thousands of them would not fit into memory."""
        try:
            return read_record(self._store, key)
        except NotFoundError:
            return None


def last_steps(segments: Iterable[MetricSegment]) -> dict[str, int]:
    """Last step that counts, by attempt."""
    return {str(segment.attempt): segment.valid_to_step for segment in segments}  # in order of steps: the last one wins


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContent:
    """What a run is to say about a job."""

    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    points: tuple[MetricPoint, ...] = ()
    datasets: tuple[DatasetUse, ...] = ()
    is_complete: bool = False
    """Whether no parameter is missing because it is not known yet."""
    said: Mapping[str, int] = field(default_factory=dict)
    """How far the run's history goes with these points, as ``RunMemory.said`` has it."""
    analyses: Mapping[str, str] = field(default_factory=dict)
    """Those that the points are of, as ``RunMemory.analyses`` has them."""


def read_all(read: Callable[[Given], Found], things: Sequence[Given]) -> list[Found]:
    """Results in order; several at once, because most of the time goes into waiting for the store."""
    if len(things) < 2:
        return [read(thing) for thing in things]
    with ThreadPoolExecutor(max_workers=_NUM_READERS, thread_name_prefix="read") as threads:
        return list(threads.map(read, things))


def read_ahead(
    read: Callable[[Given], Found], things: Iterable[Given], num_ahead: int
) -> Iterator[tuple[Given, Found]]:
    """Things and what is read of them, in order; while the caller works on one, the ``num_ahead`` next are read."""
    waiting = deque[tuple[Given, Future[Found]]]()
    with ThreadPoolExecutor(max_workers=_NUM_READERS, thread_name_prefix="read") as threads:
        try:
            for thing in things:
                waiting.append((thing, threads.submit(read, thing)))
                if len(waiting) > num_ahead:
                    first, found = waiting.popleft()
                    yield first, found.result()
            while waiting:
                first, found = waiting.popleft()
                yield first, found.result()
        finally:
            for _, found in waiting:
                found.cancel()


def analysed_backbone(job: Job, jobs: Mapping[str, Job]) -> Job | None:
    """The backbone whose features an analysis measures; None for other jobs, and for comparisons of backbones."""
    if job.kind is not JobKind.ANALYZE or any(role.startswith("features") for role in job.identity["inputs"]):
        return None
    embeds = (jobs[need] for need in job.needs if jobs[need].kind is JobKind.EMBED)
    backbones = (jobs[need] for embed in embeds for need in embed.needs)
    return next((backbone for backbone in backbones if backbone.kind is JobKind.PRETRAIN), None)


class ContentReader:
    """Reads what there is to say about the jobs of one plan.

    ``views`` are the states of its jobs: the run of a backbone shows the analyses of it that have ended.
    """

    def __init__(self, store: ObjectStore, plan: Plan, records: RecordCache, views: Mapping[str, JobView]) -> None:
        self._store, self._plan, self._records, self._views = store, plan, records, views
        self._jobs = plan.by_name()
        self._analyses: dict[str, list[Job]] = {}
        for job in plan.jobs:
            if (backbone := analysed_backbone(job, self._jobs)) is not None:
                self._analyses.setdefault(backbone.name, []).append(job)

    def backbones_of(self, runs: Iterable[RunIdentity]) -> set[RunIdentity]:
        """The backbones that some of these jobs analyse: their runs show the analyses, which end long after them."""
        jobs = [job for name, key in runs if (job := self._jobs.get(name)) is not None and job.key == key]
        found = (analysed_backbone(job, self._jobs) for job in jobs)
        return {(backbone.name, backbone.key) for backbone in found if backbone is not None}

    def outdated(self, runs: Iterable[RunMemory]) -> list[RunIdentity]:
        """Those of the plan's backbones that may show what one of its analyses found before it was changed."""
        analyses = [job for some in self._analyses.values() for job in some]
        keys, names = {job.key for job in analyses}, {job.facets["analysis"] for job in analyses}
        mixed = [run for run in runs if any(key not in keys and run.analyses[key] in names for key in run.analyses)]
        return [(run.job, run.key) for run in mixed if run.job in self._jobs and self._jobs[run.job].key == run.key]

    def segments(self, job: Job) -> list[MetricSegment]:
        """The job's metric segments of which anything counts."""
        return list_segments(self._store, job.key)

    def read(
        self, job: Job, view: JobView, *, segments: Sequence[MetricSegment], run: RunMemory | None, is_told: bool
    ) -> JobContent:
        """What is new about a job.

        Args:
            job: of the present plan.
            view: its state.
            segments: its metric segments.
            run: what its run shows already; None if it has none.
            is_told: whether the run has all tags.
        """
        record = self._records.read(job.key) if view.state.is_done else None
        shown = run.shown if run is not None else {}
        points = list(_new_points(self._store, segments, run.said if run is not None else {}))
        is_described = run is not None and run.described
        analyses = self._ended_analyses(job) if view.state.is_done else []
        if view.state.is_done:
            # Segments of a forgotten sweep are collected; its runs keep their curves.
            last = max(shown.values(), default=self._epoch(job))
            points += self._final_points(view, record, segments, last)
            points += self._analysis_points(analyses)
        granularity, datasets = self._granularity(job), self._datasets(job)
        digest = datasets[0].digest if datasets else dataset_digest(record) if record else ""
        params = {} if is_described and is_told else job_params(job, granularity, digest)
        return JobContent(
            params=factors_in(params) if is_described else params,  # a later revision may have more of them
            tags=self._record_tags(job, record),
            points=tuple(points),
            datasets=() if is_described else datasets,
            is_complete=granularity is not None or not counts_classes(job),
            said=last_steps(segments) or shown,
            analyses={analysis.key: str(analysis.facets["analysis"]) for analysis in analyses},
        )

    def _final_points(
        self, view: JobView, record: Record | None, segments: Sequence[MetricSegment], otherwise: int
    ) -> Iterator[MetricPoint]:
        """The committed metrics at the last step, or ``otherwise``, without those that the last line said already."""
        last = read_segment(self._store, segments[-1])[-1:] if segments else []
        step = last[0].step if last else otherwise
        said = dict(last[0].metrics) if last else {}
        metrics, at_s = _final_metrics(view, record)
        unsaid = {name for name, value in metrics.items() if said.get(name) != value}
        yield from points_of(metrics, step=step, at_s=at_s, only=unsaid)

    def _ended_analyses(self, backbone: Job) -> list[Job]:
        return [job for job in self._analyses.get(backbone.name, ()) if self._views[job.name].state.is_done]

    def _analysis_points(self, ended: Sequence[Job]) -> Iterator[MetricPoint]:
        """Metrics of the analyses of a backbone that have ended: curves over epochs, as ``structure/nc1``."""
        for job, record in zip(ended, read_all(self._records.read, [job.key for job in ended]), strict=True):
            metrics, at_s = _final_metrics(self._views[job.name], record)
            shown = {f"{job.facets['analysis']}/{name}": value for name, value in metrics.items()}
            yield from points_of(shown, step=self._epoch(job), at_s=at_s)

    def _epoch(self, job: Job) -> int:
        """Of the checkpoint that an analysis is about; 0 for other jobs."""
        if checkpoint := str(job.facets.get("checkpoint", "")) if job.kind is JobKind.ANALYZE else "":
            return int(checkpoint.removeprefix("epoch"))
        backbone = analysed_backbone(job, self._jobs)
        return 0 if backbone is None else round(backbone.identity["parameters"]["recipe"]["epochs"])

    def _record_tags(self, job: Job, record: Record | None) -> dict[str, str]:
        if record is None:
            return {}
        reused = {} if record.sweep == self._plan.sweep else {_REUSED_TAG: f"{record.sweep}/{record.job}"}
        return {**artifact_tags(job, record, self._store.uri), **reused}

    def _granularity(self, job: Job) -> int | None:
        """Number of classes of the label space that a job makes or was pretrained on, once it is known."""
        if "granularity" in job.facets:
            return int(job.facets["granularity"])
        labels = job if job.kind is JobKind.LABELS else self._jobs.get(f"labels/{job.facets.get('label_space')}")
        record = None if labels is None else self._records.get(labels.key)
        return int(record.metrics["num_classes"]) if record and "num_classes" in record.metrics else None

    def _datasets(self, job: Job) -> tuple[DatasetUse, ...]:
        """The data sets whose indexes a job reads."""
        needs = [self._jobs[need] for need in job.needs]
        return tuple(use for index in needs if index.kind is JobKind.INDEX for use in self._of_index(index))

    def _of_index(self, index: Job) -> Iterator[DatasetUse]:
        record = self._records.get(index.key)
        if record is not None:
            generated = next((need for need in index.needs if self._jobs[need].kind is JobKind.DATASET), None)
            yield dataset_use(index, record, self._jobs[generated] if generated else None, self._store.uri)


def _new_points(
    store: ObjectStore, segments: Iterable[MetricSegment], said: Mapping[str, int]
) -> Iterator[MetricPoint]:
    for segment in segments:
        done = said.get(str(segment.attempt), segment.from_step)
        if done < segment.valid_to_step:
            for line in read_segment(store, segment):
                if line.step > done:
                    yield from _points(line)


def _points(line: MetricLine) -> Iterator[MetricPoint]:
    metrics = {**line.metrics, "epoch": line.epoch}.items()
    shown = {f"system/{name}" if name in _SYSTEM_METRICS else name: value for name, value in metrics}
    return points_of(shown, step=line.step, at_s=line.at_s)


def _final_metrics(view: JobView, record: Record | None) -> tuple[Mapping[str, float], float]:
    """With the time; those of the journal where the artifact is no longer there."""
    return (view.metrics, view.ended_at_s or 0.0) if record is None else _of_record(record)


def _of_record(record: Record) -> tuple[dict[str, float], float]:
    measured = record.summary.get("measured") or {}
    seconds = {f"system/{name}": float(measured[name]) for name in _MEASURED if measured.get(name)}
    return {**record.metrics, **seconds}, record.created_at_s
