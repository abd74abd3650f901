"""A job's metric history out of its segments.

Attempts write immutable segments ``metrics/<key>/<attempt>/<from>-<to>.jsonl``. An attempt that resumes from step s
repeats the steps after s, so its segments supersede what earlier attempts wrote about them. Which lines count follows
from the names alone, so a reader never opens a segment that it has read before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Self

from pydantic_core import from_json

from orchestrator.core.errors import CorruptObjectError
from orchestrator.storage.bounds import METRICS_BYTES
from orchestrator.storage.layout import metrics_folder
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import check_seal

_SUFFIX = ".jsonl"


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
            metrics=dict(document["metrics"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One segment and how much of it counts: the steps ``from_step < step <= valid_to_step``."""

    name: str
    attempt: int
    from_step: int
    valid_to_step: int


def list_segments(store: ObjectStore, key: str) -> list[Segment]:
    """Segments of a key of which anything counts, in order of steps."""
    folder = metrics_folder(key)
    names = [stat.name for stat in store.list_objects(folder) if stat.name.endswith(_SUFFIX)]
    return supersede([_parse(name, folder) for name in names])


def supersede(segments: Sequence[Segment]) -> list[Segment]:
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


def read_segment(store: ObjectStore, segment: Segment) -> list[MetricLine]:
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
                raise TypeError("metrics of a line are no mapping")
        counted = [line for line in lines if segment.from_step < line[0] <= segment.valid_to_step]
        found += [(epoch, metrics) for _, epoch, metrics in sorted(counted, key=itemgetter(0))]
    return found


def _documents(store: ObjectStore, segment: Segment) -> list[dict[str, Any]]:
    # One list and not line by line, and not by json.loads: a sixth of the time, which counts where a page shows
    # thousands of runs. All that it refuses is a ValueError here too, nesting of more than 200 levels included.
    content = store.get(segment.name, max_bytes=METRICS_BYTES)
    check_seal(segment.name, content)
    documents: list[dict[str, Any]] = from_json(b"[" + b",".join(content.splitlines()) + b"]")
    return documents


@contextmanager
def _telling_which(segment: Segment) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        message = (
            f"metric segment {segment.name} cannot be read ({error!r}): was it altered? Delete it to go on without"
        )
        raise CorruptObjectError(message) from error


def _parse(name: str, folder: str) -> Segment:
    try:
        attempt, steps = name.removeprefix(folder).removesuffix(_SUFFIX).split("/")
        from_step, to_step = steps.split("-")
        return Segment(name=name, attempt=int(attempt), from_step=int(from_step), valid_to_step=int(to_step))
    except ValueError as error:
        message = f"{name} is not named <attempt>/<from>-<to>.jsonl as metric segments are; remove it from the store"
        raise CorruptObjectError(message) from error
