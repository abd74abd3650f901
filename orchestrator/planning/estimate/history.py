"""Durations of committed results compared with the model of speed. Pure; records are read elsewhere.

Each result gives one ratio: its measured seconds / the seconds that the model (``flops``) gives for the same work on
the same machine. An estimate is the model's seconds times the median ratio of the most similar results, so one
formula serves every kind and scales over image sizes, numbers of workers and amounts of work.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from statistics import median
from typing import Any

from orchestrator.core.job_kinds import BACKBONE_TRAINING_KINDS, TRAINING_KINDS, JobKind
from orchestrator.planning.estimate.flops import CPU, Fit, Machine, Work, find_accelerator, network_of, steady_s
from orchestrator.planning.estimate.volumes import (
    DatasetSize,
    builtin_size,
    embed_work,
    is_cached,
    label_work,
    scan_work,
    simulation_work,
    training_work,
    writing_work,
)
from orchestrator.planning.graph.identity import subject_of

_BRIEF_S = 10.0
FAR_LARGER = 100.0
"""Times the work of a result: beyond that, one of less than ``_BRIEF_S`` seconds is not extrapolated."""

_LEAST_SHARE = 0.2
"""Least share of a job's rows that its last attempt must have written, so that its time is representative."""


class EstimateSource(StrEnum):
    """Source of an estimate, the best first."""

    HISTORY = "history"
    """Results of the same kind of job, of the same model on the same accelerator."""
    CALIBRATED = "calibrated"
    """The model of speed, corrected by other results on that accelerator."""
    MODEL = "model"
    """The model of speed alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One committed result's speed."""

    kind: JobKind
    subject: str
    """As in `Volume`."""
    machine: Machine
    image_size: int
    precision: str
    seconds: float
    """Of the work without its start."""
    model_s: float
    """Seconds by the model of speed."""
    is_known: bool = True
    """Whether the table of models has the network: only then is the ratio valid for other networks."""
    setup_s: float = 0.0
    """Seconds of its start; 0 = not measured."""

    @property
    def ratio(self) -> float:
        """Measured seconds / the model's."""
        return self.seconds / self.model_s

    def is_too_brief_for(self, model_s: float) -> bool:
        """Whether the ratio says nothing about work that takes ``model_s`` by the model of speed."""
        return self.seconds < _BRIEF_S and model_s > FAR_LARGER * self.model_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What to multiply the model's seconds with."""

    ratio: float = 1.0
    setup_s: float | None = None
    """Measured seconds of the start; None = those of the model."""
    num_results: int = 0
    source: EstimateSource = EstimateSource.MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelError:
    """Accuracy of the model of speed, compared with results."""

    num_results: int
    median_ratio: float
    """Measured seconds / the model's: above 1, jobs take longer than by the model."""
    within: float
    """Nine of ten results lie within this factor of the model, either way."""
    within_calibrated: float
    """The same after correction by the median of the accelerator's results."""


@dataclass(frozen=True, slots=True)
class SpeedHistory:
    """Measurements of a store; an empty one leaves estimates to the model."""

    measurements: Sequence[Measurement] = ()
    sizes: Mapping[str, DatasetSize] = field(default_factory=dict)
    """Of data sets, by the key of their ``index`` job."""
    num_parameters: Mapping[str, int] = field(default_factory=dict)
    """Of whole networks that results name, by subject."""

    def usual_accelerator(self) -> str:
        """The accelerator of most results; empty if none ran on one."""
        seen = Counter(m.machine.accelerator for m in self.measurements if m.machine.is_gpu)
        return seen.most_common(1)[0][0] if seen else CPU

    def correction(self, kind: JobKind, subject: str, machine: Machine, work: Work) -> Correction:
        """By the most similar results on such an accelerator; the model alone where there are none.

        Results of a few seconds are not used for far larger work: most of their time is first steps.
        """
        model_s = steady_s(work, machine)
        found_there = (m for m in self.measurements if m.machine.accelerator == machine.accelerator)
        device = [m for m in found_there if not m.is_too_brief_for(model_s)]
        same, calibrated = EstimateSource.HISTORY, EstimateSource.CALIBRATED
        similar: tuple[tuple[EstimateSource, Callable[[Measurement], bool]], ...] = (
            (same, lambda m: _is_same(m, kind, subject, machine, work)),
            (same, lambda m: (m.kind, m.subject) == (kind, subject)),
            (same, lambda m: m.subject == subject and _alike(m.kind, kind)),
            (same, lambda m: _architecture(m.subject) == _architecture(subject) and _alike(m.kind, kind)),
            (calibrated, lambda m: m.is_known and m.precision == work.precision and _alike(m.kind, kind)),
            (calibrated, lambda m: m.is_known and _alike(m.kind, kind)),
        )
        for source, is_similar in similar:
            if found := [m for m in device if is_similar(m)]:
                return _correction(found, source)
        return Correction()

    def brief_model_s(self) -> list[float]:
        """The model's seconds of what took too little to tell about far larger work, ascending."""
        return sorted(m.model_s for m in self.measurements if m.seconds < _BRIEF_S)

    def model_error(self) -> ModelError | None:
        """Of the model of speed, over all results of jobs that train known networks; None without any."""
        found = [m for m in self.measurements if m.kind in TRAINING_KINDS and m.is_known]
        if not found:
            return None
        by_device: dict[str, list[float]] = {}
        for m in found:
            by_device.setdefault(m.machine.accelerator, []).append(m.ratio)
        medians = {device: median(ratios) for device, ratios in by_device.items()}
        return ModelError(
            num_results=len(found),
            median_ratio=median(m.ratio for m in found),
            within=_factor(m.ratio for m in found),
            within_calibrated=_factor(m.ratio / medians[m.machine.accelerator] for m in found),
        )


