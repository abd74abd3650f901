"""Trials of a search are kept from the moment when they stand in its log, which no journal tells of."""

from __future__ import annotations

from pathlib import Path

from orchestrator.controller.retention import RootReader
from orchestrator.search.events import Asked
from orchestrator.search.log import SearchLog
from orchestrator.testing import Hang
from tests.scripted_sweep import World, make_job

SEARCH = make_job("search/lr")


def test_trial_that_was_asked_for_after_the_roots_were_read_is_among_the_next_ones(tmp_path: Path) -> None:
    """A collection reads the roots again before it deletes; while a search runs, its sweep's journal stands still."""
    world = World(tmp_path)
    world.backend._scripts["search/lr"] = [Hang()]
    world.submit(SEARCH)
    world.tick_until(lambda: world.is_running("search/lr"))
    log, reader = SearchLog(world.store, SEARCH.key), RootReader(world.store)
    log.append([Asked(trial=0, at_s=1.0, key="pretrain-a-0", params={})])
    assert reader().keys == {SEARCH.key, "pretrain-a-0"}
    log.append([Asked(trial=1, at_s=2.0, key="pretrain-b-0", params={})])
    assert reader().keys == {SEARCH.key, "pretrain-a-0", "pretrain-b-0"}
