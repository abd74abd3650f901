"""How often a controller asks the store for messages: idle sweeps must cost it nothing, and no message be missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest

from orchestrator.controller.controller import LIST_EVERY_S, Controller
from orchestrator.storage import request_pool
from orchestrator.storage.layout import MARKERS, inbox_folder, inbox_message, marker_name
from orchestrator.storage.local import LocalStore
from orchestrator.storage.protocol import ObjectStat
from orchestrator.sweeps import client
from orchestrator.sweeps.inbox_polling import EVERY_S
from orchestrator.sweeps.lease import LEASE_DURATION_S, read_lease
from orchestrator.sweeps.requests import Ownership, Pause, new_envelope, post, read_markers
from orchestrator.testing import Hang, ScriptedBackend
from orchestrator.testing.faults import Fault, FaultyStore, Moment
from tests.scripted_sweep import CLUSTER, World, make_job, make_plan


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Two sweeps that have ended."""
    world = World(tmp_path)
    for sweep in ("old-1", "old-2"):
        world.submit(make_job("dataset/0"), sweep=sweep)
    world.finish("old-1", "old-2")
    world.clock.advance(2 * EVERY_S)
    world.tick()
    return world


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Requests to the store by what is asked."""
    counts: Counter[str] = Counter()
    with monkeypatch.context() as patch:
        for method in ("list_children", "list_objects", "exists", "get", "get_with_stat"):
            original = getattr(LocalStore, method)

            def call(store, name, *arguments, _original=original, **options):
                counts[name] += 1
                return _original(store, name, *arguments, **options)

            patch.setattr(LocalStore, method, call)
        yield counts


def pause_sweeps(world: World, number: int) -> None:
    for index in range(number):
        sweep = f"idle-{index}"
        world.submit(make_job(f"dataset/{index}"), sweep=sweep)
        client.pause(world.store, sweep, now=world.clock())
        world.controller.wake()
        world.tick()


def test_idle_sweeps_are_looked_at_once_a_minute_and_not_all_in_one_round(world, monkeypatch) -> None:
    pause_sweeps(world, 10)
    world.clock.advance(EVERY_S)
    world.tick()
    with counted(monkeypatch) as counts:
        per_round: list[int] = []
        for _ in range(120):
            before = counts.total()
            world.controller.tick()
            per_round.append(counts.total() - before)
            world.clock.advance(1.0)
    assert max(per_round) <= 16
    assert all(1 <= counts[inbox_folder(f"idle-{index}")] <= 3 for index in range(10))
    assert counts[MARKERS] >= 119
    assert counts["sweeps/"] <= 120 / LIST_EVERY_S + 1


def test_message_is_followed_in_the_next_round_and_leaves_no_marker(world: World) -> None:
    message = world.submit(make_job("dataset/0"), make_job("dataset/2"), sweep="old-1")
    assert read_markers(world.store) == [("old-1", message)]
    world.clock.advance(1.0)
    world.controller.tick()
    assert message in world.snapshot("old-1").handled
    assert read_markers(world.store) == []


@pytest.mark.parametrize("sweep", ["old-1", "new"])
def test_message_without_a_marker_is_followed_within_a_minute(world: World, sweep: str) -> None:
    message = world.submit(make_job("dataset/0"), make_job("dataset/2"), sweep=sweep)
    world.store.delete(f"{MARKERS}{sweep}/{message}")
    begun_s = world.clock()
    world.tick_until(lambda: message in world.snapshot(sweep).handled)
    assert world.clock() - begun_s <= EVERY_S + 2.0


def test_marker_comes_after_its_message_and_one_that_cannot_be_written_is_no_error(world: World) -> None:
    store = FaultyStore(world.store, [Fault(moment=Moment.ERROR_BEFORE, within=f"{MARKERS}old-2/")])
    for sweep in ("old-1", "old-2"):
        message_id = client.pause(store, sweep, now=world.clock())
        assert store.writes[-2:] == [inbox_message(sweep, message_id), marker_name(sweep, message_id)]
    assert [sweep for sweep, _ in read_markers(world.store)] == ["old-1"]


@pytest.mark.parametrize("has_marker", [True, False])
def test_clock_that_was_put_back_delays_no_message(world: World, has_marker: bool) -> None:
    world.controller.tick()
    world.clock.advance(-3600.0)
    message = world.submit(make_job("dataset/0"), make_job("dataset/2"), sweep="old-1")
    if not has_marker:
        world.store.delete(f"{MARKERS}old-1/{message}")
    begun_s = world.clock()
    world.tick_until(lambda: message in world.snapshot("old-1").handled)
    assert world.clock() - begun_s <= (2.0 if has_marker else EVERY_S + 2.0)


def test_clock_that_was_put_back_does_not_keep_the_lease_from_being_renewed(world: World) -> None:
    world.clock.advance(-3600.0)
    world.controller.tick()
    lease = read_lease(world.store, CLUSTER)
    assert lease is not None
    assert lease.expires_at_s == world.clock() + LEASE_DURATION_S


def test_marker_without_a_message_costs_one_look_and_goes_after_a_minute(world: World, monkeypatch) -> None:
    world.store.put(f"{MARKERS}old-1/settled", b"")
    with counted(monkeypatch) as counts:
        for _ in range(50):
            world.controller.tick()
            world.clock.advance(1.0)
        assert counts[inbox_folder("old-1")] <= 2
        assert read_markers(world.store) == [("old-1", "settled")]
        for _ in range(100):
            world.controller.tick()
            world.clock.advance(1.0)
    assert read_markers(world.store) == []


def test_message_that_could_not_be_settled_is_tried_again_at_once(world: World) -> None:
    world.submit(make_job("dataset/3"), sweep="new")
    world.tick()
    store = FaultyStore(world.store, [Fault(moment=Moment.ERROR_BEFORE, within="sweeps/new/journal", nth=2)])
    world.new_controller(store)
    world.tick()
    message = Pause(**new_envelope({"now": world.clock()}))
    post(world.store, "new", message)
    begun_s = world.clock()
    world.tick_until(lambda: message.message_id in world.snapshot("new").handled)
    assert world.clock() - begun_s <= 5.0


def take_running_sweep(world: World) -> None:
    """A job of sweep ``taken`` runs, and cluster-b is asked to take the sweep over."""
    world.backend = ScriptedBackend(world.store, {"dataset/4": [Hang()]})
    world.new_controller()
    world.submit(make_job("dataset/4"), sweep="taken")
    world.tick_until(lambda: world.is_running("dataset/4"))
    plan = make_plan(make_job("dataset/4"), sweep="taken", store_uri=world.store.uri)
    client.submit(world.store, plan, "", "cluster-b", ownership=Ownership.TAKE, now=world.clock())


def test_controller_whose_silent_sweep_was_taken_notices_by_the_marker(world: World) -> None:
    take_running_sweep(world)
    other = Controller(world.store, ScriptedBackend(world.store), "cluster-b", "holder-b", world.clock)
    other.tick()
    assert world.snapshot("taken").cluster == "cluster-b"
    assert "taken" in {one.sweep for one in world.controller.snapshots}
    world.clock.advance(1.0)
    for _ in range(3):
        world.controller.tick()
        world.clock.advance(1.0)
    assert "taken" not in {one.sweep for one in world.controller.snapshots}


def test_controller_that_saw_who_would_take_its_silent_sweep_notices_when_it_is_taken(world: World) -> None:
    take_running_sweep(world)
    world.clock.advance(1.0)
    world.controller.tick()
    assert world.snapshot("taken").cluster == CLUSTER
    Controller(world.store, ScriptedBackend(world.store), "cluster-b", "holder-b", world.clock).tick()
    for _ in range(3):
        world.clock.advance(1.0)
        world.controller.tick()
    assert "taken" not in {one.sweep for one in world.controller.snapshots}


class LateStore(LocalStore):
    """Where a message comes after its inbox was listed, and before the markers are."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.message: Pause | None = None
        self._is_listed = Event()

    def list_children(self, prefix: str, *, start_after: str = "") -> list[str]:
        found = super().list_children(prefix, start_after=start_after)
        if prefix == inbox_folder("old-1"):
            self._is_listed.set()
        return found

    def list_objects(self, prefix: str) -> Iterator[ObjectStat]:
        if prefix == MARKERS and self.message is not None:
            assert self._is_listed.wait(30.0)
            message, self.message = self.message, None
            post(LocalStore(self.root), "old-1", message)
        return super().list_objects(prefix)


def test_message_that_comes_between_two_looks_of_a_round_is_followed_in_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_pool, "_LOCAL", ())
    store = LateStore(Path(world.store.uri.removeprefix("file://")))
    world.new_controller(store)
    world.tick()
    world.clock.advance(1.0)
    store._is_listed.clear()
    store.message = message = Pause(**new_envelope({"now": world.clock()}))
    world.controller.wake("old-1")
    world.controller.tick()
    assert message.message_id in world.snapshot("old-1").handled
