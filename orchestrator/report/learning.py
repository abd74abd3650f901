"""Learning curves of a sweep's runs, out of their metric segments, thinned to what a page can show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.core.errors import CorruptObjectError
from orchestrator.core.job_kinds import RESULT_KINDS
from orchestrator.planning.graph.plan import Job
from orchestrator.report.history import read_epochs_and_metrics
from orchestrator.report.inputs import map_in_threads
from orchestrator.report.numbers import is_fraction
from orchestrator.storage.protocol import ObjectStore

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
        return _curves(read_epochs_and_metrics(store, key))
    except CorruptObjectError:
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