def measure(
    identity: Mapping[str, Any], metrics: Mapping[str, float], summary: Mapping[str, Any], *, num_classes: int = 0
) -> Measurement | None:
    """The measurement in a committed record; None if it holds none, or none that can be compared."""
    try:
        return _measure(JobKind(identity["kind"]), identity, metrics, summary, num_classes)
    except (KeyError, TypeError, ValueError, LookupError, ZeroDivisionError):
        return None  # of another version, or altered: an estimate needs no single record


def all_attempts_s(
    identity: Mapping[str, Any], metrics: Mapping[str, float], summary: Mapping[str, Any]
) -> float | None:
    """Seconds that a committed result took, as far as its record says so.

    They are those of the last attempt. If it continued what earlier ones had done, the whole work counts, at its speed
    and with its start; no record holds what was done twice and the starts of the others. None where the speed is
    unknown.
    """
    try:
        measured: Mapping[str, float] = summary["measured"]
        if summary.get("resumed_steps"):
            return (
                float(measured.get("setup_s", 0.0))
                + _images(identity["parameters"]["recipe"], metrics) / (measured["images_per_s"])
            )
        if num_earlier := int(summary.get("rows_of_earlier_attempts", 0)):
            num_rows = _rows(JobKind(identity["kind"]), identity, metrics)
            return measured["work_s"] * num_rows / _left(num_rows, num_earlier)
        if "work_s" in measured:  # of the whole attempt: what else stands beside it are parts of it
            return float(measured["work_s"])
        parts = [measured[name] for name in ("setup_s", "train_s") if name in measured]
        return float(sum(parts)) if parts else None
    except (KeyError, TypeError, ValueError, LookupError, ZeroDivisionError):
        return None  # of another version, or altered: its time is unknown then


def index_size(metrics: Mapping[str, float]) -> DatasetSize:
    """Samples and classes by the metrics of an ``index`` record."""
    return DatasetSize(**{name: int(metrics.get(name, 0)) for name in ("num_train", "num_val", "num_classes")})


def _measure(
    kind: JobKind,
    identity: Mapping[str, Any],
    metrics: Mapping[str, float],
    summary: Mapping[str, Any],
    num_classes: int,
) -> Measurement | None:
    measured: Mapping[str, float] = summary["measured"]
    work, seconds = _done(kind, identity, metrics, summary, num_classes)
    machine = _machine(summary.get("fingerprint", {}), measured)
    model_s = steady_s(work, machine)
    if not (seconds > 0 and model_s > 0 and math.isfinite(seconds)):
        return None
    return Measurement(
        kind=kind,
        subject=subject_of(identity),
        machine=machine,
        image_size=work.image_size,
        precision=work.precision,
        seconds=seconds,
        model_s=model_s,
        is_known=_is_known(identity["parameters"].get("model")),
        setup_s=float(measured.get("setup_s", 0.0)),
    )


