"""Shards of others on a real S3 server, in a place of their own beside the sweep's store."""

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.errors import NotFoundError
from orchestrator.stack.s3_server import S3Server
from orchestrator.storage.listing import list_shards, listing_digest
from orchestrator.storage.s3.store import S3Store
from tests.data_jobs import encoded, tar_of
from tests.s3_server import s3_server, s3_store
from workloads.commands.data import index, stats
from workloads.data.scan_splits import CHUNK_BYTES

__all__ = ["s3_server"]


@pytest.fixture
def shards(s3_server: S3Server, tmp_path: Path) -> S3Store:
    store = s3_store(tmp_path)
    store.put("classes.json", json.dumps([{"class": leaf, "name": f"c{leaf}"} for leaf in range(2)]).encode())
    for shard in range(2):
        noise = encoded("PNG", size=(1200, 1200), seed=shard)  # several chunks of a scan's stream
        members = [(f"{shard}{row}.{ext}", body) for row in range(3) for ext, body in (("png", noise), ("cls", b"1"))]
        store.put(f"train-{shard:03d}.tar", tar_of(members))
    return store


def run_index(store: S3Store, **fields: Any) -> dict[str, Any]:
    target = {"place": store.uri, "splits": {}, "classes": f"{store.uri}/classes.json", "num_classes": 0}
    wanted = {"policy": "fail", "budget": 0.0, "write": True, "num_processes": 1, **fields}
    return index({"target": {**target, "multi_label": False}, **wanted})


def test_s3_shards_are_streamed_indexed_and_described(shards: S3Store) -> None:
    assert shards.stat("train-000.tar").size_bytes > CHUNK_BYTES
    found = run_index(shards)
    assert found["splits"]["train"]["num_samples"] == 6
    assert stats({"place": shards.uri})["samples_per_class"]["train"]["leaf"]["max"] == 6


def test_s3_listing_follows_content_and_names_missing_shards(shards: S3Store) -> None:
    pattern = f"{shards.uri}/train-{{000..001}}.tar"
    before = listing_digest({"train": list_shards([pattern])})
    shards.put("train-001.tar", shards.get("train-001.tar"))
    assert listing_digest({"train": list_shards([pattern])}) == before
    shards.put("train-001.tar", shards.get("train-000.tar"))
    assert listing_digest({"train": list_shards([pattern])}) != before
    with pytest.raises(NotFoundError, match=r"1 of 3 shards are not in s3://.*train-002\.tar"):
        list_shards([f"{shards.uri}/train-{{000..002}}.tar"])
