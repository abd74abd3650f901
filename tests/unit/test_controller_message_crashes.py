"""Kill the controller, or fail its store, at every write while it follows messages: each is settled exactly once."""

from collections import Counter
from pathlib import Path

import pytest

from orchestrator.core.errors import StorageError
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.journal import Journal
from orchestrator.storage.layout import inbox_folder
from orchestrator.sweeps import client
from orchestrator.testing import Fault, FaultyStore, Hang, Moment, ScriptedBackend, SimulatedCrash, Succeed
from orchestrator.testing.memory_store import MemoryStore
from tests.scripted_sweep import World, make_job

JOBS = (
    make_job("dataset/tree"),
    make_job("pretrain/a", "dataset/tree"),
    make_job("pretrain/b", "dataset/tree"),
    make_job("probe/a", "pretrain/a"),
)
MAX_WRITES = 60


def make_world(root: Path) -> World:
    world = World(root, store=MemoryStore())  # no disk: the same sweep runs hundreds of times
    world.backend = ScriptedBackend(world.store, {"pretrain/b": [Hang()], "dataset/tree": [Succeed(after_observes=2)]})
    return world


def leave_messages(world: World) -> list[str]:
    """A submit, and what its user thinks of at once, while no controller runs."""
    world.submit(*JOBS)
    asked = [world.last_message["sweep"]]
    wishes = (
        lambda **o: client.pause(world.store, "sweep", running=client.Running.CHECKPOINT, **o),
        lambda **o: client.set_priority(world.store, "sweep", 3, **o),
        lambda **o: client.resume(world.store, "sweep", **o),
        lambda **o: client.resume(world.store, "sweep", **o),
    )
    for wish in wishes:
        world.clock.advance(0.001)
        asked.append(wish(now=world.clock()))
    return asked


def run_with_fault(world: World, fault: Fault) -> tuple[bool, list[str]]:
    """Run to the end under one fault, cancelling what hangs on the way; false if the fault came too late."""
    store = FaultyStore(world.store, [fault])
    world.new_controller(store)
    asked = leave_messages(world)
    struck, cancelled = False, ""
    for _ in range(400):
        try:
            world.tick()
        except SimulatedCrash:
            struck = True
            world.new_controller(store)
        except StorageError:
            world.clock.advance(1.0)
        if not cancelled and world.is_running("pretrain/b"):
            cancelled = client.cancel(world.store, "sweep", jobs=["pretrain/b"], now=world.clock())
            asked.append(cancelled)
        if world.snapshot().state.is_final:
            return struck or len(store.writes) >= fault.nth, asked
    message = f"sweep not finished after {fault}: {world.snapshot().counts}"
    raise AssertionError(message)


def check_outcome(world: World, asked: list[str]) -> None:
    snapshot = world.snapshot()
    assert snapshot.state is SweepState.FAILED, "a job was cancelled"
    assert snapshot.counts == {JobState.SUCCEEDED: 3, JobState.CANCELLED: 1}
    assert snapshot.priority == 3
    assert list(snapshot.refusals) == [asked[4]], "the second resume comes to a sweep that is not paused"
    settled = [event["message_id"] for event in Journal(world.store, "sweep").read_new() if "message_id" in event]
    assert Counter(settled) == Counter(asked)
    world.tick()
    assert world.store.list_children(inbox_folder("sweep")) == []
    assert world.backend.live == []
    ended = [request.attempt_id for request in world.backend.launched]
    assert set(ended) <= set(world.backend.released), "a runner would wait for ever"


@pytest.mark.ci
@pytest.mark.parametrize("moment", Moment)
def test_messages_with_a_fault_at_every_write_are_settled_once(tmp_path: Path, moment: Moment) -> None:
    for nth in range(1, MAX_WRITES):
        world = make_world(tmp_path / str(nth))
        was_struck, asked = run_with_fault(world, Fault(moment=moment, nth=nth))
        if not was_struck:
            break
        check_outcome(world, asked)
    assert nth > 20, "the faults must have covered the sweep's writes"
    assert nth < MAX_WRITES - 1, "the last fault must lie beyond the sweep's end"
