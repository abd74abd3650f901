"""Searches: their trials, which no journal tells of, and their logs, which go when nothing asks for them any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.planning.graph.plan import Job
from orchestrator.retention.gc import LOCK_DURATION_S
from orchestrator.retention.gc_rules import GcAction, Reason
from orchestrator.retention.roots import RootReader, forget
from orchestrator.search.log import SearchLog, TrialAsked, kept_trials
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.layout import search_log_folder, search_log_head
from orchestrator.storage.pins import remove_pin
from orchestrator.storage.trials import Trial, TrialState, find_folder, read_trials, write_trial
from orchestrator.testing import Hang
from tests.gc_store import GRACE_S, TRASH_S, Lab, MeddledStore, contents, crash, make_job, make_search, with_own_key
from tests.scripted_sweep import World
from tests.scripted_sweep import make_job as make_scripted
from tests.unit.test_gc_collect import SlowStore

SEARCH = make_scripted("search/lr")
DATASET = make_job(0)
INDEX = make_job(1)
SEARCHED = make_search(DATASET, INDEX)
WON, LOST = make_job(8, DATASET), make_job(13, DATASET)
"""Trials: no plan has them."""
BACKBONE = make_job(3, DATASET)
FROM_INDEX = make_job(23, INDEX)
TRANSFER = make_job(4, SEARCHED)
MAX_REQUESTS = 400


def finished(*, is_forgotten: bool) -> Lab:
    """A sweep with a search of three trials, two of which ran to their ends."""
    lab = Lab()
    lab.accept("tuned", [DATASET, SEARCHED])
    lab.commit(DATASET)
    lab.ask_trial(SEARCHED, WON, completed=True)
    lab.ask_trial(SEARCHED, LOST)
    lab.ask_trial(SEARCHED, make_job(18, DATASET), completed=True)
    lab.commit(SEARCHED)
    lab.finish("tuned", [DATASET, SEARCHED])
    if is_forgotten:
        forget(lab.store, "tuned", now=lab.clock())
    return lab


def of_search(lab: Lab) -> set[str]:
    return lab.names("searches/") | lab.names("trials/")


def test_trial_that_was_asked_for_after_the_roots_were_read_is_among_the_next_ones(tmp_path: Path) -> None:
    """A collection reads the roots again before it deletes; while a search runs, its sweep's journal stands still."""
    world = World(tmp_path)
    world.backend._scripts["search/lr"] = [Hang()]
    world.submit(SEARCH)
    world.tick_until(lambda: world.is_running("search/lr"))
    log, reader = SearchLog(world.store, SEARCH.key), RootReader(world.store)
    log.append([TrialAsked(trial=0, at_s=1.0, key="pretrain-a-0", params={})])
    assert reader().keys == {SEARCH.key, "pretrain-a-0"}
    log.append([TrialAsked(trial=1, at_s=2.0, key="pretrain-b-0", params={})])
    assert reader().keys == {SEARCH.key, "pretrain-a-0", "pretrain-b-0"}


def test_roots_of_a_search_take_one_read_per_new_segment() -> None:
    """A collection reads the roots three times per batch, while a search may have thousands of segments."""
    lab = Lab()
    lab.accept("tuned", [DATASET, SEARCHED])
    for trial in (WON, LOST):
        lab.ask_trial(SEARCHED, trial)
    counted = SlowStore(lab, f"/{find_folder(lab.store, SEARCHED.key)}/")
    reader = RootReader(counted)
    reader()
    assert counted.num_read == 2
    lab.ask_trial(SEARCHED, BACKBONE)
    for _ in range(2):
        assert reader().keys >= {WON.key, LOST.key, BACKBONE.key}
        assert counted.num_read == 3


def test_roots_of_a_search_are_those_of_its_newest_log() -> None:
    """People delete a log that is damaged, and the search begins another one."""
    lab = Lab()
    lab.accept("tuned", [SEARCHED])
    lab.ask_trial(SEARCHED, WON)
    reader = RootReader(lab.store)
    assert WON.key in reader().keys
    lab.store.delete(search_log_head(SEARCHED.key))
    assert WON.key not in reader().keys
    lab.ask_trial(SEARCHED, LOST)
    keys = reader().keys
    assert LOST.key in keys
    assert WON.key not in keys


def test_lock_is_held_while_the_log_of_a_search_is_read() -> None:
    lab = Lab()
    lab.accept("tuned", [SEARCHED])
    for number in range(4):
        lab.ask_trial(SEARCHED, make_job(number))
    slow = SlowStore(lab, f"/{find_folder(lab.store, SEARCHED.key)}/", read_s=LOCK_DURATION_S / 3)
    lab.collect(slow)
    assert (slow.num_read, slow.num_unlocked) == (4, 0)


