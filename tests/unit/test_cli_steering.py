"""Steering sweeps from the command line: what is chosen, what is asked, and when it takes effect."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.cli.commands import serve
from orchestrator.cli.exits import ExitCode
from orchestrator.controller.controller import Controller
from orchestrator.core.errors import FailureKind
from orchestrator.services.settings import Settings
from orchestrator.state.events import Running
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.layout import drain_name
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps.drain import drain, end_drain, read_drain
from orchestrator.testing import FakeClock, ScriptedBackend
from orchestrator.testing.scripted import Fail, Hang, Succeed
from tests.builders import make_job
from tests.commands import Ended, run_command
from tests.scripted_sweep import CLUSTER, World, diamond

Command = Callable[..., Ended]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A sweep of a data set, two backbones that run, and two probes that wait."""
    store = LocalStore(tmp_path / "store")
    backend = ScriptedBackend(store, {"pretrain/a": [Hang()], "pretrain/b": [Hang()]})
    world = World(tmp_path / "store", backend, store=store)
    world.submit(*diamond())
    world.tick_until(lambda: world.is_running("pretrain/a") and world.is_running("pretrain/b"))
    return world


@pytest.fixture
def command(world: World, capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str) -> Ended:
        name, *others = arguments
        return run_command(capsys, name, "--store", world.store.uri, *others)

    return run


@contextmanager
def serving(world: World) -> Iterator[None]:
    """A controller on the real clock, in a thread."""
    controller = Controller(world.store, world.backend, CLUSTER, "holder-live", time.time)
    begun, ends = threading.Event(), threading.Event()

    def turn() -> None:
        while not ends.wait(0.02):
            controller.wake()
            controller.tick()
            begun.set()

    thread = threading.Thread(target=turn)
    thread.start()
    assert begun.wait(60.0), "no round of the controller ended"  # its lease is there from now on
    try:
        yield
    finally:
        ends.set()
        thread.join()


def test_cancel_with_a_condition_ends_only_these_jobs(world: World, command: Command) -> None:
    result = command("cancel", "sweep", "--where", "kind=probe", "-y", "-o", "json")
    assert result.code == 0
    assert result.document["jobs"] == ["probe/a", "probe/b"]
    assert "2 jobs of sweep" in result.message
    world.tick_until(lambda: JobState.CANCELLED in world.snapshot().counts)
    states = {name: view.state for name, view in world.snapshot().jobs.items()}
    assert states["probe/a"] is states["probe/b"] is JobState.CANCELLED
    assert states["pretrain/a"] is JobState.RUNNING


def test_order_for_one_job_speaks_of_one_job(world: World, command: Command) -> None:
    told = command("cancel", "sweep", "probe/a", "-y").message
    assert "1 job of sweep is cancelled" in told
    assert f"To undo: orchestrator retry sweep --store {world.store.uri}. " in told
    assert f"See: orchestrator status sweep --store {world.store.uri}" in told


def test_undo_is_by_who_sent_the_request(world: World, command: Command) -> None:
    told = command("pause", "sweep", "--sender", "ann", "--force").message
    assert f"To undo: orchestrator resume sweep --sender ann --force --store {world.store.uri}. " in told


def test_end_of_a_drain_names_the_same_cluster(world: World, command: Command) -> None:
    told = command("drain", "--cluster", "other").message
    assert f"to end the drain: orchestrator drain --end --cluster other --store {world.store.uri}" in told


def test_cancel_conditions_all_must_hold_and_bars_part_alternatives(world: World, command: Command) -> None:
    result = command("cancel", "sweep", "--where", "kind=probe|pretrain,state=running", "-y", "-o", "json")
    assert result.document["jobs"] == ["pretrain/a", "pretrain/b"]
    result = command("cancel", "sweep", "*/a", "--where", "state=pending", "-y", "-o", "json")
    assert result.document["jobs"] == ["probe/a"]
    assert world.snapshot().counts[JobState.RUNNING] == 2  # nobody has followed anything yet


def test_cancel_chosen_jobs_that_have_ended_says_so(command: Command, world: World) -> None:
    result = command("cancel", "sweep", "--where", "kind=dataset", "-y")
    assert result.code == 102
    assert "1 jobs of sweep 'sweep' are selected (1 succeeded)" in result.err


def test_a_misspelt_condition_is_refused_also_for_a_sweep_that_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = World(tmp_path / "ended")
    ended.submit(make_job("pretrain/a"))
    ended.finish()
    for condition, told in (("knd=pretrain", "did you mean 'kind'"), ("kind=pretrain", "has no effect")):
        result = run_command(capsys, "cancel", "sweep", "--where", condition, "-y", "--store", ended.store.uri)
        assert told in result.err


