"""The listing of a source as an artifact: the place of every image, so that many jobs can write shards of them.

Parts: ``listing.json`` (converter, folders and tars by split), ``classes.json`` and ``<split>/<column>.npy`` (see
``ItemTable.columns``), which the jobs of a node map into memory and share. Its *digest* is of names, sizes and classes;
the location of the source does not count.

A new converter is a module in this package, an entry of ``CONVERTERS`` here, and a name in
``orchestrator.cli.commands.data``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult, Progress
from orchestrator.core.errors import BadDataError, UserError
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import ArtifactWriter, Record, part_object, read_part, read_record
from orchestrator.storage.dataset_files import ClassRows, level_counts, parse_class_table
from workloads.convert import arrays, huggingface, imagefolder, imagenet, inat, tabular
from workloads.convert.items import (
    Conversion,
    ConvertRequest,
    ShardingOptions,
    ShardLayout,
    StoredItems,
    check_disjoint,
    level_column_notes,
)
from workloads.convert.left_out import COLUMNS_FIELD, describe_notes
from workloads.convert.write import VERSION, classes_bytes, shard_rows, source_samples
from workloads.data.cache import ObjectCache
from workloads.data.index import CLASSES_PART
from workloads.data.shards import shard_name, write_shard
from workloads.runtime.npy import npy_bytes
from workloads.runtime.publish import publish

_LOG = logging.getLogger(__name__)
_CHECKED_EARLY = 2_000_000
"""Images that are compared when a sweep is planned; more of them when they are listed."""
_LISTING_PART: Final = "listing.json"
_ROOTS: Final = ("source", "root")
"""Of a request: what containers are stored relative to, since sources may lie elsewhere on the day they are read."""
_FOLDER: Final = "folder"
"""Of the document, if the source is a file: its folder. Paths below it move with the source; earlier readers, which do
not know the field, find them while they do not move."""
CONVERTERS: Final[Mapping[str, Callable[[ConvertRequest], Conversion]]] = {
    "imagefolder": imagefolder.convert,
    "imagenet1k": imagenet.convert_1k,
    "imagenet21k": imagenet.convert_21k,
    "inat2021": inat.convert,
    "cifar10": arrays.convert_cifar10,
    "cifar100": arrays.convert_cifar100,
    "mnist": arrays.convert_mnist,
    "svhn": arrays.convert_svhn,
    "huggingface": huggingface.convert,
    "csv": tabular.convert_csv,
    "parquet": tabular.convert_parquet,
}

_FIXED_SPLITS: Final = frozenset(("cifar10", "cifar100", "mnist"))
"""Converters that read no `ConvertRequest.splits`."""


def listing_digest(conversion: Conversion) -> str:
    """Sha256 of what a source holds: equal for the same source at another path."""
    holds = {
        "converter": conversion.converter,
        "multi_label": conversion.multi_label,
        "classes": sha256(classes_bytes(conversion)).hexdigest(),
        "splits": {split: table.digest() for split, table in conversion.splits.items()},
    }
    return sha256(json.dumps(holds, sort_keys=True).encode()).hexdigest()


def describe_conversion(conversion: Conversion) -> dict[str, Any]:
    """What planning asks of a source, as JSON; ``notes`` for people, if there are any."""
    return {
        "listing": listing_digest(conversion),
        "num_samples": {split: len(table) for split, table in conversion.splits.items()},
        "num_classes": len(conversion.classes),
        "levels": level_counts(conversion.classes),
        "multi_label": conversion.multi_label,
        "classes": conversion.classes,
        **_notes(conversion),
    }


def _notes(conversion: Conversion) -> dict[str, list[str]]:
    """``notes`` for people, if there are any."""
    notes = describe_notes(conversion.notes)
    return {"notes": notes} if notes else {}


def run_listing(request: JobRequest, context: ExecutionContext) -> JobResult:
    """List the source of ``execution.data_location["convert"]`` and commit the listing.

    Raises:
        UserError: the job has no source, it is not there, two images would have the same key, or an image of ``train``
            is in another split.
        BadDataError: it is not the source that was planned, or not as it was declared.
    """
    location = request.execution.data_location
    if "convert" not in location:
        raise UserError(f"{request.job} has no source to list; plan the sweep again with this version")
    context.report(Progress(phase="list"))
    conversion = list_source(location["convert"])
    found = describe_conversion(conversion)
    if found["listing"] != request.parameters["listing"]:
        message = f"{location['convert']['source']} has the listing {found['listing']}, the sweep was planned with "
        message += f"{request.parameters['listing']}: files, sizes or classes changed; submit the sweep again"
        raise BadDataError(message + ", or correct 'listing' where it is declared")
    _check_declared(location.get("declared", {}), found)
    for split, table in conversion.splits.items():
        table.check_keys(split)
    check_disjoint(conversion.splits)
    writer = ArtifactWriter(context.store, request)
    _write(writer, conversion, location["convert"])
    for note in describe_notes(conversion.notes):
        _LOG.warning("%s", note)
    samples = {f"num_{split}": float(number) for split, number in found["num_samples"].items()}
    metrics = {**samples, "num_classes": float(found["num_classes"])}
    return publish(writer, request, metrics=metrics, summary={"listing": found["listing"], **_notes(conversion)})


def _check_declared(declared: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """What the sweep.yaml declares of a source that nobody listed when it was planned must be so."""
    for name, value in declared.items():
        is_same = found[name] == value
        if name == "levels":
            is_same = all(found[name].get(level) == number for level, number in value.items())
        if name == "num_samples":
            is_same = all(found[name].get(split, 0) == number for split, number in value.items())
        if not is_same:
            raise BadDataError(f"{name} is declared as {value}, but the source has {found[name]}; correct the sweep")


def _write(writer: ArtifactWriter, conversion: Conversion, arguments: Mapping[str, Any]) -> None:
    roots = _roots(arguments)
    splits: dict[str, Any] = {}
    for split, table in conversion.splits.items():
        columns = table.columns()
        for column, values in columns.items():
            writer.add(f"{split}/{column}.npy", npy_bytes(values))
        splits[split] = {"columns": list(columns), "containers": [_relative(path, roots) for path in table.containers]}
    document = {"converter": conversion.converter, "multi_label": conversion.multi_label, "splits": splits}
    if roots["source"].is_file():
        document[_FOLDER] = str(roots["source"].parent)
    writer.add(_LISTING_PART, json.dumps(document, indent=1).encode())
    writer.add(CLASSES_PART, classes_bytes(conversion))


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """An opened listing."""

    classes: ClassRows
    multi_label: bool
    splits: Mapping[str, StoredItems]

    @classmethod
    def open(cls, store: ObjectStore, key: str, cache_dir: Path, arguments: Mapping[str, Any]) -> Self:
        """Open a committed listing; columns are memory-mapped from the node's cache.

        Args:
            store: the sweep's.
            key: of the artifact.
            cache_dir: the node's cache folder.
            arguments: of ``list_source``: where the source lies now.

        Raises:
            NotFoundError: it is not committed.
            CorruptObjectError: a part is not what the record says.
        """
        record, cache = read_record(store, key), ObjectCache(store, cache_dir)
        document, roots = json.loads(read_part(store, record, _LISTING_PART)), _roots(arguments)
        if roots["source"].is_file():
            roots["source"] = roots["source"].parent
        roots.setdefault("root", roots["source"])  # equal listings may come of sources with and without a root
        folder = document.get(_FOLDER)
        splits = {}
        for split, found in document["splits"].items():
            columns = {column: _column(cache, record, f"{split}/{column}.npy") for column in found["columns"]}
            splits[split] = StoredItems(columns, [_absolute(path, roots, folder) for path in found["containers"]])
        classes = parse_class_table(read_part(store, record, CLASSES_PART), f"the class table of {key}")
        return cls(classes=classes, multi_label=document["multi_label"], splits=splits)


def _column(cache: ObjectCache, record: Record, part: str) -> NDArray[Any]:
    stored = record.parts[part]
    path = cache.path(part_object(record, part), size_bytes=stored.size_bytes, digests=stored.digests)
    column: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return column


def _roots(arguments: Mapping[str, Any]) -> dict[str, Path]:
    request = convert_request(arguments)
    return {name: path for name in _ROOTS if (path := getattr(request, name)) is not None}


def _relative(path: str, roots: Mapping[str, Path]) -> Sequence[str]:
    """(name of a root, path below it), or a path alone."""
    for name, root in roots.items():
        if Path(path).is_relative_to(root):
            return [name, str(Path(path).relative_to(root))]
    return [path]


def _absolute(stored: Sequence[str], roots: Mapping[str, Path], folder: str | None) -> str:
    """The place now of what was stored; ``folder``: that of the source then, if it was a file."""
    if len(stored) == 1 and folder is not None:
        stored = _relative(stored[0], {"root": Path(folder)})
    return stored[0] if len(stored) == 1 else str(roots[stored[0]] / stored[1])


class ListedShards:
    """See `ShardSet`; which image goes into which shard follows from the listing and the layout alone."""

    def __init__(self, listing: Listing, layout: ShardingOptions) -> None:
        self._listing = listing
        found = {split: shard_rows(items, layout, split) for split, items in listing.splits.items()}
        self._places = [(split, rows) for split, shards in found.items() for rows in shards]
        self._names = [shard_name(split, number) for split, shards in found.items() for number in range(len(shards))]

    @property
    def names(self) -> Sequence[str]:
        """See `ShardSet`."""
        return self._names

    @property
    def classes(self) -> ClassRows:
        """See `ShardSet`."""
        return self._listing.classes

    def write(self, number: int, path: Path) -> None:
        """See `ShardSet`. Raises ``UserError`` if an image of the source is gone or another."""
        split, rows = self._places[number]
        items = (self._listing.splits[split].item(row) for row in rows.tolist())
        write_shard(source_samples(items, multi_label=self._listing.multi_label), path)


def open_listed(request: JobRequest, context: ExecutionContext) -> ListedShards:
    """The shards that a job with the input ``listing`` and the parameters ``shards`` is about.

    Raises:
        UserError: this code writes other shards than were planned, or the job has no source.
    """
    asked, location = request.parameters["shards"], request.execution.data_location
    if asked["version"] != VERSION:
        message = f"shards of version {asked['version']!r} were planned, this code writes version {VERSION}: plan again"
        raise UserError(message)
    if "convert" not in location:
        raise UserError(f"{request.job} has no source to read; plan the sweep again with this version")
    listing = Listing.open(context.store, request.inputs["listing"], context.cache, location["convert"])
    layout = ShardLayout(shard_bytes=asked["shard_bytes"], shuffle_seed=asked["shuffle_seed"])
    return ListedShards(listing, layout)


def list_source(arguments: Mapping[str, Any]) -> Conversion:
    """List a source.

    Args:
        arguments: ``format``, and the fields of `ConvertRequest` with paths as text; empty ones are left out.

    Raises:
        UserError: there is no such converter or source, the source does not fit, two images would have the same key, or
            an image of ``train`` is in another split.
    """
    name = arguments["format"]
    if name not in CONVERTERS:
        raise UserError(f"there is no converter {name!r}; there are {', '.join(CONVERTERS)}")
    request = convert_request(arguments)
    if request.splits and name in _FIXED_SPLITS:
        raise UserError(f"{name} has fixed files for train and val; remove --split")
    is_of_hub = name == "huggingface" and not request.source.is_absolute()
    if not request.source.exists() and not is_of_hub:
        raise UserError(f"{request.source} does not exist; name the folder or file to convert")
    conversion = CONVERTERS[name](request)
    if notes := level_column_notes(request.level_columns, conversion.classes):
        conversion = replace(conversion, notes={**conversion.notes, COLUMNS_FIELD: notes})
    for split, table in conversion.splits.items():
        if len(table) <= _CHECKED_EARLY:
            table.check_keys(split)
    if sum(map(len, conversion.splits.values())) <= _CHECKED_EARLY:
        check_disjoint(conversion.splits)
    return conversion


def convert_request(arguments: Mapping[str, Any]) -> ConvertRequest:
    """The request that arguments of `list_source` make."""
    wanted = {name: value for name, value in arguments.items() if name != "format"}
    for path in ("source", "labels", "root"):
        wanted[path] = Path(wanted[path]) if wanted.get(path) else None
    return ConvertRequest(**{**wanted, "level_columns": tuple(wanted.get("level_columns", ()))})
