"""Kill the controller, or fail its store, at every write of a small sweep: nothing is lost and nothing done twice."""

import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from orchestrator.core.errors import FailureKind, StorageError
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage import request_pool
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.journal import Journal
from orchestrator.storage.layout import inbox_folder, journal_folder, plan_name
from orchestrator.sweeps.lease import LeaseLostError, LeaseState, new_holder, read_lease
from orchestrator.testing import (
    Fail,
    Fault,
    FaultyStore,
    Hang,
    Moment,
    Script,
    ScriptedBackend,
    SimulatedCrash,
    Succeed,
)
from orchestrator.testing.memory_store import MemoryStore
from tests.scripted_sweep import CLUSTER, World, make_job

JOBS = (
    make_job("dataset/tree"),
    make_job("pretrain/a", "dataset/tree"),
    make_job("pretrain/b", "dataset/tree"),
    make_job("probe/a", "pretrain/a"),
)
SCRIPTS: dict[str, list[Script]] = {"pretrain/a": [Fail(), Succeed()]}
MAX_WRITES = 60
# Launched once each, the scripted failure again: what a crash adds is an attempt that never reached the backend.
EXPECTED_LAUNCHES = Counter({"dataset/tree": 1, "pretrain/a": 2, "pretrain/b": 1, "probe/a": 1})


def make_world(root: Path) -> World:
    world = World(root, store=MemoryStore())  # no disk: the same sweep runs hundreds of times
    world.backend = ScriptedBackend(world.store, SCRIPTS)
    return world


def run_with_fault(world: World, fault: Fault) -> bool:
    """Run to the end under one fault; false if the sweep ended before it struck."""
    store = FaultyStore(world.store, [fault])
    world.new_controller(store)
    world.submit(*JOBS)
    struck = False
    for _ in range(400):
        try:
            world.tick()
        except SimulatedCrash:
            struck = True
            world.new_controller(store)  # the backend, like real runners, is still there
        except StorageError:
            world.clock.advance(1.0)
        if world.snapshot().state.is_final:
            return struck or len(store.writes) >= fault.nth
    message = f"sweep not finished after {fault}: {world.snapshot().counts}"
    raise AssertionError(message)


def check_outcome(world: World) -> None:
    snapshot = world.snapshot()
    assert snapshot.state is SweepState.SUCCEEDED
    assert snapshot.counts == {JobState.SUCCEEDED: 4}
    assert Counter(world.launches()) == EXPECTED_LAUNCHES
    assert snapshot.jobs["pretrain/a"].failures[FailureKind.UNKNOWN] == 1
    for job in JOBS:
        writer = read_record(world.store, job.key, identity=job.identity).attempt_id
        assert snapshot.jobs[job.name].last_attempt_id == writer
    ended = [request.attempt_id for request in world.backend.launched]
    assert set(ended) <= set(world.backend.released), "a runner would wait for ever"
    assert world.backend.live == []


@pytest.mark.ci
@pytest.mark.parametrize("moment", Moment)
def test_sweep_with_a_fault_at_every_write_ends_as_without(tmp_path: Path, moment: Moment) -> None:
    for nth in range(1, MAX_WRITES):
        world = make_world(tmp_path / str(nth))
        if not run_with_fault(world, Fault(moment=moment, nth=nth)):
            break
        check_outcome(world)
    assert nth > 15, "the faults must have covered the sweep's writes"
    assert nth < MAX_WRITES - 1, "the last fault must lie beyond the sweep's end"


@pytest.mark.ci
@pytest.mark.parametrize("moment", [Moment.CRASH_BEFORE, Moment.CRASH_AFTER, Moment.ERROR_AFTER])
def test_sweep_with_a_fault_at_every_write_ends_as_without_where_writes_go_side_by_side(
    tmp_path: Path, moment: Moment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_pool, "_LOCAL", ())
    for nth in range(1, MAX_WRITES):
        world = make_world(tmp_path / str(nth))
        if not run_with_fault(world, Fault(moment=moment, nth=nth)):
            break
        check_outcome(world)
    assert 15 < nth < MAX_WRITES - 1


