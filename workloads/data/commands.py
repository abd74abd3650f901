"""The commands of ``orchestrator data``, as functions from JSON arguments to JSON results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.core.errors import UserError
from orchestrator.storage import open_store
from orchestrator.storage.dataset_files import (
    CLASSES_FILE,
    DATASET_FILE,
    NOT_LEVELS,
    DatasetFile,
    level_counts,
    read_class_table,
    read_dataset_file,
)
from orchestrator.storage.files import scratch_folder
from workloads.data.convert.formats import CONVERTERS, list_source
from workloads.data.convert.listing import describe_conversion
from workloads.data.convert.request import WriteRequest
from workloads.data.convert.write import tidy_folder, write_dataset
from workloads.data.images import ImageCheck
from workloads.data.index import BadSamplePolicy, BadSamples
from workloads.data.jobs import plan_external
from workloads.data.progress_bar import ShardBar
from workloads.data.scan_splits import ScannedSplits, scan_splits
from workloads.data.show_samples import show_samples
from workloads.data.targets import Target, TargetRequest, open_target, pattern_of, to_pattern, to_uri
from workloads.labels.coarsen import LEAF_LEVEL

__all__ = ["CONVERTERS", "index", "listing", "sample", "shard", "stats", "verify"]

Arguments = Mapping[str, Any]


def shard(arguments: Arguments) -> dict[str, Any]:
    """Convert a source to shards. Raises ``UserError`` for a source or destination that does not fit."""
    write = WriteRequest(**{**arguments["write"], "destination_uri": to_uri(arguments["write"]["destination_uri"])})
    with ShardBar("listing the source") as bar:
        conversion = list_source({"format": arguments["converter"], **arguments["source"]})
        bar.start("writing shards", sum(int(table.lengths.sum()) for table in conversion.splits.values()))
        dataset = write_dataset(conversion, write, lambda entry: bar.advance(entry.size_bytes))
    return _summary(write.destination_uri, dataset)


def listing(arguments: Arguments) -> dict[str, Any]:
    """What a source holds that is to be converted, for planning. Raises ``UserError`` as `shard`."""
    return describe_conversion(list_source(arguments))


def index(arguments: Arguments) -> dict[str, Any]:
    """Scan shards and say what they hold; with ``write``, leave a ``dataset.json`` beside them."""
    target = open_target(TargetRequest(**arguments["target"]))
    policy = BadSamples(policy=BadSamplePolicy(arguments["policy"]), budget=arguments["budget"])
    found = _scan(target, policy, arguments["num_processes"], ImageCheck.HEADER)
    dataset = _describe(target, found)
    if arguments["write"]:
        _write_beside(target, dataset)
    bad = {split: scanned.bad.to_json() for split, scanned in found.splits.items() if scanned.bad.total}
    entry = _entry(arguments, target, dataset)
    return {**_summary(target.uri, dataset), "bad_samples": bad, **found.notes(), "entry": entry}


def verify(arguments: Arguments) -> dict[str, Any]:
    """Read every shard again and compare it with ``dataset.json``; ``decode`` decodes every image, too.

    Raises:
        CorruptObjectError: a shard is not the one that is named.
        UserError: there is no ``dataset.json`` to compare with.
    """
    target = open_target(TargetRequest(**arguments["target"]))
    if target.described is None:
        raise UserError(f"{target.uri} has no {DATASET_FILE} to compare with; `data index --write` makes one")
    check = ImageCheck.PIXELS if arguments["decode"] else ImageCheck.HEADER
    everything = BadSamples(policy=BadSamplePolicy.REPLACE, budget=1.0)
    found = _scan(target, everything, arguments["num_processes"], check)
    bad = {split: scanned.bad.to_json() for split, scanned in found.splits.items() if scanned.bad.total}
    num_bad = sum(scanned.bad.total for scanned in found.splits.values())
    same = found.entries == dict(target.described.splits)
    return {**_summary(target.uri, target.described), "is_same": same, "num_bad": num_bad, "bad_samples": bad}


def stats(arguments: Arguments) -> dict[str, Any]:
    """Sizes of splits, levels and classes, from ``dataset.json`` and the class table alone."""
    uri = to_uri(arguments["place"]).rstrip("/")
    dataset = read_dataset_file(uri)
    rows, _ = read_class_table(f"{uri}/{CLASSES_FILE}")
    columns = list(dict.fromkeys(column for row in rows for column in row if column not in NOT_LEVELS))
    # Classes are counted under the name that the hierarchy has for them, where one of its levels tells all of them
    # apart; else as label spaces name them.
    is_named = any(len({row.get(column) for row in rows}) == len(rows) for column in columns)
    levels = {column: [str(row.get(column)) for row in rows] for column in columns}
    if not is_named:
        levels.setdefault(LEAF_LEVEL, [str(row["class"]) for row in rows])
    sizes = {
        split: {level: _sizes(counts, names) for level, names in levels.items()}
        for split, counts in dataset.class_counts.items()
    }
    return {**_summary(uri, dataset), "samples_per_class": sizes}


def sample(arguments: Arguments) -> dict[str, Any]:
    """Some samples of a split: their places, classes and sizes; with ``out``, their images as files."""
    target = open_target(TargetRequest(**arguments["target"]))
    out = Path(arguments["out"]) if arguments["out"] else None
    rows = show_samples(
        target,
        arguments["split"],
        num_samples=arguments["num_samples"],
        seed=arguments["seed"],
        key=arguments["key"],
        out=out,
    )
    return {"samples": rows}


def _scan(target: Target, policy: BadSamples, num_processes: int, check: ImageCheck) -> ScannedSplits:
    plan = plan_external(target.splits, target.classes, multi_label=target.multi_label, policy=policy)
    with scratch_folder("index") as folder, ShardBar("reading shards") as bar:
        sizes = [shard.size_bytes for shards in target.splits.values() for shard in shards]
        bar.start("reading shards", sum(sizes))
        return scan_splits(
            plan,
            folder,
            num_processes=num_processes,
            tick=lambda done, _: bar.advance(sizes[done - 1]),
            check=check,
        )


def _describe(target: Target, found: ScannedSplits) -> DatasetFile:
    return DatasetFile(
        splits=found.entries,
        num_classes=len(target.classes),
        levels=level_counts(target.classes),
        classes_sha256=read_class_table(target.classes_uri)[1] if target.classes_uri else "",
        digest=found.digest,
        multi_label=target.multi_label,
        class_counts={split: scanned.class_counts for split, scanned in found.splits.items()},
        source=target.described.source if target.described else {"indexed": True},
    )


def _entry(arguments: Arguments, target: Target, dataset: DatasetFile) -> dict[str, Any]:
    """What to write into a sweep.yaml, under ``datasets``."""
    passed = {"policy": arguments["policy"], "budget": arguments["budget"]}
    options = {"bad_samples": passed} if arguments["policy"] == BadSamplePolicy.REPLACE else {}
    if target.described or arguments["write"]:
        return {"from": next(iter(target.splits.values()))[0].store_uri, **options}
    places = arguments["target"]["splits"]
    if places or list(target.splits) == ["train"]:
        found: dict[str, str | list[str]] = {
            split: to_pattern(place) for split, place in (places or {"train": arguments["target"]["place"]}).items()
        }
    else:
        found = {split: pattern_of(shards) for split, shards in target.splits.items()}
    classes = {"classes": target.classes_uri} if target.classes_uri else {"num_classes": dataset.num_classes}
    return {
        "shards": found,
        **classes,
        **{f"num_{split}": dataset.num_samples(split) for split in ("train", "val") if split in dataset.splits},
        "digest": dataset.digest,
        **({"multi_label": True} if target.multi_label else {}),
        **options,
    }


def _write_beside(target: Target, dataset: DatasetFile) -> None:
    folders = {shard.store_uri for shards in target.splits.values() for shard in shards}
    if len(folders) != 1:
        raise UserError(f"the shards lie in {len(folders)} folders; {DATASET_FILE} describes those of one folder")
    (folder,) = folders
    if target.classes_uri != f"{folder}/{CLASSES_FILE}":
        message = f"the class table must lie beside the shards, as {folder}/{CLASSES_FILE}; copy it there and name it"
        raise UserError(message + " with --classes")
    store = open_store(folder)
    store.put(DATASET_FILE, dataset.to_bytes())
    tidy_folder(store)


def _summary(uri: str, dataset: DatasetFile) -> dict[str, Any]:
    splits = {
        split: {
            "num_shards": len(entries),
            "num_samples": sum(entry.num_samples for entry in entries),
            "size_bytes": sum(entry.size_bytes for entry in entries),
        }
        for split, entries in dataset.splits.items()
    }
    return {
        "uri": uri,
        "digest": dataset.digest,
        "num_classes": dataset.num_classes,
        "levels": dict(dataset.levels),
        "multi_label": dataset.multi_label,
        "splits": splits,
    }


def _sizes(counts: Sequence[int], names: Sequence[str]) -> dict[str, float]:
    """Smallest, median and largest node of a level, and its number of nodes without samples."""
    nodes = {name: number for number, name in enumerate(dict.fromkeys(names))}
    per_node = np.zeros(len(nodes), dtype=np.int64)
    np.add.at(per_node, [nodes[name] for name in names], counts)
    return {
        "num_nodes": len(nodes),
        "min": int(per_node.min()),
        "median": float(np.median(per_node)),
        "max": int(per_node.max()),
        "empty": int((per_node == 0).sum()),
    }