def test_pause_without_a_controller_waits_in_the_store_and_says_so(world: World, command: Command) -> None:
    result = command("pause", "sweep")
    assert result.code == 0
    assert "no controller runs" in result.message
    assert "waits in the store" in result.message
    world.tick_until(lambda: world.snapshot().state is SweepState.PAUSED)
    assert world.is_running("pretrain/a")


def test_orders_to_a_live_controller_are_done_when_the_command_returns(world: World, command: Command) -> None:
    with serving(world):
        assert "Done: sweep pauses" in command("pause", "sweep").message
        assert world.snapshot().state is SweepState.PAUSED
        assert "Done: sweep resumes" in command("resume", "sweep").message
        assert "has priority 100" in command("priority", "sweep", "urgent").message
        assert world.snapshot().priority == 100
        assert "Done: sweep stops" in command("stop", "sweep").message
        assert world.snapshot().state is SweepState.STOPPING


def test_order_that_the_controller_refuses_ends_with_3_and_the_reason(world: World, command: Command) -> None:
    with serving(world):
        result = command("resume", "sweep")
    assert result.code == 3
    assert "it is not paused" in result.err


def test_order_of_somebody_else_is_refused_unless_forced(world: World, command: Command) -> None:
    with serving(world):
        refused = command("cancel", "sweep", "--sender", "eve")
        assert refused.code == 3
        assert "belongs to" in refused.err
        assert command("cancel", "sweep", "--sender", "eve", "--force").code == 0
        assert world.snapshot().state in {SweepState.CANCELLING, SweepState.CANCELLED}


def test_retry_gives_failed_jobs_another_chance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = LocalStore(tmp_path / "store")
    backend = ScriptedBackend(store, {"pretrain/a": [Fail(kind=FailureKind.USER_ERROR), Succeed()]})
    world = World(tmp_path / "store", backend, store=store)
    world.submit(*diamond())
    world.finish()
    assert world.snapshot().state is SweepState.FAILED
    result = run_command(capsys, "retry", "sweep", "--store", store.uri)
    assert result.code == 0
    world.tick_until(lambda: world.snapshot().state is SweepState.SUCCEEDED)


@pytest.mark.parametrize(
    ("order", "how_it_ended", "code"),
    [
        (("pause", "sweep"), "succeeded", 1),
        (("cancel", "sweep"), "cancelled", 0),
        (("stop", "sweep"), "cancelled", 0),
    ],
)
def test_order_to_a_sweep_that_has_ended_says_so_and_leaves_no_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], order: tuple[str, ...], how_it_ended: str, code: int
) -> None:
    world = World(tmp_path / "store")
    world.submit(*diamond())
    if how_it_ended == "cancelled":
        world.tick()
        world.cancel()
    world.finish()
    result = run_command(capsys, *order, "--store", world.store.uri)
    assert result.code == code
    assert f"sweep sweep has ended ({how_it_ended}) already, so {order[0]} has no effect" in result.message
    assert world.store.list_children("sweeps/sweep/inbox/") == []
    document = run_command(capsys, *order, "--store", world.store.uri, "-o", "json").document
    assert (document["followed"], document["state"]) == (code == 0, how_it_ended)
    assert bool(document["refusal"]) is (code != 0)


def test_order_after_a_retry_that_waits_is_sent_behind_it(world: World, command: Command) -> None:
    world.cancel()
    world.finish()
    assert command("retry", "sweep").code == 0
    result = command("pause", "sweep")
    assert result.code == 0
    assert "Request sent: sweep pauses" in result.message
    assert len(world.store.list_children("sweeps/sweep/inbox/")) == 2


@pytest.mark.parametrize(
    ("words", "number"), [("high", 10), ("7", 7), ("-10", -10), ("-10 --force", -10), ("-- -10", -10)]
)
def test_priority_takes_names_and_whole_numbers(world: World, command: Command, words: str, number: int) -> None:
    assert command("priority", "sweep", *words.split()).code == 0
    world.tick_until(lambda: world.snapshot().priority == number)


def test_drain_is_kept_in_the_store_until_it_is_ended(world: World, command: Command) -> None:
    result = command("drain", "--cluster", CLUSTER, "--reason", "upgrade")
    assert result.code == 0
    assert "no controller runs" in result.message
    world.tick()
    shown = command("drain", "--cluster", CLUSTER, "--show", "-o", "json").document
    assert shown["drain"]["reason"] == "upgrade"
    assert "is no longer drained" in command("drain", "--cluster", CLUSTER, "--end").message
    assert command("drain", "--cluster", CLUSTER, "--show", "-o", "json").document["drain"] is None


