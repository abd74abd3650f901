"""Rounds of many requests to a slow store: the controller stays alive in them, and what it did is kept."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.protocol import Capacity
from orchestrator.controller import execution
from orchestrator.controller.controller import INBOX_EVERY_S, LOOK_UP_S, Controller
from orchestrator.core.contract import Execution, Resources
from orchestrator.state.failure_policy import observed_mtbf_s
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage import request_pool
from orchestrator.storage.layout import MARKERS, sweep_folder
from orchestrator.storage.local import LocalStore
from orchestrator.storage.protocol import ObjectStat
from orchestrator.sweeps import client
from orchestrator.sweeps.lease import LEASE_DURATION_S, RENEW_EVERY_S, Lease, LeaseLostError, read_lease
from orchestrator.testing import FakeClock, Hang, Lose, ScriptedBackend, Succeed
from tests.scripted_sweep import CLUSTER, World, make_job

NUM_JOBS = 30
REQUEST_S = 0.5


class SlowStore(LocalStore):
    """Each read takes its time on the world's clock."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.clock: FakeClock | None = None
        self.reads: list[str] = []

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        self._wait(name)
        return super().get(name, max_bytes=max_bytes)

    def put_if_absent(self, name: str, content: bytes) -> ObjectStat:
        self._wait(name)
        return super().put_if_absent(name, content)

    def _wait(self, name: str) -> None:
        self.reads.append(name)
        if self.clock is not None and not name.startswith("controllers/"):
            self.clock.advance(REQUEST_S)


class SlowWorld(World):
    """A world whose controller counts its signs of life."""

    def __init__(self, root: Path) -> None:
        store = SlowStore(root)
        super().__init__(root, ScriptedBackend(store, total=Resources(cpus=1000.0, memory_gib=1e6)), store=store)
        self.root = root
        self.signs_at_s: list[float] = []
        self.controller = Controller(
            store, self.backend, CLUSTER, "slow", self.clock, on_alive=lambda: self.signs_at_s.append(self.clock())
        )
        self.slow = store

    def longest_silence_s(self) -> float:
        return max(b - a for a, b in zip(self.signs_at_s, self.signs_at_s[1:], strict=False))


def test_looking_up_many_keys_leaves_time_to_start_those_that_are_known(tmp_path: Path) -> None:
    world = SlowWorld(tmp_path)
    world.submit(*(make_job(f"probe/{number}") for number in range(NUM_JOBS)))
    world.slow.clock = world.clock
    world.controller.tick()
    looked_up = [name for name in world.slow.reads if name.endswith("record.json")]
    assert 0 < len(looked_up) < NUM_JOBS
    assert world.backend.launched, f"what is known after {LOOK_UP_S} s starts"
    assert {request.key for request in world.backend.launched} <= {name.split("/")[2] for name in looked_up}
    world.finish()
    assert world.snapshot().state is SweepState.SUCCEEDED


def test_long_round_of_launches_keeps_the_lease_and_shows_signs_of_life(tmp_path: Path) -> None:
    world = SlowWorld(tmp_path)
    scripts: dict[str, Any] = {f"probe/{number}": [Hang()] for number in range(NUM_JOBS)}
    world.backend._scripts = scripts
    world.submit(*(make_job(f"probe/{number}") for number in range(NUM_JOBS)))
    world.slow.clock = world.clock
    for _ in range(12):
        world.controller.tick()
        lease = read_lease(LocalStore(tmp_path), CLUSTER)
        assert lease is not None
        assert lease.expires_at_s > world.clock()
    assert len(world.backend.launched) == NUM_JOBS
    assert world.longest_silence_s() < LEASE_DURATION_S


def test_first_look_into_many_inboxes_keeps_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = SlowWorld(tmp_path)
    for number in range(NUM_JOBS):
        world.store.put(f"{sweep_folder(f'other-{number:02d}')}/spec-0001.yaml", b"of a sweep that began no journal")
        world.store.put(f"{MARKERS}other-{number:02d}/settled", b"")
    listed = world.store.list_children

    def list_slowly(name: str, *, start_after: str = "") -> list[str]:
        if name.endswith("/inbox/"):
            world.slow._wait(name)
            lease = read_lease(LocalStore(tmp_path), CLUSTER)
            assert lease is not None
            assert lease.expires_at_s > world.clock()
        return listed(name, start_after=start_after)

    monkeypatch.setattr(world.store, "list_children", list_slowly)
    world.slow.clock = world.clock
    world.controller.tick()


