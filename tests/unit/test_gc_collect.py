"""What one garbage collection keeps, hides, destroys and brings back."""

import json
from threading import Barrier
from typing import Any, cast

import pytest

from orchestrator.core.errors import ControllerError, CorruptObjectError, TooLargeError
from orchestrator.retention.gc import LOCK_DURATION_S, CollectionBusyError, CollectionLock
from orchestrator.retention.gc_rules import GcAction, Reason, Tally
from orchestrator.retention.inventory import LOCK, artifact_lines
from orchestrator.retention.roots import RootReader, forget, is_forgotten
from orchestrator.state import events
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.journal import write_snapshot
from orchestrator.storage.layout import inbox_message, journal_folder, journal_segment, metrics_folder, record_name
from orchestrator.storage.request_pool import RequestPool
from orchestrator.testing import Fault, FaultyStore, Moment
from tests.builders import make_plan
from tests.gc_store import (
    GRACE_S,
    TRASH_S,
    Lab,
    MeddledStore,
    ShuffledStore,
    contents,
    make_job,
    make_search,
    with_own_key,
)

DATASET = make_job(0)
INDEX = make_job(1, DATASET)
PRETRAIN = make_job(3, INDEX)
OTHER = make_job(8, INDEX)
JOBS = (DATASET, INDEX, PRETRAIN)


@pytest.fixture
def lab():
    return Lab()


def counts(tally: Tally) -> dict[tuple[GcAction, Reason], int]:
    return {what: amount.num_objects for what, amount in tally.amounts.items()}


def test_collect_artifacts_of_a_finished_sweep_stay(lab) -> None:
    lab.run_sweep("kept", JOBS)
    before = contents(lab.store, lab.names())
    lab.collect_until_freed()
    assert contents(lab.store, before) == before
    assert lab.trash() == set()


def test_collect_forgotten_sweep_is_hidden_then_destroyed(lab) -> None:
    lab.run_sweep("kept", JOBS)
    forget(lab.store, "kept", now=lab.clock())
    journal = lab.names("sweeps/")
    lab.clock.advance(GRACE_S + 1)
    tally = lab.collect()
    assert counts(tally) == {
        (GcAction.HIDE, Reason.UNREFERENCED_ARTIFACT): 6,
        (GcAction.HIDE, Reason.UNREFERENCED_METRICS): 3,
        (GcAction.HIDE, Reason.FORGOTTEN_LOGS): 3,
    }
    assert not any(is_committed(lab.store, job.key) for job in JOBS), "no reader may find what is about to go"
    lab.clock.advance(TRASH_S - 2)
    assert tally_actions(lab.collect()) == {GcAction.WAIT_IN_TRASH}
    lab.clock.advance(2)
    assert counts(lab.collect()) == {
        (GcAction.DESTROY, Reason.UNREFERENCED_ARTIFACT): 3,
        (GcAction.DESTROY, Reason.UNREFERENCED_METRICS): 3,
        (GcAction.DESTROY, Reason.FORGOTTEN_LOGS): 3,
    }
    assert lab.payload() == set()
    assert lab.trash() == set()
    assert lab.names("sweeps/") == journal, "the sweep's own history is never collected"


def tally_actions(tally: Tally) -> set[GcAction]:
    return {action for action, _ in tally.amounts}


def test_collect_objects_younger_than_the_grace_stay(lab) -> None:
    lab.commit(DATASET)
    lab.clock.advance(GRACE_S - 1)
    assert tally_actions(lab.collect()) == {GcAction.WAIT_FOR_GRACE}
    assert is_committed(lab.store, DATASET.key)
    assert lab.trash() == set()


def test_collect_input_outside_every_plan_stays_with_its_own_inputs(lab) -> None:
    for job in (DATASET, INDEX, PRETRAIN):
        lab.commit(job)
    lab.accept("kept", [PRETRAIN])  # its identity names the index, the index's record names the dataset
    lab.collect_until_freed()
    assert all(is_committed(lab.store, job.key) for job in JOBS)


