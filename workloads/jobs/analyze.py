"""The job ``analyze``: measures of the features that ``embed`` jobs committed, of one backbone or of several."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import functional

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult, Progress
from orchestrator.core.errors import UserError
from orchestrator.storage.artifacts import ArtifactWriter, read_part, read_record
from orchestrator.storage.dataset_files import node_of
from workloads.analysis.features import ROWS_AT_ONCE, SampleClasses, drawn_rows
from workloads.analysis.fine_structure import ProbedSamples
from workloads.analysis.layers import ActivityCounter
from workloads.analysis.measures import AnalyzedFeatures, Findings, ProbeInputs, group_of_classes, measure
from workloads.analysis.similarity import linear_cka
from workloads.data.decode import DecoderName, Interpolation
from workloads.data.index import SampleIndex, SplitIndex
from workloads.data.pixels import PixelSpec
from workloads.data.source import SampleSource
from workloads.data.split_targets import NO_LABEL
from workloads.features.artifact import FEATURES_PART, FeatureTable
from workloads.features.backbone import open_backbone
from workloads.jobs.embed import unlabelled_loader
from workloads.labels.label_map import LabelMap
from workloads.labels.rules import leaf_labels
from workloads.labels.taxonomy import level_labels, level_names
from workloads.runtime.device import pick_device
from workloads.runtime.enums import Precision
from workloads.runtime.fingerprint import deterministic_numerics, numerics_fingerprint
from workloads.runtime.precision import Arithmetic
from workloads.runtime.publish import Ticker, publish

MEASURES_PART: Final = "measures.json"
ARRAYS_PART: Final = "arrays.npz"
CKA: Final = "cka"
_RAW_SIDE: Final = 32
"""Pixels of the control are averaged to squares of this side: 3,072 numbers per image."""
_SPLITS: Final = ("train", "val")

Tick = Callable[[], None]


def run_analyze(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit ``measures.json`` and ``arrays.npz``; the record's metrics are all numbers of the measures.

    Inputs: ``index``; ``train`` and ``val``, features of one backbone, or ``features0``, ``features1`` ... of several;
    ``labels``, the label space that the backbone was trained on, where it applies to the data set; ``classes``, that of
    the original classes, by default the leaf classes; ``backbone``, where measures look at its layers. Parameters:
    ``split``, and ``measures`` by name; with a backbone also those of an ``embed`` job.

    Raises:
        UserError: the label spaces or measures do not fit the data.
        BadDataError: features are NaN or infinite.
        PreemptedError: asked to stop; it starts over.
    """
    context.report(Progress(phase="setup"))
    ticker = Ticker(request, context, "analyze")  # of chunks of features
    # Without the limit, linear algebra and t-SNE take all cores of the node, also those of other jobs.
    num_threads = request.execution.num_threads
    with deterministic_numerics(num_threads), threadpool_limits(limits=num_threads):
        index = SampleIndex.open(context.store, request.inputs["index"], context.cache, request.execution.data_location)
        if any(role.startswith("features") for role in request.inputs):
            found = {CKA: _similarity(request, context, index, ticker)}
        else:
            analysis = Analysis(request, context, index, ticker)
            measures: Mapping[str, Mapping[str, Any]] = request.parameters["measures"]
            found = {name: measure(analysis.subject(), name, given) for name, given in measures.items()}
    return _commit(request, context, found)


def _commit(request: JobRequest, context: ExecutionContext, found: Mapping[str, Findings]) -> JobResult:
    context.report(Progress(phase="write"))
    metrics = {name: value for findings in found.values() for name, value in findings.metrics.items()}
    pictures = {name: picture for findings in found.values() for name, picture in findings.pictures.items()}
    arrays = {name: array for findings in found.values() for name, array in findings.arrays.items()}
    notes = [note for findings in found.values() for note in findings.notes]
    writer = ArtifactWriter(context.store, request)
    by_measure = {name: dict(findings.metrics) for name, findings in found.items()}
    document = {"measures": by_measure, "pictures": pictures, "notes": notes}
    writer.add(MEASURES_PART, json.dumps(document, indent=1, sort_keys=True).encode())
    file = BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)
    writer.add(ARRAYS_PART, file.getvalue())
    device = pick_device(context) if "backbone" in request.inputs else torch.device("cpu")
    fingerprint = numerics_fingerprint(device, num_threads=request.execution.num_threads, micro_batch=ROWS_AT_ONCE)
    summary = {"fingerprint": fingerprint, "pictures": sorted(pictures), **({"notes": notes} if notes else {})}
    return publish(writer, request, metrics=metrics, summary=summary)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableStream:
    """Samples of a feature table, by ascending ordinals, as a ``FeatureStream``."""

    table: FeatureTable
    ordinals_N: NDArray[np.int64]
    tick: Tick

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.ordinals_N)

    @property
    def dim(self) -> int:
        """D."""
        return self.table.dim

    def __iter__(self) -> Iterator[NDArray[np.float16]]:
        """See ``FeatureStream``."""
        for start in range(0, self.num_samples, ROWS_AT_ONCE):
            self.tick()
            yield self.table.take(self.ordinals_N[start : start + ROWS_AT_ONCE])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnalyzedSplit:
    """The samples of a split that have features and classes."""

    split: SplitIndex
    table: FeatureTable
    ordinals_N: NDArray[np.int64]
    classes_N: NDArray[np.int64]
    """Original classes, by their numbers in the label space."""
    trained_N: NDArray[np.int64] | None


