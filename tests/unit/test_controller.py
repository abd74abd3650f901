"""The controller over a scripted backend: a sweep from its submission to its end."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.backends.protocol import Capacity
from orchestrator.core.contract import Resources
from orchestrator.core.errors import ControllerError, FailureKind, NotFoundError
from orchestrator.metrics.sweeps import SHOWN_AFTER_END_S
from orchestrator.state.events import SweepEnding
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.layout import inbox_folder, record_name
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps import client
from orchestrator.sweeps.requests import Ownership
from orchestrator.testing import Fail, Hang, Lose, Script, ScriptedBackend, Succeed
from tests.scripted_sweep import CLUSTER, World, diamond, make_job, make_plan


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def scripted(tmp_path: Path, **scripts: list[Script]) -> World:
    world = World(tmp_path)
    named = {name.replace("__", "/"): script for name, script in scripts.items()}
    world.backend = ScriptedBackend(world.store, named)
    world.new_controller()
    return world


class JoiningBackend(ScriptedBackend):
    """Further nodes are about to join."""

    def capacity(self) -> Capacity:
        """As ever, and not all of it."""
        return replace(super().capacity(), is_settled=False)


def test_sweep_all_jobs_succeed_ends_with_every_key_committed(world: World) -> None:
    message_id = world.submit(*diamond())
    world.finish()
    snapshot = world.snapshot()
    assert snapshot.state is SweepState.SUCCEEDED
    assert snapshot.counts == {JobState.SUCCEEDED: 5}
    assert all(is_committed(world.store, job.key) for job in diamond())
    assert message_id in snapshot.handled
    assert world.store.list_children(inbox_folder("sweep")) == []
    assert sorted(world.backend.released) == sorted(request.attempt_id for request in world.backend.launched)


def test_jobs_launch_only_after_what_they_need(world: World) -> None:
    world.submit(*diamond())
    world.finish()
    order = world.launches()
    assert order[0] == "dataset/tree"
    assert order.index("pretrain/a") < order.index("probe/a")
    assert order.index("pretrain/b") < order.index("probe/b")


def test_success_without_record_is_not_believed(tmp_path: Path) -> None:
    world = scripted(tmp_path, dataset__tree=[Succeed(commits=0), Succeed()])
    world.submit(make_job("dataset/tree"))
    world.finish()
    view = world.job("dataset/tree")
    assert view.state is JobState.SUCCEEDED
    assert view.num_attempts == 2
    assert view.last_failure is not None
    assert view.last_failure.kind is FailureKind.STORAGE


def test_lost_attempt_that_committed_counts_as_success(tmp_path: Path) -> None:
    world = scripted(tmp_path, dataset__tree=[Lose(commits=1)])
    world.submit(make_job("dataset/tree"))
    world.finish()
    assert world.job("dataset/tree").state is JobState.SUCCEEDED
    assert world.job("dataset/tree").num_attempts == 1


def test_user_error_fails_the_job_at_once_and_skips_only_its_descendants(tmp_path: Path) -> None:
    world = scripted(tmp_path, pretrain__a=[Fail(kind=FailureKind.USER_ERROR, message="no such model")])
    world.submit(*diamond())
    world.finish()
    snapshot = world.snapshot()
    assert snapshot.state is SweepState.FAILED
    assert snapshot.jobs["pretrain/a"].state is JobState.FAILED
    assert "no such model" in snapshot.jobs["pretrain/a"].reason
    assert snapshot.jobs["pretrain/a"].num_attempts == 1
    assert snapshot.jobs["probe/a"].state is JobState.SKIPPED
    assert snapshot.jobs["probe/b"].state is JobState.SUCCEEDED


def test_unknown_failures_are_retried_until_the_budget_is_spent(tmp_path: Path) -> None:
    world = scripted(tmp_path, dataset__tree=[Fail()])
    world.submit(make_job("dataset/tree"), max_failures=3)
    world.finish()
    assert world.job("dataset/tree").num_attempts == 3
    assert "max_failures=3" in world.job("dataset/tree").reason


def test_preemptions_never_eat_the_budget(tmp_path: Path) -> None:
    preempted = [Fail(kind=FailureKind.PREEMPTED)] * 6
    world = scripted(tmp_path, dataset__tree=[*preempted, Fail(), Succeed()])
    world.submit(make_job("dataset/tree"), max_failures=2)
    world.finish()
    assert world.job("dataset/tree").state is JobState.SUCCEEDED
    assert world.job("dataset/tree").num_attempts == 8


def test_committed_key_is_reused_without_a_launch(world: World) -> None:
    world.submit(*diamond(), sweep="first")
    world.finish("first")
    num_launches = len(world.backend.launched)
    world.submit(*diamond(), sweep="second")
    world.finish("second")
    assert world.snapshot("second").counts == {JobState.REUSED: 5}
    assert len(world.backend.launched) == num_launches


def test_same_key_in_two_sweeps_runs_once(world: World) -> None:
    world.submit(*diamond(), sweep="first")
    world.submit(*diamond(), sweep="second")
    world.finish("first", "second")
    assert len(world.backend.launched) == 5
    states = [view.state for sweep in ("first", "second") for view in world.snapshot(sweep).jobs.values()]
    assert states.count(JobState.SUCCEEDED) == 5
    assert states.count(JobState.REUSED) == 5


def test_two_jobs_of_one_plan_with_one_key_run_once(world: World) -> None:
    world.submit(make_job("probe/a", key="probe-same"), make_job("probe/b", key="probe-same"))
    world.finish()
    assert world.launches() == ["probe/a"]
    assert world.job("probe/b").state is JobState.REUSED


def test_record_of_another_identity_fails_the_job_and_names_the_key(world: World) -> None:
    world.submit(make_job("dataset/tree"), sweep="first")
    world.finish("first")
    other = make_job("dataset/other")
    content = world.store.get(record_name(make_job("dataset/tree").key))
    world.store.put(record_name(other.key), content)
    world.submit(other)
    world.finish()
    assert world.job("dataset/other").state is JobState.FAILED
    assert other.key in world.job("dataset/other").reason


def test_job_larger_than_every_node_fails_as_infeasible(world: World) -> None:
    world.submit(make_job("dataset/tree", cpus=64), make_job("dataset/small"))
    world.finish()
    assert f"largest node has {world.backend.total}" in world.job("dataset/tree").reason
    assert world.job("dataset/small").state is JobState.SUCCEEDED


def test_job_waits_while_nodes_of_the_cluster_are_still_to_join(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    backend = JoiningBackend(store)
    world = World(tmp_path, backend, store=store)
    world.submit(make_job("dataset/tree", cpus=8))
    for _ in range(5):
        world.tick()
    assert world.job("dataset/tree").state is JobState.PENDING
    backend.total = Resources(cpus=8.0)
    world.finish()
    assert world.job("dataset/tree").state is JobState.SUCCEEDED


def test_attempts_of_a_key_are_numbered_on_across_sweeps(tmp_path: Path) -> None:
    world = scripted(tmp_path, dataset__tree=[Fail(kind=FailureKind.USER_ERROR), Succeed()])
    world.submit(make_job("dataset/tree"), sweep="first")
    world.finish("first")
    world.submit(make_job("dataset/tree"), sweep="second")
    world.finish("second")
    assert [request.attempt_number for request in world.backend.launched] == [1, 2]


def test_resubmit_of_the_same_plan_retries_failed_jobs_only(tmp_path: Path) -> None:
    world = scripted(tmp_path, pretrain__a=[Fail(kind=FailureKind.USER_ERROR), Succeed()])
    world.submit(*diamond())
    world.finish()
    world.submit(*diamond())
    world.finish()
    snapshot = world.snapshot()
    assert snapshot.revision == 1
    assert snapshot.state is SweepState.SUCCEEDED
    assert world.launches().count("pretrain/a") == 2
    assert world.launches().count("pretrain/b") == 1


def test_resubmit_after_a_record_was_deleted_runs_that_job_again(world: World) -> None:
    world.submit(*diamond())
    world.finish()
    world.store.delete(record_name(diamond()[1].key))
    world.submit(*diamond())
    world.finish()
    assert world.launches().count("pretrain/a") == 2
    assert world.launches().count("probe/a") == 1


def test_changed_plan_becomes_a_revision_that_adds_and_drops_jobs(tmp_path: Path) -> None:
    world = scripted(tmp_path, pretrain__b=[Hang()])
    world.submit(*diamond())
    world.tick_until(lambda: world.is_running("pretrain/b"))
    world.submit(*diamond()[:2], make_job("probe/new", "pretrain/a"))
    world.tick_until(lambda: world.snapshot().revision == 2)
    snapshot = world.snapshot()
    assert list(snapshot.jobs) == ["dataset/tree", "pretrain/a", "probe/new"]
    assert [attempt.job for attempt in snapshot.leaving.values()] == ["pretrain/b"]
    world.finish()
    assert world.backend.stopped == [
        request.attempt_id for request in world.backend.launched if request.job == "pretrain/b"
    ]
    assert world.snapshot().counts == {JobState.SUCCEEDED: 3}
    assert world.snapshot().leaving == {}


def test_cancel_stops_what_runs_and_starts_nothing(tmp_path: Path) -> None:
    world = scripted(tmp_path, pretrain__a=[Hang()], pretrain__b=[Hang()])
    world.submit(*diamond())
    world.tick_until(lambda: len(world.backend.live) == 2)
    world.cancel()
    world.finish()
    snapshot = world.snapshot()
    assert snapshot.state is SweepState.CANCELLED
    assert snapshot.counts == {JobState.SUCCEEDED: 1, JobState.CANCELLED: 4}
    assert len(world.backend.stopped) == 2


def test_resubmit_of_a_cancelled_sweep_finishes_it(tmp_path: Path) -> None:
    world = scripted(tmp_path, pretrain__a=[Hang(), Succeed()])
    world.submit(*diamond())
    world.tick_until(lambda: world.is_running("pretrain/a"))
    world.cancel()
    world.finish()
    world.submit(*diamond())
    world.finish()
    assert world.snapshot().state is SweepState.SUCCEEDED


def test_progress_of_a_running_attempt_is_shown_and_removed_at_its_end(tmp_path: Path) -> None:
    world = scripted(tmp_path, dataset__tree=[Succeed(after_observes=4)])
    world.submit(make_job("dataset/tree"))
    world.tick_until(lambda: "dataset/tree" in client.read_progress(world.store, "sweep"))
    assert client.read_progress(world.store, "sweep")["dataset/tree"].progress.phase == "train"
    world.finish()
    world.tick()
    world.tick()
    assert client.read_progress(world.store, "sweep") == {}


def test_plan_with_a_job_before_its_need_is_refused_by_the_client(world: World) -> None:
    plan = make_plan(make_job("probe/a", "pretrain/a"), make_job("pretrain/a"), store_uri=world.store.uri)
    with pytest.raises(ControllerError, match="before"):
        client.submit(world.store, plan, "", CLUSTER)


def test_message_that_is_garbage_is_refused_and_deleted(world: World) -> None:
    world.submit(make_job("dataset/tree"))
    world.finish()
    world.store.put(f"{inbox_folder('sweep')}9-garbage.json", b"{")
    world.tick_until(lambda: "9-garbage" in world.snapshot().refusals)
    assert world.store.list_children(inbox_folder("sweep")) == []


def test_submit_to_a_second_cluster_while_unfinished_is_refused_by_the_client(tmp_path: Path) -> None:
    world = scripted(tmp_path, dataset__tree=[Hang()])
    world.submit(make_job("dataset/tree"))
    world.tick_until(lambda: world.snapshot().state is SweepState.RUNNING)
    plan = make_plan(make_job("dataset/tree"), store_uri=world.store.uri)
    with pytest.raises(ControllerError, match=CLUSTER):
        client.submit(world.store, plan, "", "cluster-b")


def test_taking_a_sweep_over_moves_it_and_stops_the_former_attempts(tmp_path: Path) -> None:
    world = scripted(tmp_path, dataset__tree=[Hang()])
    world.submit(make_job("dataset/tree"))
    world.tick_until(lambda: len(world.backend.live) == 1)
    former, former_backend = world.controller, world.backend
    world.backend = ScriptedBackend(world.store)
    world.new_controller(cluster="cluster-b")
    plan = make_plan(make_job("dataset/tree"), store_uri=world.store.uri)
    client.submit(world.store, plan, "", "cluster-b", ownership=Ownership.TAKE, now=world.clock())
    world.finish()
    assert world.snapshot().cluster == "cluster-b"
    assert world.job("dataset/tree").state is JobState.SUCCEEDED
    for _ in range(3):
        former.tick()
        world.clock.advance(1.0)
    assert former.is_idle
    assert former_backend.live == []
    assert former_backend.released == [former_backend.launched[0].attempt_id]


def test_sweep_that_ended_long_ago_is_kept_without_its_jobs_and_read_again_for_a_message(tmp_path: Path) -> None:
    world = scripted(tmp_path, dataset__a=[Fail(kind=FailureKind.USER_ERROR, message="no file"), Succeed()])
    world.submit(make_job("dataset/a"), make_job("dataset/b"))
    world.finish()
    world.tick()
    (full,) = world.controller.snapshots
    assert [*full.jobs] == ["dataset/a", "dataset/b"]
    world.clock.advance(SHOWN_AFTER_END_S)
    world.tick()
    for controller in (world.controller, world.new_controller()):
        controller.tick()
        (kept,) = controller.snapshots
        assert kept.plan is not None
        assert (kept.plan.jobs, [*kept.jobs]) == ((), ["dataset/a"])
        assert (kept.state, kept.counts, kept.finished_at_s) == (full.state, full.counts, full.finished_at_s)
        assert controller.is_idle
        assert not controller._scheduler.indexes, "they hold the jobs, too"
    client.retry(world.store, "sweep", now=world.clock())
    world.tick_until(lambda: world.snapshot().state is SweepState.SUCCEEDED)
    assert (world.job("dataset/a").num_attempts, world.job("dataset/b").num_attempts) == (2, 1)


def test_reading_an_unknown_sweep_names_those_that_exist(world: World) -> None:
    world.submit(make_job("dataset/tree"))
    with pytest.raises(NotFoundError, match="sweep"):
        client.load_snapshot(world.store, "swep")


def test_sweep_before_any_controller_reads_as_submitted(world: World) -> None:
    world.submit(make_job("dataset/tree"))
    assert world.snapshot().state is SweepState.SUBMITTED
    with pytest.raises(NotFoundError, match=r"accepted .*`orchestrator submit FILE -y`.*`orchestrator serve`"):
        client.load_plan(world.store, "sweep")


def test_wake_makes_the_next_tick_read_the_inbox(world: World) -> None:
    world.controller.tick()
    world.submit(make_job("dataset/tree"))
    world.controller.tick()
    assert world.snapshot().state is SweepState.SUBMITTED
    world.controller.wake("sweep")
    world.controller.tick()
    assert world.snapshot().state is SweepState.RUNNING


def test_second_sweep_waits_while_the_cluster_is_full(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.backend = ScriptedBackend(world.store, total=Resources(cpus=1.0))
    world.new_controller()
    world.submit(make_job("dataset/one"), sweep="first")
    world.submit(make_job("dataset/two"), sweep="second")
    world.finish("first", "second")
    assert world.launches() == ["dataset/one", "dataset/two"]
    assert world.job("dataset/two", "second").queued_s > 0


def test_finished_status_is_the_sweeps_own(world: World) -> None:
    world.submit(make_job("dataset/tree"))
    world.finish()
    assert world.snapshot().state.value == SweepEnding.SUCCEEDED.value
    assert world.controller.is_idle


def test_copy_of_a_store_is_read_and_written_where_it_is(tmp_path: Path) -> None:
    """Attempts wrote, and results were read, where the sweep was submitted."""
    world = World(tmp_path / "here", ScriptedBackend(LocalStore(tmp_path / "here"), {"pretrain/a": [Hang()]}))
    world.submit(*diamond())
    world.tick_until(lambda: world.is_running("pretrain/a"))
    shutil.copytree(tmp_path / "here", tmp_path / "copy")
    copy = LocalStore(tmp_path / "copy")
    assert client.load_plan(copy, "sweep").store_uri == copy.uri
    other = World(tmp_path / "copy", store=copy)
    other.clock.advance(world.clock() - other.clock() + 3600.0)
    other.tick_until(lambda: other.snapshot().state.is_final)
    assert {request.store_uri for request in other.backend.launched} == {copy.uri}