def test_collect_job_of_an_earlier_revision_goes_and_the_shared_ones_stay(lab) -> None:
    lab.run_sweep("kept", JOBS)
    lab.commit(OTHER)
    lab.accept("kept", [DATASET, INDEX, OTHER])
    lab.collect_until_freed()
    assert not is_committed(lab.store, PRETRAIN.key)
    assert all(is_committed(lab.store, job.key) for job in (DATASET, INDEX, OTHER))
    assert lab.names(metrics_folder(PRETRAIN.key)) == set()


def test_collect_orphaned_parts_go_and_the_records_own_stay(lab) -> None:
    lab.run_sweep("kept", JOBS)
    kept = lab.payload()
    lab.write_parts(PRETRAIN)  # lost the race for the commit
    lab.accept("running", [OTHER])
    lab.write_parts(OTHER)  # of a dead attempt at a job that is not committed yet
    lab.collect_until_freed()
    assert lab.payload() == kept


def test_collect_checkpoints_of_a_committed_job_go(lab) -> None:
    lab.run_sweep("kept", JOBS)
    kept = lab.payload()
    lab.write_checkpoint(PRETRAIN)
    lab.collect_until_freed()
    assert lab.payload() == kept
    assert lab.trash() == set()


def test_collect_checkpoints_of_an_unfinished_job_stay_unless_half_written(lab) -> None:
    lab.accept("running", [PRETRAIN])
    lab.write_checkpoint(PRETRAIN, 7)
    kept = lab.payload()
    lab.write_checkpoint(PRETRAIN, 9, finished=False)
    lab.collect_until_freed()
    assert lab.payload() == kept


def test_collect_checkpoint_named_by_a_pin_stays(lab) -> None:
    lab.run_sweep("kept", JOBS)
    pinned, plain = (lab.write_checkpoint(PRETRAIN, step) for step in (1, 2))
    lab.pin("best", pinned)
    lab.collect_until_freed()
    left = {name.split("/")[4] for name in lab.payload() if "/checkpoints/" in name}
    assert left == {pinned.rpartition("/")[2]}
    assert plain.rpartition("/")[2] not in left


@pytest.mark.parametrize("is_committed_too", [False, True])
def test_collect_artifact_that_gives_initial_weights_stays_with_its_inputs(lab, is_committed_too: bool) -> None:
    lab.run_sweep("kept", JOBS)
    child = make_job(13)
    child.identity["parameters"]["initial"] = {"artifact": PRETRAIN.key}
    child = with_own_key(child)
    if is_committed_too:
        lab.commit(child)
        lab.pin("result", child.key)
    else:
        lab.accept("child", [child])
    forget(lab.store, "kept", now=lab.clock())
    lab.collect_until_freed()
    assert all(is_committed(lab.store, job.key) for job in JOBS)


def test_collect_running_attempt_protects_all_of_its_key(lab) -> None:
    lab.run_sweep("kept", JOBS)
    lab.accept("kept", [DATASET])
    lab.accept("kept", [DATASET, OTHER])
    attempt_id = lab.launch("kept", OTHER)
    lab.write_parts(OTHER)
    lab.write_checkpoint(OTHER, finished=False)
    kept = lab.names(f"artifacts/{OTHER.kind}/{OTHER.key}/")
    lab.collect_until_freed()
    assert lab.names(f"artifacts/{OTHER.kind}/{OTHER.key}/") == kept
    lab.lose("kept", OTHER, attempt_id)
    lab.collect_until_freed()
    assert lab.names(f"artifacts/{OTHER.kind}/{OTHER.key}/") == set()


def test_collect_leaving_attempt_protects_its_inputs(lab) -> None:
    for job in (DATASET, INDEX):
        lab.commit(job)
    lab.accept("kept", [OTHER])
    attempt_id = lab.launch("kept", OTHER)
    lab.accept("kept", [make_job(10)])  # the attempt at OTHER is still running, and reads the index
    lab.collect_until_freed()
    assert is_committed(lab.store, INDEX.key)
    lab.lose("kept", OTHER, attempt_id)
    lab.collect_until_freed()
    assert not is_committed(lab.store, INDEX.key)