class Analysis:
    """One backbone's features and the classes of their samples."""

    def __init__(self, request: JobRequest, context: ExecutionContext, index: SampleIndex, tick: Tick) -> None:
        self._request, self._context, self._index, self._tick = request, context, index, tick
        store, inputs = context.store, request.inputs
        self._classes: LabelMap = (
            LabelMap.open(store, inputs["classes"]) if "classes" in inputs else leaf_labels(index.classes)
        )
        self._trained = LabelMap.open(store, inputs["labels"]) if "labels" in inputs else None
        self._subject: AnalyzedFeatures | None = None

    def subject(self) -> AnalyzedFeatures:
        """What measures are given."""
        if self._subject is None:
            found = self.split(self._request.parameters["split"])
            classes = SampleClasses.of(found.classes_N, self._classes.class_names)
            trained = None
            if found.trained_N is not None and self._trained is not None:
                trained = SampleClasses.of(found.trained_N, self._trained.class_names)
            self._subject = AnalyzedFeatures(
                features=TableStream(table=found.table, ordinals_N=found.ordinals_N, tick=self._tick),
                classes=classes,
                trained=trained,
                levels=self._levels(found, classes),
                probe_inputs=self._probe_inputs if set(_SPLITS) <= self._request.inputs.keys() else None,
                layer_activity=self._layer_activity if "backbone" in self._request.inputs else None,
                tick=self._tick,
            )
        return self._subject

    def split(self, name: str) -> AnalyzedSplit:
        """Samples with features, an original class and, where there are such, a trained one.

        Raises:
            UserError: there are none, or the features are of other data.
        """
        split = self._index.split(name)
        table = _open_table(self._request, self._context, self._index, name, name)
        classes_N = self._classes.resolve_targets(split).targets_N()
        trained_N = None
        is_there_N = classes_N != NO_LABEL
        is_there_N[table.missing] = False
        if self._trained is not None and not (targets := self._trained.resolve_targets(split)).is_multi_label:
            trained_N = targets.targets_N()
            is_there_N &= trained_N != NO_LABEL
        ordinals_N = np.flatnonzero(is_there_N)
        if not len(ordinals_N):
            raise UserError(f"no {name} sample of {self._index.key} has features and a class; analyse another data set")
        return AnalyzedSplit(
            split=split,
            table=table,
            ordinals_N=ordinals_N,
            classes_N=classes_N[ordinals_N],
            trained_N=None if trained_N is None else trained_N[ordinals_N],
        )

    def _levels(self, found: AnalyzedSplit, classes: SampleClasses) -> dict[str, NDArray[np.int64]]:
        """Levels of the data set of which each class has one node, by their number of nodes."""
        rows, leaves_N = self._index.classes, found.split.leaves[found.ordinals_N].astype(np.int64)
        levels: dict[str, NDArray[np.int64]] = {}
        for name in level_names(rows) if found.split.leaf_sets is None else ():
            # As `level_labels` names them: in numbers, 1, 1.0 and true would be one node.
            nodes = {node_of(row, name) for row in rows}
            if None in nodes or len(nodes) < 2:
                continue
            groups_C = group_of_classes(classes, level_labels(name, rows).targets[leaves_N])
            if groups_C is not None:
                levels[name] = groups_C
        return dict(sorted(levels.items(), key=lambda level: len(np.unique(level[1]))))

    def _probe_inputs(self, parameters: Mapping[str, Any]) -> ProbeInputs:
        """Of both splits, each thinned to ``samples`` by a fixed draw."""
        splits = [self._thinned(self.split(name), int(parameters["samples"])) for name in _SPLITS]
        train, test = (_probed(found, found.table.take(found.ordinals_N).astype(np.float32)) for found in splits)
        if not parameters["raw_pixels"]:
            return ProbeInputs(train=train, test=test)
        raw_train, raw_test = (_probed(found, self._pixels(found)) for found in splits)
        return ProbeInputs(train=train, test=test, raw_train=raw_train, raw_test=raw_test)

    def _thinned(self, found: AnalyzedSplit, num_samples: int) -> AnalyzedSplit:
        if len(found.ordinals_N) <= num_samples:
            return found
        kept = drawn_rows(len(found.ordinals_N), num_samples)
        return AnalyzedSplit(
            split=found.split,
            table=found.table,
            ordinals_N=found.ordinals_N[kept],
            classes_N=found.classes_N[kept],
            trained_N=None if found.trained_N is None else found.trained_N[kept],
        )

    def _pixels(self, found: AnalyzedSplit) -> NDArray[np.float32]:
        """Pixels (N, P) in [0, 1] as the backbone saw them, large images averaged to small ones."""
        context = self._context
        document = json.loads(read_part(context.store, read_record(context.store, found.table.key), FEATURES_PART))
        look = document["look"]
        pixels = PixelSpec(
            image_size=look["image_size"],
            resize=look["resize"],
            interpolation=Interpolation(look["interpolation"]),
            decoder=DecoderName(look["decoder"]),
        )
        side = min(_RAW_SIDE, pixels.image_size)
        small = (functional.adaptive_avg_pool2d(b_BCHW.float() / 255, side) for b_BCHW in self._images(found, pixels))
        return np.concatenate([small_BCHW.flatten(1).numpy() for small_BCHW in small])

    def _layer_activity(self, num_samples: int) -> Mapping[str, float]:
        """Share of active units by layer, over samples that a fixed draw leaves, as an ``embed`` job computes them."""
        request, device = self._request, pick_device(self._context)
        found = self._thinned(self.split(request.parameters["split"]), num_samples)
        precision = Precision(request.parameters["precision"])
        arithmetic = Arithmetic(device, precision=precision, deterministic=request.execution.deterministic)
        backbone = open_backbone(request, self._context, device)
        counter = ActivityCounter(backbone.network)
        with counter, arithmetic.numerics(), torch.inference_mode(), arithmetic.autocast():
            for images_BCHW in self._images(found, backbone.preprocessing.pixels, device):
                if len(images_BCHW):  # of none, the network would see a made-up one
                    backbone(images_BCHW)
        return counter.shares

    def _images(self, found: AnalyzedSplit, pixels: PixelSpec, device: torch.device | None = None) -> Iterator[Tensor]:
        """Batches (B, 3, H, W) of uint8 pixels of samples, for a device; those that cannot be decoded are left out."""
        context, name = self._context, found.split.name
        source = SampleSource(context.store, self._index, name, cache_dir=context.cache, pixels=pixels, cache_bytes=0)
        num_threads = self._request.execution.num_threads
        with closing(source):
            for batch in unlabelled_loader(source, found.ordinals_N, num_threads=num_threads, device=device):
                self._tick()
                yield batch.images_BCHW


