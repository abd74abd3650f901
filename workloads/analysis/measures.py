"""The registry of measures: measures of features, by their names in the sweep language.

A new measure is an entry of ``MEASURES`` here and of ``MeasureName`` in ``orchestrator.sweepfile.analyze``; with
parameters it is also a field of ``MeasureSpec`` there. What its metrics can be, and how the report explains them, is
in ``orchestrator.report.analyses`` and ``orchestrator.report.render.analyses``.

Other packages add measures by entry points of the group ``pretraining_orchestrator.measures``: a function
``(features, targets, hierarchy, arguments) -> {name: number}``. ``features`` is a ``FeatureStream``, ``targets`` maps
``classes`` and, where it applies to the samples, ``trained`` to class ids (N,), ``hierarchy`` maps levels, coarsest
first, to the group (C,) of each class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Real
from statistics import fmean, stdev
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from orchestrator.core.plugins import MEASURES as MEASURE_PLUGINS
from workloads.analysis import geometry, units
from workloads.analysis.features import ClassMoments, FeatureStream, SampleClasses, class_moments, drawn_rows, take_rows
from workloads.analysis.fine_structure import ProbedSamples, cluster_and_probe, linear_probe, reduced
from workloads.runtime.plugin_arguments import is_fault_of_code, open_plugin, takes_arguments

_ENOUGH_SAMPLES: Final = 20
"""Of a class: the variance around their own mean is 5 % too small."""
_COLLAPSE: Final[Mapping[str, Callable[[ClassMoments, Callable[[], None]], float | None]]] = {
    "nc1": lambda moments, _: geometry.nc1(moments),
    "nc2": geometry.nc2,
    "cdnv": geometry.cdnv,
}
_OF_SCATTER: Final = ("nc1", "cdnv")
_OF_TRAINED: Final = ("distance_same", "distance_other", "msdr")
_TAKEN: Final = frozenset({"root", "self", "same", "other", "trained", "units"})
"""What distances and purities are named after besides levels."""
SHOWN_CLASSES: Final = 100
"""A matrix of more classes is averaged to so many rows and columns for its picture."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProbeInputs:
    """What cluster-and-linear-probe needs besides the features of the analysed split."""

    train: ProbedSamples
    test: ProbedSamples
    raw_train: ProbedSamples | None = None
    """The same samples as pixels; None where the control is not asked for."""
    raw_test: ProbedSamples | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnalyzedFeatures:
    """The features of a split under one backbone, and what is known of its samples."""

    features: FeatureStream
    classes: SampleClasses
    """The original classes, which structure is looked for."""
    trained: SampleClasses | None
    """Those that the backbone was trained on; None where they do not apply to these samples."""
    levels: Mapping[str, NDArray[np.int64]]
    """Group (C,) of each class at each level of the hierarchy, coarsest first."""
    probe_inputs: Callable[[Mapping[str, Any]], ProbeInputs] | None = None
    """Reads what a probe with such parameters needs; None where nothing can be probed."""
    layer_activity: Callable[[int], Mapping[str, float]] | None = None
    """Passes so many samples through the backbone: share of active units by layer. None where it is not at hand."""
    tick: Callable[[], None] = geometry.no_tick
    """Called again and again where features are not read: a sign of life, which may raise ``PreemptedError``."""
    moments: dict[int, ClassMoments] = field(default_factory=dict)
    """By id of the classes: several measures need them, and each costs two passes."""

    def moments_of(self, classes: SampleClasses) -> ClassMoments:
        """Means and scatter, found once."""
        if id(classes) not in self.moments:
            self.moments[id(classes)] = class_moments(self.features, classes)
        return self.moments[id(classes)]

    @property
    def trained_of_class(self) -> NDArray[np.int64] | None:
        """The trained class (C,) of each original class; None where the samples of one class have several."""
        if self.trained is None:
            return None
        return group_of_classes(self.classes, self.trained.ids_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a measure found."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """For ``arrays.npz``."""
    pictures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Small enough for ``measures.json``, from which reports draw."""
    notes: tuple[str, ...] = ()


def group_of_classes(classes: SampleClasses, groups_N: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """The group (C,) of each class; None where the samples of one class are of several groups."""
    groups_C = np.zeros(classes.num_classes, np.int64)
    groups_C[classes.ids_N] = groups_N
    return groups_C if bool((groups_C[classes.ids_N] == groups_N).all()) else None


def measure(subject: AnalyzedFeatures, name: str, parameters: Mapping[str, Any]) -> Findings:
    """What a measure of the registry, or of another package, finds.

    Raises:
        UserError: it does not apply to these samples, or another package's measure failed.
    """
    return MEASURES[name](subject, parameters)


def _collapse(subject: AnalyzedFeatures, _: Mapping[str, Any]) -> Findings:
    metrics: dict[str, float] = {}
    notes: list[str] = []
    for prefix, classes in _partitions(subject):
        if classes.num_classes < 2:
            notes.append(f"{prefix or 'trained '}classes: a single one has samples; collapse needs two")
            continue
        moments, counts_C = subject.moments_of(classes), classes.counts_C
        has_scatter = counts_C.max() > 1
        found = {
            name: value(moments, subject.tick)
            for name, value in _COLLAPSE.items()
            if has_scatter or name not in _OF_SCATTER
        }
        notes += _few_samples(prefix, counts_C)
        metrics |= {f"{prefix}{name}": value for name, value in found.items() if value is not None}
        notes += [f"{prefix}{name}: classes have equal means" for name, value in found.items() if value is None]
    return Findings(metrics=metrics, notes=tuple(notes))


def _few_samples(prefix: str, counts_C: NDArray[np.int64]) -> list[str]:
    """A note where scatter within classes is not known, or visibly too small."""
    median = float(np.median(counts_C))
    if median >= _ENOUGH_SAMPLES:
        return []
    told = f"the median class has {median:g} samples; scatter around the mean of n samples is too small by 1 / n of it"
    if counts_C.max() == 1:
        told = "no class has two samples, so nothing is known of the scatter within classes"
    return [f"{', '.join(f'{prefix}{name}' for name in _OF_SCATTER)}: {told}"]


def _partitions(subject: AnalyzedFeatures) -> Iterator[tuple[str, SampleClasses]]:
    """What can have collapsed: the trained classes, and the original ones where they are others."""
    trained = subject.trained
    if trained is not None:
        yield "", trained
        if trained.num_classes == subject.classes.num_classes and subject.trained_of_class is not None:
            return
    yield "original_", subject.classes


def _distances(subject: AnalyzedFeatures, parameters: Mapping[str, Any]) -> Findings:
    moments, trained_C = subject.moments_of(subject.classes), subject.trained_of_class
    wanted = parameters["levels"]
    if unknown := [name for name in wanted or () if name not in subject.levels]:
        message = (
            f"distances.levels: the classes of `of` lie in several nodes of {unknown[0]!r} each, or it is not a level; "
        )
        raise UserError(message + f"name some of: {', '.join(subject.levels) or 'there are none here'}")
    levels = {name: groups_C for name, groups_C in subject.levels.items() if wanted is None or name in wanted}
    metrics = {"distance_self": geometry.self_distance(moments)}
    if trained_C is not None:
        same, other = geometry.distances_by_group(moments, trained_C)
        found = {
            "distance_same": same.mean,
            "distance_other": other.mean,
            "msdr": geometry.msdr(same, metrics["distance_self"]),
        }
        metrics |= {name: value for name, value in found.items() if value is not None}
    by_ancestor = geometry.distances_by_ancestor(moments, levels)
    for name, pairs in by_ancestor.items():
        if pairs.mean is not None:
            metrics["distance_root" if name == geometry.ROOT else _of_level("distance", name)] = pairs.mean
    why = "no trained class holds two of the classes, or one holds all of them"
    if trained_C is None:
        why = "it is not so that all samples of a class have the same trained class"
    notes = [f"{name}: {why}" for name in _OF_TRAINED if name not in metrics]
    notes += [
        f"distances: classes that share '{fine}' and not '{coarse}' count as sharing what comes before; choose `levels`"
        for coarse, fine in geometry.unnested(levels)
    ]
    median = float(np.median(subject.classes.counts_C))
    if median < _ENOUGH_SAMPLES:
        told = f"the median class has {median:g} samples; of n samples distance_self is too small by 1 / n of it"
        notes.append(f"distances: {told}, so msdr is n / (n - 1) where there is no structure")
    num_classes = subject.classes.num_classes
    if num_classes > geometry.MAX_MATRIX:
        notes.append(f"{num_classes} classes: the distance matrix is kept of {geometry.MAX_MATRIX} at most")
        return Findings(metrics=metrics, notes=tuple(notes))
    matrix_CC = geometry.distance_matrix(moments)
    keys = [groups_C for groups_C in levels.values() if len(np.unique(groups_C)) < num_classes]
    keys = keys or ([trained_C] if trained_C is not None else [np.zeros(num_classes, np.int64)])
    order_C = geometry.order_of(keys)
    arrays: dict[str, NDArray[Any]] = {"distances": matrix_CC.astype(np.float32), "distances_order": order_C}
    names = [subject.classes.names[number] for number in order_C.tolist()]
    picture = matrix_picture(matrix_CC[np.ix_(order_C, order_C)], names)
    return Findings(metrics=metrics, arrays=arrays, pictures={"distances": picture}, notes=tuple(notes))


def _of_level(prefix: str, level: str) -> str:
    """The metric of a level; not one that the measure has besides."""
    return f"{prefix}_level_{level}" if level in _TAKEN else f"{prefix}_{level}"


def matrix_picture(matrix_CC: NDArray[np.float64], names: list[str]) -> dict[str, Any]:
    """A matrix for a figure: as it is, or averaged over runs of neighbouring classes, named after their first ones."""
    firsts = np.unique(np.linspace(0, len(names), min(SHOWN_CLASSES, len(names)) + 1).astype(np.int64))[:-1]
    sizes = np.diff(np.append(firsts, len(names)))
    sums = np.add.reduceat(np.add.reduceat(matrix_CC, firsts, axis=0), firsts, axis=1)
    values = sums / np.outer(sizes, sizes)
    return {
        "names": [names[first] for first in firsts.tolist()],
        "values": [[float(f"{value:.6g}") for value in row] for row in values.tolist()],
        "num_classes": len(names),
    }


def _rank(subject: AnalyzedFeatures, _: Mapping[str, Any]) -> Findings:
    found = units.feature_ranks(subject.features)
    if found is None:
        return Findings(notes=("rank: all features are 0",))
    return Findings(metrics={"rankme": found.rankme, "stable_rank": found.stable})


def _purity(subject: AnalyzedFeatures, parameters: Mapping[str, Any]) -> Findings:
    top = min(int(parameters["top"]), subject.features.num_samples)
    top_TU = units.top_samples(subject.features, top)
    classes, trained_C = subject.classes, subject.trained_of_class
    coarser = {name: groups for name, groups in subject.levels.items() if len(np.unique(groups)) < classes.num_classes}
    ids = {_of_level("purity", name): groups_C[classes.ids_N] for name, groups_C in coarser.items()}
    ids["purity_class"] = classes.ids_N
    if subject.trained is not None and (trained_C is None or len(np.unique(trained_C)) < classes.num_classes):
        ids["purity_trained"] = subject.trained.ids_N
    found = units.purities(top_TU, ids)
    if not found:
        return Findings(notes=(f"purity: no unit tells its {top} top samples from others",))
    metrics = {name: purity.above_chance for name, purity in found.items()}
    metrics["purity_units"] = top_TU.shape[1] / subject.features.dim
    return Findings(metrics=metrics)


def _sparsity(subject: AnalyzedFeatures, parameters: Mapping[str, Any]) -> Findings:
    found = units.sparsity(subject.features)
    metrics = {"active_share": found.active, "dead_share": found.dead}
    arrays = {"active_by_unit": found.by_unit_D}
    if "samples" not in parameters or subject.layer_activity is None:
        return Findings(metrics=metrics, arrays=arrays)
    by_layer = subject.layer_activity(parameters["samples"])
    if not by_layer:
        note = "sparsity: no activation function of the backbone is a module, so its layers cannot be told apart"
        return Findings(metrics=metrics, arrays=arrays, notes=(note,))
    metrics["layers_active_share"] = fmean(by_layer.values())
    arrays["active_by_layer"] = np.array(list(by_layer.values()))
    picture = {"names": list(by_layer), "values": [float(f"{share:.6g}") for share in by_layer.values()]}
    return Findings(metrics=metrics, arrays=arrays, pictures={"layers": picture})


def _clp(subject: AnalyzedFeatures, parameters: Mapping[str, Any]) -> Findings:
    if subject.trained_of_class is None or subject.probe_inputs is None:
        message = "clp: samples of one original class have several trained classes, so there are no clusters to find"
        return Findings(notes=(message,))
    inputs, reduce, seeds = subject.probe_inputs(parameters), parameters["reduce"], parameters["seeds"]
    tick = subject.tick
    found = [cluster_and_probe(inputs.train, inputs.test, reduce=reduce, seed=seed, tick=tick) for seed in seeds]
    accuracies = [one.accuracy for one in found]
    metrics = {
        "clp_accuracy": fmean(accuracies),
        "clp_chance_accuracy": fmean(one.chance for one in found),
        "lpo_accuracy": linear_probe(inputs.train, inputs.test, tick),
        **({"clp_std": stdev(accuracies)} if len(found) > 1 else {}),
    }
    if inputs.raw_train is not None and inputs.raw_test is not None:
        raw_train, raw_test = inputs.raw_train, inputs.raw_test
        raw = [cluster_and_probe(raw_train, raw_test, reduce=reduce, seed=seed, tick=tick) for seed in seeds]
        metrics |= {
            "clp_raw_accuracy": fmean(one.accuracy for one in raw),
            "lpo_raw_accuracy": linear_probe(raw_train, raw_test, tick),
        }
    notes = _few_probed(inputs.train.classes_N, inputs.test.classes_N)
    return Findings(metrics=metrics, arrays={"clp_by_seed": np.array(accuracies)}, notes=notes)


def _few_probed(train_N: NDArray[np.int64], test_N: NDArray[np.int64]) -> tuple[str, ...]:
    """A note where classes have few training samples, or none."""
    classes = np.union1d(train_N, test_N)
    median = float(np.median(np.bincount(train_N, minlength=int(classes[-1]) + 1)[classes]))
    known = float(np.isin(test_N, train_N).mean())
    if median >= _ENOUGH_SAMPLES and known == 1:
        return ()
    told = f"clp: the median class has {median:g} training samples"
    if known < 1:
        missing = f"{100 * (1 - known):.1f} % of the test samples are of classes without any"
        told += f", and {missing}, so lpo_accuracy is at most {100 * known:.1f} %"
    return (told + "; raise `samples`, or take coarser classes in `of`",)


def _embedding(subject: AnalyzedFeatures, parameters: Mapping[str, Any]) -> Findings:
    rows = drawn_rows(subject.features.num_samples, parameters["samples"])
    points_B2 = reduced(take_rows(subject.features, rows), parameters["method"], parameters["seed"])
    trained = subject.trained
    picture = {
        "method": parameters["method"],
        "points": [[float(f"{value:.4g}") for value in point[:2]] for point in points_B2.tolist()],
        "classes": subject.classes.ids_N[rows].tolist(),
        "class_names": list(subject.classes.names),
        "trained": [] if trained is None else trained.ids_N[rows].tolist(),
        "trained_names": [] if trained is None else list(trained.names),
    }
    return Findings(pictures={"embedding": picture})


def _plugin(subject: AnalyzedFeatures, parameters: Mapping[str, Any]) -> Findings:
    name = parameters["name"]
    function, arguments = open_plugin(name, MEASURE_PLUGINS, parameters["arguments"])
    given = (arguments,) if takes_arguments(function, MEASURE_PLUGINS) else ()
    targets = {"classes": subject.classes.ids_N.copy()}
    if subject.trained is not None:
        targets["trained"] = subject.trained.ids_N.copy()
    try:
        found = function(subject.features, targets, dict(subject.levels), *given)
        is_right = isinstance(found, Mapping) and all(
            isinstance(key, str) and isinstance(value, Real) and math.isfinite(value) for key, value in found.items()
        )  # numpy's scalars are registered as real numbers
    except Exception as error:
        if not is_fault_of_code(error):
            raise
        raise UserError(f"the measure {name} failed: {error!r}") from error
    if not is_right:
        raise UserError(f"the measure {name} gave {found!r:.200} in place of finite numbers by name")
    short = name.rpartition(":")[2]
    return Findings(metrics={f"{short}_{key}": float(value) for key, value in found.items()})


MEASURES: Final[Mapping[str, Callable[[AnalyzedFeatures, Mapping[str, Any]], Findings]]] = {
    "collapse": _collapse,
    "distances": _distances,
    "clp": _clp,
    "rank": _rank,
    "purity": _purity,
    "sparsity": _sparsity,
    "embedding": _embedding,
    "plugin": _plugin,
}
