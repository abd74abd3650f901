"""The jobs ``dataset`` (writes a built-in data set as shards) and ``index`` (scans shards into columns)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.contract import ExecutionContext, JobRequest, JobResult, Progress
from orchestrator.errors import BadDataError, PreemptedError
from orchestrator.storage.artifacts import ArtifactWriter, Record, part_object, read_part, read_record
from workloads.data.arrays import npy_bytes
from workloads.data.builtin import open_builtin
from workloads.data.cache import ObjectCache
from workloads.data.index import CLASSES_PART, INDEX_PART, NO_SUBSET, Shard, column_part
from workloads.data.publish import publish
from workloads.data.scan import ScannedSample, scan_shard
from workloads.data.shards import write_shards

_SHARD_SUFFIX = ".tar"


def run_dataset(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Write a built-in data set: ``<split>-<number>.tar`` and ``classes.json``.

    Raises:
        UserError: the parameters describe no built-in data set.
        PreemptedError: asked to stop; nothing is committed.
    """
    dataset = open_builtin(request.parameters)
    writer = ArtifactWriter(context.store, request)
    num_shards = 0
    for split, samples in dataset.splits.items():
        for path in write_shards(samples, split, context.scratch):
            writer.add_file(path.name, path)
            path.unlink()
            num_shards += 1
            _tick(request, context, "write", num_shards)
    writer.add(CLASSES_PART, _json_bytes(dataset.classes))
    metrics = {"num_classes": float(len(dataset.classes)), "num_shards": float(num_shards)}
    return publish(writer, request, metrics=metrics, summary={})


def run_index(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Scan every shard of a data set once and commit the columns that `SampleIndex` opens.

    The record's summary has the ``dataset_digest``; its metrics have ``num_<split>`` and ``num_classes``.

    Raises:
        BadDataError: a shard, a sample or the class table is wrong; samples are named ``shard:key``.
        PreemptedError: asked to stop; nothing is committed.
    """
    dataset = read_record(context.store, request.inputs["dataset"])
    classes = _read_classes(context, dataset)
    writer = ArtifactWriter(context.store, request)
    scanned = _scan_splits(request, context, dataset, num_classes=len(classes))
    subset_names = _subset_names(scanned)
    for split, shards in scanned.items():
        for column, values in _columns(shards, subset_names).items():
            writer.add(column_part(split, column), npy_bytes(values))
    writer.add(INDEX_PART, _json_bytes(_index_document(dataset, scanned, subset_names)))
    writer.add(CLASSES_PART, _json_bytes(classes))
    sizes = {f"num_{split}": float(sum(map(len, shards.values()))) for split, shards in scanned.items()}
    metrics = {"num_train": 0.0, "num_val": 0.0, **sizes, "num_classes": float(len(classes))}
    return publish(writer, request, metrics=metrics, summary={"dataset_digest": dataset_digest(dataset)})


def dataset_digest(dataset: Record) -> str:
    """Sha256 over the sorted lines ``<shard basename> <size> <sha256>``: the same data has the same digest anywhere."""
    shards = sorted((name, part) for name, part in dataset.parts.items() if name.endswith(_SHARD_SUFFIX))
    lines = [f"{name} {part.size_bytes} {part.sha256}\n" for name, part in shards]
    return sha256("".join(lines).encode()).hexdigest()


_Scanned = dict[str, dict[str, list[ScannedSample]]]
"""Samples by split and shard name, both sorted."""


def _scan_splits(request: JobRequest, context: ExecutionContext, dataset: Record, *, num_classes: int) -> _Scanned:
    cache = ObjectCache(context.store, context.cache)
    names = sorted(name for name in dataset.parts if name.endswith(_SHARD_SUFFIX))
    scanned: _Scanned = {}
    for number, name in enumerate(names, start=1):
        part = dataset.parts[name]
        path = cache.path(part_object(dataset, name), size_bytes=part.size_bytes, sha256=part.sha256)
        samples = scan_shard(path, name, num_classes=num_classes)
        scanned.setdefault(name.rpartition("-")[0], {})[name] = samples
        _tick(request, context, "scan", number, len(names))
    for shards in scanned.values():
        _check_unique(shards)
    return scanned


def _check_unique(shards: Mapping[str, Sequence[ScannedSample]]) -> None:
    """Keys are unique within a shard by construction; here across the shards of a split."""
    first_place: dict[str, str] = {}
    for name, samples in shards.items():
        for sample in samples:
            other = first_place.setdefault(sample.key, name)
            if other != name:
                raise BadDataError(f"{name}:{sample.key} has the key of a sample in {other}; keys must be unique")


def _subset_names(scanned: _Scanned) -> tuple[str, ...]:
    found = {sample.subset for shards in scanned.values() for samples in shards.values() for sample in samples}
    return tuple(sorted(name for name in found if name is not None))


def _columns(shards: Mapping[str, Sequence[ScannedSample]], subset_names: Sequence[str]) -> dict[str, NDArray[Any]]:
    sizes = [len(samples) for samples in shards.values()]
    samples = [sample for members in shards.values() for sample in members]
    subset_ids: dict[str | None, int] = {None: NO_SUBSET, **{name: number for number, name in enumerate(subset_names)}}
    return {
        "shard": np.repeat(np.arange(len(sizes), dtype=np.int32), sizes),
        "row": np.concatenate([np.arange(size, dtype=np.int32) for size in sizes]),
        "offset": np.array([sample.offset_bytes for sample in samples], dtype=np.int64),
        "length": np.array([sample.length_bytes for sample in samples], dtype=np.int64),
        "leaf": np.array([sample.leaf for sample in samples], dtype=np.int32),
        "subset": np.array([subset_ids[sample.subset] for sample in samples], dtype=np.int16),
        "key": np.array([sample.key.encode(errors="surrogateescape") for sample in samples], dtype=np.bytes_),
    }


def _index_document(dataset: Record, scanned: _Scanned, subset_names: Sequence[str]) -> dict[str, Any]:
    splits = {
        split: [_shard_row(dataset, name, len(samples)) for name, samples in shards.items()]
        for split, shards in scanned.items()
    }
    return {"splits": splits, "subset_names": list(subset_names)}


def _shard_row(dataset: Record, name: str, num_samples: int) -> dict[str, Any]:
    part, object_name = dataset.parts[name], part_object(dataset, name)
    shard = Shard(
        name=name, object_name=object_name, size_bytes=part.size_bytes, sha256=part.sha256, num_samples=num_samples
    )
    return asdict(shard)


def _read_classes(context: ExecutionContext, dataset: Record) -> list[dict[str, Any]]:
    """The class table, ordered and complete: row c is leaf class c."""
    rows: list[dict[str, Any]] = json.loads(read_part(context.store, dataset, CLASSES_PART))
    rows.sort(key=lambda row: int(row["class"]))
    found = [row["class"] for row in rows]
    if found != list(range(len(rows))):
        raise BadDataError(f"the class table of {dataset.key} has the classes {found[:20]}; they must be 0, 1, 2, ...")
    return rows


def _json_bytes(value: object) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()


def _tick(request: JobRequest, context: ExecutionContext, phase: str, step: int, total_steps: int = 0) -> None:
    context.report(Progress(phase=phase, step=step, total_steps=total_steps))
    if context.should_stop():
        raise PreemptedError(f"{request.job} was asked to stop after {step} shards; it starts over when it runs again")