def test_new_controller_goes_on_with_the_attempts_that_run(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend = ScriptedBackend(world.store, {"dataset/tree": [Succeed(after_observes=5)]})
    world.new_controller()
    world.submit(make_job("dataset/tree"))
    world.tick_until(lambda: len(world.backend.live) == 1)
    world.new_controller()
    world.finish()
    assert world.launches() == ["dataset/tree"]
    assert world.job("dataset/tree").num_attempts == 1
    assert world.backend.epochs == [1, 2]


def test_attempts_whose_runners_died_with_the_controller_run_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend = ScriptedBackend(world.store, {"dataset/tree": [Hang(), Succeed()]})
    world.new_controller()
    world.submit(make_job("dataset/tree"))
    world.tick_until(lambda: len(world.backend.live) == 1)
    world.backend.kill_all()
    world.new_controller()
    world.finish()
    assert world.job("dataset/tree").state is JobState.SUCCEEDED
    assert world.job("dataset/tree").num_attempts == 2


def test_old_controller_stops_itself_once_a_new_one_has_started(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend = ScriptedBackend(world.store, {"dataset/tree": [Hang()]})
    old = world.new_controller()
    world.submit(make_job("dataset/tree"))
    world.tick_until(lambda: len(world.backend.live) == 1)
    world.new_controller().tick()
    num_segments = len(world.store.list_children(journal_folder("sweep")))
    world.clock.advance(10.0)
    with pytest.raises(LeaseLostError, match="epoch 2"):
        old.tick()
    assert len(world.store.list_children(journal_folder("sweep"))) == num_segments
    assert world.backend.stopped == [], "the new controller goes on with these attempts"


def test_zombie_that_wakes_before_its_lease_check_cannot_write(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend = ScriptedBackend(world.store, {"dataset/tree": [Hang()]})
    old = world.new_controller()
    world.submit(make_job("dataset/tree"))
    world.tick_until(lambda: len(world.backend.live) == 1)
    world.new_controller().tick()
    segments = world.store.list_children(journal_folder("sweep"))
    world.backend.kill_all()  # gives the zombie something that it wants to append
    with pytest.raises(LeaseLostError):
        old.tick()
    assert world.store.list_children(journal_folder("sweep")) == segments


def test_damaged_sweep_does_not_stop_the_others(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.submit(make_job("dataset/broken"), sweep="broken")
    world.finish("broken")
    world.store.put(f"{journal_folder('broken')}{99:08d}.jsonl", b"")
    segments = world.store.list_children(journal_folder("broken"))
    for name in segments:
        world.store.put(f"{journal_folder('broken')}{name}", b'{}\n{"type": "no_such_event", "version": 1}\n')
    world.new_controller()
    world.submit(make_job("dataset/tree"))
    world.finish()
    assert world.snapshot().state is SweepState.SUCCEEDED


def test_message_settled_but_not_deleted_is_not_followed_twice(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    world.new_controller(FaultyStore(world.store, [Fault(moment=Moment.CRASH_BEFORE, within=inbox_folder("sweep"))]))
    world.submit(*JOBS)
    with pytest.raises(SimulatedCrash):
        world.tick()
    world.new_controller()
    world.finish()
    settled = [event for event in Journal(world.store, "sweep").read_new() if "message_id" in event]
    assert [event["message_id"] for event in settled] == [world.last_message["sweep"]]
    assert world.store.list_children(inbox_folder("sweep")) == []


def test_plan_left_by_a_dead_controller_is_not_overwritten(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.store.put(plan_name("sweep", 1), b'{"left": "behind"}')
    world.submit(*JOBS)
    world.finish()
    assert world.snapshot().revision == 2
    assert world.store.get(plan_name("sweep", 1)) == b'{"left": "behind"}'


def test_lease_is_renewed_without_a_new_epoch(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.tick()
    first = read_lease(world.store, CLUSTER)
    world.clock.advance(6.0)
    world.tick()
    second = read_lease(world.store, CLUSTER)
    assert first is not None
    assert second is not None
    assert (first.epoch, second.epoch) == (1, 1)
    assert second.expires_at_s > first.expires_at_s


def test_lease_may_be_held_until_it_expires_or_its_process_on_this_host_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as ended:
        ended.wait()
    here = socket.gethostname()
    for holder, left_s, may_be_held in (
        (new_holder(), 60.0, True),
        (new_holder(), -1.0, False),
        (f"{here}-{ended.pid}-0123abcd", 60.0, False),
        (f"not-{here}-{ended.pid}-0123abcd", 60.0, True),
        ("holder-1", 60.0, True),
    ):
        lease = LeaseState(cluster=CLUSTER, epoch=1, holder=holder, expires_at_s=time.time() + left_s)
        assert lease.may_be_held() is may_be_held, holder


def test_idle_controller_writes_nothing_but_its_lease(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.submit(*JOBS)
    world.finish()
    world.tick_until(lambda: not world.tick())
    store = FaultyStore(world.store)
    world.new_controller(store)
    for _ in range(30):
        world.tick()
    assert {name.split("/")[0] for name in store.writes} == {"controllers"}
