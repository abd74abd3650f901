"""A collection that sleeps for longer than its lock, and goes on as if nothing had happened in between."""

from __future__ import annotations

from contextlib import suppress

import pytest

from orchestrator.retention.gc import LOCK_DURATION_S, CollectionBusyError, CollectionLock
from orchestrator.retention.inventory import LOCK, TRASH
from orchestrator.retention.roots import forget
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.layout import record_name
from orchestrator.testing import Fault, FaultyStore, Moment
from tests.gc_store import GRACE_S, TRASH_S, Lab, make_job

DATASET = make_job(0)
WANTED, GONE = make_job(8, DATASET), make_job(13, DATASET)
ASLEEP_S = LOCK_DURATION_S + 1


def garbage(stage: str) -> Lab:
    """A sweep of which nothing is needed any more: to be hidden by the next collection, or to be destroyed."""
    lab = Lab()
    lab.run_sweep("red", [DATASET, WANTED, GONE])
    lab.write_checkpoint(GONE)
    forget(lab.store, "red", now=lab.clock())
    lab.clock.advance(GRACE_S + 1)
    if stage == "destroy":
        lab.collect()
        lab.clock.advance(TRASH_S + 1)
    return lab


@pytest.mark.parametrize("stage", ["hide", "destroy"])
@pytest.mark.parametrize("num_others", [0, 1, 2])
def test_collect_suspended_at_each_write_takes_nothing_that_is_wanted_since(num_others: int, stage: str) -> None:
    """While it sleeps a sweep asks for artifacts, and other collections come and go; their records are relied on."""
    for nth in range(1, 60):
        lab = garbage(stage)
        relied_on: list[str] = []

        def meanwhile(delay_s: float, lab: Lab = lab, relied_on: list[str] = relied_on) -> None:
            lab.clock.advance(delay_s)
            lab.post("green", [DATASET, WANTED])
            for number in range(num_others + 1):
                if number:
                    lab.collect()
                relied_on.extend(job.key for job in (DATASET, WANTED) if is_committed(lab.store, job.key))

        late = Fault(moment=Moment.LATE, nth=nth, delay_s=ASLEEP_S)
        asleep = FaultyStore(lab.store, [late], wait=meanwhile)
        try:
            lab.collect(asleep)
        except CollectionBusyError:
            assert num_others
        if len(asleep.writes) < nth:
            assert nth > 8
            return
        lab.clock.advance(ASLEEP_S)
        lab.collect()
        assert [key for key in relied_on if not is_committed(lab.store, key)] == [], f"asleep at write {nth}"
        lab.check_intact([DATASET, WANTED])
        lab.collect_until_freed()
        lab.clock.advance(TRASH_S + 1)
        lab.collect()
        lab.check_intact([DATASET, WANTED])
        assert lab.trash() == set()
        assert not lab.names(f"artifacts/{GONE.kind}/{GONE.key}/"), "garbage goes all the same"
    pytest.fail("a collection has fewer writes")


@pytest.mark.parametrize("stage", ["hide", "destroy"])
def test_collect_that_wakes_after_another_has_begun_deletes_nothing_more(stage: str) -> None:
    """Whatever it knew may have changed, so that the one request that it was about to make is its last."""
    num_struck = 0
    for nth in range(2, 30):
        lab = garbage(stage)

        def meanwhile(delay_s: float, lab: Lab = lab) -> None:
            lab.clock.advance(delay_s)
            lab.collect()

        late = Fault(moment=Moment.LATE, nth=nth, delay_s=2 * TRASH_S)
        asleep = FaultyStore(lab.store, [late], wait=meanwhile)
        with suppress(CollectionBusyError):
            lab.collect(asleep)
        if len(asleep.writes) >= nth and not asleep.writes[nth - 1].startswith(TRASH):
            num_struck += 1
            assert set(asleep.writes[nth:]) <= {LOCK}
    assert num_struck > 3


def test_collect_after_one_that_ended_keeps_no_tombstones_of_what_lives_on() -> None:
    """A record that people delete to have it made anew does not come back."""
    lab = garbage("hide")
    lab.collect()
    lab.post("green", [DATASET, WANTED])
    lab.collect()
    assert is_committed(lab.store, WANTED.key)
    lab.store.delete(record_name(WANTED.key))
    lab.clock.advance(1.0)
    lab.collect()
    assert not is_committed(lab.store, WANTED.key)


def test_lock_remembers_that_it_was_taken_from_one_that_never_ended() -> None:
    lab = Lab()
    dead = CollectionLock(lab.store, "dead", lab.clock)
    dead.__enter__()
    lab.clock.advance(ASLEEP_S)
    taken_at_s = lab.clock()
    for _ in range(2):
        with CollectionLock(lab.store, "next", lab.clock) as lock:
            assert lock.deserted_at_s == taken_at_s
        lab.clock.advance(1.0)
    with pytest.raises(CollectionBusyError):
        dead.keep()


def test_lock_by_a_clock_that_was_a_day_ahead_is_deserted() -> None:
    lab = Lab()
    ahead = CollectionLock(lab.store, "ahead", lambda: lab.clock() + 86_400.0)
    ahead.__enter__()
    with CollectionLock(lab.store, "next", lab.clock) as lock:
        assert lock.deserted_at_s == lab.clock()
        with pytest.raises(CollectionBusyError):
            CollectionLock(lab.store, "third", lambda: lab.clock() - LOCK_DURATION_S).__enter__()
    lab.clock.advance(ASLEEP_S)
    with pytest.raises(CollectionBusyError):
        ahead.keep()


def test_lock_of_a_collection_whose_clock_is_set_back_is_renewed_at_once() -> None:
    """Until then it ends a day ahead, so that others take it; its owner must not go on beside them until that day."""
    lab, ahead_s = Lab(), 86_400.0
    first, second = (CollectionLock(lab.store, name, lambda: lab.clock() + ahead_s) for name in ("first", "second"))
    first.__enter__()
    first.__exit__(None, None, None)
    second.__enter__()
    ahead_s = 0.0
    second.keep()
    with pytest.raises(CollectionBusyError, match="second"):
        first.__enter__()


def test_collection_whose_clock_is_set_back_stops_if_its_lock_was_taken() -> None:
    lab, ahead_s = Lab(), 86_400.0
    ahead = CollectionLock(lab.store, "ahead", lambda: lab.clock() + ahead_s)
    ahead.__enter__()
    ahead_s = 0.0
    with CollectionLock(lab.store, "next", lab.clock), pytest.raises(CollectionBusyError, match="this one stops"):
        ahead.keep()
