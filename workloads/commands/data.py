"""The commands of ``orchestrator data``, as functions from JSON arguments to JSON results.

They work on shards named by a folder, by patterns, or by a ``dataset.json``; a progress bar goes to stderr if that is a
terminal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote

import numpy as np
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from orchestrator.core.errors import NotFoundError, UserError
from orchestrator.storage import open_store
from orchestrator.storage.dataset_files import (
    CLASSES_FILE,
    DATASET_FILE,
    LEAF_LEVEL,
    ClassRows,
    DatasetFile,
    held_out_problem,
    level_counts,
    node_of,
    numbered_classes,
    read_class_table,
    read_dataset_file,
)
from orchestrator.storage.files import scratch_folder
from orchestrator.storage.listing import folder_shards, list_shards, not_held_out
from orchestrator.storage.open import as_uri, expand_braces, split_object_uri
from workloads.convert.items import WriteRequest
from workloads.convert.left_out import describe_notes
from workloads.convert.listing import CONVERTERS, describe_conversion, list_source
from workloads.convert.write import tidy_folder, write_dataset
from workloads.data.images import FORMATS, ImageCheck
from workloads.data.index import BadSamplePolicy, BadSamples, Shard
from workloads.data.scan import ClassRule, ShardTable, class_names
from workloads.data.scan_splits import ScannedSplits, scan_source, scan_splits
from workloads.jobs.index import described_shards, plan_external, streamed, unread_shard

__all__ = ["CONVERTERS", "index", "listing", "sample", "shard", "stats", "verify"]

Arguments = Mapping[str, Any]
_SHARD_SUFFIX = ".tar"
_SHOWN = 5
_NUMBERED = re.compile(r"([^{},]*?)([0-9]+)\.tar")
_NUMBERED_STEM = re.compile(r"(.*?)[-_.][0-9]+(?:-of-[0-9]+)?|(?P<split>train|val|valid|validation|test)[0-9]*")


def shard(arguments: Arguments) -> dict[str, Any]:
    """Convert a source to shards; ``notes`` say what was left out.

    Raises:
        UserError: the source or the destination does not fit.
    """
    write = WriteRequest(**{**arguments["write"], "destination_uri": to_uri(arguments["write"]["destination_uri"])})
    with ShardBar("listing the source") as bar:
        conversion = list_source({"format": arguments["converter"], **arguments["source"]})
        bar.start("writing shards", sum(int(table.lengths.sum()) for table in conversion.splits.values()))
        dataset = write_dataset(conversion, write, lambda entry: bar.advance(entry.size_bytes))
    return {**_summary(write.destination_uri, dataset), "notes": describe_notes(conversion.notes)}


def listing(arguments: Arguments) -> dict[str, Any]:
    """What a source holds that is to be converted, for planning. Raises ``UserError`` as `shard`."""
    return describe_conversion(list_source(arguments))


def index(arguments: Arguments) -> dict[str, Any]:
    """Scan shards and say what they hold; with ``write``, leave a ``dataset.json`` beside them."""
    request = ShardInputRequest(**arguments["target"])
    shard_input = open_shard_input(request)
    if shard_input.described is not None:
        _check_description(request, shard_input, shard_input.described)
    policy = BadSamples(policy=BadSamplePolicy(arguments["policy"]), budget=arguments["budget"])
    found = _scan(shard_input, policy, arguments["num_processes"], ImageCheck.HEADER)
    if problem := held_out_problem(found.entries):
        raise UserError(problem)
    dataset = _describe(shard_input, found)
    if arguments["write"]:
        _write_beside(shard_input, dataset)
    bad = {split: scanned.bad.to_json() for split, scanned in found.splits.items() if scanned.bad.total}
    entry = _entry(arguments, shard_input, dataset)
    return {**_summary(shard_input.uri, dataset), "bad_samples": bad, **found.notes(), "entry": entry}


def _check_description(request: ShardInputRequest, shard_input: ShardInput, described: DatasetFile) -> None:
    """Raises ``UserError``: the folder or the request has what the ``dataset.json`` of the folder lacks."""
    known = {entry.name for entries in described.splits.values() for entry in entries}
    lacks = sorted(set(folder_shards(shard_input.uri)) - known)
    remedy = f"remove {DATASET_FILE}, and index the folder with --classes {shard_input.classes_uri}"
    if lacks:
        shown = ", ".join(lacks[:_SHOWN]) + (", ..." if len(lacks) > _SHOWN else "")
        message = f"{shard_input.uri}/{DATASET_FILE} does not list {len(lacks)} shards beside it: {shown}; "
        raise UserError(f"{message}move them away, or {remedy}")
    if request.multi_label and not described.multi_label:
        message = f"{shard_input.uri}/{DATASET_FILE} says that each sample has one class, against --multi-label; "
        raise UserError(f"{message}{remedy} --multi-label")


def verify(arguments: Arguments) -> dict[str, Any]:
    """Read every shard again and compare it, and the class table, with ``dataset.json``; ``decode`` decodes every
    image, too.

    Raises:
        CorruptObjectError: a shard is not the one that is named.
        NotFoundError: there is no ``dataset.json`` to compare with.
        UserError: shards are named in place of their folder.
    """
    _, described = _described_folder(arguments["target"]["place"])
    shard_input = open_shard_input(ShardInputRequest(**arguments["target"]))
    check = ImageCheck.PIXELS if arguments["decode"] else ImageCheck.HEADER
    everything = BadSamples(policy=BadSamplePolicy.REPLACE, budget=1.0)
    found = _scan(shard_input, everything, arguments["num_processes"], check)
    bad = {split: scanned.bad.to_json() for split, scanned in found.splits.items() if scanned.bad.total}
    num_bad = sum(scanned.bad.total for scanned in found.splits.values())
    same = found.entries == dict(described.splits)
    has_table = shard_input.classes_uri and described.classes_sha256
    is_same_table = not has_table or read_class_table(shard_input.classes_uri)[1] == described.classes_sha256
    return {
        **_summary(shard_input.uri, described),
        "is_same": same and is_same_table,
        "is_same_class_table": is_same_table,
        "num_bad": num_bad,
        "bad_samples": bad,
    }


def stats(arguments: Arguments) -> dict[str, Any]:
    """Sizes of splits, levels and classes, from ``dataset.json`` and the class table alone.

    Raises:
        NotFoundError: there is no ``dataset.json``.
        UserError: shards are named in place of their folder.
    """
    uri, dataset = _described_folder(arguments["place"])
    rows, _ = read_class_table(f"{uri}/{CLASSES_FILE}")
    # Classes are counted under the name that the hierarchy has for them, where one of its levels tells all of them
    # apart; else as label spaces name them.
    levels = {level: [node_of(row, level) for row in rows] for level in level_counts(rows)}
    if not any(None not in nodes and len(set(nodes)) == len(rows) for nodes in levels.values()):
        levels.setdefault(LEAF_LEVEL, [str(row["class"]) for row in rows])
    sizes = {
        split: {level: _sizes(counts, nodes) for level, nodes in levels.items()}
        for split, counts in dataset.class_counts.items()
    }
    return {**_summary(uri, dataset), "samples_per_class": sizes}


def _described_folder(place: str) -> tuple[str, DatasetFile]:
    """URI of a folder, and its description.

    Raises:
        NotFoundError: there is no such folder, or no ``dataset.json`` in it.
        UserError: shards are named in place of their folder.
    """
    uri = to_uri(place).rstrip("/")
    if uri.endswith(_SHARD_SUFFIX):
        message = f"{uri} names shards, and this command takes their folder, with its {DATASET_FILE}: "
        raise UserError(f"{message}give {uri.rpartition('/')[0]}; `data index` and `data sample` also take shards")
    _check_path(uri)
    described = _described(uri)
    if described is None:
        classes = "" if _is_there(f"{uri}/{CLASSES_FILE}") else "--num-classes N "
        message = f"{uri} has no {DATASET_FILE}, which this command reads; make it with: orchestrator data index"
        raise NotFoundError(f"{message} {quote(place)} {classes}--write")
    return uri, described


def _check_path(uri: str) -> None:
    """Raises ``NotFoundError`` where a folder of this machine does not exist."""
    path = Path(unquote(uri.removeprefix("file://")))
    if uri.startswith("file:///") and not path.exists():
        raise NotFoundError(f"{path} does not exist; check the path")


def sample(arguments: Arguments) -> dict[str, Any]:
    """Some samples of a split: their places, classes and sizes; with ``out``, their images as files."""
    shard_input = open_shard_input(ShardInputRequest(**arguments["target"]))
    out = Path(arguments["out"]) if arguments["out"] else None
    rows = show_samples(
        shard_input,
        arguments["split"],
        num_samples=arguments["num_samples"],
        seed=arguments["seed"],
        key=arguments["key"],
        out=out,
    )
    return {"samples": rows}


def _scan(shard_input: ShardInput, policy: BadSamples, num_processes: int, check: ImageCheck) -> ScannedSplits:
    plan = plan_external(shard_input.splits, shard_input.classes, multi_label=shard_input.multi_label, policy=policy)
    with scratch_folder("index") as folder, ShardBar("reading shards") as bar:
        sizes = [shard.size_bytes for shards in shard_input.splits.values() for shard in shards]
        bar.start("reading shards", sum(sizes))
        return scan_splits(
            plan,
            folder,
            num_processes=num_processes,
            tick=lambda done, _: bar.advance(sizes[done - 1]),
            check=check,
        )


def _describe(shard_input: ShardInput, found: ScannedSplits) -> DatasetFile:
    return DatasetFile(
        splits=found.entries,
        num_classes=len(shard_input.classes),
        levels=level_counts(shard_input.classes),
        classes_sha256=read_class_table(shard_input.classes_uri)[1] if shard_input.classes_uri else "",
        digest=found.digest,
        multi_label=shard_input.multi_label,
        class_counts={split: scanned.class_counts for split, scanned in found.splits.items()},
        source=shard_input.described.source if shard_input.described else {"indexed": True},
    )


def _entry(arguments: Arguments, shard_input: ShardInput, dataset: DatasetFile) -> dict[str, Any]:
    """What to write into a sweep.yaml, under ``datasets``."""
    passed = {"policy": arguments["policy"], "budget": arguments["budget"]}
    options = {"bad_samples": passed} if arguments["policy"] == BadSamplePolicy.REPLACE else {}
    if shard_input.described or arguments["write"]:
        folder = next(iter(shard_input.splits.values()))[0].store_uri
        own_table = shard_input.classes_uri == f"{folder}/{CLASSES_FILE}"
        return {"from": folder, **({} if own_table else {"classes": shard_input.classes_uri}), **options}
    places = arguments["target"]["splits"]
    if places or list(shard_input.splits) == ["train"]:
        found: dict[str, str | list[str]] = {
            split: to_pattern(place) for split, place in (places or {"train": arguments["target"]["place"]}).items()
        }
    else:
        found = {split: pattern_of(shards) for split, shards in shard_input.splits.items()}
    classes = {"classes": shard_input.classes_uri} if shard_input.classes_uri else {"num_classes": dataset.num_classes}
    return {
        "shards": found,
        **classes,
        **{f"num_{split}": dataset.num_samples(split) for split in ("train", "val") if split in dataset.splits},
        "digest": dataset.digest,
        **({"multi_label": True} if shard_input.multi_label else {}),
        **options,
    }


def _write_beside(shard_input: ShardInput, dataset: DatasetFile) -> None:
    folders = {shard.store_uri for shards in shard_input.splits.values() for shard in shards}
    if len(folders) != 1:
        raise UserError(f"the shards lie in {len(folders)} folders; {DATASET_FILE} describes those of one folder")
    (folder,) = folders
    if shard_input.classes_uri != f"{folder}/{CLASSES_FILE}":
        message = f"the class table must be in the folder of the shards, as {folder}/{CLASSES_FILE}; "
        raise UserError(message + "copy it there and name it with --classes")
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


def _sizes(counts: Sequence[int], nodes: Sequence[str | None]) -> dict[str, float]:
    """Smallest, median and largest node of a level, and its number of nodes without samples.

    Classes that stand nowhere at the level (None) count in no node.
    """
    number_of = {node: number for number, node in enumerate(dict.fromkeys(filter(None, nodes)))}
    per_node = np.zeros(len(number_of), dtype=np.int64)
    for node, count in zip(nodes, counts, strict=True):
        if node is not None:
            per_node[number_of[node]] += count
    return {
        "num_nodes": len(number_of),
        "min": int(per_node.min()),
        "median": float(np.median(per_node)),
        "max": int(per_node.max()),
        "empty": int((per_node == 0).sum()),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInput:
    """Shards by split with their class table."""

    uri: str
    splits: Mapping[str, Sequence[Shard]]
    classes: ClassRows
    classes_uri: str
    """Empty: the classes are numbers."""
    described: DatasetFile | None
    multi_label: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInputRequest:
    """What somebody names."""

    place: str
    """A folder, a tar or a brace pattern, as a path or a URI; unused where ``splits`` are given."""
    splits: Mapping[str, str]
    """Patterns or folders by split."""
    classes: str = ""
    num_classes: int = 0
    multi_label: bool = False


def open_shard_input(request: ShardInputRequest) -> ShardInput:
    """Find the shards.

    Raises:
        NotFoundError: there are none, or there is no such folder.
        UserError: nothing says what the classes are.
    """
    uri = ", ".join(to_uri(place).rstrip("/") for place in request.splits.values() or [request.place])
    is_folder = not request.splits and not uri.endswith(_SHARD_SUFFIX)
    if is_folder:
        _check_path(uri)
    described = _described(uri) if is_folder else None
    own_uri = f"{uri}/{CLASSES_FILE}" if described or (is_folder and _is_there(f"{uri}/{CLASSES_FILE}")) else ""
    classes_uri = to_uri(request.classes) if request.classes else own_uri
    if not classes_uri and not request.num_classes:
        message = f"{uri} has no dataset.json, and nothing says its classes"
        raise UserError(f"{message}: name the class table with --classes, or count the classes with --num-classes")
    classes = read_class_table(classes_uri)[0] if classes_uri else numbered_classes(request.num_classes)
    if request.num_classes not in {0, len(classes)}:
        message = f"--num-classes is {request.num_classes}, but {classes_uri} has {len(classes)} classes"
        raise UserError(f"{message}; leave --num-classes out, or correct the class table")
    return ShardInput(
        uri=uri,
        splits=described_shards(uri, described) if described else _listed(uri, request),
        classes=classes,
        classes_uri=classes_uri,
        described=described,
        multi_label=described.multi_label if described else request.multi_label,
    )


def to_uri(place: str) -> str:
    """A path as a ``file://`` URI with its braces; a URI as it is, and a folder without its final slash."""
    if place.startswith("pipe:"):
        raise UserError(f"{place!r} would run a program; name a path, file:// or s3:// URI of shards")
    return place if "://" in place else as_uri(place.rstrip("/") or place)


