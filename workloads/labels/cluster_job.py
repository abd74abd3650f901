"""The job ``cluster``: k-means on the features of a training split, and the label map that is made of it.

Parts of the artifact: ``clusters.json``, ``centroids.npy`` (num_classes, D) float32, and ``targets/<split>.npy`` int32
with the target id of each sample by ordinal, -1 = it has none.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult, Progress
from orchestrator.core.errors import PreemptedError, UserError
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import ArtifactWriter, read_part, read_record
from workloads.data.arrays import from_npy_bytes, npy_bytes
from workloads.data.index import SampleIndex, SplitIndex
from workloads.data.publish import publish
from workloads.embed.features import FeatureTable
from workloads.labels.bound import NO_LABEL
from workloads.labels.cluster_space import Clustering, ClusterSpace, Rule
from workloads.labels.coarsen import one_target_each
from workloads.labels.kmeans import Settings
from workloads.labels.kmeans_search import Library, one_thread_per_call, open_search
from workloads.labels.label_map import LabelMap, SampleLabels
from workloads.labels.spaces import make_label_map
from workloads.train.fingerprint import pick_device

_LOG = logging.getLogger(__name__)
_CLUSTERS_PART: Final = "clusters.json"
_SPLITS: Final = ("train", "val")


def run_cluster(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Cluster the training samples; a validation sample gets the nearest centroid of its own group.

    Inputs: ``index``, and the features ``train`` and ``val``. Parameters: ``k`` or ``rebalanced``, ``within`` (the
    definition of a label space, or null), ``seed``, ``iterations``, ``num_init`` and ``library``.

    Raises:
        UserError: more clusters than samples; features of another data set; the library is not installed.
        BadDataError: features are NaN or infinite.
        PreemptedError: asked to stop; it starts over.
    """
    parameters, execution = request.parameters, request.execution
    index = SampleIndex.open(context.store, request.inputs["index"], context.cache, execution.data_location)
    digest = _digest_of(context.store, index.key)
    tables = {split: _features(request, context, split, digest) for split in _SPLITS}
    within = _within(request, index)
    names = within.class_names if within is not None else ("",)
    groups = {split: _groups(within, index.split(split), tables[split]) for split in _SPLITS}
    library = Library(parameters["library"])
    version = library.version
    clustering = Clustering(
        rule=Rule.of(parameters),
        settings=Settings(**{name: parameters[name] for name in ("seed", "iterations", "num_init")}),
        open_search=partial(open_search, library, device=pick_device()),
        num_threads=execution.num_threads,
        tick=_Ticker(request, context),
    )
    expected = clustering.operations(tables["train"], groups["train"])
    _LOG.info("k-means of %d samples: at most %.3g operations", tables["train"].num_samples, expected)
    with one_thread_per_call():
        space = clustering.fit(tables["train"], groups["train"], names)
        val = space.assign(tables["val"], groups["val"], clustering.open_search, execution.num_threads)
    document = {**_document(space), "dataset_digest": digest, "library": library.value, "library_version": version}
    return _commit(request, context, space, {"train": space.targets_N, "val": val}, document)


def cluster_labels(store: ObjectStore, clusters_key: str, index_key: str) -> SampleLabels:
    """The label map of a ``cluster`` artifact. Raises ``UserError`` if it is of another data set than the index."""
    record = read_record(store, clusters_key)
    document = json.loads(read_part(store, record, _CLUSTERS_PART))
    if document["dataset_digest"] != _digest_of(store, index_key):
        raise UserError(f"{clusters_key} was made of other data than {index_key} is the index of; plan the sweep again")
    return SampleLabels(
        num_classes=document["num_classes"],
        names=tuple(document["class_names"]),
        targets={split: from_npy_bytes(read_part(store, record, _targets_part(split))) for split in _SPLITS},
    )


class _Ticker:
    """Counts iterations of all groups."""

    def __init__(self, request: JobRequest, context: ExecutionContext) -> None:
        self._request, self._context = request, context
        self._lock, self._done = threading.Lock(), 0

    def __call__(self) -> None:
        with self._lock:
            self._done += 1
            self._context.report(Progress(phase="cluster", step=self._done))
            if self._context.should_stop():
                raise PreemptedError(f"{self._request.job} was asked to stop; it starts over when it runs again")


def _features(request: JobRequest, context: ExecutionContext, split: str, digest: str) -> FeatureTable:
    table = FeatureTable.open(context.store, request.inputs[split], context.cache)
    if table.dataset_digest != digest or table.split != split:
        message = f"features {table.key} are of split {table.split!r} of the data {table.dataset_digest[:12]}, but "
        message += f"{request.inputs['index']} is the index of {digest[:12]}: clusters would get the wrong samples; "
        raise UserError(message + "embed the data set that is indexed")
    return table


def _digest_of(store: ObjectStore, index_key: str) -> str:
    """What tells data sets apart: the digest of their shards."""
    return str(read_record(store, index_key).summary.get("dataset_digest", index_key))


def _within(request: JobRequest, index: SampleIndex) -> LabelMap | None:
    definition = request.parameters["within"]
    if definition is None:
        return None
    files, num_train = request.execution.label_files, index.split("train").num_samples
    return one_target_each(make_label_map(definition, index.classes, num_train=num_train, files=files), "clusters")


def _groups(within: LabelMap | None, split: SplitIndex, table: FeatureTable) -> NDArray[np.int64]:
    """Group (N,) of each sample; -1 for those that are not part of the label space, or have no features."""
    groups_N = np.zeros(split.num_samples, np.int64) if within is None else within.bind(split).targets_N()
    groups_N[table.missing] = NO_LABEL
    return groups_N


def _document(space: ClusterSpace) -> dict[str, Any]:
    return {
        "num_classes": int(space.firsts[-1]),
        "class_names": list(space.class_names),
        "groups": [
            {
                "name": name,
                "num_clusters": len(group.centroids_KD),
                "smallest": int(group.sizes.min()),
                "largest": int(group.sizes.max()),
                "inertia": group.inertia,
                "num_iterations": group.num_iterations,
            }
            for name, group in zip(space.names, space.groups, strict=True)
        ],
    }


def _commit(
    request: JobRequest,
    context: ExecutionContext,
    space: ClusterSpace,
    targets: Mapping[str, NDArray[np.int32]],
    document: Mapping[str, Any],
) -> JobResult:
    writer = ArtifactWriter(context.store, request)
    writer.add(_CLUSTERS_PART, json.dumps(document, indent=1).encode())
    writer.add("centroids.npy", npy_bytes(np.concatenate([group.centroids_KD for group in space.groups])))
    for split, targets_N in targets.items():
        writer.add(_targets_part(split), npy_bytes(targets_N))
    sizes = [group.sizes for group in space.groups]
    metrics = {
        "num_classes": float(space.firsts[-1]),
        "inertia": sum(group.inertia for group in space.groups),
        "smallest_class": float(min(size.min() for size in sizes)),
        "largest_class": float(max(size.max() for size in sizes)),
    }
    summary = {name: document[name] for name in ("groups", "dataset_digest", "library", "library_version")}
    return publish(writer, request, metrics=metrics, summary=summary)


def _targets_part(split: str) -> str:
    return f"targets/{split}.npy"