def test_collect_submit_that_waits_in_the_inbox_protects(lab) -> None:
    for job in JOBS:
        lab.commit(job)
    lab.post("waiting", JOBS)
    lab.collect_until_freed()
    assert all(is_committed(lab.store, job.key) for job in JOBS)


@pytest.mark.parametrize(
    "change",
    [
        {"identity": []},
        {"identity": {"inputs": []}},
        {"identity": {"parameters": []}},
        {"key": []},
        {"key": "../away"},
        {"simulations": [{"factors": []}]},
    ],
    ids=str,
)
def test_collect_submit_whose_plan_cannot_be_read_keeps_nothing_and_stops_nothing(lab, change) -> None:
    """A controller refuses it."""
    lab.commit(DATASET)
    lab.commit(INDEX)
    plan: dict[str, Any] = make_plan(DATASET, make_search(), sweep="odd", store_uri=lab.store.uri).to_json()
    (plan if "simulations" in change else plan["jobs"][1]).update(change)
    message = {"type": "submit", "sender": "me", "cluster": "cluster", "plan": plan, "spec_text": ""}
    lab.store.put(inbox_message("odd", "1"), json.dumps(message).encode())
    lab.collect_until_freed()
    assert lab.payload() == set()


def test_collect_damaged_record_keeps_everything_of_its_key(lab) -> None:
    lab.run_sweep("kept", JOBS)
    lab.write_parts(PRETRAIN)
    lab.store.put(record_name(PRETRAIN.key), b"{not json")
    before = lab.payload()
    lab.collect_until_freed()
    assert lab.payload() == before


@pytest.mark.parametrize("error", [CorruptObjectError, TooLargeError])
def test_collect_artifact_whose_record_cannot_be_read_stays_and_the_rest_goes(
    lab, error: type[CorruptObjectError]
) -> None:
    class Unreadable(MeddledStore):
        def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
            if name == record_name(DATASET.key):
                raise error(name)
            content: bytes = self._store.get(name, max_bytes=max_bytes)
            return content

    lab.commit(DATASET)
    before = lab.payload()
    lab.commit(INDEX)
    lab.store = cast("ObjectStore", Unreadable(lab.store))
    lab.collect_until_freed()
    assert lab.payload() == before


def test_collect_unreadable_sweep_stops_before_anything_is_touched(lab) -> None:
    lab.commit(DATASET)
    lab.accept("broken", [DATASET])
    lab.store.put(journal_segment("broken", 2), b'{}\n{"type": "no_such_event", "version": 1}\n')
    lab.clock.advance(GRACE_S + 1)
    before = lab.payload()
    with pytest.raises(ControllerError, match=r"sweep broken .* nothing can be collected"):
        lab.collect()
    assert lab.payload() == before


@pytest.mark.parametrize("lost", ["first", "middle", "last", "all"])
def test_collect_sweep_that_lost_segments_of_its_journal_stops_before_anything_is_touched(lab, lost: str) -> None:
    """A journal that seems to end early must not release what the rest of it keeps."""
    lab.run_sweep("kept", JOBS)
    names = sorted(lab.names(journal_folder("kept")))
    if lost == "last":  # only a stored state can tell
        write_snapshot(lab.store, "kept", len(names), {})
    chosen = {"first": names[:1], "middle": names[1:2], "last": names[-1:], "all": names}[lost]
    for name in chosen:
        lab.store.delete(name)
    lab.clock.advance(GRACE_S + 1)
    before = lab.payload()
    with pytest.raises(ControllerError, match=rf"segment {names.index(chosen[0])} of .*it is missing, and"):
        lab.collect()
    assert lab.payload() == before


def test_collect_damaged_pin_stops_before_anything_is_touched(lab) -> None:
    lab.commit(DATASET)
    lab.store.put("pins/x.json", b"[]")
    lab.clock.advance(GRACE_S + 1)
    with pytest.raises(CorruptObjectError, match=r"pins/x\.json"):
        lab.collect()
    assert is_committed(lab.store, DATASET.key)