def test_collect_search_of_a_kept_sweep_stays_with_the_trials_that_completed() -> None:
    lab = finished(is_forgotten=False)
    before = contents(lab.store, of_search(lab))
    lab.clock.advance(GRACE_S + 1)
    assert Reason.UNREFERENCED_SEARCH not in {reason for _, reason in lab.collector().preview().amounts}
    lab.collect_until_freed()
    assert contents(lab.store, before) == before
    assert is_committed(lab.store, WON.key)
    assert not lab.names(f"artifacts/{LOST.kind}/{LOST.key}/"), "nothing goes on from the checkpoint of one that lost"


def test_collect_search_of_a_forgotten_sweep_is_hidden_then_destroyed() -> None:
    lab = finished(is_forgotten=True)
    lab.clock.advance(GRACE_S + 1)
    lab.collect()
    assert SearchLog(lab.store, SEARCHED.key).read() == [], "no search may go on from a log that is about to go"
    assert len(of_search(lab)) == 3 + 3, "segments and trials; the head is in the trash"
    lab.clock.advance(TRASH_S - 2)
    lab.collect()
    assert len(of_search(lab)) == 3 + 3
    lab.clock.advance(2)
    tally = lab.collect()
    assert tally.amounts[GcAction.DESTROY, Reason.UNREFERENCED_SEARCH].num_objects == 3 + 3
    assert lab.payload() == set()
    lab.clock.advance(TRASH_S + 1)
    lab.collect()
    assert lab.trash() == set()


@pytest.mark.parametrize("is_live", [False, True])
def test_collect_search_that_is_not_over_stays_with_all_of_its_trials(is_live: bool) -> None:
    lab = Lab()
    lab.accept("tuned", [DATASET, SEARCHED])
    if is_live:
        lab.launch("tuned", SEARCHED)
        lab.accept("tuned", [DATASET])  # a revision without it: its attempt is still to end
    lab.ask_trial(SEARCHED, WON, completed=True)
    lab.ask_trial(SEARCHED, LOST)
    before = contents(lab.store, of_search(lab) | lab.names("artifacts/"))
    lab.collect_until_freed()
    assert contents(lab.store, before) == before


def test_collect_young_search_waits_for_its_grace() -> None:
    lab = finished(is_forgotten=True)
    lab.clock.advance(GRACE_S - 1)
    before = of_search(lab)
    tally = lab.collect()
    assert tally.amounts[GcAction.WAIT_FOR_GRACE, Reason.UNREFERENCED_SEARCH].num_objects == len(before) == 7
    assert of_search(lab) == before


def test_collect_search_stays_as_long_as_its_record_can_be_seen() -> None:
    """Whoever reads the record of a search may look up its trials."""
    lab = finished(is_forgotten=True)
    lab.clock.advance(GRACE_S + 1)
    lab.write_checkpoint(SEARCHED)  # something young, for which the record waits
    lab.collect()
    assert is_committed(lab.store, SEARCHED.key)
    assert len(kept_trials(lab.store, SEARCHED.key)) == 2


def test_collect_search_that_is_asked_for_again_comes_back_with_its_trials() -> None:
    lab = finished(is_forgotten=True)
    before = contents(lab.store, of_search(lab))
    lab.clock.advance(GRACE_S + 1)
    lab.collect()
    lab.post("again", [SEARCHED])
    lab.clock.advance(TRASH_S + 1)
    lab.collect()
    assert contents(lab.store, of_search(lab)) == before
    assert is_committed(lab.store, SEARCHED.key)
    assert is_committed(lab.store, WON.key)


@pytest.mark.parametrize("num_deaths", [0, 1])
def test_collect_search_that_begins_anew_at_every_request_keeps_all_that_it_writes(num_deaths: int) -> None:
    """Another sweep asks for the very search while its log is destroyed; where its record is hidden, it starts over."""
    nth, num_requests, num_anew = 0, 1, 0
    while nth < num_requests:
        nth += 1
        lab = finished(is_forgotten=True)
        lab.clock.advance(GRACE_S + 1)
        lab.collect()
        lab.clock.advance(TRASH_S + 1)
        log, told = SearchLog(lab.store, SEARCHED.key), [TrialAsked(trial=0, at_s=9.0, key="pretrain-new-0", params={})]
        view = Trial(number=0, params={"lr": 9.0}, state=TrialState.RUNNING, started_s=9.0)

        def begin(lab: Lab = lab, log: SearchLog = log, told: list[TrialAsked] = told, view: Trial = view) -> None:
            lab.post("again", [SEARCHED])
            if not is_committed(lab.store, SEARCHED.key) and not log.read():
                log.append(told)
                write_trial(lab.store, SEARCHED.key, view, log=log.folder)
            if num_deaths:
                crash()

        num_requests = max(lab.collect_meddled({nth: begin}), nth + num_deaths)
        if not lab.names("sweeps/again/"):
            break  # the collection had ended before
        lab.clock.advance(LOCK_DURATION_S + 1)
        lab.collect()
        events = SearchLog(lab.store, SEARCHED.key).read()
        if events == told:
            num_anew += 1
            assert read_trials(lab.store, SEARCHED.key) == [view]
            log.append([TrialAsked(trial=1, at_s=9.0, key="pretrain-newer-0", params={})])
            # Where the record of the old one came back, the search is over, and none of its trials goes on.
            is_over = is_committed(lab.store, SEARCHED.key)
            kept = set() if is_over else {"pretrain-new-0", "pretrain-newer-0"}
            assert kept_trials(lab.store, SEARCHED.key) == kept
        else:
            assert kept_trials(lab.store, SEARCHED.key) >= {WON.key}, "the old log came back whole"
    assert 30 < nth < MAX_REQUESTS
    assert num_anew > 5


