"""What shells offer after Tab."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import typer

from orchestrator.cli import arguments as completion
from orchestrator.cli.arguments import complete_job, complete_sweep
from tests.scripted_sweep import World, diamond


def context_of(**params: str) -> typer.Context:
    """What a shell's half-typed command line holds so far."""
    return cast("typer.Context", SimpleNamespace(params=params))


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path / "store")
    world.submit(*diamond())
    world.tick()
    return world


def test_sweeps_are_offered_by_their_beginning(world: World) -> None:
    assert complete_sweep(context_of(store=world.store.uri), "sw") == ["sweep"]
    assert complete_sweep(context_of(store=world.store.uri), "x") == []


def test_jobs_are_offered_folder_by_folder(world: World) -> None:
    context = context_of(store=world.store.uri, sweep="sweep")
    assert complete_job(context, "") == ["dataset/", "pretrain/", "probe/"]
    assert complete_job(context, "pre") == ["pretrain/a", "pretrain/b"]
    assert complete_job(context, "probe/b") == ["probe/b"]


def test_nothing_is_offered_where_there_is_no_store(tmp_path: Path) -> None:
    assert complete_sweep(context_of(store=(tmp_path / "none").as_uri()), "") == []
    assert list(tmp_path.iterdir()) == []


def test_silent_store_offers_nothing_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(completion, "DEADLINE_S", 0.2)
    monkeypatch.setattr(completion, "_sweeps", lambda _: [str(release.wait(60))])
    began_s = time.monotonic()
    assert complete_sweep(context_of(), "") == []
    assert time.monotonic() - began_s < 10
    release.set()
