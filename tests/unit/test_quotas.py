"""Bounds of users on a cluster, and what a sweep's progress warns of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from orchestrator.core.contract import JobRequest, Outcome, Progress
from orchestrator.core.errors import ControllerError
from orchestrator.state.transitions import SweepState
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.layout import quotas_name
from orchestrator.storage.local import LocalStore
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps import client
from orchestrator.sweeps.client import Cap
from orchestrator.sweeps.progress import ProgressBoard
from orchestrator.testing import ScriptedBackend, Succeed, scripted
from tests.scripted_sweep import CLUSTER, World, make_job


def make_world(root: Path, num_jobs: int) -> World:
    world = World(root)
    names = [f"dataset/{number}" for number in range(num_jobs)]
    world.backend = ScriptedBackend(world.store, {name: [Succeed(after_observes=4)] for name in names})
    world.new_controller()
    return world


def test_quota_bounds_all_sweeps_of_a_user_and_is_obeyed_from_the_next_look_on(tmp_path: Path) -> None:
    world = make_world(tmp_path, 4)
    client.write_quotas(world.store, CLUSTER, {"*": Cap(max_concurrent=2)})
    world.submit(*(make_job(f"dataset/{number}") for number in range(4)))
    assert most_at_once(world) == 2


def most_at_once(world: World) -> int:
    """Runs the sweep to its end; how many attempts ran at once."""
    most = 0

    def has_ended() -> bool:
        nonlocal most
        most = max(most, len(world.backend.live))
        return world.snapshot().state.is_final

    world.tick_until(has_ended)
    return most


def test_quotas_are_read_as_written_and_refused_if_they_make_no_sense(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert client.read_quotas(store, CLUSTER) == {}
    quotas = {"ada": Cap(max_gpus=8.0), "*": Cap(max_concurrent=3)}
    client.write_quotas(store, CLUSTER, quotas)
    assert client.read_quotas(store, CLUSTER) == quotas
    with pytest.raises(ControllerError, match="ada"):
        client.write_quotas(store, CLUSTER, {"ada": Cap(max_gpus=-1.0)})


@pytest.mark.parametrize(
    "content", [b"{", b"[1]", b'{"users": [1]}', b'{"users": {"ada": {"max_gpus": "many"}}}', b"[" * 100_000]
)
def test_quotas_that_are_none_are_refused_as_they_are_read(tmp_path: Path, content: bytes) -> None:
    store = LocalStore(tmp_path)
    store.put(quotas_name(CLUSTER), content)
    with pytest.raises(ControllerError, match="write it anew"):
        client.read_quotas(store, CLUSTER)


def test_damaged_quotas_leave_those_that_were_read_before(tmp_path: Path) -> None:
    world = make_world(tmp_path, 3)
    client.write_quotas(world.store, CLUSTER, {"*": Cap(max_concurrent=1)})
    world.tick()
    world.store.put(quotas_name(CLUSTER), b"[1, 2")
    world.submit(*(make_job(f"dataset/{number}") for number in range(3)))
    assert most_at_once(world) == 1


def test_quotas_that_were_never_read_hold_everybody_back_and_the_wait_says_why(tmp_path: Path) -> None:
    world = make_world(tmp_path, 1)
    world.store.put(quotas_name(CLUSTER), b"[1, 2")
    world.submit(make_job("dataset/0"))
    world.tick_until(lambda: bool(client.read_progress(world.store, "sweep")))
    shown = client.read_progress(world.store, "sweep")["dataset/0"]
    assert "quotas of the cluster cannot be read" in shown.progress.phase
    assert world.backend.launched == []
    client.write_quotas(world.store, CLUSTER, {})
    world.finish()


def test_warnings_are_shown_beside_the_progress_until_they_are_over(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert client.read_warnings(store, "sweep") == ()
    board = ProgressBoard(store, "sweep")
    board.show("pretrain/a", "a.1", Progress(phase="train", step=3))
    board.warn("the budget is 20 GPU-hours", "")
    board.flush(1.0)
    assert client.read_warnings(store, "sweep") == ("the budget is 20 GPU-hours",)
    assert client.read_progress(store, "sweep")["pretrain/a"].progress.step == 3
    board.warn()
    board.flush(1.5)  # too soon
    assert client.read_warnings(store, "sweep") == ("the budget is 20 GPU-hours",)
    board.flush(9.0)
    assert client.read_warnings(store, "sweep") == ()


def test_new_controller_replaces_what_the_former_one_said_of_a_sweep_that_waits(tmp_path: Path) -> None:
    world = make_world(tmp_path, 1)
    client.write_quotas(world.store, CLUSTER, {"*": Cap(max_concurrent=0)})
    world.submit(make_job("dataset/0"))
    world.tick_until(lambda: bool(client.read_progress(world.store, "sweep")))
    world.new_controller()
    client.pause(world.store, "sweep", now=world.clock())
    world.tick_until(lambda: world.snapshot().state is SweepState.PAUSED)
    assert client.read_progress(world.store, "sweep") == {}
    assert not ProgressBoard(world.store, "sweep").is_due(1e12), "ended sweeps cost no write"


def commit_without_some_samples(store: ObjectStore, request: JobRequest, metrics: Mapping[str, float]) -> Outcome:
    bad = {"train": {"corrupt": {"count": 3, "first": ["shard-0001.tar:00012: cut off", "x"]}}}
    writer = ArtifactWriter(store, request)
    writer.add("payload", b"weights")
    return writer.commit(now=0.0, metrics=metrics, summary={"bad_samples": bad})


def test_samples_that_a_training_did_without_are_in_the_journal_and_among_the_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted, "_commit", commit_without_some_samples)
    world = World(tmp_path)
    world.submit(make_job("dataset/0"), make_job("dataset/1", "dataset/0"))
    world.tick_until(lambda: world.snapshot().state.is_final)
    told = ("train: 3 corrupt (shard-0001.tar:00012: cut off)",)
    assert [view.quarantined for view in world.snapshot().jobs.values()] == [told, told]
    board = ProgressBoard(world.store, "sweep")
    for view in world.snapshot().jobs.values():
        board.quarantine(view.name, view.quarantined)
    board.warn("")
    board.flush(1e12)
    (warning,) = client.read_warnings(world.store, "sweep")
    assert warning == f"dataset/0 and 1 more jobs did without samples that cannot be read: {told[0]}"


@pytest.mark.parametrize(
    "bad", ["many", {"train": 3}, {"train": {"corrupt": 3}}, {"train": {"corrupt": {"first": [1]}}}]
)
def test_summary_of_another_form_keeps_no_result_from_its_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: object
) -> None:
    def commit(store: ObjectStore, request: JobRequest, metrics: Mapping[str, float]) -> Outcome:
        writer = ArtifactWriter(store, request)
        writer.add("payload", b"weights")
        return writer.commit(now=0.0, metrics=metrics, summary={"bad_samples": bad})

    monkeypatch.setattr(scripted, "_commit", commit)
    world = World(tmp_path)
    world.submit(make_job("dataset/0"))
    world.tick_until(lambda: world.snapshot().state.is_final)
    assert world.snapshot().jobs["dataset/0"].quarantined == ()
