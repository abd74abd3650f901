"""The job ``index``: scans the shards of a data set into columns, or joins the columns of a mixture."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult, Progress
from orchestrator.core.errors import BadDataError, PreemptedError, UserError
from orchestrator.storage.artifacts import ArtifactWriter, part_object, read_part, read_record
from orchestrator.storage.dataset_files import (
    ClassRows,
    DatasetFile,
    held_out_problem,
    join_class_tables,
    numbered_classes,
    parse_class_table,
    read_class_table,
    read_dataset_file,
)
from orchestrator.storage.listing import ListedShard, list_shards, listing_digest
from workloads.data.cache import ObjectCache
from workloads.data.index import (
    CLASSES_PART,
    INDEX_PART,
    NO_LEAF,
    NO_SUBSET,
    BadSamplePolicy,
    BadSamples,
    Column,
    SampleIndex,
    Shard,
    SplitCount,
    SplitIndex,
    check_declared_counts,
    column_part,
    counts_part,
)
from workloads.data.index_writer import ColumnFile, subset_dtype
from workloads.data.scan import ClassRule, class_names
from workloads.data.scan_splits import ScannedSplits, ShardSource, SplitPlan, most_queued, scan_splits
from workloads.runtime.npy import npy_bytes
from workloads.runtime.publish import publish

_LOG = logging.getLogger(__name__)
_SHARD_SUFFIX: Final = ".tar"


def run_index(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Scan every shard of a data set once and commit the columns that `SampleIndex` opens.

    With a parameter ``mixture``, the columns of other indexes are joined instead: see `run_mixture`. Otherwise the
    input ``dataset`` is the artifact to scan; without it, ``execution.data_location`` says where shards lie that
    others wrote, and the parameters what they must be: ``digest`` or ``listing``, ``classes_sha256``, ``multi_label``,
    ``bad_samples``. The record's summary has the ``dataset_digest``, bad samples by reason and sizes of classes; its
    metrics have ``num_<split>``, ``num_bad_<split>`` (where there are any) and ``num_classes``.

    Raises:
        BadDataError: a shard, a sample or the class table is wrong, or not what was planned, or a shard of ``train``
            is in another split; samples are named ``shard:key``.
        PreemptedError: asked to stop; nothing is committed.
    """
    if "mixture" in request.parameters:
        return run_mixture(request, context)
    planned = _artifact_shards(request, context) if "dataset" in request.inputs else _external_shards(request)
    found = scan_splits(
        planned,
        context.scratch / "columns",
        num_processes=request.execution.num_threads,
        tick=lambda done, total: _tick(request, context, "scan", done, total),
    )
    if request.parameters.get("listing"):
        # Once more: a scan takes hours, and a shard that was replaced before its turn is whole when it is read.
        _listed(request.execution.data_location["splits"], request.parameters)
    _check_declared(request, found)
    _check_held_out({name: split.shards for name, split in found.splits.items()})
    return _commit_index(request, context, planned, found)


def _check_declared(request: JobRequest, found: ScannedSplits) -> None:
    """Digest and numbers of samples must be those of the sweep.yaml, where it gives them."""
    expected = request.parameters.get("digest")
    if expected and found.digest != expected:
        message = f"the shards have the digest {found.digest}, the data set was declared with {expected}: other data "
        message += "lie at its URIs; correct the digest or the URIs (a digest is of all splits together; was it "
        raise BadDataError(message + f"computed with the same splits? here they are {', '.join(found.splits)})")
    counts = {name: SplitCount(good=split.num_samples, bad=split.bad.total) for name, split in found.splits.items()}
    check_declared_counts(request.execution.data_location, counts)


def _check_held_out(splits: Mapping[str, Sequence[Shard]]) -> None:
    if problem := held_out_problem(splits):
        raise BadDataError(problem)


