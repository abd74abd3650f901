"""Learning curves of a sweep's runs, out of their metric segments, thinned to what a page can show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from orchestrator.contract import JobKind
from orchestrator.errors import CorruptObjectError
from orchestrator.plan.graph import Job
from orchestrator.report.history import MetricLine, read_metric_history
from orchestrator.report.inputs import TRANSFER_KINDS
from orchestrator.report.numbers import is_fraction
from orchestrator.storage.protocol import ObjectStore

TRAINED_KINDS = TRANSFER_KINDS | {JobKind.PRETRAIN}
_NUM_READERS = 32
_MAX_NUMBERS = 400_000
"""Values over all curves: about 4 MB of JSON, as much as plotly itself."""
_MIN_POINTS, _MAX_POINTS = 8, 200


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
    trained = [job for job in jobs if job.kind in TRAINED_KINDS]
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="learning") as pool:
        # Curves at once and not lines: of thousands of runs only the numbers are kept, not an object per step.
        read = list(pool.map(lambda job: _read_curves(store, job.key), trained))
    curves = {job.name: some for job, some in zip(trained, read, strict=True) if some}
    unreadable = tuple(job.name for job, some in zip(trained, read, strict=True) if some is None)
    return Learning(curves=_thinned(curves), unreadable=unreadable)


def thin(curve: Curve, num_points: int) -> Curve:
    """At most so many of the curve's own points, evenly spread, the last one always among them."""
    if len(curve.epochs) <= num_points:
        return curve
    step = (len(curve.epochs) - 1) / max(1, num_points - 1)
    kept = sorted({round(index * step) for index in range(num_points)} | {len(curve.epochs) - 1})[-num_points:]
    return Curve(epochs=tuple(curve.epochs[i] for i in kept), values=tuple(curve.values[i] for i in kept))


def _read_curves(store: ObjectStore, key: str) -> dict[str, Curve] | None:
    try:
        return _curves(read_metric_history(store, key))
    except CorruptObjectError:
        return None  # the page is about the others; it names this one


def _curves(lines: Sequence[MetricLine]) -> dict[str, Curve]:
    names = [name for name in _names(lines) if is_fraction(name) or "loss" in name]
    return {
        name: Curve(
            epochs=tuple(line.epoch for line in lines if name in line.metrics),
            values=tuple(line.metrics[name] for line in lines if name in line.metrics),
        )
        for name in names
    }


def _names(lines: Iterable[MetricLine]) -> dict[str, None]:
    return dict.fromkeys(name for line in lines for name in line.metrics)


def _thinned(curves: Mapping[str, Mapping[str, Curve]]) -> dict[str, dict[str, Curve]]:
    """All curves with the same limit, so that together they stay within the page's budget."""
    count = sum(len(some) for some in curves.values())
    limit = max(_MIN_POINTS, min(_MAX_POINTS, _MAX_NUMBERS // (2 * max(1, count))))
    return {job: {name: thin(curve, limit) for name, curve in some.items()} for job, some in curves.items()}
