"""From a listed source to shards: several processes, the same bytes for any number of them, and resumable.

The shard of each image follows only from the listing, before anything is written; so shards are independent, and a run
that was killed continues with the missing ones. ``dataset.json`` is written last: it is the commit.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import file_digest, sha256
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import NotFoundError, UserError
from orchestrator.core.units import printable
from orchestrator.storage import ObjectStore, open_store
from orchestrator.storage.dataset_files import (
    CLASSES_FILE,
    DATASET_FILE,
    DatasetFile,
    ShardEntry,
    dataset_digest,
    level_counts,
    read_dataset_file,
)
from orchestrator.storage.files import open_regular, read_regular, scratch_folder
from orchestrator.storage.local import LocalStore
from workloads.convert.arrays import forget, read_row
from workloads.convert.items import (
    WHOLE_FILE,
    Conversion,
    Items,
    ShardingOptions,
    SourceItem,
    WriteRequest,
    check_disjoint,
    row_of_offset,
)
from workloads.data.images import is_image_form
from workloads.data.shards import shard_name, write_shard
from workloads.runtime.processes import owned_pool
from workloads.runtime.streams import Purpose, Stage, permutation, seed_sequence

VERSION: Final = 1
"""Bumped when the same source gives other shards. It was not when files that are named as images and are none came to
be packed as nothing: shards of both kinds count such a sample as bad."""

_LOG = logging.getLogger(__name__)
_RECEIPTS: Final = "conversion"
_RECEIPT: Final = re.compile(rf"{_RECEIPTS}/[0-9a-f]{{16}}/.+-[0-9]{{6}}\.tar\.json")
_HEADERS_BYTES: Final = 3 * 512 + 2 * 512
"""Of a sample beside its image: three headers at most, its label, and what rounds the image up to a block."""
_OPEN_FILES: Final = 256

OnShard = Callable[[ShardEntry], None]
"""Called for each shard that is there, also for those that an earlier run wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTask:
    """One shard to write."""

    name: str
    items: tuple[SourceItem, ...]
    multi_label: bool
    destination_uri: str
    receipt: str
    """Object that says that the shard is whole."""
    untrue: tuple[str, ...]
    """Those of other conversions, which say so of a shard that this one replaces."""


def write_dataset(conversion: Conversion, request: WriteRequest, on_shard: OnShard) -> DatasetFile:
    """Write all shards that are not there yet, then ``classes.json`` and ``dataset.json``.

    Raises:
        UserError: the destination holds another data set, an image of ``train`` is in another split, or an image of the
            source cannot be read.
        StorageError: the destination cannot be written.
    """
    store = open_store(request.destination_uri)
    source = _fingerprint(conversion, request)
    done = _finished(store, request, source)
    if done is not None:
        return done
    for split, table in conversion.splits.items():
        table.check_keys(split)
    check_disjoint(conversion.splits)
    plan = {split: shard_rows(table, request, split) for split, table in conversion.splits.items()}
    receipts = _Receipts(store, source["fingerprint"])
    entries = _write_all(conversion, plan, request, receipts, on_shard)
    dataset = _describe(store, conversion, entries, source)
    # Last: a reader that finds this file finds everything it names.
    store.put(DATASET_FILE, dataset.to_bytes())
    receipts.delete()
    tidy_folder(store)
    return dataset


def tidy_folder(store: ObjectStore) -> None:
    """Leave nothing but objects in a folder that people look at and copy."""
    if isinstance(store, LocalStore):
        store.remove_empty_staging()


def shard_rows(table: Items, layout: ShardingOptions, split: str) -> list[NDArray[np.int64]]:
    """Rows of each shard: the listing's order or one drawn from the seed, cut where a shard would become too large."""
    order: NDArray[np.int64] = np.arange(len(table))
    if layout.shuffle_seed is not None:
        order = permutation(
            seed_sequence(layout.shuffle_seed, Stage.DATASET, Purpose.ORDER, *split.encode()), len(table)
        )
    ends = np.cumsum(table.lengths[order] + _HEADERS_BYTES)
    shards, first, before = list[NDArray[np.int64]](), 0, 0
    while first < len(order):
        # At least one: an image may be larger than a shard is to become.
        stop = max(first + 1, int(np.searchsorted(ends, before + layout.shard_bytes, side="right")))
        shards.append(order[first:stop])
        first, before = stop, int(ends[stop - 1])
    return shards


