"""How often a controller asks the store for messages: what has ended long ago must not cost as what runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from orchestrator.controller.controller import QUIET_AFTER_S, QUIET_EVERY_S
from orchestrator.storage.layout import inbox_folder
from orchestrator.storage.local import LocalStore
from tests.scripted_sweep import World, make_job

ENDED = ("old-1", "old-2")


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Two sweeps that ended long ago."""
    world = World(tmp_path)
    for sweep in ENDED:
        world.submit(make_job("dataset/0"), sweep=sweep)
    world.finish(*ENDED)
    world.clock.advance(QUIET_AFTER_S + 1.0)
    world.tick()
    return world


def looks(world: World, monkeypatch: pytest.MonkeyPatch, seconds: int) -> Counter[str]:
    """Looks into inboxes, by folder, within so many rounds of a second each."""
    counts: Counter[str] = Counter()
    original = LocalStore.list_children

    def counted(store: LocalStore, prefix: str) -> list[str]:
        counts[prefix] += 1
        return original(store, prefix)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "list_children", counted)
        for _ in range(seconds):
            world.controller.tick()
            world.clock.advance(1.0)
    return counts


def test_inboxes_of_sweeps_that_ended_long_ago_are_looked_into_seldom(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 120
    counts = looks(world, monkeypatch, seconds)
    for sweep in ENDED:
        assert 1 <= counts[inbox_folder(sweep)] <= seconds / QUIET_EVERY_S + 1


def test_inbox_of_a_sweep_that_just_ended_is_looked_into_every_second(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit(make_job("dataset/1"), sweep="new")
    world.finish("new")
    assert looks(world, monkeypatch, 20)[inbox_folder("new")] >= 19


def test_message_to_a_sweep_that_ended_long_ago_is_followed_soon_and_at_once_if_told(world: World) -> None:
    world.tick()
    message = world.submit(make_job("dataset/0"), make_job("dataset/2"), sweep="old-1")
    begun_s = world.clock()
    world.tick_until(lambda: message in world.snapshot("old-1").handled)
    assert world.clock() - begun_s <= QUIET_EVERY_S + 2.0
    world.clock.advance(QUIET_AFTER_S + 1.0)
    world.tick()
    message = world.submit(make_job("dataset/0"), sweep="old-2")
    world.controller.wake("old-2")
    world.tick()
    assert message in world.snapshot("old-2").handled