def test_long_look_for_the_records_of_a_sweep_that_is_submitted_again_keeps_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_pool, "_LOCAL", ())
    monkeypatch.setattr(request_pool, "NUM_THREADS", 2)
    world = SlowWorld(tmp_path)
    jobs = [make_job(f"probe/{number}") for number in range(NUM_JOBS)]
    world.submit(*jobs)
    world.finish()
    exists, looked, late = world.store.exists, list[str](), list[str]()

    def look_slowly(name: str) -> bool:
        if name.endswith("record.json"):
            looked.append(name)
            world.clock.advance(2 * REQUEST_S)
            lease = read_lease(LocalStore(tmp_path), CLUSTER)
            if lease is None or lease.expires_at_s <= world.clock():
                late.append(name)
        return exists(name)

    monkeypatch.setattr(world.store, "exists", look_slowly)
    world.submit(*jobs)
    world.finish()
    assert len(looked) == NUM_JOBS
    assert late == []
    assert world.longest_silence_s() < LEASE_DURATION_S


@pytest.mark.parametrize(
    ("how", "within"),
    [
        ("put_if_absent", "/journal/"),
        ("put_if_absent", "/snapshots/"),
        ("put_if_absent", "/plan-"),
        ("put_if_absent", "/spec-"),
        ("put_if_match", "/lease"),
        ("put_if_match", "/drain"),
        ("get", "/inbox/"),
        ("delete", "/inbox/"),
        ("list_children", "sweeps/"),
    ],
)
def test_one_request_that_waits_for_the_store_shows_signs_of_life_and_keeps_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, within: str
) -> None:
    monkeypatch.setattr(request_pool, "_LOCAL", ())
    monkeypatch.setattr(request_pool, "_ALIVE_EVERY_S", 0.001)
    world = SlowWorld(tmp_path)
    waited, expired = let_one_wait(world, monkeypatch, how, lambda name: within in name)
    world.controller.tick()
    world.clock.advance(RENEW_EVERY_S)
    world.submit(make_job("probe/0"))
    world.finish()
    client.drain(world.store, CLUSTER)
    world.clock.advance(INBOX_EVERY_S)
    world.controller.tick()
    assert len(waited) == 1
    assert expired == []
    assert world.longest_silence_s() < LEASE_DURATION_S


def test_check_of_the_lease_before_an_attempt_counts_as_lost_shows_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_pool, "_LOCAL", ())
    monkeypatch.setattr(request_pool, "_ALIVE_EVERY_S", 0.001)
    world = SlowWorld(tmp_path)
    world.backend._scripts = {"probe/0": [Lose(), Succeed()]}
    world.submit(make_job("probe/0"))
    world.tick_until(lambda: bool(world.backend.launched))
    waited, _ = let_one_wait(world, monkeypatch, "put_if_match", lambda name: "/lease" in name)
    world.controller.tick()
    assert len(waited) == 1, "it is not due yet, and is renewed all the same"
    assert world.longest_silence_s() < LEASE_DURATION_S


def let_one_wait(
    world: SlowWorld, monkeypatch: pytest.MonkeyPatch, how: str, is_wanted: Callable[[str], bool]
) -> tuple[list[str], list[float]]:
    """The first such request takes 30 s of the world's clock, which goes on as the controller shows signs of life: its
    name, and when the lease had expired meanwhile.
    """
    request, waited, expired = getattr(world.store, how), list[str](), list[float]()

    def wait_first(name: str, *arguments: Any, **options: Any) -> Any:
        if is_wanted(name) and not waited:
            waited.append(name)
            for _ in range(30):
                world.clock.advance(1.0)
                wait_for_sign_of_life(world)
                lease = read_lease(LocalStore(world.root), CLUSTER)
                if "/lease" not in name and (lease is None or lease.expires_at_s <= world.clock()):
                    expired.append(world.clock())
        return request(name, *arguments, **options)

    monkeypatch.setattr(world.store, how, wait_first)
    return waited, expired


def wait_for_sign_of_life(world: SlowWorld) -> None:
    """Wait for one of now; for a second at most, since a controller that shows none waits for the caller."""
    for _ in range(1000):
        if world.signs_at_s[-1:] == [world.clock()]:
            return
        time.sleep(0.001)