def _described(uri: str) -> DatasetFile | None:
    try:
        return read_dataset_file(uri)
    except NotFoundError:
        return None


def _is_there(uri: str) -> bool:
    folder, name = split_object_uri(uri)
    return open_store(folder).exists(name)


def _listed(uri: str, request: ShardInputRequest) -> dict[str, list[Shard]]:
    if request.splits:
        patterns = {split: to_pattern(place) for split, place in request.splits.items()}
        listed = {split: list_shards([found]) for split, found in patterns.items()}
        for split, message in not_held_out(listed).items():
            raise UserError(f"--split {split}: {message}")
        return {split: [unread_shard(shard) for shard in shards] for split, shards in listed.items()}
    splits: dict[str, list[Shard]] = {}
    for shard in list_shards([to_pattern(uri)]):
        splits.setdefault(_split_of(shard.name.removesuffix(_SHARD_SUFFIX)), []).append(unread_shard(shard))
    if "train" in splits:
        return splits
    if len(splits) > 1:
        message = f"the names of the shards in {uri} do not say which are the training data: {', '.join(splits)}; "
        raise UserError(message + "say it, as with --split train=PATTERN --split val=PATTERN")
    return dict.fromkeys(["train"], *splits.values())  # names that tell no splits, such as photos-000000.tar


