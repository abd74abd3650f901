"""What comes back out of the trash, and how often a folder may live."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

import pytest

from orchestrator.core.errors import NotFoundError, StorageError
from orchestrator.retention.gc import LOCK_DURATION_S, Collector
from orchestrator.retention.gc_rules import GcAction, Graces, Reason, Roots, Tally
from orchestrator.retention.roots import check_reference, forget
from orchestrator.state.events import SweepReopened
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.layout import record_name
from orchestrator.storage.pins import Pin, pin_name, remove_pin
from orchestrator.storage.seals import seal
from orchestrator.testing import Fault, FaultyStore, Moment, SimulatedCrash
from tests.gc_store import GRACE_S, TRASH_S, Lab, contents, make_job

DATASET = make_job(0)
INDEX = make_job(1, DATASET)
PRETRAIN = make_job(3, INDEX)
JOBS = (DATASET, INDEX, PRETRAIN)


@pytest.fixture
def lab():
    return Lab()


def counts(tally: Tally) -> dict[tuple[GcAction, Reason], int]:
    return {what: amount.num_objects for what, amount in tally.amounts.items()}


def tally_actions(tally: Tally) -> set[GcAction]:
    return {action for action, _ in tally.amounts}


def test_collect_pin_protects_lineage_until_it_is_removed(lab) -> None:
    lab.run_sweep("kept", JOBS)
    lab.pin("best", INDEX.key)
    forget(lab.store, "kept", now=lab.clock())
    lab.collect_until_freed()
    assert [is_committed(lab.store, job.key) for job in JOBS] == [True, True, False]
    remove_pin(lab.store, "best")
    lab.collect_until_freed()
    assert lab.payload() == set()


def test_collect_pin_with_a_slash_in_its_name_protects_until_it_is_removed(lab) -> None:
    """Earlier versions made such pins."""
    with pytest.raises(StorageError, match="'paper/final' of a pin has a '/'"):
        lab.pin("paper/final", INDEX.key)
    pin, name = Pin(name="paper/final", keys=(INDEX.key,), created_at_s=1.0), pin_name("paper/final")
    lab.store.put(name, seal(name, json.dumps(asdict(pin)).encode()))
    lab.run_sweep("kept", JOBS)
    forget(lab.store, "kept", now=lab.clock())
    lab.collect_until_freed()
    assert [is_committed(lab.store, job.key) for job in JOBS] == [True, True, False]
    remove_pin(lab.store, "paper/final")
    lab.collect_until_freed()
    assert lab.payload() == set()


def test_collect_sweep_submitted_again_gets_its_hidden_artifacts_back(lab) -> None:
    lab.run_sweep("kept", JOBS)
    before = contents(lab.store, lab.payload())
    forget(lab.store, "kept", now=lab.clock())
    lab.clock.advance(GRACE_S + 1)
    lab.collect()
    lab.append("kept", SweepReopened(at_s=lab.clock(), message_id="again"))
    lab.clock.advance(TRASH_S + 1)
    tally = lab.collect()
    assert len(tally.restored) == 3
    assert contents(lab.store, lab.payload()) == before
    assert lab.trash() == set()


def test_collect_pin_on_a_hidden_artifact_brings_its_inputs_back_too(lab) -> None:
    lab.run_sweep("kept", JOBS)
    forget(lab.store, "kept", now=lab.clock())
    lab.clock.advance(GRACE_S + 1)
    lab.collect()
    lab.pin("late", PRETRAIN.key)
    lab.clock.advance(TRASH_S + 1)
    lab.collect()
    assert all(is_committed(lab.store, job.key) for job in JOBS)
    lab.check_intact(JOBS)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_collect_pin_on_a_hidden_artifact_while_others_are_about_to_go_brings_its_inputs_back(lab, nth) -> None:
    """The third reading of the roots is the last one before inputs of the artifact would be destroyed."""
    lab.run_sweep("kept", JOBS)
    forget(lab.store, "kept", now=lab.clock())
    lab.clock.advance(GRACE_S + 1)
    lab.collect()
    lab.clock.advance(TRASH_S + 1)
    lab.collect_and_pin(nth, PRETRAIN.key)
    assert [job.name for job in JOBS if not is_committed(lab.store, job.key)] == []
    lab.check_intact(JOBS)


def test_pin_is_refused_unless_it_can_keep_something(lab) -> None:
    lab.write_parts(PRETRAIN)
    partial = lab.write_checkpoint(PRETRAIN, 1, finished=False)
    for reference in (PRETRAIN.key, partial):
        with pytest.raises(NotFoundError, match="no complete checkpoint"):
            check_reference(lab.store, reference)
    whole = lab.write_checkpoint(PRETRAIN, 2)
    lab.write_parts(DATASET, 3).commit(now=lab.clock())
    references = (DATASET.key, PRETRAIN.key, whole)
    for wait_s in (GRACE_S, TRASH_S):
        for reference in references:
            check_reference(lab.store, reference)  # visible, then in the trash
        lab.clock.advance(wait_s + 1)
        with suppress(SimulatedCrash):
            lab.collect(FaultyStore(lab.store, [Fault(moment=Moment.CRASH_AFTER, within="/parts/", nth=2)]))
    assert lab.names("artifacts/"), "their destruction has begun"
    for reference in references:
        with pytest.raises(NotFoundError, match="no complete checkpoint"):
            check_reference(lab.store, reference)


def test_collect_checkpoints_of_a_job_that_is_planned_again_come_back(lab) -> None:
    lab.write_checkpoint(PRETRAIN, 5)
    kept = lab.payload()
    lab.clock.advance(GRACE_S + 1)
    lab.collect()
    assert lab.payload() < kept
    lab.accept("again", [PRETRAIN])
    lab.collect()
    assert lab.payload() == kept


def test_collect_artifact_made_anew_while_the_old_one_is_in_the_trash_survives(lab) -> None:
    lab.commit(DATASET)
    lab.clock.advance(GRACE_S + 1)
    lab.collect()
    lab.accept("again", [DATASET])
    lab.commit(DATASET)
    record = lab.store.get(record_name(DATASET.key))
    lab.collect_until_freed()
    assert lab.store.get(record_name(DATASET.key)) == record
    assert len(lab.names("artifacts/")) == 2
    lab.check_intact([DATASET])


def test_collect_key_that_a_root_reaches_since_the_survey_is_restored_not_destroyed(lab) -> None:
    lab.commit(DATASET)
    lab.clock.advance(GRACE_S + 1)
    lab.collect()
    lab.clock.advance(TRASH_S + 1)
    num_readings = 0

    def roots(_: Callable[[], None]) -> Roots:
        nonlocal num_readings
        num_readings += 1
        return Roots(keys={DATASET.key} if num_readings > 2 else frozenset())

    graces = Graces(age_s=GRACE_S, trash_s=TRASH_S)
    Collector(lab.store, roots, graces=graces, now=lab.clock).collect()
    assert num_readings > 2
    assert is_committed(lab.store, DATASET.key)
    lab.check_intact([DATASET])


def test_collect_folder_that_a_long_collection_hides_late_has_its_whole_time_in_the_trash(lab) -> None:
    lab.commit(DATASET)
    lab.clock.advance(GRACE_S + 1)

    times_s = iter([TRASH_S])

    def read_slowly(_: Callable[[], None]) -> Roots:
        lab.clock.advance(next(times_s, 0.0))
        return Roots()

    graces = Graces(age_s=GRACE_S, trash_s=TRASH_S)
    Collector(lab.store, read_slowly, graces=graces, now=lab.clock).collect()
    assert not is_committed(lab.store, DATASET.key)
    lab.clock.advance(TRASH_S - 1)
    assert tally_actions(lab.collect()) == {GcAction.WAIT_IN_TRASH}
    lab.pin("late", DATASET.key)
    lab.collect()
    assert is_committed(lab.store, DATASET.key)
    lab.check_intact([DATASET])


def test_collect_half_destroyed_artifact_is_not_restored(lab) -> None:
    lab.write_parts(DATASET, 3).commit(now=lab.clock())
    lab.clock.advance(GRACE_S + 1)
    lab.collect()
    lab.clock.advance(TRASH_S + 1)
    with pytest.raises(SimulatedCrash):
        lab.collect(FaultyStore(lab.store, [Fault(moment=Moment.CRASH_AFTER, within="/parts/", nth=2)]))
    lab.accept("again", [DATASET])
    lab.clock.advance(LOCK_DURATION_S + 1)
    lab.collect()
    assert not is_committed(lab.store, DATASET.key)
    lab.collect_until_freed()
    assert lab.payload() == set()


def test_collect_second_life_of_a_folder_gets_its_own_time_in_the_trash(lab) -> None:
    lab.write_parts(DATASET)
    lab.clock.advance(GRACE_S + 1)
    lab.collect()
    lab.clock.advance(TRASH_S)
    lab.write_parts(DATASET)
    lab.clock.advance(GRACE_S + 1)
    assert tally_actions(lab.collect()) == {GcAction.HIDE}


def test_collect_metrics_stay_as_long_as_their_artifact_can_be_restored(lab) -> None:
    lab.run_sweep("kept", [DATASET])
    forget(lab.store, "kept", now=lab.clock())
    lab.clock.advance(GRACE_S + 1)
    lab.collect()
    lab.commit(DATASET)  # made anew, without metrics of its own
    lab.clock.advance(TRASH_S + 1)
    assert counts(lab.collect())[GcAction.WAIT_IN_TRASH, Reason.UNREFERENCED_METRICS] == 1


def test_collect_twice_in_a_second_keeps_both_tombstones(lab) -> None:
    lab.run_sweep("red", [DATASET])
    lab.run_sweep("green", [make_job(5)])
    lab.clock.advance(GRACE_S + 1)
    for sweep in ("red", "green"):
        forget(lab.store, sweep, now=lab.clock())
        lab.collect()
    lab.pin("all", DATASET.key, make_job(5).key)
    lab.collect()
    assert is_committed(lab.store, DATASET.key)
    assert is_committed(lab.store, make_job(5).key)


def test_collect_forgotten_sweep_that_is_submitted_again_is_kept(lab) -> None:
    lab.run_sweep("kept", JOBS)
    forget(lab.store, "kept", now=lab.clock())
    lab.post("kept", JOBS)
    before = lab.payload()
    lab.collect_until_freed()
    assert lab.payload() == before
