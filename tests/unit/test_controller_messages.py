"""What clients ask of a sweep while it runs, rests or has ended; with a controller there or not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.controller.attempt_tracker import ATTEMPT_STOP_GRACE_S, MAX_GAP_S, RESUMED_GRACE_S, Heartbeats
from orchestrator.core.contract import Progress
from orchestrator.core.errors import ControllerError, FailureKind, StorageTimeoutError
from orchestrator.planning.graph.plan import Plan
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.layout import inbox_message
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps import client
from orchestrator.sweeps.client import Consent, Running
from orchestrator.sweeps.requests import new_message_id
from orchestrator.testing import Fail, FaultyStore, Hang, Harm, ReadFault, Script, ScriptedBackend, Succeed
from tests.scripted_sweep import CLUSTER, World, diamond, make_job

FAILS = Fail(kind=FailureKind.USER_ERROR, message="no such model")
Ask = Callable[..., str]


def make_world(root: Path, **scripts: list[Script]) -> World:
    world = World(root)
    named = {name.replace("_", "/"): script for name, script in scripts.items()}
    world.backend = ScriptedBackend(world.store, named)
    world.new_controller()
    return world


def send(world: World, ask: Ask, *arguments: object, sweep: str = "sweep", **options: Any) -> str:
    """Leave a message now."""
    world.clock.advance(0.001)
    world.last_message[sweep] = ask(world.store, sweep, *arguments, now=world.clock(), **options)
    return world.last_message[sweep]


def tell(world: World, ask: Ask, *arguments: object, sweep: str = "sweep", **options: Any) -> str:
    """Leave a message and wait until it is settled; returns why it was refused, or nothing."""
    message = send(world, ask, *arguments, sweep=sweep, **options)
    world.tick_until(lambda: message in world.snapshot(sweep).handled)
    return world.snapshot(sweep).refusals.get(message, "")


def start(world: World, *running: str) -> None:
    world.submit(*diamond())
    world.tick_until(lambda: all(world.is_running(name) for name in running))


def test_paused_sweep_starts_nothing_new_and_lets_the_running_end(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Succeed(after_observes=3)])
    start(world, "dataset/tree")
    assert tell(world, client.pause) == ""
    world.tick_until(lambda: world.job("dataset/tree").state is JobState.SUCCEEDED)
    for _ in range(5):
        world.tick()
    assert world.launches() == ["dataset/tree"]
    assert world.snapshot().state is SweepState.PAUSED
    assert tell(world, client.resume) == ""
    world.finish()
    assert world.snapshot().state is SweepState.SUCCEEDED


def test_pause_with_checkpoints_gives_the_room_back_and_charges_nobody(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Hang(), Succeed()])
    start(world, "dataset/tree")
    tell(world, client.pause, running=Running.CHECKPOINT)
    world.tick_until(lambda: not world.backend.live)
    world.tick()
    view = world.job("dataset/tree")
    assert view.state is JobState.PENDING
    assert view.last_failure is not None
    assert view.last_failure.kind is FailureKind.PREEMPTED
    tell(world, client.resume)
    world.finish()
    assert world.snapshot().state is SweepState.SUCCEEDED


def test_attempt_that_does_not_stop_is_killed_after_its_grace(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Hang(obeys=0), Succeed()])
    start(world, "dataset/tree")
    asked_at_s = world.clock()
    tell(world, client.pause, running=Running.CHECKPOINT)
    world.tick_until(lambda: bool(world.backend.killed))
    assert world.clock() - asked_at_s > ATTEMPT_STOP_GRACE_S
    assert len(set(world.backend.stopped)) == 1
    assert len(world.backend.stopped) > 2, "a lost request is repeated"
    world.tick()
    failure = world.job("dataset/tree").last_failure
    assert failure is not None
    assert "had 12" in failure.message


def test_attempt_is_asked_and_killed_in_time_though_the_clock_was_set_back(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Hang(obeys=0), Succeed()])
    start(world, "dataset/tree")
    tell(world, client.pause, running=Running.CHECKPOINT)
    world.tick()
    num_asked = len(world.backend.stopped)
    world.clock.advance(-3600.0)
    for _ in range(int(ATTEMPT_STOP_GRACE_S / 10) + 2):
        world.clock.advance(10.0)
        world.tick()
    assert len(world.backend.stopped) > num_asked
    assert world.backend.killed


def test_attempt_that_could_not_save_in_an_outage_is_not_killed_at_the_first_look_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(tmp_path, dataset_tree=[Hang(obeys=0), Succeed()])
    start(world, "dataset/tree")
    tell(world, client.pause, running=Running.CHECKPOINT)
    store = FaultyStore(
        world.store,
        read_faults=[ReadFault(harm=Harm.REFUSED, nth=n, within="lease", error=StorageTimeoutError) for n in range(21)],
    )
    monkeypatch.setattr(world.controller._lease, "_store", store)  # asked first in each round
    for _ in range(20):
        world.clock.advance(10.0)
        with pytest.raises(StorageTimeoutError):
            world.controller.tick()
    back_s = world.clock()
    world.tick()
    assert world.backend.killed == []
    world.tick_until(lambda: bool(world.backend.killed))
    assert world.clock() - back_s > ATTEMPT_STOP_GRACE_S - 2 * MAX_GAP_S


@pytest.mark.parametrize("down_s", [ATTEMPT_STOP_GRACE_S, 300.0])
def test_preempted_attempt_is_killed_by_the_next_controller_too_after_a_minute(tmp_path: Path, down_s: float) -> None:
    world = make_world(tmp_path, dataset_tree=[Hang(obeys=0), Succeed()])
    start(world, "dataset/tree")
    tell(world, client.pause, running=Running.CHECKPOINT)
    world.clock.advance(down_s)
    world.backend.stopped.clear()
    world.new_controller()
    begun_s = world.clock()
    world.tick()
    attempt_id = world.job("dataset/tree").last_attempt_id
    assert world.backend.stopped == [attempt_id], "it is asked once more"
    assert world.backend.killed == []
    world.tick_until(lambda: bool(world.backend.killed))
    assert world.backend.killed == [attempt_id]
    assert world.clock() - begun_s > RESUMED_GRACE_S


def test_cancelled_sweep_kills_what_does_not_stop(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Hang(obeys=0)])
    start(world, "dataset/tree")
    world.cancel()
    world.finish()
    assert world.snapshot().state is SweepState.CANCELLED
    assert len(world.backend.killed) == 1


def test_stopped_sweep_ends_with_its_running_attempts(tmp_path: Path) -> None:
    world = make_world(tmp_path, pretrain_a=[Succeed(after_observes=4)])
    start(world, "pretrain/a")
    tell(world, client.stop)
    world.finish()
    snapshot = world.snapshot()
    assert snapshot.state is SweepState.CANCELLED
    assert snapshot.jobs["pretrain/a"].state is JobState.SUCCEEDED
    assert snapshot.jobs["probe/a"].state is JobState.CANCELLED
    assert world.backend.stopped == []


def test_cancelled_job_is_stopped_and_what_needs_it_is_skipped(tmp_path: Path) -> None:
    world = make_world(tmp_path, pretrain_a=[Hang()])
    start(world, "pretrain/a")
    assert tell(world, client.cancel, jobs=["pretrain/a"], sender="ada", consent=Consent.FORCE) == ""
    world.finish()
    snapshot = world.snapshot()
    assert snapshot.jobs["pretrain/a"].state is JobState.CANCELLED
    assert snapshot.jobs["pretrain/a"].reason == "cancelled by ada"
    assert snapshot.jobs["probe/a"].state is JobState.SKIPPED
    assert snapshot.jobs["probe/b"].state is JobState.SUCCEEDED
    assert snapshot.state is SweepState.FAILED
    assert len(world.backend.stopped) == 1


def test_jobs_are_cancelled_by_a_pattern(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Succeed(after_observes=3)])
    start(world, "dataset/tree")
    tell(world, client.cancel, jobs=["probe/*"])
    world.finish()
    states = {name: view.state for name, view in world.snapshot().jobs.items()}
    assert [name for name, state in states.items() if state is JobState.CANCELLED] == ["probe/a", "probe/b"]
    assert states["pretrain/b"] is JobState.SUCCEEDED


def test_retry_of_a_finished_sweep_runs_what_failed_and_what_was_skipped_for_it(tmp_path: Path) -> None:
    world = make_world(tmp_path, pretrain_a=[FAILS, Succeed()])
    world.submit(*diamond())
    world.finish()
    assert world.snapshot().counts == {JobState.SUCCEEDED: 3, JobState.FAILED: 1, JobState.SKIPPED: 1}
    send(world, client.retry)
    world.finish()
    assert world.snapshot().state is SweepState.SUCCEEDED
    assert world.launches().count("pretrain/b") == 1


def test_retry_of_all_takes_back_a_cancel_of_some_jobs_and_what_was_skipped_for_them(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    world.submit(*diamond())
    send(world, client.cancel, jobs=["pretrain/a"])
    world.finish()
    assert tell(world, client.retry) == ""
    world.finish()
    assert world.snapshot().counts == {JobState.SUCCEEDED: 5}


def test_retry_of_a_cancelled_sweep_opens_it_again(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Hang(), Succeed()])
    start(world, "dataset/tree")
    world.cancel()
    world.finish()
    assert "is cancelled: it has ended, there is nothing to cancel" in tell(world, client.cancel)
    assert tell(world, client.retry) == ""
    world.finish()
    assert world.snapshot().state is SweepState.SUCCEEDED


def test_retry_of_a_skipped_job_takes_what_it_needs_along(tmp_path: Path) -> None:
    world = make_world(tmp_path, pretrain_a=[FAILS, Succeed()], pretrain_b=[FAILS, Succeed()])
    world.submit(*diamond())
    world.finish()
    send(world, client.retry, jobs=["probe/a"])
    world.finish()
    snapshot = world.snapshot()
    assert snapshot.jobs["probe/a"].state is JobState.SUCCEEDED
    assert snapshot.jobs["pretrain/b"].state is JobState.FAILED
    assert snapshot.state is SweepState.FAILED


def test_retry_after_results_were_deleted_makes_them_again(tmp_path: Path) -> None:
    world = make_world(tmp_path, probe_a=[FAILS, Succeed()])
    world.submit(*diamond())
    world.finish()
    world.store.delete(f"artifacts/pretrain/{world.job('pretrain/a').key}/record.json")
    send(world, client.retry)
    world.finish()
    assert world.snapshot().state is SweepState.SUCCEEDED
    assert world.launches().count("pretrain/a") == 2


def test_retry_renews_the_budget_of_a_job(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Fail(), Fail(), Succeed()])
    world.submit(make_job("dataset/tree"), max_failures=2)
    world.finish()
    assert world.job("dataset/tree").state is JobState.FAILED
    send(world, client.retry)
    world.finish()
    assert world.job("dataset/tree").state is JobState.SUCCEEDED


def test_priority_is_changed_while_the_sweep_runs(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Hang()])
    start(world, "dataset/tree")
    assert world.snapshot().priority is None
    tell(world, client.set_priority, 7)
    assert world.snapshot().priority == 7


def test_messages_sent_while_no_controller_runs_are_followed_by_the_next_in_order(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Succeed(after_observes=30)])
    start(world, "dataset/tree")
    messages = [send(world, client.pause), send(world, client.set_priority, 3), send(world, client.resume)]
    world.new_controller()
    world.tick_until(lambda: world.snapshot().handled.issuperset(messages))
    assert world.snapshot().state is SweepState.RUNNING
    assert world.snapshot().priority == 3
    assert world.snapshot().refusals == {}


@pytest.mark.parametrize(
    ("ask", "options", "why"),
    [
        (client.resume, {}, "is running, so nobody can resume it: it is not paused"),
        (client.retry, {}, "nothing to retry"),
        (client.cancel, {"jobs": ["pretrian/a"]}, "has no job 'pretrian/a': did you mean 'pretrain/a'"),
        (client.retry, {"jobs": ["dataset/tree"]}, r"none is failed, skipped or cancelled \(dataset/tree is running\)"),
    ],
)
def test_message_that_cannot_be_followed_is_refused_with_a_reason(tmp_path, ask, options, why) -> None:
    world = make_world(tmp_path, dataset_tree=[Hang()])
    start(world, "dataset/tree")
    reason = tell(world, ask, **options)
    assert re.search(why, reason), reason
    assert world.snapshot().state is SweepState.RUNNING


@pytest.mark.parametrize("ask", [client.pause, client.resume, client.stop, partial(client.set_priority, priority=3)])
def test_message_to_a_sweep_that_has_ended_is_refused(tmp_path: Path, ask: Ask) -> None:
    world = make_world(tmp_path)
    world.submit(*diamond())
    world.finish()
    assert "it has ended; submit it again" in tell(world, ask)
    assert world.snapshot().state is SweepState.SUCCEEDED


def test_job_selection_without_jobs_is_an_error_of_the_client(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    world.submit(*diamond())
    with pytest.raises(ControllerError, match="no job is named"):
        client.cancel(world.store, "sweep", jobs=[])


def test_message_of_somebody_else_is_refused_unless_they_insist(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Hang()])
    start(world, "dataset/tree")
    assert world.snapshot().plan.owner == client.current_user()  # type: ignore[union-attr]
    assert "belongs to" in tell(world, client.pause, sender="somebody-else")
    assert world.snapshot().state is SweepState.RUNNING
    assert tell(world, client.pause, sender="somebody-else", consent=Consent.FORCE) == ""
    assert world.snapshot().state is SweepState.PAUSED


def test_plan_replaces_only_the_revision_that_its_sender_saw(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Hang()])
    start(world, "dataset/tree")
    first = cast("Plan", world.snapshot().plan)

    def submit(store: ObjectStore, _: str, *, priority: int, **seen: Any) -> str:
        plan = replace(first, policy=replace(first.policy, priority=priority))
        return client.submit(store, plan, "text", CLUSTER, **seen)

    assert tell(world, submit, priority=1, replaced_revision=1) == ""
    late = tell(world, submit, priority=2, replaced_revision=1)
    assert "it has revision 2, and this would replace revision 1" in late
    assert "would replace none" in tell(world, submit, priority=2, replaced_revision=0)
    assert tell(world, submit, priority=1, replaced_revision=1) == ""  # the same plan replaces nothing
    assert tell(world, submit, priority=2) == ""
    assert world.snapshot().revision == 3


def test_message_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Hang()])
    start(world, "dataset/tree")
    message_id = new_message_id(world.clock())
    world.store.put(inbox_message("sweep", message_id), b'{"type": "levitate"}')
    world.tick_until(lambda: message_id in world.snapshot().handled)
    assert "unknown message 'levitate'" in world.snapshot().refusals[message_id]


# ------------------------------------------------------------------------------------------------------------- draining


def test_drained_cluster_starts_nothing_until_the_drain_ends(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Succeed(after_observes=3)])
    start(world, "dataset/tree")
    client.drain(world.store, CLUSTER, reason="new driver")
    world.tick_until(lambda: (wish := client.read_drain(world.store, CLUSTER)) is not None and bool(wish.drained_at_s))
    assert world.launches() == ["dataset/tree"]
    world.new_controller()
    for _ in range(5):
        world.tick()
    assert world.controller.is_idle
    assert world.launches() == ["dataset/tree"]
    client.end_drain(world.store, CLUSTER)
    world.finish()
    assert world.snapshot().state is SweepState.SUCCEEDED


def test_drained_cluster_is_idle_and_has_unfinished_sweeps(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Hang(), Succeed()])
    assert world.controller.has_unfinished, "until it has looked"
    start(world, "dataset/tree")
    client.drain(world.store, CLUSTER, running=Running.CHECKPOINT)
    world.tick_until(lambda: world.controller.is_idle)
    assert world.controller.has_unfinished
    client.end_drain(world.store, CLUSTER)
    world.finish()
    assert (world.controller.is_idle, world.controller.has_unfinished) == (True, False)


def test_drained_cluster_ends_no_attempt_for_one_that_may_not_start(tmp_path: Path) -> None:
    world = make_world(tmp_path, pretrain_low=[Hang()])
    world.submit(make_job("pretrain/low", cpus=4.0), sweep="low")
    world.tick_until(lambda: world.is_running("pretrain/low"))
    client.drain(world.store, CLUSTER)
    world.submit(make_job("pretrain/high", cpus=4.0), sweep="high")
    tell(world, client.set_priority, 100, sweep="high")
    for _ in range(5):
        world.tick()
    assert world.backend.stopped == []
    client.end_drain(world.store, CLUSTER)
    world.tick_until(lambda: bool(world.backend.stopped))


def test_drain_with_checkpoints_preempts_what_runs_and_says_why(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Hang(), Succeed()])
    start(world, "dataset/tree")
    client.drain(world.store, CLUSTER, running=Running.CHECKPOINT, reason="new driver")
    world.tick_until(lambda: (wish := client.read_drain(world.store, CLUSTER)) is not None and bool(wish.drained_at_s))
    failure = world.job("dataset/tree").last_failure
    assert failure is not None
    assert failure.kind is FailureKind.PREEMPTED
    client.end_drain(world.store, CLUSTER)
    world.finish()
    assert world.job("dataset/tree").num_attempts == 2


@pytest.mark.parametrize("content", [b'{"cluster": "c", "running": "levitate"}', b"[]", b"null", b"{}", b"\xff"])
def test_drain_that_cannot_be_read_starts_nothing_and_what_runs_ends(tmp_path: Path, content: bytes) -> None:
    world = make_world(tmp_path, dataset_tree=[Succeed(after_observes=2)])
    start(world, "dataset/tree")
    world.store.put(f"controllers/{CLUSTER}/drain.json", content)
    world.tick_until(lambda: world.job("dataset/tree").state is JobState.SUCCEEDED)
    for _ in range(5):
        world.tick()
    assert world.launches() == ["dataset/tree"]
    with pytest.raises(ControllerError, match="nothing is started"):
        client.read_drain(world.store, CLUSTER)


# ---------------------------------------------------------------------------------------------------------------- hangs


def test_attempt_that_reports_no_further_step_is_ended_as_hanging_and_tried_again(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Hang(steps=3), Succeed()])
    world.submit(make_job("dataset/tree"))
    for _ in range(6):
        world.tick()
    for _ in range(24):
        world.clock.advance(24.0)
        world.tick()
    world.finish()
    view = world.job("dataset/tree")
    assert view.state is JobState.SUCCEEDED
    assert view.failures == {FailureKind.HANG: 1}
    assert view.last_failure is not None
    assert re.search("no progress for 60. s in phase 'train' at step 3; 600 s", view.last_failure.message)


def test_attempt_that_goes_on_slowly_does_not_hang(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Succeed(after_observes=4)])
    world.submit(make_job("dataset/tree"))
    world.tick_until(lambda: world.is_running("dataset/tree"))
    for _ in range(3):
        world.clock.advance(500.0)
        world.tick()
    assert world.backend.killed == []


def test_attempt_that_counts_other_work_hangs_once_it_stands_still() -> None:
    """As in the setup of a probe that computes the features of its samples, before its first step."""
    beats, ends_s = Heartbeats(), 2400.0
    whys = {
        at_s: beats.see("a", Progress(phase="setup", done=min(at_s, int(ends_s))), at_s) for at_s in range(0, 7200, 24)
    }
    assert min(at_s for at_s, why in whys.items() if why) == ends_s + 1800.0 + 24.0
    assert beats.stepping == set()


def test_simulation_may_take_hours_for_a_seed() -> None:
    beats = Heartbeats()
    seed_s = 36_000
    reports = ((Progress(phase="simulate", step=at_s // seed_s), at_s) for at_s in range(0, 2 * seed_s, 30))
    assert not any(beats.see("a", progress, at_s) for progress, at_s in reports)
    assert beats.silent_s == {"a": 0.0}  # nobody is called for it


def test_attempts_that_stood_still_while_nobody_could_look_do_not_hang(tmp_path: Path) -> None:
    # The store was away for an hour: neither the attempt nor the controller went on.
    world = make_world(tmp_path, dataset_tree=[Hang(steps=3), Succeed()])
    world.submit(make_job("dataset/tree"))
    for _ in range(6):
        world.tick()
    world.clock.advance(3600.0)
    world.tick()
    world.tick()
    assert world.backend.killed == []


# --------------------------------------------------------------------------------------------- what a pause leaves over


def test_retry_after_a_paused_sweep_was_cancelled_runs_to_the_end(tmp_path: Path) -> None:
    world = make_world(tmp_path, dataset_tree=[Hang(), Succeed()])
    start(world, "dataset/tree")
    assert tell(world, client.pause, running=Running.CHECKPOINT) == ""
    world.cancel()
    world.finish()
    assert world.snapshot().state is SweepState.CANCELLED
    assert tell(world, client.retry, jobs=["*"]) == ""
    assert world.snapshot().pause is None
    world.finish()
    assert world.snapshot().state is SweepState.SUCCEEDED
    assert world.job("dataset/tree").num_attempts == 2


def test_accepted_plan_is_in_memory_as_the_store_has_it(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    world.submit(*diamond())
    world.finish()
    owned = world.controller._owned
    assert owned is not None
    (holding,) = owned.all()
    assert holding.snapshot.plan == world.snapshot().plan
    assert holding.snapshot.plan is not None
    assert holding.snapshot.plan.revision == 1
