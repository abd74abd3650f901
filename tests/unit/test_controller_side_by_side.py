"""Requests that a controller makes side by side, as it does on a distant store: no sweep is served twice at once."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from threading import Condition, Lock, Thread, current_thread
from time import sleep

import pytest

from orchestrator.backends.protocol import ANYWHERE, Placement
from orchestrator.controller.controller import Controller
from orchestrator.core.contract import JobRequest, Resources
from orchestrator.storage import request_pool
from orchestrator.storage.layout import record_name
from orchestrator.storage.local import LocalStore
from orchestrator.storage.protocol import ObjectStat, ObjectStore
from orchestrator.testing import ScriptedBackend
from orchestrator.testing.faults import Fault, FaultyStore, Moment
from tests.scripted_sweep import CLUSTER, World, make_job

SLOW_S = 0.02
"""Of each append: long enough for a second one to begin meanwhile, which is what must not happen."""


class SlowJournals(LocalStore):
    """Counts for each journal how many appends were under way at the same time."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._lock = Lock()
        self._under_way: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    def put_if_absent(self, name: str, content: bytes) -> ObjectStat:
        folder, found, _ = name.partition("/journal/")
        if not found:
            return super().put_if_absent(name, content)
        with self._lock:
            self._under_way[folder] += 1
            self.most[folder] = max(self.most[folder], self._under_way[folder])
        sleep(SLOW_S)
        try:
            return super().put_if_absent(name, content)
        finally:
            with self._lock:
                self._under_way[folder] -= 1


class SuspiciousBackend(ScriptedBackend):
    """Refuses attempts that are not in the journal of their sweep."""

    world: World

    def launch(self, request: JobRequest, resources: Resources, placement: Placement = ANYWHERE) -> None:
        live = {attempt.attempt_id for attempt in self.world.snapshot(request.sweep).live_attempts}
        assert request.attempt_id in live, f"{request.attempt_id} of sweep {request.sweep} is in no journal"
        super().launch(request, resources, placement)


def two_mixed_sweeps(store: ObjectStore, root: Path) -> World:
    """Two sweeps that will, in one round, take a result of an earlier one and launch something of their own.

    The scheduler then gives a sweep's commands in two places, with those of the other in between.
    """
    backend = SuspiciousBackend(store)
    world = World(root, backend, store=store)
    backend.world = world
    world.submit(make_job("dataset/shared"), sweep="earlier")
    world.finish("earlier")
    for sweep in ("a", "b"):
        world.submit(make_job("dataset/shared"), make_job(f"dataset/{sweep}"), sweep=sweep)
    return world


def test_events_of_one_sweep_are_never_appended_by_two_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(request_pool, "_LOCAL", ())
    store = SlowJournals(tmp_path)
    world = two_mixed_sweeps(store, tmp_path)
    with caplog.at_level(logging.WARNING):
        world.finish("a", "b")
    assert set(store.most.values()) == {1}
    assert not caplog.records
    assert sorted(world.launches()) == ["dataset/a", "dataset/b", "dataset/shared"]


class MeetingStore(LocalStore):
    """While ``num_expected`` is set, requests for names with ``where`` wait for as many to be under way at once."""

    def __init__(self, root: Path, where: str) -> None:
        super().__init__(root)
        self._changed = Condition()
        self._where = where
        self._under_way = self.most = self.num_expected = 0

    def exists(self, name: str) -> bool:
        self._meet(name)
        return super().exists(name)

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        self._meet(name)
        return super().get(name, max_bytes=max_bytes)

    def _meet(self, name: str) -> None:
        if self.num_expected and self._where in name:
            with self._changed:
                self._under_way += 1
                self.most = max(self.most, self._under_way)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.most >= self.num_expected, timeout=1)
                self._under_way -= 1


def test_records_of_a_sweep_that_is_submitted_again_are_looked_for_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_pool, "_LOCAL", ())
    store = MeetingStore(tmp_path, "/record.json")
    world, jobs = World(tmp_path, store=store), [make_job(f"dataset/{number}") for number in range(5)]
    world.submit(*jobs)
    world.finish()
    for job in (jobs[1], jobs[4]):
        store.delete(record_name(job.key))
    store.num_expected = len(jobs)
    world.submit(*jobs)
    world.finish()
    assert store.most == len(jobs)
    assert sorted(world.launches()[5:]) == ["dataset/1", "dataset/4"]


def test_new_controller_reads_sweeps_side_by_side_and_renews_its_lease_in_its_own_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_pool, "_LOCAL", ())
    store, sweeps = MeetingStore(tmp_path, "/snapshots/"), ("a", "b", "c", "d")
    world = World(tmp_path, store=store)
    for sweep in sweeps:
        world.submit(make_job(f"dataset/{sweep}"), sweep=sweep)
    world.finish(*sweeps)
    store.num_expected = len(sweeps)
    threads = set[Thread]()
    controller = Controller(
        store, world.backend, CLUSTER, "next", world.clock, on_alive=lambda: threads.add(current_thread())
    )
    controller.tick()
    assert store.most == len(sweeps)
    assert [snapshot.sweep for snapshot in controller.snapshots] == list(sweeps)
    assert threads == {current_thread()}


@pytest.mark.parametrize("nth", range(1, 4))
def test_nothing_is_launched_whose_append_failed_although_another_of_the_same_round_was_done(
    tmp_path: Path, nth: int
) -> None:
    world = two_mixed_sweeps(LocalStore(tmp_path), tmp_path)
    fault = Fault(moment=Moment.ERROR_BEFORE, within="sweeps/a/journal", nth=nth)
    world.new_controller(FaultyStore(world.store, [fault]))
    world.finish("a", "b")