class _Receipts:
    """Which shards an earlier run of the same conversion finished."""

    def __init__(self, store: ObjectStore, fingerprint: str) -> None:
        self._store, self._folder = store, f"{_RECEIPTS}/{fingerprint[:16]}"

    def name(self, shard: str) -> str:
        """Object name of a shard's receipt."""
        return f"{self._folder}/{shard}.json"

    def read(self) -> dict[str, ShardEntry]:
        """Finished shards by name; a receipt whose shard is gone or has another size does not count."""
        found = [
            ShardEntry(**json.loads(self._store.get(stat.name)))
            for stat in self._store.list_objects(f"{self._folder}/")
        ]
        return {entry.name: entry for entry in found if self._is_there(entry)}

    def others(self) -> dict[str, list[str]]:
        """By shard, receipts of other conversions: their shards have the names of ours."""
        found: dict[str, list[str]] = {}
        for name in self._all():
            if not name.startswith(f"{self._folder}/"):
                found.setdefault(name.rpartition("/")[2].removesuffix(".json"), []).append(name)
        return found

    def delete(self) -> None:
        """Delete all, also of other conversions."""
        for name in self._all():
            self._store.delete(name)

    def _all(self) -> list[str]:
        names = [stat.name for stat in self._store.list_objects(f"{_RECEIPTS}/")]
        return [name for name in names if _RECEIPT.fullmatch(name)]

    def _is_there(self, entry: ShardEntry) -> bool:
        try:
            return self._store.stat(entry.name).size_bytes == entry.size_bytes
        except NotFoundError:
            return False


def _write_all(
    conversion: Conversion,
    plan: dict[str, list[NDArray[np.int64]]],
    request: WriteRequest,
    receipts: _Receipts,
    on_shard: OnShard,
) -> dict[str, tuple[ShardEntry, ...]]:
    finished, others = receipts.read(), receipts.others()
    names = {split: [shard_name(split, number) for number in range(len(rows))] for split, rows in plan.items()}
    for entry in finished.values():
        on_shard(entry)
    tasks = (
        ShardTask(
            name=name,
            items=tuple(conversion.splits[split].item(row) for row in plan[split][number].tolist()),
            multi_label=conversion.multi_label,
            destination_uri=request.destination_uri,
            receipt=receipts.name(name),
            untrue=tuple(others.get(name, ())),
        )
        for split in plan
        for number, name in enumerate(names[split])
        if name not in finished
    )
    for entry in _written(tasks, request.num_processes):
        finished[entry.name] = entry
        on_shard(entry)
    return {split: tuple(finished[name] for name in names[split]) for split in plan}


def _written(tasks: Iterator[ShardTask], num_processes: int) -> Iterator[ShardEntry]:
    if num_processes < 2:
        yield from map(write_one, tasks)
        return
    with owned_pool(num_processes) as pool:
        pending = {pool.submit(write_one, task) for task in islice(tasks, 2 * num_processes)}
        while pending:
            done = next(as_completed(pending))
            pending.remove(done)
            # One more for the one that is done: lists of images are made when they are needed.
            pending |= {pool.submit(write_one, task) for task in islice(tasks, 1)}
            yield done.result()


def write_one(task: ShardTask) -> ShardEntry:
    """Write one shard and its receipt.

    Raises:
        UserError: an image of the source is gone, unreadable or shorter than it was.
    """
    store = open_store(task.destination_uri)
    with scratch_folder("shard") as folder:
        path = folder / task.name
        num_samples = write_shard(source_samples(task.items, multi_label=task.multi_label), path)
        with path.open("rb") as file:
            digest = file_digest(file, "sha256").hexdigest()
        entry = ShardEntry(name=task.name, size_bytes=path.stat().st_size, sha256=digest, num_samples=num_samples)
        for receipt in task.untrue:
            store.delete(receipt)
        store.put_file(task.name, path)
    # After the shard is durable under its name: a crash in between writes it once more.
    store.put(task.receipt, json.dumps(asdict(entry)).encode())
    return entry