def _probed(found: AnalyzedSplit, features_ND: NDArray[np.float32]) -> ProbedSamples:
    trained_N = found.classes_N if found.trained_N is None else found.trained_N
    return ProbedSamples(features_ND=features_ND, classes_N=found.classes_N, trained_N=trained_N)


def _similarity(request: JobRequest, context: ExecutionContext, index: SampleIndex, tick: Tick) -> Findings:
    """CKA of every pair of backbones, in the order of their roles."""
    roles = sorted(
        (role for role in request.inputs if role.startswith("features")),
        key=lambda role: int(role.removeprefix("features")),
    )
    split = request.parameters["split"]
    tables = [_open_table(request, context, index, role, split) for role in roles]
    missing = np.unique(np.concatenate([table.missing for table in tables]))
    ordinals_N = np.setdiff1d(np.arange(index.split(split).num_samples), missing)
    if len(ordinals_N) < 4:
        raise UserError(f"{len(ordinals_N)} {split} samples of {index.key} have features; similarity needs 4 at least")
    matrix_SS = linear_cka([TableStream(table=table, ordinals_N=ordinals_N, tick=tick) for table in tables])
    notes = _constant(matrix_SS, roles)
    values = [[float(value) if np.isfinite(value) else None for value in row] for row in matrix_SS]
    picture = {"values": values, "num_samples": len(ordinals_N)}
    others = matrix_SS[~np.eye(len(tables), dtype=bool)]
    metrics = {"cka_mean": float(np.nanmean(others))} if np.isfinite(others).any() else {}
    return Findings(metrics=metrics, arrays={CKA: matrix_SS}, pictures={CKA: picture}, notes=notes)


def _constant(matrix_SS: NDArray[np.float64], roles: Sequence[str]) -> tuple[str, ...]:
    same = [role for role, value in zip(roles, np.diag(matrix_SS), strict=True) if not np.isfinite(value)]
    return (
        (f"{', '.join(same)}: all samples have the same features, so their similarity is not defined",) if same else ()
    )


def _open_table(
    request: JobRequest, context: ExecutionContext, index: SampleIndex, role: str, split: str
) -> FeatureTable:
    table = FeatureTable.open(context.store, request.inputs[role], context.cache, context.activity.tick)
    expected = (split, index.key, index.split(split).num_samples)
    if (table.split, table.index_key, table.num_samples) != expected:
        message = f"features {table.key} are of split {table.split!r} of {table.index_key}, not of {split!r} of "
        raise UserError(f"{message}{index.key}; plan the sweep again")
    return table