def test_collect_artifact_that_gives_trials_their_initial_weights_stays_with_their_search() -> None:
    lab = finished(is_forgotten=False)
    lab.run_sweep("before", [DATASET, BACKBONE])
    search = make_search(DATASET)
    search.identity["parameters"]["trial"] = {"kind": "pretrain", "parameters": {"initial": {"artifact": BACKBONE.key}}}
    lab.accept("tuned", [DATASET, with_own_key(search)])
    forget(lab.store, "before", now=lab.clock())
    lab.collect_until_freed()
    assert is_committed(lab.store, BACKBONE.key)


@pytest.mark.parametrize("when", ["before", "hidden", "about to go"])
@pytest.mark.parametrize("pinned", [(DATASET, SEARCHED), (TRANSFER,)], ids=["sweep", "transfer"])
def test_collect_pin_that_leads_to_a_search_keeps_its_trials_that_completed(pinned: tuple[Job, ...], when: str) -> None:
    """The backbone that a transfer reads is the best trial: only the log and the record of the search name it."""
    lab = finished(is_forgotten=True)
    lab.commit(INDEX)
    lab.ask_trial(SEARCHED, FROM_INDEX, completed=True)
    lab.commit(TRANSFER)
    before = contents(lab.store, of_search(lab))
    references = [job.key for job in pinned]
    if when != "before":
        lab.clock.advance(GRACE_S + 1)
        lab.collect()
        assert not is_committed(lab.store, WON.key)
    if when == "about to go":
        lab.clock.advance(TRASH_S + 1)
        lab.collect_and_pin(3, *references)
    else:
        lab.pin("late", *references)
    lab.collect_until_freed()
    kept = [DATASET, INDEX, SEARCHED, WON, FROM_INDEX, *pinned]
    assert [job.name for job in kept if not is_committed(lab.store, job.key)] == []
    lab.check_intact(kept)
    assert contents(lab.store, of_search(lab)) == before
    assert not lab.names(f"artifacts/{LOST.kind}/{LOST.key}/")
    remove_pin(lab.store, "late")
    lab.collect_until_freed()
    assert lab.payload() == set()


def test_collect_pin_of_a_search_without_a_record_keeps_what_its_trials_were_made_from() -> None:
    """It was cancelled: its log and its trials are all there is of it."""
    lab = Lab()
    lab.accept("tuned", [DATASET, SEARCHED])
    lab.commit(DATASET)
    lab.ask_trial(SEARCHED, WON, completed=True)
    lab.finish("tuned", [DATASET])
    forget(lab.store, "tuned", now=lab.clock())
    lab.pin("best", SEARCHED.key)
    lab.collect_until_freed()
    assert [job.name for job in (DATASET, WON) if not is_committed(lab.store, job.key)] == []


def test_roots_of_a_search_in_a_lineage_take_no_read_per_trial() -> None:
    """What the trials read is in the identity of the search, and there may be thousands of them."""
    lab = finished(is_forgotten=True)
    lab.pin("paper", SEARCHED.key)
    counted = SlowStore(lab, "/record.json")
    assert RootReader(counted)().keys >= {SEARCHED.key, DATASET.key, WON.key}
    assert counted.num_read == 2, "of the search and of the data set"


def test_collect_log_of_which_a_segment_is_gone_is_not_brought_back() -> None:
    lab = finished(is_forgotten=True)
    lab.clock.advance(GRACE_S + 1)
    lab.collect()
    (first, *_) = sorted(name for name in lab.names(search_log_folder(SEARCHED.key)))
    lab.store.delete(first)
    lab.post("again", [SEARCHED])
    lab.collect()
    assert not lab.store.exists(search_log_head(SEARCHED.key))
    SearchLog(lab.store, SEARCHED.key).append([TrialAsked(trial=0, at_s=9.0, key="pretrain-new-0", params={})])
    assert kept_trials(lab.store, SEARCHED.key) == (
        set() if is_committed(lab.store, SEARCHED.key) else {"pretrain-new-0"}
    )


def test_preview_counts_searches_as_the_collection_does() -> None:
    lab = finished(is_forgotten=True)
    lab.clock.advance(GRACE_S + 1)
    seen = lab.collector().preview().amounts
    assert seen[GcAction.HIDE, Reason.UNREFERENCED_SEARCH].num_objects == 7
    assert seen == lab.collect().amounts


def test_collect_search_costs_no_request_where_there_is_none() -> None:
    """Sweeps without searches: two more listings and nothing else."""
    lab = Lab()
    lab.run_sweep("plain", [DATASET])
    store = MeddledStore(lab.store)
    lab.collect(store)
    assert store.num_requests < 60