def test_collect_metrics_of_an_artifact_that_readers_see_stay(lab) -> None:
    lab.commit(DATASET)
    metrics = lab.write_metrics(DATASET)
    lab.clock.advance(GRACE_S + 1)
    lab.write_parts(DATASET)  # something young: the artifact waits for its grace, and its metrics for the artifact
    for _ in range(2):
        assert lab.collector().preview().amounts == lab.collect().amounts
        assert lab.trash() == set()
        assert lab.store.exists(metrics)


def test_collect_two_at_once_are_refused_until_the_lock_expires(lab) -> None:
    lock = CollectionLock(lab.store, "first", lab.clock)
    lock.__enter__()
    with pytest.raises(CollectionBusyError, match="first"):
        lab.collect()
    lab.clock.advance(LOCK_DURATION_S + 1)
    lab.collect()
    with pytest.raises(CollectionBusyError, match="took the lock"):
        lock.keep()


@pytest.mark.parametrize("content", [b"\0" * 40, b"[]", b"{}", b'{"expires_at_s": "x"}'])
def test_collect_goes_on_over_a_lock_that_is_damaged(lab, content: bytes) -> None:
    lab.commit(DATASET)
    lab.store.put(LOCK, content)
    lab.collect_until_freed()
    assert lab.payload() == set()
    assert "holder" in json.loads(lab.store.get(LOCK))


def test_collect_ends_by_freeing_the_lock(lab) -> None:
    lab.collect()
    lab.collect()


def test_collect_from_a_store_that_lists_in_any_order_frees_the_same(lab) -> None:
    lab.run_sweep("kept", JOBS)
    kept = lab.payload()
    lab.run_sweep("gone", [make_job(number, DATASET) for number in (5, 6, 7)])
    forget(lab.store, "gone", now=lab.clock())
    lab.write_parts(PRETRAIN)
    lab.store = cast("ObjectStore", ShuffledStore(lab.store))
    lab.collect_until_freed()
    assert lab.payload() == kept
    assert lab.trash() == set()
    assert {line.key for line in artifact_lines(lab.store)} == {job.key for job in JOBS}


def test_collect_foreign_objects_are_never_touched(lab) -> None:
    key = DATASET.key
    names = (
        *("artifacts/notes.txt", "artifacts/misc/x/readme", "artifacts/resnet/resnet-50/weights.pt", "other/thing"),
        *("metrics/loose", "metrics/resnet-50/loss.csv", "logs/tensorboard/events.1", "logs/a/j/000001/rank0.txt"),
        *("trials/a/b", "searches/words-0123456789abcdeX/log", "probes/linear/resnet.pt", f"probes/{key}/x"),
        "jobs/k/attempts/1.json",
    )
    for name in names:
        lab.store.put(name, b"mine")
    lab.collect_until_freed()
    assert set(names) <= lab.names()


def test_preview_says_what_collect_does_and_writes_nothing(lab) -> None:
    lab.run_sweep("kept", JOBS)
    lab.write_parts(PRETRAIN)
    forget(lab.store, "kept", now=lab.clock())
    for wait_s in (1.0, GRACE_S + 1, TRASH_S - 5, TRASH_S):
        lab.clock.advance(wait_s)
        before = contents(lab.store, lab.names())
        preview = lab.collector(FaultyStore(lab.store, [Fault(moment=Moment.CRASH_BEFORE)])).preview()
        assert contents(lab.store, lab.names()) == before
        assert preview.amounts == lab.collect().amounts


def test_forget_unfinished_sweep_is_refused(lab) -> None:
    lab.accept("running", [DATASET])
    with pytest.raises(ControllerError, match="only a sweep that has ended"):
        forget(lab.store, "running", now=0.0)