def _split_of(stem: str) -> str:
    """``train`` for ``train-000001``, ``train_1``, ``train-00000-of-00064``, and where the name tells none."""
    numbered = _NUMBERED_STEM.fullmatch(stem)
    split = (numbered[1] or numbered["split"]) if numbered else stem.rpartition("-")[0]
    return "val" if split in {"valid", "validation"} else split or "train"


def to_pattern(place: str) -> str:
    """A URI that names shards: a tar or brace pattern as it is, anything else as a folder, with a slash at its end."""
    uri = to_uri(place)
    return uri if uri.endswith(_SHARD_SUFFIX) else f"{uri.rstrip('/')}/"


def pattern_of(shards: Sequence[Shard]) -> str | list[str]:
    """What names these shards of one folder and no others: a brace pattern if they are numbered, else their URIs."""
    folder, names = shards[0].store_uri.rstrip("/"), [shard.object_name for shard in shards]
    first, last = _NUMBERED.fullmatch(names[0]), _NUMBERED.fullmatch(names[-1])
    if len(names) > 1 and first and last:
        pattern = f"{first[1]}{{{first[2]}..{last[2]}}}{_SHARD_SUFFIX}"
        if list(expand_braces(pattern)) == names:
            return f"{folder}/{pattern}"
    return [f"{folder}/{name}" for name in names]