def _commit_index(
    request: JobRequest, context: ExecutionContext, planned: SplitPlan, found: ScannedSplits
) -> JobResult:
    writer = ArtifactWriter(context.store, request)
    splits: dict[str, Any] = {}
    for name, split in found.splits.items():
        for column in split.columns:
            writer.add_file(column_part(name, column), split.path(column))
        writer.add(counts_part(name), npy_bytes(np.array(split.class_counts, dtype=np.int64)))
        splits[name] = {
            "columns": list(split.columns),
            "shards": [asdict(shard) for shard in split.shards],
            "bad": split.bad.to_json(),
        }
    document = {
        "splits": splits,
        "subset_names": list(found.subset_names),
        "bad_samples": {"policy": planned.policy.policy.value, "budget": planned.policy.budget},
        "multi_label": planned.rule.multi_label,
    }
    writer.add(INDEX_PART, _json_bytes(document))
    writer.add(CLASSES_PART, json.dumps(planned.classes, indent=1).encode())  # columns in order: coarse to fine
    summary = {
        "dataset_digest": found.digest,
        "samples_per_class": {name: split.class_sizes() for name, split in found.splits.items()},
        "bad_samples": {name: split.bad.to_json() for name, split in found.splits.items() if split.bad.total},
        **found.notes(),
    }
    metrics = {"num_train": 0.0, "num_val": 0.0, **found.counts(), "num_classes": float(len(planned.classes))}
    return publish(writer, request, metrics=metrics, summary=summary)


def _artifact_shards(request: JobRequest, context: ExecutionContext) -> SplitPlan:
    """Of a ``dataset`` artifact: shards are named ``<split>-<number>.tar``."""
    dataset = read_record(context.store, request.inputs["dataset"])
    classes = parse_class_table(read_part(context.store, dataset, CLASSES_PART), f"the class table of {dataset.key}")
    names = sorted(name for name in dataset.parts if name.endswith(_SHARD_SUFFIX))
    splits: dict[str, list[Shard]] = {}
    for name in names:
        part = dataset.parts[name]
        shard = Shard(
            name=name,
            object_name=part_object(dataset, name),
            size_bytes=part.size_bytes,
            sha256=part.sha256,
            blake3=part.blake3,
            num_samples=0,
        )
        splits.setdefault(name.rpartition("-")[0], []).append(shard)
    # A shard must not be evicted between its download and its scan, also if it has no room beside the next ones.
    cache = ObjectCache(context.store, context.cache, kept_paths=most_queued(request.execution.num_threads) + 1)
    return SplitPlan(
        splits=splits,
        sources=_cached_sources(splits, cache),
        classes=classes,
        rule=ClassRule(num_classes=len(classes), multi_label=bool(request.parameters.get("multi_label"))),
        policy=BadSamples.from_json(request.parameters.get("bad_samples", {})),
    )


def _cached_sources(splits: dict[str, list[Shard]], cache: ObjectCache) -> Iterator[ShardSource]:
    """Local copies, each fetched when it is its turn: the training jobs will want them too."""
    for shards in splits.values():
        for shard in shards:
            path = cache.path(shard.object_name, size_bytes=shard.size_bytes, digests=shard.digests)
            yield ShardSource(name=shard.name, size_bytes=shard.size_bytes, path=path)


def _external_shards(request: JobRequest) -> SplitPlan:
    """Of shards that others wrote: beside a ``dataset.json`` that names them, or found by URI patterns."""
    location, parameters = request.execution.data_location, request.parameters
    if not location:
        raise UserError(f"{request.job} has no URIs of shards; plan the sweep again with this version")
    splits = described_shards(location["dataset"]) if "dataset" in location else _listed(location["splits"], parameters)
    classes = _planned_classes(location.get("classes", ""), parameters)
    return plan_external(
        splits,
        classes,
        multi_label=parameters["multi_label"],
        policy=BadSamples.from_json(parameters["bad_samples"]),
    )


def plan_external(
    splits: Mapping[str, Sequence[Shard]], classes: ClassRows, *, multi_label: bool, policy: BadSamples
) -> SplitPlan:
    """What to scan of shards that are streamed from their own stores."""
    sources = (streamed(shard) for shards in splits.values() for shard in shards)
    rule = ClassRule(num_classes=len(classes), multi_label=multi_label, names=class_names(classes))
    return SplitPlan(splits=splits, sources=sources, classes=classes, rule=rule, policy=policy)


