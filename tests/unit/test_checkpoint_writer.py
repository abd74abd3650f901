"""Saving in the background: what the loop waits for, what it hears of errors, and what a death leaves."""

import logging
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from orchestrator.core.errors import (
    NoSpaceError,
    StorageDeniedError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
)
from orchestrator.storage.local import LocalStore
from tests.checkpoint_cases import (
    KEY,
    Deaths,
    Errors,
    FirstTries,
    Gate,
    HookedStore,
    assert_equal,
    checkpoint_of,
    committed_steps,
    raise_interrupt,
    resident_bytes,
)
from workloads.checkpoint.store import Checkpoint, CheckpointFolder
from workloads.checkpoint.writer import CheckpointWriter, WhenBusy, retry_in_outage

SEGMENT = "metrics/key/000001/000000000000-000000000003.jsonl"
MIB = 1024**2


@pytest.fixture
def store(tmp_path: Path) -> HookedStore:
    return HookedStore(tmp_path / "store")


@pytest.fixture
def writer(store: HookedStore) -> Iterator[CheckpointWriter]:
    """One that neither waits for what may be skipped nor long for an outage's end."""
    writer = CheckpointWriter(CheckpointFolder(store, KEY), allowance_s=0.0, first_pause_s=0.001)
    yield writer
    writer.close()


def _newest(store: LocalStore) -> Checkpoint | None:
    return CheckpointFolder(LocalStore(store.root), KEY).load_newest()


def _failure(writer: CheckpointWriter) -> BaseException | None:
    """Waits for the write in flight, and leaves its error to be raised."""
    assert writer._flight is not None
    return writer._flight.exception(timeout=60)


def test_writer_saved_checkpoint_is_that_of_the_call(store: HookedStore, writer: CheckpointWriter) -> None:
    gate = store.before = Gate()
    checkpoint = checkpoint_of(3)
    writer.save(checkpoint)
    assert gate.reached.wait(60)
    assert committed_steps(store) == []
    for tensor in [*checkpoint.model.values(), *checkpoint.optimizer.values()]:
        tensor.fill_(-1)
    gate.open()
    writer.drain()
    assert_equal(_newest(store), checkpoint_of(3))


def test_writer_busy_skips_what_may_be_skipped_and_waits_for_the_rest(
    store: HookedStore, writer: CheckpointWriter
) -> None:
    gate = store.before = Gate()
    writer.save(checkpoint_of(1))
    assert gate.reached.wait(60)
    assert not writer.has_room(WhenBusy.SKIP)
    gate.open()
    assert writer.has_room(WhenBusy.WAIT)
    assert committed_steps(store) == [1]
    assert writer.has_room(WhenBusy.SKIP)


def test_writer_short_write_is_waited_for_rather_than_skipped(store: HookedStore) -> None:
    writer = CheckpointWriter(CheckpointFolder(store, KEY), allowance_s=60.0)
    for step in range(1, 6):
        assert writer.has_room(WhenBusy.SKIP)
        writer.save(checkpoint_of(step))
    writer.drain()
    writer.close()
    assert committed_steps(store) == [4, 5]


def test_writer_saves_follow_each_other_one_at_a_time(store: HookedStore, writer: CheckpointWriter) -> None:
    names: list[str] = []
    store.after = names.append
    for step in (1, 2, 3):
        writer.save(checkpoint_of(step))
    writer.drain()
    written = [name for name in names if name.endswith("manifest.json") or "model" in name]
    assert [int(Path(name).parent.name.partition("-")[0]) for name in written] == [1, 1, 2, 2, 3, 3, 1, 1]
    assert_equal(_newest(store), checkpoint_of(3))


def test_writer_optimizer_that_grows_is_saved_whole(store: HookedStore, writer: CheckpointWriter) -> None:
    small = checkpoint_of(1)
    writer.save(Checkpoint(step=1, model=small.model, optimizer={}, state=small.state))
    writer.save(checkpoint_of(2))
    writer.drain()
    assert_equal(_newest(store), checkpoint_of(2))


