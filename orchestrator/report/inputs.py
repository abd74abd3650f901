"""What a report is computed from: committed results, metric histories and learning curves.

Attempts write immutable segments ``metrics/<key>/<attempt>/<from>-<to>.jsonl``. An attempt that resumes from step s
repeats the steps after s, so its segments supersede what earlier attempts wrote about them. Which lines of a job's
history count follows from the names alone, so a reader never opens a segment that it has read before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from io import BytesIO
from operator import itemgetter
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from orchestrator.core.errors import CorruptObjectError, NotFoundError
from orchestrator.core.job_kinds import RESULT_KINDS, TIMED_KINDS, JobKind
from orchestrator.planning.estimate.history import all_attempts_s
from orchestrator.planning.graph.plan import Job
from orchestrator.report.statistics.intervals import is_fraction
from orchestrator.storage.artifacts import Record, read_part, read_record
from orchestrator.storage.bounds import METRICS_BYTES
from orchestrator.storage.layout import metrics_folder
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.sample_outcomes import SUMMARY_FIELD
from orchestrator.storage.seals import check_seal

_SUFFIX = ".jsonl"
_NUM_READERS = 32
"""Requests in flight to a server: each waits some 20 ms for its answer."""
_NUM_READERS_OF_FILES = 4
"""There is hardly any wait, and many threads cost a third more processor time: they contend for Python's lock."""
_MOST_AT_ONCE = 16
T = TypeVar("T")
U = TypeVar("U")
_MAX_NUMBERS = 400_000
"""Values over all curves: about 4 MB of JSON, as much as plotly itself."""
_MIN_POINTS, _MAX_POINTS = 8, 200
_MEASURES_PART = "measures.json"
"""Of analyses; see ``docs/analyze.md``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricLine:
    """Metrics of one step, measured at ``at_s`` (unix seconds); ``epoch`` is fractional."""

    step: int
    epoch: float
    at_s: float
    metrics: Mapping[str, float]

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """One line of a segment."""
        return cls(
            step=int(document["step"]),
            epoch=float(document["epoch"]),
            at_s=float(document["at_s"]),
            metrics={name: float(value) for name, value in document["metrics"].items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSegment:
    """One segment and how much of it counts: the steps ``from_step < step <= valid_to_step``."""

    name: str
    attempt: int
    from_step: int
    valid_to_step: int


def list_segments(store: ObjectStore, key: str) -> list[MetricSegment]:
    """Segments of a key of which anything counts, in order of steps."""
    folder = metrics_folder(key)
    names = [stat.name for stat in store.list_objects(folder) if stat.name.endswith(_SUFFIX)]
    return supersede([_parse(name, folder) for name in names])


def supersede(segments: Sequence[MetricSegment]) -> list[MetricSegment]:
    """Cut every segment at the first step that a later attempt starts from; drop those without any step left."""
    starts: dict[int, int] = {}
    for segment in segments:
        starts[segment.attempt] = min(segment.from_step, starts.get(segment.attempt, segment.from_step))
    cut = []
    for segment in segments:
        later = [start for attempt, start in starts.items() if attempt > segment.attempt]
        valid_to_step = min([segment.valid_to_step, *later])
        # An attempt without a step (only its evaluation at the start) has from_step == to_step and counts for nothing.
        if valid_to_step > segment.from_step:
            cut.append(replace(segment, valid_to_step=valid_to_step))
    return sorted(cut, key=lambda segment: (segment.from_step, segment.attempt))


def read_segment(store: ObjectStore, segment: MetricSegment) -> list[MetricLine]:
    """The lines of a segment that count, in order of steps.

    Raises:
        CorruptObjectError: a line is not what the layout promises.
    """
    with _telling_which(segment):
        lines = [MetricLine.from_json(document) for document in _documents(store, segment)]
    counted = [line for line in lines if segment.from_step < line.step <= segment.valid_to_step]
    return sorted(counted, key=lambda line: line.step)


def read_metric_history(store: ObjectStore, key: str) -> list[MetricLine]:
    """All lines of a job that count, in order of steps; empty if it reported none (yet)."""
    return [line for segment in list_segments(store, key) for line in read_segment(store, segment)]


def read_epochs_and_metrics(store: ObjectStore, key: str) -> list[tuple[float, Mapping[str, float]]]:
    """Of each line of ``read_metric_history``: without an object per line, for who reads those of thousands of jobs.

    Raises:
        CorruptObjectError: see ``read_segment``.
    """
    found = []
    for segment in list_segments(store, key):
        with _telling_which(segment):
            lines = [(int(line["step"]), float(line["epoch"]), line["metrics"]) for line in _documents(store, segment)]
            if not all(isinstance(metrics, dict) for _, _, metrics in lines):
                raise TypeError("metrics of a line are not a mapping")
        counted = [line for line in lines if segment.from_step < line[0] <= segment.valid_to_step]
        found += [(epoch, metrics) for _, epoch, metrics in sorted(counted, key=itemgetter(0))]
    return found


def _documents(store: ObjectStore, segment: MetricSegment) -> list[dict[str, Any]]:
    # One list and not line by line, and not by json.loads: a sixth of the time, which counts where a page shows
    # thousands of runs. All that it refuses is a ValueError here too, nesting of more than 200 levels included.
    content = store.get(segment.name, max_bytes=METRICS_BYTES)
    check_seal(segment.name, content)
    documents: list[dict[str, Any]] = from_json(b"[" + b",".join(content.splitlines()) + b"]")
    return documents


@contextmanager
def _telling_which(segment: MetricSegment) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = (
            f"metric segment {segment.name} cannot be read ({error!r}): was it altered? Delete it to go on without"
        )
        raise CorruptObjectError(message) from error


def _parse(name: str, folder: str) -> MetricSegment:
    try:
        attempt, steps = name.removeprefix(folder).removesuffix(_SUFFIX).split("/")
        from_step, to_step = steps.split("-")
        return MetricSegment(name=name, attempt=int(attempt), from_step=int(from_step), valid_to_step=int(to_step))
    except ValueError as error:
        message = f"{name} is not named <attempt>/<from>-<to>.jsonl as metric segments are; remove it from the store"
        raise CorruptObjectError(message) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a report needs of a record; thousands of these fit where whole records would not."""

    metrics: Mapping[str, float]
    measured_s: float | None = None
    """Seconds that it took, as far as its record says so; of a resumed result all of it, at its last speed."""
    images_per_s: float | None = None
    """Trained on per second by all ranks, of a training run."""
    has_changed_numerics: bool = False
    """Whether it was resumed on other hardware or libraries, which ends the promise of the same bits."""
    num_rewinds: int = 0
    """How often it went back after a NaN, an infinity or a spike, and left out the batches that led there."""
    num_bad_samples: int = 0
    """Samples that it could not decode, and replaced in training or left out of validation."""
    is_uncompiled: bool = False
    """Whether it ran without ``torch.compile`` although it was asked for."""
    num_val: int | None = None
    """Validation samples that its error is a share of; None in records that do not say."""
    search: Mapping[str, Any] = field(default_factory=dict)
    """What a search found; empty for other jobs."""
    runs: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Of a block of a simulation: columns by name, a row per seed; empty for other jobs."""
    pictures: Mapping[str, Any] = field(default_factory=dict)
    """What the figures of an analysis are drawn from; empty for other jobs."""

    @classmethod
    def of(
        cls,
        record: Record,
        *,
        runs: Mapping[str, NDArray[np.float64]] | None = None,
        pictures: Mapping[str, Any] | None = None,
    ) -> Committed:
        """The part of a record that reports need."""
        return cls(
            runs=runs or {},
            pictures=pictures or {},
            metrics=record.metrics,
            measured_s=all_attempts_s(record.identity, record.metrics, record.summary),
            images_per_s=(record.summary.get("measured") or {}).get("images_per_s"),
            has_changed_numerics=bool(record.summary.get("fingerprint_changes")),
            num_rewinds=len(record.summary.get("rewinds") or ()),
            num_bad_samples=_num_bad(record.summary.get("bad_samples")),
            is_uncompiled=any("torch.compile failed" in str(one) for one in record.summary.get("notes") or ()),
            num_val=record.summary.get(SUMMARY_FIELD, {}).get("num_counted"),
            search=record.summary.get("search", {}),
        )


def read_committed(store: ObjectStore, jobs: Iterable[Job]) -> dict[str, Committed]:
    """What is committed of some jobs at this moment, by job name; jobs that share a key share the reading."""
    wanted = [job for job in jobs if job.kind in TIMED_KINDS]
    keys = list(dict.fromkeys(job.key for job in wanted))
    found = dict(zip(keys, map_in_threads(store, lambda key: _read(store, key), keys), strict=True))
    return {job.name: committed for job in wanted if (committed := found[job.key]) is not None}


def map_in_threads(store: ObjectStore, function: Callable[[T], U], items: Sequence[T]) -> list[U]:
    """``function``, which reads from the store, of each item, in order.

    Items are handed out by the dozen, as handing over costs as much as a file.
    """
    num_readers = _NUM_READERS_OF_FILES if store.uri.startswith("file:") else _NUM_READERS
    size = max(1, min(_MOST_AT_ONCE, len(items) // num_readers))
    portions = [items[start : start + size] for start in range(0, len(items), size)]
    with ThreadPoolExecutor(num_readers, thread_name_prefix="report") as pool:
        found = pool.map(lambda portion: [function(item) for item in portion], portions)
        return [result for results in found for result in results]


def _read(store: ObjectStore, key: str) -> Committed | None:
    try:
        record = read_record(store, key)
    except NotFoundError:
        return None  # not committed (yet): the report says so
    if record.identity.get("kind") == JobKind.THEORY:
        return Committed.of(record, runs=_read_runs(store, record))
    if not record.summary.get("pictures") or _MEASURES_PART not in record.parts:
        return Committed.of(record)
    return Committed.of(record, pictures=json.loads(read_part(store, record, _MEASURES_PART))["pictures"])


def _read_runs(store: ObjectStore, record: Record) -> dict[str, NDArray[np.float64]]:
    """Columns of a block of a simulation; NaN where a seed has no such metric."""
    import pyarrow.parquet as pq  # type: ignore[import-untyped]  # 0.2 s to import: only who reports on simulations

    table = pq.read_table(BytesIO(read_part(store, record, "runs.parquet")))
    return {name: table.column(name).to_numpy().astype(np.float64) for name in table.column_names}


def _num_bad(by_split: object) -> int:
    """From ``{split: {reason: {"count": n, ...}}}`` of a record."""
    splits = by_split.values() if isinstance(by_split, Mapping) else ()
    return sum(int(found["count"]) for reasons in splits for found in reasons.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One metric of one run; ``epochs`` are fractional and ascending, ``values`` rates as fractions."""

    epochs: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Curves by job and metric."""

    curves: Mapping[str, Mapping[str, Curve]]
    unreadable: tuple[str, ...] = ()
    """Jobs whose segments cannot be read."""


def read_learning(store: ObjectStore, jobs: Iterable[Job]) -> Learning:
    """Errors and losses over the epochs of every training run that reported any, running ones included."""
    trained = [job for job in jobs if job.kind in RESULT_KINDS]
    # Curves at once and not lines: of thousands of runs only the numbers are kept, not an object per step.
    read = map_in_threads(store, lambda job: _read_curves(store, job.key), trained)
    curves = {job.name: some for job, some in zip(trained, read, strict=True) if some}
    unreadable = tuple(job.name for job, some in zip(trained, read, strict=True) if some is None)
    return Learning(curves=_thinned(curves), unreadable=unreadable)


def thin(curve: Curve, num_points: int) -> Curve:
    """At most so many of the curve's own points, evenly spread, the last one always among them."""
    if len(curve.epochs) <= num_points:
        return curve
    kept = _kept(len(curve.epochs), num_points)
    return Curve(epochs=tuple([curve.epochs[i] for i in kept]), values=tuple([curve.values[i] for i in kept]))


