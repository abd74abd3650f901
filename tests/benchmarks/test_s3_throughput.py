"""Bulk bytes to and from a real server on this machine: the store, against the server's own ceiling and obstore."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orchestrator.stack.description import BUCKET
from orchestrator.stack.s3_server import S3Server
from orchestrator.storage.bulk import fetch
from orchestrator.storage.digests import Algorithm, digests_of
from orchestrator.storage.s3.store import S3Store
from tests.benchmarks.s3_arms import MIB, NUM_PARALLEL, Arm, in_parallel, open_server, raw_get, raw_put, run

pytestmark = pytest.mark.bench

OBJECT_BYTES = 256 * MIB
PIECES = range(0, OBJECT_BYTES, OBJECT_BYTES // NUM_PARALLEL)
RANGE_BYTES = 16 * MIB
"""What suits this server best, in either arm: it reads its own chunks ahead within a request."""


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[S3Server]:
    with open_server(tmp_path / "server", monkeypatch) as found:
        yield found


@pytest.fixture
def content() -> bytes:
    return os.urandom(OBJECT_BYTES)


def test_bulk_download_rate_against_raw_requests(server: S3Server, content: bytes, tmp_path: Path) -> None:
    """Asked: >= 0.85 of ``raw``, which throws the bytes away; the other raw arms do part of what the store does."""
    store, target, digests = S3Store(BUCKET, "ours"), tmp_path / "target", digests_of(content)
    store.put("object", content)
    in_parallel(lambda start: raw_put(server, f"raw/{start}", content[start : start + len(content) // 4]), PIECES)
    memory = os.memfd_create("target")
    os.posix_fallocate(memory, 0, OBJECT_BYTES)

    def fetch_verified(descriptor: int, algorithm: Algorithm = Algorithm.BLAKE3) -> None:
        digest = digests.blake3 if algorithm is Algorithm.BLAKE3 else digests.sha256
        assert fetch(store, "object", descriptor, size_bytes=OBJECT_BYTES, algorithm=algorithm) == digest

    moves: dict[str, Callable[[], None]] = {
        "raw": lambda: in_parallel(lambda start: raw_get(server, f"raw/{start}", ignore), PIECES),
        "raw ranges": lambda: in_parallel(lambda start: raw_ranges(server, start), PIECES),
        "raw to file": lambda: raw_to_file(server, target),
        "raw to file + sha256": lambda: raw_to_file(server, target, digests.sha256),
        "ours to file": lambda: store.download("object", target),
        "ours to file + blake3": lambda: with_new_file(target, fetch_verified),
        "ours to memory + blake3": lambda: fetch_verified(memory),
        "ours to file + sha256": lambda: with_new_file(target, lambda file: fetch_verified(file, Algorithm.SHA256)),
        **obstore_down(server, target),
    }
    arms = {name: Arm(move, OBJECT_BYTES, before=lambda: remove(target)) for name, move in moves.items()}
    run(arms, server, ["raw", "raw ranges", "raw to file + sha256"])
    store.download("object", target)
    assert target.read_bytes() == content


def test_bulk_upload_rate_against_raw_requests(server: S3Server, content: bytes, tmp_path: Path) -> None:
    """Asked: >= 0.85 of raw requests; these travel as four objects, because one unsigned PUT cannot be split."""
    source, store = tmp_path / "source", S3Store(BUCKET, "ours")
    source.write_bytes(content)

    def put(start: int) -> None:
        raw_put(server, f"raw/{start}", content[start : start + len(content) // NUM_PARALLEL])

    arms = {
        "raw": Arm(lambda: in_parallel(put, PIECES), OBJECT_BYTES),
        "ours": Arm(lambda: ignore(store.put_file("object", source)), OBJECT_BYTES),
        **{name: Arm(move, OBJECT_BYTES) for name, move in obstore_up(server, source).items()},
    }
    run(arms, server, ["raw"])


def raw_ranges(server: S3Server, start: int) -> None:
    """A quarter of the store's own object, thrown away."""
    for first in range(start, start + OBJECT_BYTES // NUM_PARALLEL, RANGE_BYTES):
        raw_get(server, "ours/object", ignore, (first, first + RANGE_BYTES))


def raw_to_file(server: S3Server, target: Path, digest: str = "") -> None:
    """The same objects into a file, hashed afterwards if a digest is given."""

    def copy(descriptor: int) -> None:
        def get(start: int) -> None:
            position = start

            def write(chunk: memoryview) -> None:
                nonlocal position
                position += os.pwrite(descriptor, chunk, position)

            raw_get(server, f"raw/{start}", write)

        in_parallel(get, PIECES)

    with_new_file(target, copy)
    if digest:
        with target.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == digest


def with_new_file(target: Path, fill: Callable[[int], None]) -> None:
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        fill(descriptor)
    finally:
        os.close(descriptor)


def remove(target: Path) -> None:
    with suppress(FileNotFoundError):
        target.unlink()


def obstore_down(server: S3Server, target: Path) -> dict[str, Callable[[], None]]:
    """The same through obstore, where it is installed; it is no dependency."""
    try:
        import obstore
    except ImportError:
        return {}
    store = open_obstore(server, "ours")

    def copy(descriptor: int) -> None:
        def get(start: int) -> None:
            found = obstore.get(store, "object", options={"range": (start, start + OBJECT_BYTES // NUM_PARALLEL)})
            for chunk in found.stream(min_chunk_size=MIB):
                start += os.pwrite(descriptor, chunk, start)

        in_parallel(get, PIECES)

    return {"obstore to file": lambda: with_new_file(target, copy)}


def obstore_up(server: S3Server, source: Path) -> dict[str, Callable[[], None]]:
    try:
        import obstore
    except ImportError:
        return {}
    store = open_obstore(server, "obstore")

    def put() -> None:
        obstore.put(store, "object", source, use_multipart=True, chunk_size=16 * MIB, max_concurrency=NUM_PARALLEL)

    return {"obstore": put}


def open_obstore(server: S3Server, prefix: str) -> Any:
    from obstore.store import S3Store as Obstore

    environment = server.client_environment
    return Obstore(
        BUCKET,
        prefix=prefix,
        endpoint=server.endpoint_url,
        access_key_id=environment["AWS_ACCESS_KEY_ID"],
        secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region=environment["AWS_REGION"],
        checksum_algorithm="SHA256",
        client_options={"allow_http": True},
    )


def ignore(_: object) -> None:
    """Drop a result."""