def test_writer_metrics_are_durable_before_the_manifest_exists(store: HookedStore, writer: CheckpointWriter) -> None:
    names: list[str] = []
    store.before = names.append
    writer.save(checkpoint_of(3), before={SEGMENT: b"{}\n"})
    writer.drain()
    assert names[0] == SEGMENT
    assert names[-1].endswith("manifest.json")
    assert store.get(SEGMENT) == b"{}\n"


@pytest.mark.parametrize("within", ["metrics/", "model", "optimizer", "state.json", "manifest"])
@pytest.mark.parametrize("error", [StorageDeniedError("no"), NoSpaceError("full"), StorageError("odd")])
def test_writer_error_is_raised_once_by_the_next_call(
    store: HookedStore, writer: CheckpointWriter, within: str, error: StorageError
) -> None:
    writer.save(checkpoint_of(1))
    writer.drain()
    store.before = Errors([error], within)
    writer.save(checkpoint_of(2), before={SEGMENT: b""})
    assert _failure(writer) is error
    with pytest.raises(type(error)):
        writer.check()
    writer.check()
    assert_equal(_newest(store), checkpoint_of(1))
    writer.save(checkpoint_of(3))
    writer.drain()
    assert_equal(_newest(store), checkpoint_of(3))


def test_writer_unforeseen_error_becomes_a_storage_error(store: HookedStore, writer: CheckpointWriter) -> None:
    def fail(_: str) -> None:
        raise ZeroDivisionError

    store.before = fail
    writer.save(checkpoint_of(4))
    with pytest.raises(StorageError, match=r"step 4.*ZeroDivisionError"):
        writer.drain()


@pytest.mark.parametrize("error", [StorageThrottledError("slow down"), StorageTimeoutError("no answer")])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_writer_outage_delays_every_write_and_loses_none(
    store: HookedStore, writer: CheckpointWriter, error: StorageError, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3):
        # "after": written, and the answer lost.
        setattr(store, moment, FirstTries([error]))
        writer.save(checkpoint_of(step), before={SEGMENT: b"{}\n"})
        writer.drain()
        assert_equal(_newest(store), checkpoint_of(step))
    assert store.get(SEGMENT) == b"{}\n"
    assert "tried again" in caplog.text


def test_writer_tells_of_unsaved_work_until_the_store_is_back_and_not_until_all_is_written(
    store: HookedStore, writer: CheckpointWriter
) -> None:
    told = list[bool]()

    def refuse_once(_: str) -> None:
        told.append(writer.unsaved_s > 0)
        if len(told) == 1:
            raise StorageTimeoutError("no answer")

    store.before = refuse_once
    writer.save(checkpoint_of(1))
    writer.drain()
    assert told[:2] == [False, True]
    assert len(told) > 3, "there is more to write"
    assert not any(told[2:])