@pytest.mark.parametrize(
    ("event", "stays"),
    [
        (events.NodeExcluded(at_s=9.0, node="n", reason="ECC", until_s=99.0), True),
        (events.SweepAdopted(at_s=9.0, cluster="local", epoch=2, holder="next"), True),
        (events.MessageRefused(at_s=9.0, message_id="m", reason="it has ended"), True),
        (events.SweepReopened(at_s=9.0, message_id="m"), False),
        (events.JobsRetried(at_s=9.0, message_id="m", jobs=(DATASET.name,)), False),
        (events.PlanAccepted(at_s=9.0, message_id="m", revision=1), False),
    ],
)
def test_forgotten_sweep_stays_so_until_it_is_opened_again(lab, event: events.Event, stays: bool) -> None:
    lab.run_sweep("kept", JOBS)
    forget(lab.store, "kept", now=lab.clock())
    lab.append("kept", event)
    assert is_forgotten(lab.store, "kept") is stays
    lab.store.put(journal_segment("kept", len(lab.store.list_children(journal_folder("kept")))), b"{}")
    assert not is_forgotten(lab.store, "kept"), "what a damaged segment tells is not known"


def test_forgotten_sweep_with_a_lost_segment_is_kept(lab) -> None:
    lab.run_sweep("kept", JOBS)
    forget(lab.store, "kept", now=lab.clock())
    num_segments = len(lab.store.list_children(journal_folder("kept")))
    lab.append("kept", events.SweepReopened(at_s=9.0, message_id="m"))
    lab.append("kept", events.NodeExcluded(at_s=9.0, node="n", reason="ECC", until_s=99.0))
    lab.store.delete(journal_segment("kept", num_segments))
    assert not is_forgotten(lab.store, "kept")


@pytest.mark.parametrize("lost", ["all since", "the end at that time"])
def test_collect_forgotten_sweep_whose_journal_lost_its_end_stops_before_anything_is_touched(lab, lost: str) -> None:
    """What is gone may have opened it again: nothing that it planned may go."""
    lab.run_sweep("kept", JOBS)
    forget(lab.store, "kept", now=lab.clock())
    num_segments = len(lab.names(journal_folder("kept")))
    if lost == "all since":
        write_snapshot(lab.store, "kept", num_segments + 1, {})  # of a segment that is gone
    else:
        lab.store.delete(journal_segment("kept", num_segments - 1))
    assert not is_forgotten(lab.store, "kept")
    lab.clock.advance(GRACE_S + 1)
    before = lab.payload()
    with pytest.raises(ControllerError, match=r"segment \d of .* missing, and (a stored snapshot|.* was forgotten)"):
        lab.collect()
    assert lab.payload() == before


def test_roots_are_read_again_only_for_sweeps_that_changed(lab) -> None:
    lab.run_sweep("kept", JOBS)
    lab.accept("running", [OTHER])
    reader = RootReader(lab.store)
    first = reader()
    lab.launch("running", OTHER)
    assert reader().live - first.live == {OTHER.key}
    assert reader().keys == first.keys == {job.key for job in (*JOBS, OTHER)}


class SlowStore(FaultyStore):
    """Reading some objects takes a while; counts them, and those that were read without a collection's lock."""

    def __init__(self, lab: Lab, within: str = "/journal/", read_s: float = 0.0) -> None:
        super().__init__(lab.store)
        self.lab, self.within, self.read_s = lab, within, read_s
        self.num_read = self.num_unlocked = 0

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        """See ``ObjectStore.get``."""
        content = super().get(name, max_bytes=max_bytes)
        if self.within in name:
            self.num_read += 1
            self.lab.clock.advance(self.read_s)
            is_locked = self.exists(LOCK) and json.loads(super().get(LOCK))["expires_at_s"] > self.lab.clock()
            self.num_unlocked += not is_locked
        return content


def test_roots_of_a_sweep_that_goes_on_take_one_read_per_new_segment(lab) -> None:
    """A collection reads the roots three times per batch; thousands of segments each time would take longer."""
    lab.accept("running", [DATASET, OTHER])
    counted = SlowStore(lab)
    reader = RootReader(counted)
    reader()
    assert counted.num_read == 2
    lab.launch("running", OTHER)
    assert reader().live == {OTHER.key}
    assert counted.num_read == 3


