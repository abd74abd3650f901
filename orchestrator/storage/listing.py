"""Lists the shards of URIs by names, sizes and versions, without downloading them.

The *version* of an object changes when its content does and survives a copy: S3's ETag; for a local file, whose times
change with every copy, the sha256 of its size and of blocks spread over it. Two files can share a version and differ
between the blocks; the index holds the sha256 of all bytes, which every reader checks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Final
from urllib.parse import unquote, urlsplit

from orchestrator.core.errors import NotFoundError, StorageError
from orchestrator.storage.local import LocalStore
from orchestrator.storage.open import check_store_uri, find_objects, open_store
from orchestrator.storage.protocol import ObjectStat, ObjectStore, OpenableStore, check_name

_SHARD_SUFFIX: Final = ".tar"
_NUM_BLOCKS: Final = 16
_BLOCK_BYTES: Final = 16 * 1024
_NUM_THREADS: Final = 8
_NUM_NAMED: Final = 5
_EMPTY_TAR_BYTES: Final = 10_240
"""Size of a tar without members. Such shards are equal, whatever their splits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedShard:
    """An existing shard."""

    name: str
    store_uri: str
    object_name: str
    size_bytes: int
    version: str


def list_shards(patterns: Sequence[str]) -> list[ListedShard]:
    """Shards by name: all ``.tar`` of a folder (a URI that ends in ``/``), or the objects of a brace pattern.

    Raises:
        NotFoundError: shards of a pattern are missing, or a folder has none.
        StorageError: a URI is refused, two shards have one name, or a store does not answer.
    """
    found: dict[str, ListedShard] = {}
    folders = [pattern for pattern in patterns if pattern.endswith("/")]
    for folder in folders:
        check_store_uri(folder)  # as it was written, which messages then show
    for folder in dict.fromkeys(folder.rstrip("/") for folder in folders):
        _add(found, _list_folder(folder))
    wanted = find_objects(pattern for pattern in patterns if not pattern.endswith("/"))
    by_store: dict[str, list[str]] = {}
    for store_uri, name in wanted.values():
        by_store.setdefault(store_uri, []).append(name)
    for store_uri, names in by_store.items():
        _add(found, _find_named(store_uri, names))
    return [found[name] for name in sorted(found)]


def folder_shards(store_uri: str) -> list[str]:
    """Names of the shards directly in a folder."""
    return [stat.name for stat in _in_folder(open_store(store_uri))]


def not_held_out(splits: Mapping[str, Iterable[ListedShard]]) -> dict[str, str]:
    """Which splits have shards of the split ``train``, each with a message."""
    of_train = {mark for shard in splits.get("train", ()) for mark in _marks(shard)}
    found: dict[str, str] = {}
    for split, shards in splits.items():
        both = [shard for shard in shards if split != "train" and not of_train.isdisjoint(_marks(shard))]
        if both:
            more = f" (and {len(both) - 1} more)" if len(both) > 1 else ""
            message = (
                f"{both[0].name}{more} in {both[0].store_uri} is a shard of split 'train', too: its samples would "
            )
            found[split] = f"{message}be trained on and measured on; name the shards of 'train' without it"
    return found


def _marks(shard: ListedShard) -> set[tuple[int, str]]:
    """What only one shard has: its place, with links followed, and its content, of which there may be copies."""
    place = f"{shard.store_uri}/{shard.object_name}"
    if place.startswith("file:"):
        place = os.path.realpath(f"{unquote(urlsplit(shard.store_uri).path)}/{shard.object_name}")
    has_content = shard.version and shard.size_bytes > _EMPTY_TAR_BYTES
    return {(0, place), *([(shard.size_bytes, shard.version)] if has_content else ())}


def listing_digest(splits: Mapping[str, Iterable[ListedShard]]) -> str:
    """Sha256 over the sorted lines ``<split>/<basename> <size> <version>``: independent of where the shards lie."""
    lines = [
        f"{split}/{shard.name} {shard.size_bytes} {shard.version}\n"
        for split, shards in splits.items()
        for shard in shards
    ]
    return sha256("".join(sorted(lines)).encode()).hexdigest()


def _list_folder(store_uri: str) -> dict[str, ListedShard]:
    store = open_store(store_uri)
    stats = _in_folder(store)
    if not stats:
        raise NotFoundError(f"{store_uri} has no shards: no object directly in it ends in {_SHARD_SUFFIX}")
    return _versions(store, store_uri, stats)


def _in_folder(store: OpenableStore) -> list[ObjectStat]:
    """Shards directly in a folder; deeper ones do not count."""
    for name in store.refused_children(""):
        if name.endswith(_SHARD_SUFFIX):  # in no listing: the data set would lack that shard, and nobody would say so
            check_name(name)
    if isinstance(store, LocalStore):  # other things in it are not walked, nor need they be readable
        return _found(store, (name for name in store.list_children("") if name.endswith(_SHARD_SUFFIX)))
    return [stat for stat in store.list_objects("") if "/" not in stat.name and stat.name.endswith(_SHARD_SUFFIX)]


def _found(store: LocalStore, names: Iterable[str]) -> list[ObjectStat]:
    stats = []
    for name in names:
        with suppress(NotFoundError):  # a folder of that name, or deleted meanwhile
            stats.append(store.stat(name))
    return stats


def _add(found: dict[str, ListedShard], more: Mapping[str, ListedShard]) -> None:
    """A second shard of the same name would replace the first one in the data set."""
    for name, shard in more.items():
        if found.setdefault(name, shard).store_uri != shard.store_uri:
            places = f"{found[name].store_uri} and {shard.store_uri}"
            raise StorageError(f"{places} both have a shard {name}; names must be unique within a split: rename one")


def _find_named(store_uri: str, names: Sequence[str]) -> dict[str, ListedShard]:
    store = open_store(store_uri)
    stats = _found(store, names) if isinstance(store, LocalStore) else store.list_objects(_common_prefix(names))
    there = {stat.name: stat for stat in stats}
    if missing := sorted(set(names) - there.keys()):
        shown = ", ".join(missing[:_NUM_NAMED]) + (", ..." if len(missing) > _NUM_NAMED else "")
        raise NotFoundError(f"{len(missing)} of {len(names)} shards are not in {store_uri}: {shown}")
    return _versions(store, store_uri, [there[name] for name in names])


def _common_prefix(names: Sequence[str]) -> str:
    first, last = min(names), max(names)
    length = next(
        (at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )
    return first[:length]


def _versions(store: ObjectStore, store_uri: str, stats: Sequence[ObjectStat]) -> dict[str, ListedShard]:
    if store_uri.startswith("file:"):
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            versions = list(pool.map(lambda stat: _sampled_sha256(store, stat), stats))
    else:
        versions = [stat.etag for stat in stats]
    return {
        stat.name: ListedShard(
            name=stat.name, store_uri=store_uri, object_name=stat.name, size_bytes=stat.size_bytes, version=version
        )
        for stat, version in zip(stats, versions, strict=True)
    }


def _sampled_sha256(store: ObjectStore, stat: ObjectStat) -> str:
    size = stat.size_bytes
    digest = sha256(str(size).encode())
    if size <= _NUM_BLOCKS * _BLOCK_BYTES:
        digest.update(store.get(stat.name))
        return digest.hexdigest()
    for block in range(_NUM_BLOCKS):
        start = (size - _BLOCK_BYTES) * block // (_NUM_BLOCKS - 1)
        digest.update(store.get_range(stat.name, start, _BLOCK_BYTES))
    return digest.hexdigest()
