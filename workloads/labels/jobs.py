"""The job ``labels``: makes a label map from the index of a data set."""

from __future__ import annotations

from typing import Any

import numpy as np

from orchestrator.contract import ExecutionContext, JobRequest, JobResult
from orchestrator.storage.artifacts import ArtifactWriter
from workloads.data.index import SampleIndex, SplitIndex
from workloads.data.publish import publish
from workloads.labels.label_map import LabelMap
from workloads.labels.spaces import make_label_map


def run_labels(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit the label map of ``parameters["space"]``.

    The record's metrics have ``num_classes``; its summary has the smallest, median and largest class of each split.

    Raises:
        UserError: the label space does not fit the data set.
    """
    location = request.execution.data_location
    index = SampleIndex.open(context.store, request.inputs["index"], context.cache, location)
    num_train = index.split("train").num_samples
    files, space = request.execution.label_files, request.parameters["space"]
    label_map: LabelMap
    if "clusters" in request.inputs:
        from workloads.labels.cluster_job import cluster_labels  # torch and scikit-learn: most label maps need neither

        label_map = cluster_labels(context.store, request.inputs["clusters"], index.key)
    else:
        label_map = make_label_map(space, index.classes, num_train=num_train, files=files)
    writer = ArtifactWriter(context.store, request)
    label_map.write(writer)
    sizes = {name: _class_sizes(label_map, split) for name, split in index.splits.items()}
    metrics = {"num_classes": float(label_map.num_classes)}
    return publish(writer, request, metrics=metrics, summary={"samples_per_class": sizes})


def _class_sizes(label_map: LabelMap, split: SplitIndex) -> dict[str, Any]:
    """Samples per class: min, median, max."""
    counts = label_map.bind(split).counts()
    return {"min": int(counts.min()), "median": float(np.median(counts)), "max": int(counts.max())}
