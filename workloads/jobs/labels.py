"""The job ``labels``: makes a label map from the index of a data set."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult
from orchestrator.storage.artifacts import ArtifactWriter
from workloads.data.index import SampleIndex
from workloads.labels.inputs import LabelInputs
from workloads.labels.label_map import LabelMap
from workloads.labels.rules import make_label_map
from workloads.labels.taxonomy import find_parents, write_parents
from workloads.runtime.npy import npy_bytes
from workloads.runtime.publish import publish


def run_labels(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit the label map of ``parameters["space"]``, with what people ask of it.

    The record's metrics have ``num_classes``; its summary has the smallest, median and largest class of each split.
    Besides the parts of the label map there are ``counts/<split>.npy``, the samples [num_classes] int64 of each class
    (a sample counts in each of its classes), and the parents of the classes (see ``workloads.labels.taxonomy``).

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
    writer = ArtifactWriter(context.store, request)
    label_map.write(writer)
    inputs = LabelInputs(classes=index.classes, num_train=num_train, files=files)
    write_parents(writer, find_parents(label_map, space, inputs))
    counts = {name: label_map.resolve_targets(split).counts() for name, split in index.splits.items()}
    for name, counts_K in counts.items():
        writer.add(f"counts/{name}.npy", npy_bytes(counts_K))
    sizes = {name: _class_sizes(counts_K) for name, counts_K in counts.items()}
    metrics = {"num_classes": float(label_map.num_classes)}
    return publish(writer, request, metrics=metrics, summary={"samples_per_class": sizes})


def _class_sizes(counts_K: NDArray[np.int64]) -> dict[str, Any]:
    """Samples per class: min, median, max."""
    return {"min": int(counts_K.min()), "median": float(np.median(counts_K)), "max": int(counts_K.max())}
