"""The job ``labels``: makes a label map from the index of a data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult
from orchestrator.core.errors import UserError
from orchestrator.storage.artifacts import ArtifactWriter
from workloads.data.index import SampleIndex
from workloads.labels.inputs import LabelInputs
from workloads.labels.label_map import LabelMap, SampleLabels
from workloads.labels.rules import make_label_map
from workloads.labels.taxonomy import find_parents, write_parents
from workloads.runtime.npy import npy_bytes
from workloads.runtime.publish import publish


def run_labels(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit the label map of ``parameters["space"]``, with what people ask of it.

    The record's metrics have ``num_classes``; its summary has the smallest, median and largest class of each split that
    the label map holds. Besides the parts of the label map there are ``counts/<split>.npy``, the samples [num_classes]
    int64 of each class (a sample counts in each of its classes), and the parents of the classes (see
    ``workloads.labels.taxonomy``).

    Raises:
        UserError: the label space does not fit the data set.
    """
    location = request.execution.data_location
    index = SampleIndex.open(context.store, request.inputs["index"], context.cache, location)
    num_train = index.split("train").num_samples
    files, space = request.execution.label_files, request.parameters["space"]
    label_map: LabelMap
    if "clusters" in request.inputs:
        from workloads.jobs.cluster import cluster_labels  # torch and scikit-learn: most label maps need neither

        label_map = cluster_labels(context.store, request.inputs["clusters"], index.key)
    else:
        label_map = make_label_map(space, index.classes, num_train=num_train, files=files)
    _check_declared(space, label_map, request.execution.declared_classes)
    writer = ArtifactWriter(context.store, request)
    label_map.write(writer)
    inputs = LabelInputs(classes=index.classes, num_train=num_train, files=files)
    write_parents(writer, find_parents(label_map, space, inputs))
    # Clusters have targets for the splits whose features they are made of; data may have more, such as `test`.
    held = label_map.targets if isinstance(label_map, SampleLabels) else index.splits
    counts = {name: label_map.resolve_targets(index.split(name)).counts() for name in index.splits if name in held}
    for name, counts_K in counts.items():
        writer.add(f"counts/{name}.npy", npy_bytes(counts_K))
    sizes = {name: _class_sizes(counts_K) for name, counts_K in counts.items()}
    metrics = {"num_classes": float(label_map.num_classes)}
    return publish(writer, request, metrics=metrics, summary={"samples_per_class": sizes})


def _check_declared(space: Mapping[str, Any], label_map: LabelMap, declared: int) -> None:
    """What nobody could know when the sweep was planned. Plans of earlier versions do not say that, and go on.

    Raises:
        UserError: the definition does not say which file it is of, or the space has another number of classes.
    """
    if not declared:
        return
    if _lacks_digest(space):
        raise UserError("the label space names no digest of its file, so others share its key; submit the sweep again")
    if label_map.num_classes != declared:
        message = f"num_classes is declared as {declared}, but the label space has {label_map.num_classes} classes; "
        raise UserError(message + "correct the number in labels, and submit the sweep again")


def _lacks_digest(definition: Mapping[str, Any]) -> bool:
    within = [value for name, value in definition.items() if name != "plugin" and isinstance(value, Mapping)]
    return definition.get("digest") == "" or any(map(_lacks_digest, within))


def _class_sizes(counts_K: NDArray[np.int64]) -> dict[str, Any]:
    """Samples per class: min, median, max."""
    return {"min": int(counts_K.min()), "median": float(np.median(counts_K)), "max": int(counts_K.max())}