def show_samples(
    shard_input: ShardInput, split: str, *, num_samples: int, seed: int, key: str = "", out: Path | None = None
) -> list[dict[str, Any]]:
    """Rows of some samples of one shard, drawn by the seed, or of the one with a key.

    Args:
        shard_input: the shards.
        split: one of its splits.
        num_samples: how many to draw.
        seed: draws the shard and the samples.
        key: a sample's key; shards are read in order until it is found.
        out: folder for the images and ``labels.json``; None = no files.

    Raises:
        UserError: there is no such split.
        NotFoundError: there is no sample with this key.
    """
    if split not in shard_input.splits:
        raise UserError(f"{shard_input.uri} has no split {split!r}; it has {', '.join(shard_input.splits)}")
    found = _find(shard_input, split, key) if key else _draw(shard_input, split, num_samples, seed)
    rows = []
    for shard, table, row in found:
        described, encoded = _describe_sample(shard_input, shard, table, row)
        rows.append(described)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / described["file"]).write_bytes(encoded)
    if out is not None:
        (out / "labels.json").write_text(json.dumps(rows, indent=1))
    return rows


def _table(shard_input: ShardInput, shard: Shard) -> ShardTable:
    names = class_names(shard_input.classes)
    rule = ClassRule(num_classes=len(shard_input.classes), multi_label=shard_input.multi_label, names=names)
    return scan_source(streamed(shard), rule)