def test_writer_waits_for_longer_than_its_patience_while_objects_are_written(
    store: HookedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, looked, written = [0.0], threading.Event(), list[int]()

    def monotonic() -> float:
        looked.set()
        return now_s[0]

    def take_long(_: str) -> None:
        now_s[0] += 0.015
        looked.clear()
        assert looked.wait(60.0), "nobody waits for the checkpoint"

    clock = SimpleNamespace(monotonic=monotonic, perf_counter=time.perf_counter)
    monkeypatch.setattr("workloads.checkpoint.writer.time", clock)
    folder, tell = CheckpointFolder(store, KEY), partial(written.append, 1)
    writer = CheckpointWriter(folder, patience_s=0.02, allowance_s=0.0, on_written=tell)
    store.before = take_long
    writer.save(checkpoint_of(3))
    writer.drain()
    writer.close()
    assert committed_steps(store) == [3]
    assert now_s[0] > 0.02
    assert written, "nobody would know that it goes on"


def test_writer_outage_skips_periodic_saves_and_ends_one_that_must_be(store: HookedStore) -> None:
    writer = CheckpointWriter(CheckpointFolder(store, KEY), patience_s=0.05, allowance_s=0.0, first_pause_s=0.001)
    store.before = Errors([StorageTimeoutError("no answer")] * 10**6)
    writer.save(checkpoint_of(3))
    for _ in range(10):
        writer.check()
        assert not writer.has_room(WhenBusy.SKIP)
    with pytest.raises(StorageError, match=r"step 3 is still not written after 0\.05 s"):
        writer.has_room(WhenBusy.WAIT)
    writer.close()
    assert committed_steps(store) == []


def test_writer_closed_in_an_outage_stops_trying(store: HookedStore, caplog: pytest.LogCaptureFixture) -> None:
    writer = CheckpointWriter(CheckpointFolder(store, KEY), first_pause_s=3600.0)
    store.before = Errors([StorageTimeoutError("no answer")] * 10**6)
    writer.save(checkpoint_of(3))
    writer.close()
    assert "step 3 is not written: no answer" in caplog.text


def test_writer_closed_lets_the_write_in_flight_end(store: HookedStore) -> None:
    writer = CheckpointWriter(CheckpointFolder(store, KEY))
    writer.save(checkpoint_of(3))
    writer.close()
    assert committed_steps(store) == [3]


def test_writer_failed_deletion_keeps_the_checkpoint_and_is_made_up_for(
    store: HookedStore, writer: CheckpointWriter, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        writer.save(checkpoint_of(step))
    writer.drain()
    store.before = Errors([StorageDeniedError("not yours")], f"{1:012d}-")
    with caplog.at_level(logging.WARNING):
        writer.save(checkpoint_of(3))
        writer.drain()
    assert committed_steps(store) == [1, 2, 3]
    assert "not yours" in caplog.text
    writer.save(checkpoint_of(4))
    writer.drain()
    assert committed_steps(store) == [3, 4]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_writer_dead_at_any_change_leaves_an_intact_checkpoint(tmp_path: Path, moment: str) -> None:
    for changes in range(100):
        store = HookedStore(tmp_path / str(changes))
        writer = CheckpointWriter(CheckpointFolder(store, KEY))
        for step in (1, 2):
            writer.save(checkpoint_of(step))
        writer.drain()
        setattr(store, moment, Deaths(changes, raise_interrupt))
        writer.save(checkpoint_of(3), before={SEGMENT: b""})
        died = isinstance(_failure(writer), KeyboardInterrupt)
        writer.close()
        store.before = store.after = lambda _: None
        found = _newest(store)
        assert found is not None
        assert_equal(found, checkpoint_of(found.step))
        assert found.step in {2, 3}
        assert found.step == 2 or store.exists(SEGMENT)
        if not died:
            assert changes == 9
            return
    pytest.fail("saving never ended")


def test_writer_needs_memory_for_one_copy_of_the_state(tmp_path: Path) -> None:
    model = {"a": torch.ones(96 * MIB // 4)}
    store = HookedStore(tmp_path)
    writer = CheckpointWriter(CheckpointFolder(store, KEY))
    peaks = []
    store.before = store.after = lambda _: peaks.append(resident_bytes())
    before = resident_bytes()
    for step in (1, 2):
        writer.save(Checkpoint(step=step, model=model, optimizer={}, state={}))
    writer.drain()
    writer.close()
    assert max(peaks) - before <= (96 + 64) * MIB
    assert max(peaks) - before >= 96 * MIB  # or this test does not see the copy at all
    assert resident_bytes() - before <= 64 * MIB


@pytest.mark.parametrize(
    ("error", "patience_s", "num_tries"),
    [(StorageTimeoutError("no answer"), 60.0, 3), (StorageTimeoutError("no"), 0.0, 1), (NoSpaceError("full"), 60.0, 1)],
)
def test_what_may_be_repeated_is_repeated_while_the_store_is_out_of_reach_and_patience_lasts(
    monkeypatch: pytest.MonkeyPatch, error: StorageError, patience_s: float, num_tries: int
) -> None:
    monkeypatch.setattr("workloads.checkpoint.writer._FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("workloads.checkpoint.writer._PATIENCE_S", patience_s)
    tries, errors = list[int](), Errors([error] * 2)

    def work() -> str:
        tries.append(1)
        errors("record.json")
        return "done"

    if num_tries == 1:
        with pytest.raises(type(error)):
            retry_in_outage(work)
    else:
        assert retry_in_outage(work) == "done"
    assert len(tries) == num_tries


def test_writer_cost_is_known_after_the_first_checkpoint(writer: CheckpointWriter) -> None:
    assert writer.cost_s == 0
    writer.save(checkpoint_of(1))
    writer.drain()
    assert 0 < writer.cost_s < 60