def source_samples(items: Iterable[SourceItem], *, multi_label: bool) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Keys and members of some images, as `write_shard` takes them. Raises ``UserError``: an image cannot be read.

    What is called an image and is none (``x.png`` with the content of another file) is never packed: in its place is
    a member of zero bytes, a bad sample for whoever indexes the shards, by the data set's policy.
    """
    with SourceFiles() as files:
        for item in items:
            content, label = files.read(item), _label(item.leaves, multi_label=multi_label)
            if content and not is_image_form(content):
                message = "%s (%s) is not an image: nothing of it is packed, and its sample is bad"
                _LOG.warning(message, printable(item.path), printable(item.key))
                content = b""
            yield item.key, {item.extension: content, **label}


def _label(leaves: Sequence[int], *, multi_label: bool) -> dict[str, bytes]:
    if multi_label:
        return {"json": json.dumps({"labels": list(leaves)}).encode()}
    return {"cls": str(leaves[0]).encode()}


class SourceFiles:
    """Reads images of a source; keeps the tars open that were used last."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])
        forget()

    def read(self, item: SourceItem) -> bytes:
        """The encoded image. Raises ``UserError`` if it is not as it was listed."""
        row = row_of_offset(item.offset_bytes)
        try:
            if row >= 0:
                content = read_row(Path(item.path), row)
            elif item.offset_bytes == WHOLE_FILE:
                content = read_regular(Path(item.path))
            else:
                content = os.pread(self._descriptor(item.path), item.length_bytes, item.offset_bytes)
        except OSError as error:
            raise UserError(f"{item.path} cannot be read: {error.strerror}; repair the source and run again") from error
        if len(content) != item.length_bytes:
            message = f"{item.path} ({item.key}) has {len(content)} bytes, it was listed with {item.length_bytes}"
            raise UserError(message + ": the source changed; run again when it is not being written")
        return content

    def _descriptor(self, path: str) -> int:
        if path not in self._open:
            with open_regular(Path(path))[0] as file:
                self._open[path] = os.dup(file.fileno())
            if len(self._open) > _OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(path)
        return self._open[path]


def _fingerprint(conversion: Conversion, request: WriteRequest) -> dict[str, Any]:
    """What decides the bytes of the shards, and their digest."""
    decides = {
        "version": VERSION,
        "converter": conversion.converter,
        "multi_label": conversion.multi_label,
        "shard_bytes": request.shard_bytes,
        "shuffle_seed": request.shuffle_seed,
        "classes": sha256(classes_bytes(conversion)).hexdigest(),
        "splits": {split: table.digest() for split, table in conversion.splits.items()},
    }
    fingerprint = sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    return {**decides, "fingerprint": fingerprint}


def _finished(store: ObjectStore, request: WriteRequest, source: dict[str, Any]) -> DatasetFile | None:
    with suppress(NotFoundError):
        found = read_dataset_file(request.destination_uri)
        if found.source.get("fingerprint") == source["fingerprint"]:
            return found
        message = f"{store.uri} holds another data set (dataset.json: made by {found.source.get('converter')!r} from "
        raise UserError(message + "other images or with other options); choose an empty destination")
    return None


def classes_bytes(conversion: Conversion) -> bytes:
    """The class table as it stands beside the shards."""
    return json.dumps(conversion.classes, indent=1).encode()  # columns keep their order: levels, coarse to fine


def _describe(
    store: ObjectStore, conversion: Conversion, entries: dict[str, tuple[ShardEntry, ...]], source: dict[str, Any]
) -> DatasetFile:
    content = classes_bytes(conversion)
    store.put(CLASSES_FILE, content)
    return DatasetFile(
        splits=entries,
        num_classes=len(conversion.classes),
        levels=level_counts(conversion.classes),
        classes_sha256=sha256(content).hexdigest(),
        digest=dataset_digest(entries),
        multi_label=conversion.multi_label,
        class_counts={split: table.class_counts(len(conversion.classes)) for split, table in conversion.splits.items()},
        source=source,
    )