@lru_cache(maxsize=1024)
def _kept(count: int, num_points: int) -> tuple[int, ...]:
    """Which of ``count`` points stay: almost all curves of a sweep have as many."""
    step = (count - 1) / max(1, num_points - 1)
    return tuple(sorted({round(index * step) for index in range(num_points)} | {count - 1})[-num_points:])


def _read_curves(store: ObjectStore, key: str) -> dict[str, Curve] | None:
    try:
        curves = _curves(read_epochs_and_metrics(store, key))
        for curve in curves.values():
            sum(curve.values)  # the quickest look for what is no number
        return curves
    except (CorruptObjectError, TypeError):
        return None  # the page is about the others; it names this one


def _curves(lines: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, Curve]:
    names = [name for name in _names(lines) if is_fraction(name) or "loss" in name]
    everywhere = tuple([epoch for epoch, _ in lines])
    curves = {}
    for name in names:
        points = [(epoch, metrics[name]) for epoch, metrics in lines if name in metrics]
        epochs = everywhere if len(points) == len(lines) else tuple([epoch for epoch, _ in points])
        curves[name] = Curve(epochs=epochs, values=tuple([value for _, value in points]))
    return curves


def _names(lines: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, None]:
    names: dict[str, None] = {}
    for _, metrics in lines:
        names.update(dict.fromkeys(metrics))
    return names


def _thinned(curves: Mapping[str, Mapping[str, Curve]]) -> dict[str, dict[str, Curve]]:
    """All curves with the same limit, so that together they stay within the page's budget."""
    count = sum(len(some) for some in curves.values())
    limit = max(_MIN_POINTS, min(_MAX_POINTS, _MAX_NUMBERS // (2 * max(1, count))))
    return {job: {name: thin(curve, limit) for name, curve in some.items()} for job, some in curves.items()}
