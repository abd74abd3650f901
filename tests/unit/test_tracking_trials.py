"""Which trials a publisher reads, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from orchestrator.core.errors import CorruptObjectError
from orchestrator.planning.graph.plan import Job
from orchestrator.state.snapshot import JobView
from orchestrator.state.transitions import JobState
from orchestrator.storage.protocol import ObjectStat
from orchestrator.storage.trials import Trial, TrialState, trials_folder, write_trial
from orchestrator.testing.memory_store import MemoryStore
from orchestrator.tracking.facts import RunIdentity
from orchestrator.tracking.memory import RunMemory
from orchestrator.tracking.trials import TrialRun, TrialsReader
from tests.builders import make_job, make_plan

NUM_TRIALS = 5
FIRST, SECOND = make_job("search/a"), make_job("search/b")
IDENTITIES = {(job.name, job.key) for job in (FIRST, SECOND)}


class CountingStore(MemoryStore):
    """Counts requests."""

    num_requests = 0

    def get_with_stat(self, name: str, *, max_bytes: int | None = None) -> tuple[bytes, ObjectStat]:
        self.num_requests += 1
        return super().get_with_stat(name, max_bytes=max_bytes)

    def list_objects(self, prefix: str) -> Iterator[ObjectStat]:
        self.num_requests += 1
        return super().list_objects(prefix)


class Shown:
    """A publisher that shows each trial as soon as it is told of it."""

    def __init__(self) -> None:
        self.store = CountingStore()
        self.reader = TrialsReader(self.store)
        self.runs: dict[RunIdentity, RunMemory] = {}
        self.unreadable: dict[RunIdentity, CorruptObjectError] = {}
        self.views = {job.name: _view(job, JobState.RUNNING) for job in (FIRST, SECOND)}
        for job in (FIRST, SECOND):
            for number in range(NUM_TRIALS):
                write_trial(self.store, job.key, _trial(number))

    def look(self, looked_at: set[RunIdentity]) -> list[str]:
        """Trials that are news."""
        self.store.num_requests = 0
        found = self.reader.changed(
            make_plan(FIRST, SECOND), self.views, self.runs, looked_at=looked_at, unreadable=self.unreadable
        )
        self.runs |= {run.facts.identity: _shown(run) for run in found}
        return [run.facts.job for run in found]


def _view(job: Job, state: JobState) -> JobView:
    return JobView(name=job.name, key=job.key, state=state, num_attempts=1)


def _trial(number: int, state: TrialState = TrialState.RUNNING) -> Trial:
    return Trial(number=number, params={"lr": 0.1}, state=state, started_s=1.0)


def _shown(run: TrialRun) -> RunMemory:
    facts = run.facts
    return RunMemory(job=facts.job, key=facts.key, run_id=facts.job, fingerprint=facts.fingerprint)


def test_search_that_goes_on_is_read_only_when_it_is_looked_at() -> None:
    shown = Shown()
    assert len(shown.look(IDENTITIES)) == 2 * NUM_TRIALS
    write_trial(shown.store, FIRST.key, _trial(1, TrialState.COMPLETED))
    assert shown.look(set()) == []
    assert shown.store.num_requests == 0
    assert shown.look({(FIRST.name, FIRST.key)}) == ["search/a#1"]
    assert shown.store.num_requests <= 2 + NUM_TRIALS


def test_search_that_has_ended_is_read_until_all_of_it_is_shown() -> None:
    shown = Shown()
    shown.views = {name: replace(view, state=JobState.SUCCEEDED) for name, view in shown.views.items()}
    assert len(shown.look(set())) == 2 * NUM_TRIALS, "by a publisher that has just begun"
    assert shown.look(set()) == []
    assert shown.store.num_requests == 0
    del shown.runs["search/b#3", SECOND.key]  # somebody has deleted it on the server
    assert shown.look(set()) == ["search/b#3"]
    assert shown.store.num_requests <= 2 + NUM_TRIALS


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.SUCCEEDED])
def test_trial_that_cannot_be_read_keeps_no_other_and_is_told_each_time(state: JobState) -> None:
    shown = Shown()
    shown.views[FIRST.name] = _view(FIRST, state)
    shown.store.put(f"{trials_folder(FIRST.key)}000002.json", b"{}")
    assert len(shown.look(IDENTITIES)) == 2 * NUM_TRIALS - 1
    for _ in range(2):
        ((search, _key),) = shown.unreadable
        assert search == "search/a#"
        shown.unreadable.clear()
        assert shown.look({(FIRST.name, FIRST.key)}) == []
