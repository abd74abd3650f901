"""Nodes and idle runners as the live view shows them, read from the store alone."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable

from orchestrator.cli.commands.live_rows import Reader
from orchestrator.cli.commands.live_view import LiveView
from orchestrator.core.contract import Resources
from orchestrator.state.nodes import Node
from orchestrator.storage.layout import nodes_name
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps.progress import PRESENCE_EVERY_S, NodePresence, PresenceBoard, read_presence
from orchestrator.testing import ScriptedBackend
from orchestrator.testing.scripted import Hang
from tests.scripted_sweep import CLUSTER, World, make_job

BUSY = Node(name="node-1", resources=Resources(cpus=4.0, gpus=2.0), accelerator="H100", is_spot=True)
IDLE = Node(name="node-2", resources=Resources(cpus=8.0, gpus=8.0), leaves_at_s=100.0)
GONE = Node(name="node-3", resources=Resources(cpus=8.0), is_alive=False)


def test_presence_through_the_store_is_what_was_shown(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    PresenceBoard(store, "c").show([BUSY, IDLE, GONE], {"node-2": 3}, 0.0)
    assert read_presence(store, "c") == (
        NodePresence(name="node-1", cpus=4.0, gpus=2.0, accelerator="H100", is_spot=True),
        NodePresence(name="node-2", cpus=8.0, gpus=8.0, is_leaving=True, idle_runners=3),
    )


def test_presence_is_written_when_it_changed_and_not_too_often(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    board = PresenceBoard(store, "c")
    board.show([BUSY], {}, 100.0)
    assert not board.is_due(100.0 + PRESENCE_EVERY_S - 0.1)
    assert board.is_due(100.0 + PRESENCE_EVERY_S)
    store.delete(nodes_name("c"))
    board.show([BUSY], {}, 110.0)
    assert read_presence(store, "c") == ()  # nothing had changed
    board.show([BUSY], {"node-1": 1}, 120.0)
    assert read_presence(store, "c")[0].idle_runners == 1


@pytest.mark.parametrize("content", [b"", b"[]", b'{"nodes": 3}', b'{"nodes": [{"cpus": 1}]}', b'{"nodes": [7]}'])
def test_presence_that_is_damaged_counts_as_unknown(tmp_path: Path, content: bytes) -> None:
    store = LocalStore(tmp_path)
    store.put(nodes_name("c"), content)
    assert read_presence(store, "c") == ()
    assert read_presence(store, "nobody") == ()


@pytest.fixture
def world(tmp_path: Path) -> World:
    """One job runs on one node of two; a runner waits on the other."""
    store = LocalStore(tmp_path)
    world = World(tmp_path, ScriptedBackend(store, {"dataset/0": [Hang()]}), store=store)
    world.submit(make_job("dataset/0"))
    world.tick_until(lambda: world.is_running("dataset/0"))
    PresenceBoard(store, CLUSTER).show([BUSY, IDLE], {"node-2": 3}, 0.0)
    return world


def test_live_view_shows_idle_nodes_and_the_runners_that_wait_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.services.status.time.time", world.clock)
    app = LiveView(world.store, "sweep", every_s=0.2)

    async def script(pilot: Pilot[str]) -> None:
        end_s = time.monotonic() + 30.0
        while not app.shown.nodes:
            assert time.monotonic() < end_s
            await pilot.pause(0.02)
        table = app.query_one("#nodes", DataTable)
        rows = [[str(cell) for cell in table.get_row(key)] for key in table.rows]
        assert [row[:4] for row in rows] == [["node-1", "1", "0/2", "0"], ["node-2", "0", "0/8", "3"]]
        assert rows[1][-1] == "about to go"

    async def run() -> None:
        async with app.run_test(size=(160, 50)) as pilot:
            await script(pilot)

    asyncio.run(run())


def test_nodes_of_a_cluster_without_a_controller_are_not_shown(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.services.status.time.time", lambda: world.clock() + 3600.0)
    assert [row.name for row in Reader(world.store).look("sweep").nodes] == ["node-1"]