def _draw(shard_input: ShardInput, split: str, num_samples: int, seed: int) -> Iterator[tuple[Shard, ShardTable, int]]:
    random = np.random.default_rng(seed)
    shards = shard_input.splits[split]
    shard = shards[int(random.integers(len(shards)))]
    table = _table(shard_input, shard)
    chosen = random.permutation(table.num_samples)[:num_samples]
    yield from ((shard, table, row) for row in sorted(chosen.tolist()))


def _find(shard_input: ShardInput, split: str, key: str) -> Iterator[tuple[Shard, ShardTable, int]]:
    for shard in shard_input.splits[split]:
        table = _table(shard_input, shard)
        for row in range(table.num_samples):
            if _key(table, row) == key:
                yield shard, table, row
                return
    raise NotFoundError(f"split {split!r} of {shard_input.uri} has no usable sample with the key {key!r}")


def _key(table: ShardTable, row: int) -> str:
    end = int(table.key_lengths[: row + 1].sum())
    return table.keys[end - int(table.key_lengths[row]) : end].tobytes().decode(errors="replace")


def _describe_sample(
    shard_input: ShardInput, shard: Shard, table: ShardTable, row: int
) -> tuple[dict[str, Any], bytes]:
    offset, length = int(table.offsets[row]), int(table.lengths[row])
    encoded = open_store(shard.store_uri).get_range(shard.object_name, offset, length)
    with Image.open(BytesIO(encoded), formats=FORMATS) as image:
        width, height, image_format = image.width, image.height, str(image.format).lower()
    end = int(table.num_leaves[: row + 1].sum())
    leaves = table.leaves[end - int(table.num_leaves[row]) : end].tolist()
    key = _key(table, row)
    described = {
        "shard": shard.name,
        "key": key,
        "row": row,
        "offset_bytes": offset,
        "length_bytes": length,
        "classes": leaves,
        "names": [str(shard_input.classes[leaf].get("name")) for leaf in leaves],
        "width": width,
        "height": height,
        "file": f"{key.replace('/', '_')}.{image_format}",
    }
    return described, encoded


class ShardBar:
    """Bytes of shards done, with rate and time left. A context manager.

    Args:
        title: what is being done before the amount of work is known.
    """

    def __init__(self, title: str) -> None:
        console = Console(stderr=True, markup=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task(title, total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def start(self, title: str, total_bytes: int) -> None:
        """The amount of work is known now."""
        self._progress.update(self._task, description=title, total=total_bytes)

    def advance(self, num_bytes: int) -> None:
        """So much more is done."""
        self._progress.advance(self._task, num_bytes)