@pytest.mark.parametrize("slow", ["controller.controller.estimate", "scheduling.scheduler.SweepIndex"])
def test_first_decision_for_many_sweeps_keeps_the_lease_and_shows_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    world = SlowWorld(tmp_path)
    for number in range(8):
        world.submit(make_job(f"probe/{number}"), sweep=f"sweep-{number}")
    where, _, name = slow.rpartition(".")
    module = importlib.import_module(f"orchestrator.{where}")
    original = getattr(module, name)

    def take_long(*arguments: Any) -> Any:
        world.clock.advance(6.0)
        return original(*arguments)

    monkeypatch.setattr(module, name, take_long)
    world.controller.tick()
    lease = read_lease(LocalStore(tmp_path), CLUSTER)
    assert lease is not None
    assert lease.expires_at_s > world.clock()
    assert len(world.backend.launched) == 8
    assert world.longest_silence_s() < LEASE_DURATION_S


def test_batch_of_launches_counts_the_deaths_of_all_attempts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, ScriptedBackend(LocalStore(tmp_path), total=Resources(cpus=1000.0, memory_gib=1e6)))
    jobs = [make_job(f"pretrain/{number}") for number in range(NUM_JOBS)]
    world.submit(*(replace(job, execution=Execution(checkpoint_mtbf_s=3600.0)) for job in jobs))
    counts = list[None]()

    def count(*arguments: Any, **options: Any) -> float:
        counts.append(None)
        return observed_mtbf_s(*arguments, **options)

    monkeypatch.setattr(execution, "observed_mtbf_s", count)
    world.controller.tick()
    assert len(world.backend.launched) == NUM_JOBS
    assert len(counts) == 1


def test_round_of_many_launches_asks_once_per_decision_what_the_cluster_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, ScriptedBackend(LocalStore(tmp_path), total=Resources(cpus=1000.0, memory_gib=1e6)))
    world.submit(*(make_job(f"probe/{number}") for number in range(NUM_JOBS)))
    capacity, looks = world.backend.capacity, list[None]()

    def look() -> Capacity:
        looks.append(None)
        return capacity()

    monkeypatch.setattr(world.backend, "capacity", look)
    world.controller.tick()
    assert len(world.backend.launched) == NUM_JOBS
    assert len(looks) <= 3


def test_launches_of_a_batch_are_on_record_before_the_next_batch_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "MAX_BATCH", 8)
    world = World(tmp_path, ScriptedBackend(LocalStore(tmp_path), total=Resources(cpus=1000.0, memory_gib=1e6)))
    world.submit(*(make_job(f"probe/{number}") for number in range(24)))
    original = world.controller._executor._on_alive

    def die_in_the_second_batch() -> None:
        original()
        if len(world.backend.launched) == 8:
            raise SystemExit

    world.controller._executor._on_alive = die_in_the_second_batch
    with pytest.raises(SystemExit):
        world.controller.tick()
    assert world.snapshot().counts[JobState.RUNNING] == 8
    world.new_controller()
    world.finish()
    assert world.snapshot().state is SweepState.SUCCEEDED
    assert len(world.launches()) == 24


def test_controller_that_lost_its_lease_within_a_round_launches_nothing_more(tmp_path: Path) -> None:
    world = SlowWorld(tmp_path)
    world.submit(*(make_job(f"probe/{number}") for number in range(NUM_JOBS)))

    def be_replaced(name: str) -> None:
        if name.endswith("record.json") and not world.backend.launched:
            Lease(LocalStore(tmp_path), CLUSTER, "successor", world.clock).acquire()
            world.clock.advance(LEASE_DURATION_S)

    world.slow._wait = be_replaced  # type: ignore[method-assign]
    with pytest.raises(LeaseLostError):
        world.controller.tick()
    assert world.snapshot().counts == {JobState.PENDING: NUM_JOBS}
    assert world.backend.launched == []


def test_priority_change_asks_for_no_record_again(tmp_path: Path) -> None:
    world = SlowWorld(tmp_path)
    world.backend.total = Resources(cpus=1.0, memory_gib=1e6)
    world.backend._scripts = {"probe/0": [Hang()]}
    world.submit(*(make_job(f"probe/{number}") for number in range(5)))
    world.tick_until(lambda: bool(world.backend.live))
    world.slow.reads.clear()
    client.set_priority(world.store, "sweep", 7, now=world.clock())
    world.tick_until(lambda: world.snapshot().priority == 7)
    assert not [name for name in world.slow.reads if name.endswith("record.json")]
