"""A collection that dies, fails, or meets a submit, at every single request to the store."""

import pytest

from orchestrator.core.errors import StorageError
from orchestrator.planning.graph.plan import Job
from orchestrator.retention.gc import LOCK_DURATION_S
from orchestrator.retention.inventory import tombstones_name
from orchestrator.retention.roots import forget
from orchestrator.search.log import kept_trials
from orchestrator.storage.artifacts import is_committed
from orchestrator.testing import Fault, FaultyStore, Moment, SimulatedCrash
from tests.gc_store import GRACE_S, TRASH_S, Lab, crash, make_job, make_search

DATASET = make_job(0)
PRETRAIN = make_job(3, DATASET)
SEARCH = make_search(DATASET)
TRIAL = make_job(13, DATASET)
"""Of the search: no plan has it."""
KEPT, GONE = (DATASET,), (PRETRAIN, make_job(8, DATASET), SEARCH)
STAGES = ("to hide", "to destroy", "half hidden")
SUBMITTED_AT = ("to hide", *(pytest.param(stage, marks=pytest.mark.slow) for stage in STAGES[1:]))
"""Hundreds of collections for each stage."""
MAX_REQUESTS = 400


def make_lab(stage: str) -> Lab:
    """One sweep that stays, one that is forgotten, and garbage of every kind, about to be collected."""
    lab = Lab()
    lab.ask_trial(SEARCH, TRIAL, completed=True)
    for sweep, jobs in (("kept", KEPT), ("gone", (*KEPT, *GONE))):
        lab.accept(sweep, jobs)
        for job in jobs:
            if not is_committed(lab.store, job.key):
                lab.commit(job)
            lab.write_metrics(job)
        lab.write_log(sweep, jobs[0])
        lab.finish(sweep, jobs)
    lab.write_parts(DATASET)
    lab.write_checkpoint(DATASET)
    lab.write_checkpoint(PRETRAIN)
    forget(lab.store, "gone", now=lab.clock())
    lab.clock.advance(GRACE_S + 1)
    if stage == "to destroy":
        lab.collect()
    elif stage == "half hidden":
        with pytest.raises(SimulatedCrash):
            lab.collect(FaultyStore(lab.store, [Fault(moment=Moment.CRASH_BEFORE, within="record.json")]))
    if stage != "to hide":
        lab.clock.advance(TRASH_S + LOCK_DURATION_S + 1)
    return lab


def check_freed(lab: Lab) -> None:
    lab.collect_until_freed()
    names = lab.payload()
    assert {name.split("/")[2] for name in names if name.startswith("artifacts/")} == {DATASET.key}
    assert {name.split("/")[1] for name in names if name.startswith("metrics/")} == {DATASET.key}
    assert {name.split("/")[1] for name in names if name.startswith("logs/")} == {"kept"}
    assert len(names) == 4, names  # record, part, metrics, log
    lab.check_intact(KEPT)
    assert lab.trash() == set()


@pytest.mark.ci
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("moment", Moment)
def test_collect_with_a_fault_at_every_write_is_continued_by_the_next(moment: Moment, stage: str) -> None:
    for nth in range(1, MAX_REQUESTS):
        lab = make_lab(stage)
        store = FaultyStore(lab.store, [Fault(moment=moment, nth=nth)])
        try:
            lab.collect(store)
            struck = False
        except (SimulatedCrash, StorageError):
            struck = True
        lab.check_intact((*KEPT, *GONE))
        assert is_committed(lab.store, DATASET.key)
        lab.clock.advance(LOCK_DURATION_S + 1)
        check_freed(lab)
        if not struck and nth > len(store.writes):
            break
    assert 8 < nth < MAX_REQUESTS - 1, "the faults must have covered all writes"


@pytest.mark.ci
@pytest.mark.parametrize("stage", SUBMITTED_AT)
def test_collect_submit_at_every_request_gets_what_it_found(stage: str) -> None:
    """A client submits, and a controller looks the keys up at once: what it finds must be there to stay."""
    nth, num_requests = 0, 1
    while nth < num_requests:
        nth += 1
        lab = make_lab(stage)
        found: list[Job] = []

        def submit(lab=lab, found=found) -> None:
            lab.post("again", GONE)
            found += [job for job in GONE if is_committed(lab.store, job.key)]

        num_requests = lab.collect_meddled({nth: submit})
        lab.check_intact((*KEPT, *GONE))
        assert [job for job in found if not is_committed(lab.store, job.key)] == []
        lab.collect_until_freed()
        assert [job for job in found if not is_committed(lab.store, job.key)] == []
        if SEARCH in found:
            assert kept_trials(lab.store, SEARCH.key) == {TRIAL.key}
            assert is_committed(lab.store, TRIAL.key)
        lab.check_intact((*GONE, TRIAL))
    assert 30 < nth < MAX_REQUESTS


@pytest.mark.ci
@pytest.mark.parametrize("stage", SUBMITTED_AT)
def test_collect_submit_then_death_at_every_request_is_made_good(stage: str) -> None:
    nth, num_requests = 0, 1
    while nth < num_requests:
        nth += 1
        lab = make_lab(stage)
        found: list[Job] = []

        def submit_and_die(lab=lab, found=found) -> None:
            lab.post("again", GONE)
            found += [job for job in GONE if is_committed(lab.store, job.key)]
            crash()

        num_requests = max(nth + 1, lab.collect_meddled({nth: submit_and_die})) if nth < MAX_REQUESTS else nth
        if not lab.names("sweeps/again/"):
            break  # the collection had ended before
        lab.clock.advance(LOCK_DURATION_S + 1)
        lab.collect()
        assert [job for job in found if not is_committed(lab.store, job.key)] == []
        lab.check_intact((*KEPT, *GONE))
    assert 30 < nth < MAX_REQUESTS


def test_collect_tombstones_are_durable_before_anything_is_hidden() -> None:
    lab = make_lab("to hide")
    store = FaultyStore(lab.store)
    lab.collect(store)
    hidden = [name for name in store.writes if name.endswith(("record.json", "manifest.json"))]
    assert hidden
    first = store.writes.index(hidden[0])
    run = next(name for name in store.writes if name.startswith("trash/") and not name.endswith("lock.json"))
    assert run == tombstones_name(run.split("/")[1], 0)
    assert store.writes.index(run) < first
