"""Journals and plans of earlier versions are read, and their sweeps go on: weeks-long sweeps survive an upgrade."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.errors import FailureKind
from orchestrator.core.ids import make_key
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.layout import journal_segment, plan_name, spec_name
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps import client
from tests.scripted_sweep import World

GOLDEN = Path(__file__).parents[1] / "golden" / "journals" / "before-policies.json"
"""Written by the version before priorities, pauses and snapshots: one job failed, one was retried twice."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def restore(root: Path, *, num_segments: int | None = None) -> None:
    """Put the sweep into a store, up to some segment of its journal."""
    store, golden = LocalStore(root), golden_sweep()
    plan = {**golden["plan"], "store_uri": store.uri}
    store.put_if_absent(plan_name("sweep", 1), json.dumps(plan).encode())
    store.put_if_absent(spec_name("sweep", 1), b"name: sweep\n")
    for number, segment in enumerate(golden["segments"][:num_segments]):
        lines = "\n".join(json.dumps(line) for line in segment)
        store.put_if_absent(journal_segment("sweep", number), f"{lines}\n".encode())


def golden_sweep() -> Any:
    """The test that recorded it made its keys up; those of a planner are the addresses of the identities."""
    text = GOLDEN.read_text()
    identities = [job["identity"] for job in json.loads(text)["plan"]["jobs"]]
    for job in json.loads(text)["plan"]["jobs"]:
        key = make_key(job["kind"], job["name"].partition("/")[2], job["identity"])
        text = text.replace(f'"{job["key"]}"', f'"{key}"').replace(f'"{job["key"]}.', f'"{key}.')
    document = json.loads(text)
    for job, identity in zip(document["plan"]["jobs"], identities, strict=True):
        job["identity"] = identity
    return document


def test_journal_of_an_earlier_version_adds_up_to_the_same(root: Path) -> None:
    restore(root)
    snapshot = client.load_snapshot(LocalStore(root), "sweep")
    assert snapshot.state is SweepState.FAILED
    assert {name: view.state for name, view in snapshot.jobs.items()} == {
        "dataset/tree": JobState.SUCCEEDED,
        "pretrain/a": JobState.FAILED,
        "pretrain/b": JobState.SUCCEEDED,
        "probe/a": JobState.SKIPPED,
        "probe/b": JobState.SUCCEEDED,
    }
    assert snapshot.jobs["pretrain/b"].failures == {FailureKind.OUT_OF_MEMORY: 1, FailureKind.NODE_LOST: 1}
    assert "no such model" in snapshot.jobs["pretrain/a"].reason
    assert snapshot.plan is not None
    assert snapshot.plan.policy.max_failures == 3


@pytest.mark.parametrize("num_segments", [2, 4, 6, 8])
def test_sweep_that_an_earlier_version_left_unfinished_is_finished(root: Path, num_segments: int) -> None:
    restore(root, num_segments=num_segments)
    world = World(root)
    world.clock.advance(1e6)
    world.tick_until(lambda: world.snapshot().state.is_final)
    snapshot = world.snapshot()
    assert all(view.state.is_final for view in snapshot.jobs.values())
    assert snapshot.epoch == 2, "a lease that was lost begins above the epoch that the journal names"
    assert snapshot.holder == "holder-1"