def test_roots_of_a_forgotten_sweep_are_read_once(lab) -> None:
    lab.run_sweep("kept", JOBS)
    forget(lab.store, "kept", now=lab.clock())
    for number in range(3):
        lab.append("kept", events.NodeExcluded(at_s=9.0, node=f"n{number}", reason="ECC", until_s=99.0))
    counted = SlowStore(lab)
    reader = RootReader(counted)
    for _ in range(2):
        assert reader().keys == frozenset()
        assert counted.num_read == 3


def test_lock_is_held_while_a_long_journal_is_read(lab) -> None:
    lab.accept("long", [DATASET])
    for number in range(100):
        lab.append("long", events.NodeExcluded(at_s=9.0, node=f"n{number}", reason="ECC", until_s=99.0))
    slow = SlowStore(lab, read_s=10.0)
    lab.collect(slow)
    assert slow.num_read == 102
    assert slow.num_unlocked == 0


def test_lock_is_held_while_records_are_read_for_little_garbage(lab) -> None:
    jobs = [make_job(number) for number in range(40)]
    lab.run_sweep("kept", jobs)
    for job in jobs:
        lab.write_checkpoint(job)  # whether it may go, the record says
    slow = SlowStore(lab, "/record.json", read_s=10.0)
    lab.collect(slow)
    assert slow.num_read >= 40
    assert slow.num_unlocked == 0


def test_lock_is_held_while_records_that_are_gone_are_looked_for(lab) -> None:
    lab.pin("gone", *(make_job(number).key for number in range(3)))
    signs: list[str] = []
    RootReader(lab.store)(lambda: signs.append("alive"))
    assert len(signs) == 3


class MeetingStore(FaultyStore):
    """A distant store, of which some requests are answered only once so many of them are there."""

    def __init__(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(lab.store)
        monkeypatch.setattr(RequestPool, "of", lambda uri: RequestPool(4))
        self.inboxes: Barrier | None = None
        self.records: Barrier | None = None

    def list_children(self, prefix: str, *, start_after: str = "") -> list[str]:
        """See ``ObjectStore.list_children``."""
        if self.inboxes and prefix.startswith("sweeps/"):
            self.inboxes.wait(10.0)
        return super().list_children(prefix, start_after=start_after)

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        """See ``ObjectStore.get``."""
        if self.records and name.endswith("/record.json"):
            self.records.wait(10.0)
        return super().get(name, max_bytes=max_bytes)


def test_roots_of_sweeps_in_a_distant_store_are_asked_for_side_by_side(lab, monkeypatch: pytest.MonkeyPatch) -> None:
    for sweep, job in zip(("a", "b", "c"), (DATASET, OTHER, PRETRAIN), strict=True):
        lab.accept(sweep, [job])
    store = MeetingStore(lab, monkeypatch)
    reader = RootReader(store)
    before = reader()
    monkeypatch.setattr("orchestrator.retention.roots.list_sweeps", lambda _: ["a", "b", "c"])
    store.inboxes = Barrier(3)
    assert reader() == before
    assert before.keys >= {DATASET.key, OTHER.key, PRETRAIN.key}


def test_collect_in_a_distant_store_reads_what_it_hides_side_by_side_and_frees_the_same(
    lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.run_sweep("kept", [DATASET])
    kept = lab.payload()
    lab.run_sweep("gone", [OTHER, PRETRAIN])
    forget(lab.store, "gone", now=lab.clock())
    store = MeetingStore(lab, monkeypatch)
    store.records = Barrier(2)
    lab.clock.advance(GRACE_S + 1)
    lab.collect(store)
    store.records = None
    assert not any(is_committed(lab.store, job.key) for job in (OTHER, PRETRAIN))
    lab.clock.advance(TRASH_S + 1)
    lab.collect(store)
    assert lab.payload() == kept
    assert lab.trash() == set()
