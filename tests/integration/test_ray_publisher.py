"""The publisher as a detached actor: it is started again when it hangs, and goes on where it publishes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.controller.actor import PublisherActor
from orchestrator.controller.connect import PUBLISHER_NAME, ensure_publisher, publishes_elsewhere
from orchestrator.sweeps.progress import read_trouble
from tests.tracking_sweeps import big_sweep

pytestmark = pytest.mark.slow
HANGS_AFTER_S = 20.0
"""More than the import of MLflow and a new database take on a busy machine: its process would end in them for ever."""


class ImpatientPublisher(PublisherActor):
    """Ends itself sooner."""

    hangs_after_s = HANGS_AFTER_S


@pytest.fixture
def dripping_server() -> Iterator[str]:
    """Address of a server that sends one byte of its answer each second, so that no client's timeout ends the call."""
    over = threading.Event()

    def drip(connection: socket.socket) -> None:
        with connection:
            connection.recv(1)
            while not over.wait(1.0):
                try:
                    connection.sendall(b"H")
                except OSError:
                    return

    def serve(server: socket.socket) -> None:
        while not over.is_set():
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=drip, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        over.set()


def test_publisher_that_hangs_is_started_again_and_publishes_the_other_sweeps(
    ray_cluster, namespace, store, tmp_path, until, dripping_server
) -> None:
    for sweep in ("a", "b"):
        big_sweep(2, sweep=sweep, store=store, tracking_uri=dripping_server)
    big_sweep(2, sweep="c", store=store)
    database = f"sqlite:///{tmp_path}/mlflow.db"
    publisher = (
        ray_cluster.remote(ImpatientPublisher)
        .options(name=PUBLISHER_NAME, namespace=namespace, num_cpus=0, max_restarts=-1)
        .remote(store.uri, database)
    )
    first = ray_cluster.get(publisher.ping.remote())["pid"]

    def pong() -> dict[str, object]:
        try:
            return dict(ray_cluster.get(publisher.ping.remote(), timeout=10))
        except ray_cluster.exceptions.RayError:
            return {"pid": first, "caught_up": []}

    until(lambda: pong()["pid"] != first, 120.0)
    until(lambda: pong()["caught_up"] == ["c"], 60.0)
    assert "made no progress" in read_trouble(store, "a")[0]
    ray_cluster.kill(publisher)


def test_publisher_that_publishes_elsewhere_goes_on_and_is_told(ray_cluster, namespace, store, tmp_path) -> None:
    here, elsewhere = (f"sqlite:///{tmp_path}/{name}.db" for name in ("here", "elsewhere"))
    found: list[Any] = [ensure_publisher(store.uri, uri, namespace) for uri in (here, elsewhere)]
    assert len({ray_cluster.get(publisher.ping.remote())["pid"] for publisher in found}) == 1
    assert publishes_elsewhere(found[1], here) == ""
    assert "uses another tracking server than the settings of this command" in publishes_elsewhere(found[1], elsewhere)
    ray_cluster.kill(found[0])
