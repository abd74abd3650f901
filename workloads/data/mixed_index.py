"""The index of a mixture: the columns of its components, one after the other, under joined classes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult
from orchestrator.core.errors import UserError
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.dataset_files import join_class_tables
from workloads.data.arrays import npy_bytes
from workloads.data.columns import ColumnFile, subset_dtype
from workloads.data.index import (
    CLASSES_PART,
    INDEX_PART,
    NO_LEAF,
    NO_SUBSET,
    BadSamplePolicy,
    Column,
    SampleIndex,
    SplitIndex,
    column_part,
    counts_part,
)
from workloads.data.publish import publish


def run_mixture(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit the joint index of the inputs ``part0``, ``part1``, ...: indexes of data sets.

    Ordinals run through the components in this order. Shards are read where the components' indexes found them.

    Raises:
        UserError: weights do not fit the components.
        BadDataError: the class tables cannot be joined.
    """
    parts = [SampleIndex.open(context.store, key, context.cache) for key in _inputs(request)]
    weights = request.parameters["mixture"]["weights"]
    if weights is not None and len(weights) != len(parts):
        raise UserError(f"a mixture of {len(parts)} data sets has {len(weights)} weights; give one for each")
    classes, numbers = join_class_tables([part.classes for part in parts])
    subset_names = sorted({name for part in parts for name in part.subset_names})
    writer = ArtifactWriter(context.store, request)
    splits: dict[str, Any] = {}
    for name in sorted({name for part in parts for name in part.splits}):
        members = [(part.splits.get(name), leaves) for part, leaves in zip(parts, numbers, strict=True)]
        joined = _JoinedSplit(name, members, subset_names, context.scratch / "columns" / name)
        splits[name] = joined.write(writer)
        writer.add(counts_part(name), npy_bytes(joined.class_counts(len(classes))))
    document = {
        "splits": splits,
        "subset_names": subset_names,
        "bad_samples": _policy(parts),
        "multi_label": any("leaf_set" in split["columns"] for split in splits.values()),
        "mixture": {"weights": weights},
    }
    writer.add(INDEX_PART, json.dumps(document, indent=1, sort_keys=True).encode())
    writer.add(CLASSES_PART, json.dumps(classes, indent=1).encode())  # columns in order: coarse to fine
    counts = {f"num_{name}": float(sum(s["num_samples"] for s in split["shards"])) for name, split in splits.items()}
    metrics = {"num_train": 0.0, "num_val": 0.0, **counts, "num_classes": float(len(classes))}
    return publish(writer, request, metrics=metrics, summary={"components": [part.key for part in parts]})


def _inputs(request: JobRequest) -> list[str]:
    return [request.inputs[f"part{number}"] for number in range(len(request.inputs))]


def _policy(parts: Sequence[SampleIndex]) -> dict[str, Any]:
    """The most lenient of the components' policies."""
    replaces = [part.bad_samples for part in parts if part.bad_samples.policy is BadSamplePolicy.REPLACE]
    policy = BadSamplePolicy.REPLACE if replaces else BadSamplePolicy.FAIL
    return {"policy": policy.value, "budget": max((found.budget for found in replaces), default=0.0)}


class _JoinedSplit:
    """One split of the mixture; a component without it has no samples in it."""

    def __init__(
        self,
        name: str,
        members: Sequence[tuple[SplitIndex | None, Sequence[int]]],
        subset_names: Sequence[str],
        folder: Path,
    ) -> None:
        self._name, self._folder, self._subset_names = name, folder, subset_names
        self._num_shards = [len(split.shards) if split else 0 for split, _ in members]
        self._members = [(split, np.array([*leaves, NO_LEAF])) for split, leaves in members if split is not None]
        self._is_multi_label = any(split.leaf_sets is not None for split, _ in self._members)

    def write(self, writer: ArtifactWriter) -> dict[str, Any]:
        """Add the columns to the artifact; returns the split's entry of ``index.json``."""
        columns = self._columns()
        for column, (dtype, pieces) in columns.items():
            file = ColumnFile(self._folder / f"{column.value}.npy", dtype)
            for piece in pieces:
                file.append(piece)
            file.close()
            writer.add_file(column_part(self._name, column), file.path)
            file.path.unlink()
        return {
            "columns": [column.value for column in columns],
            "shards": [asdict(shard) for split, _ in self._members for shard in split.shards],
            "num_shards": self._num_shards,
        }

    def class_counts(self, num_classes: int) -> NDArray[np.int64]:
        """Samples [C] of each joined leaf class."""
        total = np.zeros(num_classes, dtype=np.int64)
        for split, numbers in self._members:
            values = numbers[split.leaves if split.leaf_sets is None else split.leaf_sets.values]
            total += np.bincount(values, minlength=num_classes)
        return total

    def _columns(self) -> dict[Column, tuple[type[np.generic], list[NDArray[Any]]]]:
        """Type and pieces of each column; large ones stay memory-mapped until they are written."""
        splits = [split for split, _ in self._members]
        columns: dict[Column, tuple[type[np.generic], list[NDArray[Any]]]] = {
            Column.OFFSET: (np.int64, [split.offsets for split in splits]),
            Column.LENGTH: (np.int32, [split.lengths for split in splits]),
            Column.LEAF: (np.int32, [numbers[split.leaves] for split, numbers in self._members]),
            Column.KEY: (np.uint8, [split.key_bytes for split in splits]),
            Column.KEY_OFFSET: (np.int64, _chained([split.key_offsets for split in splits])),
        }
        checks = [split.checks for split in splits if split.checks is not None]
        if len(checks) == len(splits):  # older indexes have none
            columns[Column.CHECK] = (np.uint32, checks)
        if self._subset_names:
            dtype = subset_dtype(len(self._subset_names))
            columns[Column.SUBSET] = (dtype, [self._subset_ids(split) for split in splits])
        if self._is_multi_label:
            sets = [_leaf_sets(split, numbers) for split, numbers in self._members]
            columns[Column.LEAF_SET] = (np.int32, [values for _, values in sets])
            columns[Column.LEAF_SET_OFFSET] = (np.int64, _chained([offsets for offsets, _ in sets]))
        return columns

    def _subset_ids(self, split: SplitIndex) -> NDArray[np.int64]:
        numbers = {name: number for number, name in enumerate(self._subset_names)}
        final = np.array([*map(numbers.__getitem__, split.subset_names), NO_SUBSET], dtype=np.int64)
        ids: NDArray[np.int64] = final[split.subset_ids]
        return ids


def _chained(offsets: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Offsets [N + 1] of concatenated values."""
    pieces: list[NDArray[Any]] = [np.zeros(1, dtype=np.int64)]
    total = 0
    for own in offsets:
        pieces.append(own[1:].astype(np.int64) + total)
        total += int(own[-1])
    return pieces


def _leaf_sets(split: SplitIndex, numbers: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Offsets and values; a sample of single-label data has a set of one."""
    if split.leaf_sets is not None:
        return split.leaf_sets.offsets, numbers[split.leaf_sets.values]
    return np.arange(split.num_samples + 1), numbers[split.leaves]
