"""Damaged records, sweeps that keep failing, and messages that were left for another controller."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.backends.ray.backend import UNCLAIMED_S, RayBackend
from orchestrator.backends.ray.link import LinkState
from orchestrator.backends.simulated import (
    ClusterSpec,
    JobWork,
    NodeGroup,
    SimulatedBackend,
    SimulatedCluster,
    VirtualClock,
)
from orchestrator.controller.controller import Controller
from orchestrator.controller.owned_sweeps import BLIND_S, MAX_RETRY_EVERY_S, Identification, OwnedSweeps
from orchestrator.core.contract import Execution, Resources
from orchestrator.core.errors import StorageError, StorageTimeoutError
from orchestrator.state import events
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.journal import Journal
from orchestrator.storage.layout import inbox_folder, journal_folder, journal_segment, plan_name, record_name
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps import client
from orchestrator.sweeps.requests import Ownership, new_submit, post
from orchestrator.testing import FakeClock, Fault, FaultyStore, Hang, Moment, ScriptedBackend
from orchestrator.testing.memory_store import MemoryStore
from tests.scripted_sweep import CLUSTER, World, diamond, make_job, make_plan

TREE = make_job("dataset/tree")


def num_adoptions(world: World) -> int:
    told = list(Journal(world.store, "sweep").read_new())
    return sum(event["type"] == "sweep_adopted" for event in told)


def test_damaged_record_fails_its_job_and_names_the_object(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store.put(record_name(TREE.key), b'{"key": "trunc')
    world.submit(*diamond())
    world.finish()
    assert world.snapshot().counts == {JobState.FAILED: 1, JobState.SKIPPED: 4}
    assert record_name(TREE.key) in world.job(TREE.name).reason
    assert num_adoptions(world) == 1


def test_record_damaged_while_its_attempt_runs_fails_the_job(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend = ScriptedBackend(world.store, {TREE.name: [Hang()]})
    world.new_controller()
    world.submit(TREE)
    world.tick_until(lambda: world.is_running(TREE.name))
    world.store.put(record_name(TREE.key), b"{")
    world.backend.kill_all()
    world.finish()
    assert world.job(TREE.name).state is JobState.FAILED
    assert record_name(TREE.key) in world.job(TREE.name).reason
    assert world.backend.released == [world.backend.launched[0].attempt_id]


def test_sweep_that_keeps_failing_is_not_adopted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    world.backend = ScriptedBackend(world.store, {TREE.name: [Hang()]})
    world.new_controller()
    world.submit(TREE)
    world.tick_until(lambda: world.is_running(TREE.name))
    segments = world.store.list_children(journal_folder("sweep"))
    looked_at_s: list[float] = []

    def look_up(*_: object) -> None:
        looked_at_s.append(world.clock())
        raise KeyError("bug")

    monkeypatch.setattr(world.controller._scheduler, "unlaunched", look_up)
    for _ in range(300):
        world.tick()
    assert world.store.list_children(journal_folder("sweep")) == segments
    waits = [after - before for before, after in pairwise(looked_at_s)]
    assert len(looked_at_s) < 15
    assert max(waits) >= MAX_RETRY_EVERY_S
    monkeypatch.undo()
    world.backend.stop(world.backend.launched[0].attempt_id)
    world.tick_until(lambda: world.job(TREE.name).num_attempts == 2)


def test_delay_of_a_failing_sweep_grows_but_not_in_an_outage_of_the_store(tmp_path: Path) -> None:
    clock = FakeClock()
    fleet = OwnedSweeps(LocalStore(tmp_path), Identification(cluster="c", epoch=1, holder="h"), clock)

    def fail(error: Exception) -> None:
        raise error

    def delay_s(error: Exception) -> float:
        with fleet.guard("sweep"):
            fail(error)
        return fleet._delays["sweep"].length_s

    outage, damage = StorageTimeoutError("slow"), StorageError("bad")
    assert [delay_s(error) for error in (outage, outage, damage, damage)] == [1.0, 1.0, 2.0, 4.0]
    clock.advance(2 * MAX_RETRY_EVERY_S)
    assert delay_s(damage) == 1.0


def test_clock_that_is_put_back_makes_neither_a_failing_sweep_nor_a_blind_controller_wait(tmp_path: Path) -> None:
    clock = FakeClock()
    fleet = OwnedSweeps(LocalStore(tmp_path), Identification(cluster="c", epoch=1, holder="h"), clock)
    fleet._unseen.add("other")
    fleet._shelve("sweep", StorageError("bad"))
    clock.advance(-3600.0)
    fleet.reload()
    assert fleet._retry_at_s == {}
    assert fleet.is_blind
    clock.advance(BLIND_S)
    assert not fleet.is_blind


def test_write_in_doubt_is_fenced_by_another_adoption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    world.backend = ScriptedBackend(world.store, {TREE.name: [Hang()]})
    world.new_controller()
    world.submit(TREE)
    world.tick_until(lambda: world.is_running(TREE.name))
    append = Journal.append

    def lose(*_: object) -> None:
        raise StorageTimeoutError("no answer")

    monkeypatch.setattr(Journal, "append", lose)
    world.backend.kill_all()
    world.tick()
    monkeypatch.setattr(Journal, "append", append)
    world.tick_until(lambda: world.job(TREE.name).num_attempts == 2)
    assert num_adoptions(world) == 2


def take_over(world: World, other: Controller) -> None:
    plan = make_plan(TREE, store_uri=world.store.uri)
    world.clock.advance(1.0)
    client.submit(world.store, plan, "", "cluster-b", ownership=Ownership.TAKE, now=world.clock())
    for _ in range(3):
        world.clock.advance(2.0)
        other.tick()


def test_cancel_that_its_controller_left_does_not_end_the_sweep_taken_over(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend = ScriptedBackend(world.store, {TREE.name: [Hang()]})
    world.new_controller()
    backend = ScriptedBackend(world.store, {TREE.name: [Hang()]})
    other = Controller(world.store, backend, "cluster-b", "holder-b", world.clock)
    world.submit(TREE)
    world.tick_until(lambda: world.is_running(TREE.name))
    world.cancel()
    other.tick()  # meets the cancel, which is not for it
    take_over(world, other)
    assert world.snapshot().state is SweepState.RUNNING
    assert world.store.list_children(inbox_folder("sweep")) == []
    restarted = Controller(world.store, backend, "cluster-b", "holder-c", world.clock)
    for _ in range(3):
        world.clock.advance(2.0)
        restarted.tick()
    assert world.snapshot().state is SweepState.RUNNING


def test_messages_count_in_their_order_though_the_first_one_meets_an_outage(tmp_path: Path) -> None:
    """The cancel was handled first, and the sweep that it is for ran."""
    world = World(tmp_path)
    world.submit(TREE)
    world.clock.advance(0.001)
    world.cancel()
    fault = Fault(moment=Moment.ERROR_BEFORE, within=plan_name("sweep", 1), error=StorageTimeoutError)
    world.new_controller(FaultyStore(world.store, [fault]))
    for _ in range(4):
        world.tick()
    assert world.snapshot().state is SweepState.CANCELLED
    assert world.launches() == []


def test_submit_to_another_cluster_is_refused_once_a_later_one_took_the_sweep(tmp_path: Path) -> None:
    world = World(tmp_path)
    other = Controller(world.store, ScriptedBackend(world.store), "cluster-b", "holder-b", world.clock)
    message_id = world.submit(TREE)
    other.tick()  # nobody serves the first cluster
    take_over(world, other)
    assert "cluster-b" in world.snapshot().refusals[message_id]
    world.new_controller().tick()
    assert world.snapshot().cluster == "cluster-b"


def test_submit_to_another_cluster_whose_sweep_began_here_meanwhile_is_refused_and_not_run_here(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend = ScriptedBackend(world.store, {TREE.name: [Hang()]})
    world.new_controller()
    world.submit(TREE)
    world.tick_until(lambda: world.is_running(TREE.name))
    plan = make_plan(make_job("dataset/other"), store_uri=world.store.uri)
    # Its client has looked for an owner before there was one.
    message = new_submit(plan, "", "cluster-b", {"now": world.clock()})
    post(world.store, "sweep", message)
    world.tick_until(lambda: message.message_id in world.snapshot().handled)
    assert f"is running on cluster {CLUSTER}" in world.snapshot().refusals[message.message_id]
    assert (world.snapshot().revision, world.launches()) == (1, [TREE.name])
    assert world.store.list_children(inbox_folder("sweep")) == []


def test_cancel_after_a_takeover_is_followed(tmp_path: Path) -> None:
    world = World(tmp_path)
    other = Controller(
        world.store, ScriptedBackend(world.store, {TREE.name: [Hang()]}), "cluster-b", "holder-b", world.clock
    )
    world.submit(TREE)
    take_over(world, other)
    world.cancel()
    for _ in range(3):
        world.clock.advance(2.0)
        other.tick()
    assert world.snapshot().state is SweepState.CANCELLED


def test_reading_many_sweeps_at_the_start_tells_that_it_goes_on(tmp_path: Path) -> None:
    world = World(tmp_path)
    for sweep in "abc":
        world.submit(TREE, sweep=sweep)
    stamps: list[float] = []
    controller = Controller(
        world.store, world.backend, "cluster-b", "h", world.clock, on_alive=lambda: stamps.append(world.clock())
    )
    controller.tick()
    # For the lease and the list of sweeps; for each sweep as it is read, for its inbox, for the message in it and the
    # end of the messages; for markers, drain and quotas.
    assert len(stamps) == 2 + 3 * 4 + 3


@pytest.mark.parametrize("harm", ["priority", "weight", "negative weight", "budget", "workers"])
def test_sweep_that_earlier_versions_accepted_and_cannot_be_ranked_is_set_aside_alone(
    tmp_path: Path, harm: str
) -> None:
    world = World(tmp_path)
    world.backend = ScriptedBackend(world.store, {"pretrain/a": [Hang()]}, total=Resources(cpus=2.0))
    world.new_controller()
    sound = make_plan(
        make_job("pretrain/a"), make_job("pretrain/b", cpus=2.0), sweep="victim", store_uri=world.store.uri
    )
    client.submit(world.store, sound, "", CLUSTER, now=world.clock())
    world.tick_until(lambda: world.is_running("pretrain/a"))

    plan, journal = replace(sound, revision=2), Journal(world.store, "victim", holder="earlier version")
    if harm == "workers":
        plan = replace(plan, jobs=(plan.jobs[0], replace(plan.jobs[1], execution=Execution(num_workers=0))))
    elif harm != "priority":
        numbers = {"weight": {"weight": 0.0}, "negative weight": {"weight": -1.0}, "budget": {"gpu_hours": 0.0}}
        changes: dict[str, Any] = numbers[harm]
        plan = replace(plan, policy=replace(plan.policy, **changes))
    world.store.put(plan_name("victim", 2), json.dumps(plan.to_json()).encode())
    accepted = events.PlanAccepted(at_s=world.clock(), message_id="m", revision=2)
    changed = events.PriorityChanged(at_s=world.clock(), message_id="n", priority="high")  # type: ignore[arg-type]
    journal.read_new()
    journal.append([events.encode_event(event) for event in (accepted, *([changed] if harm == "priority" else []))])

    world.new_controller()
    world.submit(make_job("probe/c"), make_job("probe/d"), sweep="bystander")
    world.finish("bystander")
    assert world.snapshot("bystander").state is SweepState.SUCCEEDED
    assert world.backend.stopped == world.backend.killed == []
    assert [request.job for request in world.backend.live] == ["pretrain/a"], "it keeps its room"

    world.backend.stop(world.backend.launched[0].attempt_id)
    world.backend._scripts = {}
    for _ in range(150):
        world.tick()  # it fails again and again, and is read once a minute
    begun_s = world.clock()
    world.last_message["victim"] = client.submit(world.store, sound, "", CLUSTER, now=world.clock())
    world.tick_until(lambda: world.last_message["victim"] in world.snapshot("victim").handled)
    assert world.clock() - begun_s <= 2.0, "its message is a reason to read it at once"
    world.finish("victim")
    assert world.snapshot("victim").state is SweepState.SUCCEEDED, "a sound plan repairs it"


def test_attempts_of_a_sweep_that_is_set_aside_are_not_chosen_to_make_room(tmp_path: Path) -> None:
    """It was the cheapest choice in every round, and nothing came of it: the urgent job waited for the end of one."""
    world = World(tmp_path)
    jobs = {sweep: make_job(f"pretrain/{sweep}") for sweep in ("low", "middle", "urgent")}
    world.backend = ScriptedBackend(world.store, {job.name: [Hang()] for job in jobs.values()}, total=Resources(cpus=2))
    world.new_controller()

    def submit(sweep: str, priority: int) -> None:
        plan = make_plan(jobs[sweep], sweep=sweep, store_uri=world.store.uri, priority=priority)
        client.submit(world.store, plan, "", CLUSTER, now=world.clock())

    submit("low", -2)
    submit("middle", -1)
    world.tick_until(lambda: len(world.backend.live) == 2)
    damaged = journal_segment("low", len(world.store.list_children(journal_folder("low"))))
    world.store.put(damaged, b"damaged")
    world.controller.wake("low")
    submit("urgent", 1)
    world.tick_until(lambda: world.is_running("pretrain/urgent"))
    assert [attempt_id.partition(".")[0] for attempt_id in world.backend.stopped] == [jobs["middle"].key]
    assert world.is_running("pretrain/low")


def test_controller_has_an_unfinished_sweep_while_attempts_run_for_one_that_cannot_be_read(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend = ScriptedBackend(world.store, {TREE.name: [Hang()]})
    world.new_controller()
    world.submit(TREE)
    world.tick_until(lambda: world.is_running(TREE.name))
    damaged = journal_segment("sweep", len(world.store.list_children(journal_folder("sweep"))))
    world.store.put(damaged, b"damaged")
    world.controller.wake("sweep")
    for _ in range(3):
        world.tick()
    assert world.controller.snapshots == [], "it is set aside"
    assert world.is_running(TREE.name)
    assert world.controller.has_unfinished


class SilentStore(MemoryStore):
    """Does not answer about names with ``silent`` in them, which it lets ``wait`` for."""

    silent = ""
    wait: Callable[[], None] = staticmethod(lambda: None)

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        if self.silent and self.silent in name:
            self.wait()
            raise StorageTimeoutError("no answer")
        return super().get(name, max_bytes=max_bytes)


@pytest.mark.parametrize("silence_s", [0.0, 60.0])
def test_attempts_of_a_sweep_whose_journal_does_not_answer_a_new_controller_run_on(silence_s: float) -> None:
    clock = VirtualClock()
    store = SilentStore(now=clock)
    store.wait = lambda: clock.jump(clock() + silence_s)
    work = JobWork(work_s=400.0, checkpoint_every_s=1000.0)
    spec = ClusterSpec(groups=(NodeGroup(count=1, shape=Resources(cpus=4.0)),))
    cluster = SimulatedCluster(spec, clock, store, lambda _: work, Random(1))  # noqa: S311 - a simulation

    def run_for(controller: Controller, seconds: float) -> None:
        until_s = clock() + seconds
        while clock() < until_s:
            controller.tick()
            clock.jump(clock() + 1.0)

    first = Controller(store, SimulatedBackend(cluster), CLUSTER, "first", clock)
    for sweep, name in (("sweep", "probe/a"), ("other", "probe/b")):
        client.submit(store, make_plan(make_job(name), sweep=sweep, store_uri=store.uri), "", CLUSTER, now=clock())
    run_for(first, 5.0)
    store.silent = journal_folder("sweep")
    second = Controller(store, SimulatedBackend(cluster), CLUSTER, "second", clock)
    client.submit(store, make_plan(make_job("probe/c"), sweep="new", store_uri=store.uri), "", CLUSTER, now=clock())
    run_for(second, 100.0)
    view = client.load_snapshot(store, "new").jobs["probe/c"]
    assert view.num_attempts == 0, "nothing is launched beside attempts that may run unseen"
    store.silent = ""
    run_for(second, 600.0)
    for sweep, name in (("sweep", "probe/a"), ("other", "probe/b"), ("new", "probe/c")):
        view = client.load_snapshot(store, sweep).jobs[name]
        assert (view.state, view.num_attempts) == (JobState.SUCCEEDED, 1)


def test_cluster_does_not_count_as_drained_while_attempts_may_run_unseen(tmp_path: Path) -> None:
    store = SilentStore()
    world = World(tmp_path, ScriptedBackend(store, {TREE.name: [Hang()]}), store=store)
    world.submit(TREE)
    world.tick_until(lambda: world.is_running(TREE.name))
    client.drain(store, CLUSTER)
    store.silent = journal_folder("sweep")
    world.new_controller()

    def drained_at_s() -> float | None:
        drain = client.read_drain(store, CLUSTER)
        assert drain is not None
        return drain.drained_at_s

    for _ in range(3):
        world.tick()
    assert world.controller.is_blind
    assert drained_at_s() is None
    store.silent = ""
    world.tick_until(lambda: not world.controller.is_blind)
    world.backend.stop(world.backend.launched[0].attempt_id)
    world.tick_until(lambda: drained_at_s() is not None)


def test_runner_is_not_ended_for_an_unknown_attempt_while_the_controller_may_not_know_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[str] = []
    link = SimpleNamespace(state=LinkState.READY, has_ended=False, kill=killed.append)
    clock = FakeClock()
    monkeypatch.setattr("orchestrator.backends.ray.backend.time", SimpleNamespace(monotonic=clock))
    backend = RayBackend("namespace")
    monkeypatch.setattr(backend, "_poll", lambda: None)
    backend._attempts["a.1"] = link  # type: ignore[assignment]
    for _ in range(100):
        backend.observe((), are_all=False)
        clock.advance(1.0)
    backend.observe(())
    assert killed == []
    clock.advance(UNCLAIMED_S)
    backend.observe(())
    assert killed == ["no sweep knows its attempt a.1"]