def streamed(shard: Shard) -> ShardSource:
    """A shard to be read from its own store."""
    return ShardSource(
        name=shard.name, size_bytes=shard.size_bytes, store_uri=shard.store_uri, object_name=shard.object_name
    )


def described_shards(folder_uri: str, described: DatasetFile | None = None) -> dict[str, list[Shard]]:
    """Shards by split, as the ``dataset.json`` beside them names them."""
    found = described or read_dataset_file(folder_uri)
    return {
        split: [
            Shard(**asdict(entry), object_name=entry.name, store_uri=folder_uri.rstrip("/"))
            for entry in sorted(entries, key=lambda entry: entry.name)
        ]
        for split, entries in found.splits.items()
    }


def _listed(patterns: Mapping[str, Sequence[str]], parameters: Mapping[str, Any]) -> dict[str, list[Shard]]:
    listed = {split: list_shards(wanted) for split, wanted in patterns.items()}
    expected = parameters.get("listing")
    if expected and listing_digest(listed) != expected:
        raise BadDataError("the shards changed since the sweep was planned (names, sizes or versions); submit it again")
    return {split: [unread_shard(shard) for shard in shards] for split, shards in listed.items()}


def unread_shard(shard: ListedShard) -> Shard:
    """A shard whose content nobody has read yet."""
    return Shard(
        name=shard.name,
        object_name=shard.object_name,
        size_bytes=shard.size_bytes,
        sha256="",
        num_samples=0,
        store_uri=shard.store_uri,
    )


def _planned_classes(uri: str, parameters: Mapping[str, Any]) -> ClassRows:
    if not uri:
        return numbered_classes(parameters["num_classes"])
    classes, digest = read_class_table(uri)
    if digest != parameters["classes_sha256"]:
        raise BadDataError(f"the class table {uri} changed since the sweep was planned; submit it again")
    return classes


def _json_bytes(value: object) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()


def _tick(request: JobRequest, context: ExecutionContext, phase: str, step: int, total_steps: int = 0) -> None:
    context.report(Progress(phase=phase, step=step, total_steps=total_steps))
    if context.should_stop():
        raise PreemptedError(f"{request.job} was asked to stop after {step} shards; it starts over when it runs again")


def run_mixture(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit the joint index of the inputs ``part0``, ``part1``, ...: indexes of data sets.

    Ordinals run through the components in this order. Shards are read where the components' indexes found them.

    Raises:
        UserError: weights do not fit the components.
        BadDataError: the class tables cannot be joined, or a shard of ``train`` of a component is in another split of
            this one or another.
    """
    parts = [SampleIndex.open(context.store, key, context.cache) for key in _inputs(request)]
    weights = request.parameters["mixture"]["weights"]
    if weights is not None and len(weights) != len(parts):
        raise UserError(f"a mixture of {len(parts)} data sets has {len(weights)} weights; give one for each")
    names = sorted({name for part in parts for name in part.splits})
    held = {name: [part.splits[name] for part in parts if name in part.splits] for name in names}
    shards = {name: [shard for split in found for shard in split.shards] for name, found in held.items()}
    _check_held_out(shards)
    _warn_of_repeats(shards.get("train", ()))
    classes, numbers = join_class_tables([part.classes for part in parts])
    subset_names = sorted({name for part in parts for name in part.subset_names})
    writer = ArtifactWriter(context.store, request)
    splits: dict[str, Any] = {}
    for name in names:
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


def _warn_of_repeats(shards: Sequence[Shard]) -> None:
    """Not an error: an earlier version planned such mixtures, and their sweeps can be finished."""
    times = Counter(shard.sha256 for shard in shards if shard.num_samples)
    repeated = {shard.sha256: shard.name for shard in shards if times[shard.sha256] > 1}
    if repeated:
        message = "%d shards of split 'train' are in several data sets of the mixture, the first is %s: their samples "
        _LOG.warning(message + "occur several times in each epoch", len(repeated), next(iter(repeated.values())))


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
