"""Nodes are checked before their first work and after blame; a node is let back in by a passed check."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.backends.protocol import AttemptReport, Capacity
from orchestrator.controller.node_health import RECHECK_S
from orchestrator.controller.owned_sweeps import OwnedSweep, OwnedSweeps
from orchestrator.core.contract import Resources
from orchestrator.core.errors import FailureKind, StorageError
from orchestrator.metrics.sweeps import SHOWN_AFTER_END_S
from orchestrator.scheduling.node_exclusion import EXCLUDED_S, REPEATED_S, excluded_nodes
from orchestrator.state import events
from orchestrator.state.nodes import Node
from orchestrator.storage.local import LocalStore
from orchestrator.testing import Fail, Hang, Script, ScriptedBackend, Succeed
from tests.scripted_sweep import World, make_job

GPU_NODE = Resources(cpus=8.0, gpus=8.0)
ECC = "CUDA error: uncorrectable ECC error encountered"


class CheckedBackend(ScriptedBackend):
    """Two nodes with GPUs; everything that fails does so on the first. Checks end when a test says so."""

    def __init__(self, store: LocalStore, scripts: Mapping[str, list[Script]]) -> None:
        super().__init__(store, scripts)
        self.asked: list[str] = []
        self.ended: dict[str, str] = {}
        self.num_launched_before: dict[str, int] = {}

    def capacity(self) -> Capacity:
        machines = tuple(Node(name=name, resources=GPU_NODE) for name in ("bad", "good"))
        return Capacity(total=Resources(cpus=16.0, gpus=16.0), machines=machines)

    def observe(self, attempt_ids: Collection[str], *, are_all: bool = True) -> list[AttemptReport]:
        return [replace(report, node="bad") for report in super().observe(attempt_ids)]

    def check_node(self, name: str, store_uri: str) -> None:
        assert store_uri.startswith("file:")
        self.asked.append(name)
        self.num_launched_before[name] = len(self.launched)

    def checked_nodes(self) -> Mapping[str, str]:
        ended, self.ended = self.ended, {}
        return ended


def world_of(folder: Path, **scripts: list[Script]) -> tuple[World, CheckedBackend]:
    store = LocalStore(folder)
    named = {name.replace("__", "/"): script for name, script in scripts.items()}
    backend = CheckedBackend(store, named)
    return World(folder, backend, store=store), backend


def until_s(world: World) -> float:
    return world.snapshot().excluded["bad"].until_s


@pytest.fixture
def blamed(tmp_path: Path) -> tuple[World, CheckedBackend]:
    """A sweep that has left the first node out; its other job goes on."""
    broken = Fail(kind=FailureKind.UNKNOWN, message=ECC)
    scripts: dict[str, list[Script]] = {"dataset__a": [broken, Succeed()], "dataset__b": [Hang(), Hang()]}
    world, backend = world_of(tmp_path, **scripts)
    world.submit(make_job("dataset/a"), make_job("dataset/b"))
    world.tick_until(lambda: "bad" in world.snapshot().excluded)
    return world, backend


def test_nodes_with_gpus_are_checked_once_before_anything_runs_there(tmp_path: Path) -> None:
    world, backend = world_of(tmp_path, dataset__a=[Succeed(after_observes=50)])
    world.tick()
    assert backend.asked == []  # nobody waits for nodes
    world.submit(make_job("dataset/a"))
    world.tick_until(lambda: bool(backend.asked))
    assert backend.asked == ["bad", "good"]
    assert backend.num_launched_before == {"bad": 0, "good": 0}
    for _ in range(20):
        world.tick()
    assert backend.asked == ["bad", "good"]


def test_node_that_fails_its_first_check_is_left_out_until_it_passes_one(tmp_path: Path) -> None:
    world, backend = world_of(tmp_path, dataset__a=[Hang()])
    world.submit(make_job("dataset/a"))
    world.tick_until(lambda: bool(world.launches()))
    backend.ended = {"bad": "cuda:3: 5 entries of a matrix product are wrong"}
    world.tick()
    found = world.snapshot().excluded["bad"]
    assert (
        found.reason == "node bad is excluded until it passes a check: cuda:3: 5 entries of a matrix product are wrong"
    )
    assert found.until_s - world.clock() == pytest.approx(REPEATED_S, abs=60)


def test_node_left_out_for_a_failure_is_checked_and_let_in_at_once_if_it_passes(
    blamed: tuple[World, CheckedBackend],
) -> None:
    world, backend = blamed
    assert until_s(world) - world.clock() == pytest.approx(EXCLUDED_S, abs=60)
    world.clock.advance(RECHECK_S)
    world.tick_until(lambda: backend.asked.count("bad") == 2)
    backend.ended = {"bad": ""}
    world.tick()
    assert until_s(world) <= world.clock()
    assert world.snapshot().excluded["bad"].reason == "node bad is used again: it has passed its check"


def test_node_that_passes_its_check_is_let_in_although_the_sweep_that_left_it_out_ended_long_ago(
    blamed: tuple[World, CheckedBackend],
) -> None:
    world, backend = blamed
    world.cancel()
    world.finish()
    world.submit(make_job("dataset/b"), sweep="next")  # its job goes on for ever, too
    world.tick_until(lambda: world.is_running("dataset/b"))
    backend.ended = {"bad": "still broken"}
    world.tick()
    world.clock.advance(SHOWN_AFTER_END_S)
    world.tick()
    assert not [*next(one for one in world.controller.snapshots if one.sweep == "sweep").jobs]
    assert until_s(world) > world.clock()
    backend.ended = {"bad": ""}
    world.tick()
    assert until_s(world) <= world.clock()


def test_node_stays_left_out_while_the_ended_sweep_that_left_it_out_cannot_be_read(
    blamed: tuple[World, CheckedBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, backend = blamed
    world.cancel()
    world.finish()
    world.submit(make_job("dataset/c"), sweep="next")
    world.finish("next")

    def failing(*_: object) -> None:
        raise StorageError("the store refuses")

    with monkeypatch.context() as patched:
        patched.setattr(OwnedSweeps, "append", failing)
        backend.ended = {"bad": ""}
        world.tick()
        assert "bad" in excluded_nodes(world.controller.snapshots, world.clock())
    world.tick_until(lambda: all(snapshot.jobs for snapshot in world.controller.snapshots))  # it is read again


def test_node_that_keeps_failing_its_check_never_comes_back_by_the_clock(blamed: tuple[World, CheckedBackend]) -> None:
    world, backend = blamed
    for number in range(30):
        world.clock.advance(RECHECK_S)
        world.tick_until(lambda number=number: backend.asked.count("bad") == 2 + number)  # type: ignore[misc]
        backend.ended = {"bad": "all_reduce_s: rank 3 of 8"}
        world.tick()
        assert until_s(world) > world.clock() + RECHECK_S


def test_node_whose_check_says_nothing_comes_back_by_the_clock(blamed: tuple[World, CheckedBackend]) -> None:
    world, backend = blamed
    end_s = until_s(world)
    while world.clock() < end_s:
        world.clock.advance(RECHECK_S)
        world.tick()
    assert until_s(world) == end_s
    assert backend.asked.count("bad") > 2


def test_check_that_fails_everywhere_leaves_out_no_more_nodes_than_the_breaker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world, backend = world_of(tmp_path, dataset__a=[Hang()])
    world.submit(make_job("dataset/a"))
    world.tick_until(lambda: bool(world.launches()))
    backend.ended = {"bad": "disk_bytes_per_s: slow", "good": "disk_bytes_per_s: slow"}
    for _ in range(3):
        world.tick()
    assert list(world.snapshot().excluded) == ["bad"]
    assert sum("node good stays in use, 1 are excluded already" in one.message for one in caplog.records) == 1
    backend.ended = {"bad": ""}
    for _ in range(2):
        world.tick()
    assert world.snapshot().excluded["good"].until_s > world.clock()


def test_fault_whose_journal_cannot_be_written_is_told_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, backend = world_of(tmp_path, dataset__a=[Hang()])
    world.submit(make_job("dataset/a"))
    world.tick_until(lambda: bool(world.launches()))
    append = OwnedSweeps.append

    def failing(fleet: OwnedSweeps, holding: OwnedSweep, written: Sequence[events.Event]) -> None:
        if any(isinstance(event, events.NodeExcluded) for event in written):
            raise StorageError("the store does not answer")
        append(fleet, holding, written)

    with monkeypatch.context() as patched:
        patched.setattr(OwnedSweeps, "append", failing)
        backend.ended = {"bad": "tflops: wrong"}
        world.tick()
    assert world.snapshot().excluded == {}
    world.tick_until(lambda: "bad" in world.snapshot().excluded)
