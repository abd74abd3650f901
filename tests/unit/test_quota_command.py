"""``orchestrator quota``: bounds of users, set and shown from the store alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from orchestrator.core.errors import ControllerError
from orchestrator.storage.layout import quotas_name
from orchestrator.storage.local import LocalStore
from orchestrator.storage.protocol import ObjectStat
from orchestrator.sweeps import client
from orchestrator.sweeps.client import Cap, Quotas
from orchestrator.testing import ScriptedBackend, Succeed
from tests.commands import Ended, run_command
from tests.scripted_sweep import CLUSTER, World, make_job, make_plan


class Quota:
    """The command on one store and cluster."""

    def __init__(self, capsys: pytest.CaptureFixture[str], world: World) -> None:
        self._capsys, self._world = capsys, world

    def __call__(self, *arguments: str) -> Ended:
        at = ("--cluster", CLUSTER) * ("--cluster" not in arguments)
        return run_command(self._capsys, "quota", *arguments, *at, "--store", self._world.store.uri)

    def kept(self) -> Quotas:
        return client.read_quotas(self._world.store, CLUSTER)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Three jobs of ada's, each for several looks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    world = World(tmp_path / "store")
    names = [f"dataset/{number}" for number in range(3)]
    world.backend = ScriptedBackend(world.store, {name: [Succeed(after_observes=9)] for name in names})
    world.new_controller()
    plan = make_plan(*(make_job(name) for name in names), store_uri=world.store.uri)
    world.last_message["sweep"] = client.submit(world.store, plan, "name: sweep\n", CLUSTER, sender="ada", now=1.0)
    return world


@pytest.fixture
def quota(world: World, capsys: pytest.CaptureFixture[str]) -> Quota:
    return Quota(capsys, world)


def test_bounds_are_kept_shown_and_obeyed(quota: Quota, world: World) -> None:
    ended = quota("set", "--others", "--max-concurrent", "1")
    assert ended.code == 0
    assert "what all users without their own limits may hold is set" in ended.message
    world.tick_until(lambda: len(world.backend.live) == 1)
    world.tick()
    assert len(world.backend.live) == 1
    assert quota("show", "-o", "json").document["users"] == {
        "ada": {"max_gpus": None, "max_concurrent": 1, "bounds_of": "*", "gpus": 0, "attempts": 1},
        "*": {"max_gpus": None, "max_concurrent": 1, "bounds_of": "*"},
    }
    told = [line.progress.phase for line in client.read_progress(world.store, "sweep").values()]
    assert "user ada runs 1 attempt, of max_concurrent=1" in told  # which `status` shows
    assert quota("set", "ada", "--max-concurrent", "2").code == 0
    world.tick_until(lambda: len(world.backend.live) == 2)


def test_what_is_not_given_stays_and_none_removes(quota: Quota) -> None:
    quota("set", "bob", "--max-gpus", "64", "--max-concurrent", "100")
    quota("set", "bob", "--max-gpus", "0.5")
    assert quota.kept() == {"bob": Cap(max_gpus=0.5, max_concurrent=100)}
    quota("set", "bob", "--max-concurrent", "none")
    assert quota.kept() == {"bob": Cap(max_gpus=0.5)}


def test_others_without_any_bound_are_no_entry_and_a_user_without_is_an_exception(quota: Quota) -> None:
    quota("set", "--others", "--max-concurrent", "1")
    quota("set", "bob", "--max-concurrent", "none")
    quota("set", "--others", "--max-concurrent", "none")
    assert quota.kept() == {"bob": Cap()}


def test_cleared_user_is_bounded_as_all_others_again(quota: Quota) -> None:
    quota("set", "bob", "--max-gpus", "8")
    quota("set", "--others", "--max-gpus", "2")
    assert quota("clear", "bob").code == 0
    assert quota.kept() == {"*": Cap(max_gpus=2.0)}
    assert quota("clear", "--others").code == 0
    assert quota.kept() == {}
    assert "no user has limits" in quota("show").out


def test_clearing_who_has_no_bounds_changes_nothing_and_names_the_nearest(quota: Quota) -> None:
    quota("set", "bobby", "--max-gpus", "8")
    ended = quota("clear", "boby")
    assert ended.code == 102
    assert "boby has no limits on cluster cluster-a, and nothing was changed" in ended.message
    assert "nothing was changed; did you mean 'bobby'? users with limits: bobby" in ended.message
    assert quota.kept() == {"bobby": Cap(max_gpus=8.0)}


def test_name_that_owns_no_sweep_is_doubted(quota: Quota, world: World) -> None:
    world.tick()
    assert "ad owns no sweep on it; did you mean 'ada'?" in quota("set", "ad", "--max-gpus", "1").message
    assert "owns no sweep" not in quota("set", "ada", "--max-gpus", "1").message


def test_command_says_when_the_bounds_count(quota: Quota, world: World) -> None:
    assert (
        "the store has seen no controller of a cluster of this name" in quota("set", "ada", "--max-gpus", "1").message
    )
    world.tick()
    assert (
        "no controller runs; the next one will apply it" in quota("set", "ada", "--max-gpus", "2").message
    )  # a fake clock


def test_damaged_bounds_are_told_and_cleared_by_all_alone(quota: Quota, world: World) -> None:
    world.store.put(quotas_name(CLUSTER), b"[1, 2")
    for arguments in (("show",), ("set", "ada", "--max-gpus", "1"), ("clear", "ada")):
        ended = quota(*arguments)
        assert ended.code == 1
        assert "orchestrator quota clear --all" in ended.message
    assert quota("clear", "--all").code == 0
    assert quota.kept() == {}


def test_sweep_that_cannot_be_read_hides_no_other(quota: Quota, world: World) -> None:
    world.tick()
    (segment, *_) = world.store.list_children("sweeps/sweep/journal/")
    world.store.put(f"sweeps/broken/journal/{segment}", world.store.get(f"sweeps/sweep/journal/{segment}"))
    ended = quota("show", "-o", "json")
    assert ended.document["unreadable_sweeps"] == ["broken"]
    assert ended.document["users"]["ada"]["attempts"] == 3
    assert "they cannot be read: broken" in ended.message


class Contested(LocalStore):
    """Somebody else changes the bounds between the read and the write, a few times."""

    def __init__(self, root: Path, num_changes: int) -> None:
        super().__init__(root)
        self._left = num_changes

    def get_with_stat(self, name: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectStat]:
        found = super().get_with_stat(name, max_bytes=max_bytes)
        if name == quotas_name(CLUSTER) and self._left:
            self._left -= 1
            client.write_quotas(self, CLUSTER, {"other": Cap(max_gpus=float(self._left))})
        return found


def test_change_keeps_what_others_write_at_the_same_time(tmp_path: Path) -> None:
    store = Contested(tmp_path, num_changes=3)
    client.write_quotas(store, CLUSTER, {"first": Cap(max_gpus=1.0)})
    client.change_quotas(store, CLUSTER, lambda now: {**now, "ada": Cap(max_gpus=2.0)})
    assert client.read_quotas(store, CLUSTER) == {"other": Cap(max_gpus=0.0), "ada": Cap(max_gpus=2.0)}


def test_change_that_never_comes_through_is_given_up_with_that_reason(tmp_path: Path) -> None:
    store = Contested(tmp_path, num_changes=10_000)
    client.write_quotas(store, CLUSTER, {})
    with pytest.raises(ControllerError, match="changed by others 20 times in a row; nothing was changed here"):
        client.change_quotas(store, CLUSTER, lambda now: {**now, "ada": Cap()})
    assert "ada" not in client.read_quotas(store, CLUSTER)


def one_more(cap: Cap) -> Cap:
    return Cap(max_concurrent=(cap.max_concurrent or 0) + 1)


def test_many_changes_at_once_are_all_kept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)

    def count_up(user: str) -> None:
        for _ in range(5):
            client.change_quotas(store, CLUSTER, lambda now: {**now, user: one_more(now.get(user, Cap()))})

    threads = [threading.Thread(target=count_up, args=(name,)) for name in ("ada", "bob", "eve")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.read_quotas(store, CLUSTER) == {name: Cap(max_concurrent=5) for name in ("ada", "bob", "eve")}


@pytest.mark.parametrize("bound", [-1.0, float("nan"), float("inf")])
def test_bound_that_is_no_number_is_never_written(tmp_path: Path, bound: float) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(ControllerError, match="bounds are 0 or more, or left out"):
        client.change_quotas(store, CLUSTER, lambda _: {"ada": Cap(max_gpus=bound)})
    assert client.read_quotas(store, CLUSTER) == {}