def test_drain_that_is_damaged_can_be_ended(world: World, command: Command) -> None:
    """Nothing starts while nobody can tell whether the cluster is drained, and the error says to end the drain."""
    world.store.put(drain_name(CLUSTER), b"{")
    assert "end the drain" in command("drain", "--cluster", CLUSTER, "--show").message
    ended = command("drain", "--cluster", CLUSTER, "--end")
    assert (ended.code, "is no longer drained" in ended.message) == (0, True)
    assert read_drain(world.store, CLUSTER) is None


def test_drain_of_a_cluster_that_the_store_has_never_seen_says_so(world: World, command: Command) -> None:
    told = command("drain", "--cluster", "typo").message
    assert f"the store has seen no controller of a cluster of this name (it has seen {CLUSTER})" in told
    assert "is drained" not in told


def test_drain_without_a_controller_is_not_said_to_be_complete(world: World, command: Command) -> None:
    """Its lease has expired, and the jobs that it started may still run."""
    told = command("drain", "--cluster", CLUSTER).message
    assert "is draining, but no controller runs: jobs that the last one started may still run" in told
    assert "is drained" not in told


@pytest.mark.parametrize(("sender", "left"), [("ann", "ann"), (serve.SENDER, None)])
def test_end_of_serve_leaves_the_drain_of_a_person_to_its_sender(
    world: World, monkeypatch: pytest.MonkeyPatch, sender: str, left: str | None
) -> None:
    class Served:
        """A connection to Ray: while it is used, the machine is taken back."""

        def __init__(self, settings: Settings, *, is_idle: bool) -> None:
            self.settings, self.store, self.link = settings, world.store, SimpleNamespace(has_unfinished=not is_idle)

        def keep_alive(self) -> None:
            if self.link.has_unfinished:
                signal.raise_signal(signal.SIGTERM)

        def wake(self) -> None:
            pass

    @contextmanager
    def connect(settings: Settings, *_: object, **__: object) -> Iterator[Served]:
        yield Served(settings, is_idle=is_idle)

    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setenv("ORCHESTRATOR_CLUSTER", CLUSTER)
    monkeypatch.setattr(serve, "connect", connect)
    drain(world.store, CLUSTER, reason="upgrade", sender=sender)
    is_idle = False
    serve.serve_cluster(until_idle_s=None, grace_s=0.0)
    found = read_drain(world.store, CLUSTER)
    assert found is not None
    assert (found.sender, found.running) == (sender, Running.CHECKPOINT)
    is_idle = True  # the next allocation
    serve.serve_cluster(until_idle_s=0.0, grace_s=0.0)
    found = read_drain(world.store, CLUSTER)
    assert (found and (found.sender, found.reason)) == (left and (left, "upgrade"))


@pytest.mark.parametrize("until_idle_s", [0.0, 0.001])
def test_serve_does_not_end_as_idle_while_a_sweep_of_a_drained_cluster_is_unfinished(
    world: World, monkeypatch: pytest.MonkeyPatch, until_idle_s: float
) -> None:
    """A queueing system would not submit the next allocation."""
    drain(world.store, CLUSTER, running=Running.CHECKPOINT, reason="upgrade", sender="ann")
    world.tick_until(lambda: world.controller.is_idle)

    @contextmanager
    def connect(settings: Settings, *_: object, **__: object) -> Iterator[SimpleNamespace]:
        polls = count()

        def keep_alive() -> None:
            if next(polls) == 2:
                signal.raise_signal(signal.SIGTERM)

        yield SimpleNamespace(
            settings=settings, store=world.store, link=world.controller, keep_alive=keep_alive, wake=lambda: None
        )

    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setenv("ORCHESTRATOR_CLUSTER", CLUSTER)
    monkeypatch.setattr(serve, "connect", connect)
    monkeypatch.setattr(serve, "_POLL_S", 0.002)
    assert serve.serve_cluster(until_idle_s=until_idle_s, grace_s=0.0) is not ExitCode.OK


def test_serve_whose_drain_somebody_ends_does_not_say_that_all_attempts_have_ended(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def connect(settings: Settings, *_: object, **__: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(
            settings=settings,
            store=world.store,
            link=world.controller,
            keep_alive=lambda: signal.raise_signal(signal.SIGTERM),
            wake=lambda: end_drain(world.store, CLUSTER),  # the drain has just begun
        )

    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setenv("ORCHESTRATOR_CLUSTER", CLUSTER)
    monkeypatch.setattr(serve, "connect", connect)
    assert serve.serve_cluster(until_idle_s=None, grace_s=60.0) is ExitCode.UNFINISHED
    assert "the drain was ended" in capsys.readouterr().err
    assert read_drain(world.store, CLUSTER) is None


def test_fake_clock_is_in_the_past() -> None:
    """What the tests above mean by a controller that does not run any more."""
    assert FakeClock()() < time.time() - 3600