def _done(
    kind: JobKind,
    identity: Mapping[str, Any],
    metrics: Mapping[str, float],
    summary: Mapping[str, Any],
    num_classes: int,
) -> tuple[Work, float]:
    """The work that the last attempt at a record did, and the seconds that it took."""
    measured: Mapping[str, float] = summary["measured"]
    num_earlier = int(summary.get("rows_of_earlier_attempts", 0))
    parameters: Mapping[str, Any] = identity["parameters"]
    if is_cached(identity):
        raise LookupError("how many features a probe was trained on does not stand in its record")
    if kind in TRAINING_KINDS and "images_per_s" in measured:
        recipe, model = parameters["recipe"], parameters["model"]
        # All of the job, though the rate is that of its last attempt.
        images = _images(recipe, metrics)
        size = DatasetSize(num_train=round(images / recipe["epochs"]))
        classes = num_classes or int(metrics.get("num_classes", 0))
        work = training_work(
            recipe, network_of(model), int(model["image_size"]), size=size, num_classes=classes, kind=kind
        )
        return work.without_evaluation(), images / measured["images_per_s"]
    seconds = measured["work_s"]
    if kind is JobKind.EMBED:
        num_samples = _left(_rows(kind, identity, metrics), num_earlier)
        return embed_work(parameters, network_of(parameters["model"]), num_samples), seconds
    if kind is JobKind.INDEX:
        return scan_work(index_size(metrics)), seconds
    if kind is JobKind.DATASET and "builtin" in parameters and not metrics.get("num_adopted"):
        return writing_work(builtin_size(parameters)), seconds
    if kind is JobKind.LABELS:
        return label_work(), seconds
    if kind is JobKind.THEORY:
        stop = parameters["seeds"]["stop"]
        first = stop - int(_left(_rows(kind, identity, metrics), num_earlier))
        return simulation_work({"seeds": {"first": first, "stop": stop}}), seconds
    raise LookupError(f"how much work a {kind} job does does not stand in its record")


def _images(recipe: Mapping[str, Any], metrics: Mapping[str, float]) -> float:
    """Images that a training was trained on, in all of its attempts."""
    return float(metrics["num_steps"] * recipe["batch_size"])


def _rows(kind: JobKind, identity: Mapping[str, Any], metrics: Mapping[str, float]) -> float:
    """Rows that all attempts at an embedding or a simulation wrote."""
    if kind is JobKind.EMBED:
        return metrics["num_samples"]
    span = identity["parameters"]["seeds"]
    return float(span["stop"] - span["first"])


def _left(num_rows: float, num_earlier: int) -> float:
    """Rows that the last attempt wrote. Too few of them measure its start and not its work: ``LookupError``."""
    left = num_rows - num_earlier
    if left < _LEAST_SHARE * num_rows:
        raise LookupError("almost all of it was done before the last attempt")
    return left


_CPUS = frozenset({"", "cpu", "x86_64", "AMD64", "i686", "aarch64", "arm64", "ppc64le", "s390x", "riscv64"})
"""First words of devices that are CPUs; see ``platform.machine``."""


def _machine(fingerprint: Mapping[str, Any], measured: Mapping[str, float]) -> Machine:
    threads = float(fingerprint.get("num_threads", measured.get("num_threads", 1)))
    workers = int(fingerprint.get("world_size", 1))
    device = str(fingerprint.get("device", ""))
    # A GPU that the table of peaks lacks keeps its own name: its results say nothing of CPUs.
    accelerator = find_accelerator(device) or ("" if device.partition(" ")[0] in _CPUS else device)
    return Machine(accelerator=accelerator, num_workers=workers, num_cores=threads * workers)


def _is_known(model: Mapping[str, Any] | None) -> bool:
    return model is None or network_of(model).fit is Fit.KNOWN


def _is_same(m: Measurement, kind: JobKind, subject: str, machine: Machine, work: Work) -> bool:
    return (
        (m.kind, m.subject, m.precision) == (kind, subject, work.precision)
        and m.machine.num_workers == machine.num_workers
        and (machine.is_gpu or m.machine.num_cores == machine.num_cores)
    )


@cache
def _architecture(subject: str) -> str:
    """A model without its image size."""
    model = json.loads(subject) if subject else {}
    return json.dumps({name: value for name, value in model.items() if name != "image_size"}, sort_keys=True)


def _alike(kind: JobKind, other: JobKind) -> bool:
    """Whether jobs of two kinds compute the same way."""
    return kind is other or {kind, other} <= BACKBONE_TRAINING_KINDS


def _correction(found: Sequence[Measurement], source: EstimateSource) -> Correction:
    starts = [m.setup_s for m in found if m.setup_s > 0]
    return Correction(
        ratio=median(m.ratio for m in found),
        setup_s=median(starts) if starts else None,
        num_results=len(found),
        source=source,
    )


def _factor(ratios: Iterable[float]) -> float:
    """The factor within which nine of ten ratios lie of 1."""
    ordered = sorted(max(ratio, 1 / ratio) for ratio in ratios)
    return ordered[math.ceil(0.9 * len(ordered)) - 1]
