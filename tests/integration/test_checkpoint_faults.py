"""Training over stores that hang, refuse, forget and die: the same weights, or a clear end with a checkpoint."""

import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from orchestrator.core.contract import Execution, Outcome, Progress
from orchestrator.core.errors import PreemptedError, StorageDeniedError, StorageThrottledError, StorageTimeoutError
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.layout import metrics_segment, record_name
from orchestrator.storage.local import LocalStore
from orchestrator.storage.protocol import ObjectStat
from tests.checkpoint_cases import (
    KEY,
    PARTS,
    Deaths,
    Errors,
    FirstTries,
    Gate,
    HookedStore,
    assert_equal,
    checkpoint_of,
    committed_steps,
    kill_this,
    object_of,
    save_at_once,
)
from tests.s3_server import s3_server, s3_store
from tests.tiny_training import TinyTraining, prepared
from workloads.checkpoint.store import CheckpointFolder
from workloads.checkpoint.writer import CheckpointWriter
from workloads.train import saver, step_metrics

__all__ = ["prepared", "s3_server"]

EVERY_STEP = Execution(checkpoint_every_steps=1)
CHECKPOINTS = "checkpoints/"
SEGMENT = "metrics/key/000001/000000000000-000000000003.jsonl"


@pytest.fixture
def fresh(prepared: Path, tmp_path: Path) -> Callable[[], tuple[TinyTraining, HookedStore]]:
    numbers = itertools.count()

    def copy() -> tuple[TinyTraining, HookedStore]:
        folder = tmp_path / str(next(numbers))
        shutil.copytree(prepared, folder)
        store = HookedStore(folder / "store")
        return TinyTraining(store, folder), store

    return copy


def _weights(tiny: TinyTraining, key: str) -> str:
    return str(read_record(tiny.store, key).summary["weights_sha256"])


@pytest.mark.ci
@pytest.mark.parametrize("moment", ["before", "after"])
def test_training_over_a_store_that_throttles_or_forgets_ends_with_the_same_weights(
    fresh: Callable[[], tuple[TinyTraining, HookedStore]], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "CheckpointWriter", partial(CheckpointWriter, first_pause_s=0.001))
    (plain, _), (troubled, store) = fresh(), fresh()
    expected = plain.run(plain.training())
    faults = FirstTries([StorageThrottledError("slow down"), StorageTimeoutError("no answer")], CHECKPOINTS)
    setattr(store, moment, faults)
    with pytest.raises(PreemptedError):
        troubled.run(troubled.training(execution=EVERY_STEP), should_stop=_at_question(7))
    assert len(faults.failed) >= 7 * len(PARTS)
    assert committed_steps(store, expected.key)[-1] == 7
    result = troubled.run(troubled.training(execution=EVERY_STEP, attempt=2))
    assert result.resumed_from_step == 7
    assert _weights(troubled, result.key) == _weights(plain, expected.key)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_training_whose_store_is_out_of_reach_at_its_end_commits_its_result(
    fresh: Callable[[], tuple[TinyTraining, HookedStore]], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "CheckpointWriter", partial(CheckpointWriter, first_pause_s=0.001))
    monkeypatch.setattr("workloads.checkpoint.writer._FIRST_PAUSE_S", 0.001)
    (plain, _), (troubled, store) = fresh(), fresh()
    expected, request = plain.run(plain.training()), troubled.training()
    faults = FirstTries([StorageThrottledError("slow down"), StorageTimeoutError("no answer")])
    setattr(store, moment, faults)
    put_if_absent = store.put_if_absent

    def put_record(name: str, content: bytes) -> ObjectStat:
        store.before(name)
        stat = put_if_absent(name, content)
        store.after(name)
        return stat

    monkeypatch.setattr(store, "put_if_absent", put_record)
    result = troubled.run(request)
    assert result.outcome is Outcome.COMMITTED
    assert {record_name(request.key), metrics_segment(request.key, 1, 12, 15)} <= faults.failed
    assert {name.rpartition("/")[2] for name in faults.failed if "/parts/" in name} >= {"backbone.safetensors"}
    assert _weights(troubled, result.key) == _weights(plain, expected.key)


def test_training_in_an_outage_goes_on_and_stops_with_its_last_step_saved(
    fresh: Callable[[], tuple[TinyTraining, HookedStore]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "CheckpointWriter", partial(CheckpointWriter, allowance_s=0.0))
    tiny, store = fresh()
    gate = store.before = Gate(CHECKPOINTS)
    questions = itertools.count()

    def should_stop() -> bool:
        if next(questions) < 9:
            return False
        gate.open()
        return True

    request = tiny.training(execution=EVERY_STEP)
    with pytest.raises(PreemptedError, match="stopped at step 9"):
        tiny.run(request, should_stop=should_stop)
    # The first one was in flight all the time and the eight after it were skipped.
    assert committed_steps(store, request.key) == [1, 9]


def test_training_reports_how_long_its_work_is_not_saved_while_the_store_is_out_of_reach(
    fresh: Callable[[], tuple[TinyTraining, HookedStore]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "CheckpointWriter", partial(CheckpointWriter, first_pause_s=0.001, allowance_s=0.0))
    monkeypatch.setattr(step_metrics, "_REPORT_EVERY_S", 0.0)
    tiny, store = fresh()
    outage, told = Outage(CHECKPOINTS), dict[int, list[float]]()

    def report(progress: Progress) -> None:
        if progress.phase == "train":
            told.setdefault(progress.step, []).append(progress.counters.get("unsaved_s", 0.0))
            if progress.step == 4:
                assert outage.reached.wait(60)
            if progress.step == 8:
                outage.is_over.set()
                _let_writes_end()

    request = tiny.training(execution=Execution(checkpoint_every_steps=3))
    store.before = outage
    tiny.run(request, report=report)
    unsaved_s = {step: max(found) for step, found in told.items()}
    assert [step for step, found in unsaved_s.items() if found and step not in {3, 4}] == [5, 6, 7, 8]
    assert unsaved_s[5] < unsaved_s[8], "it grows with the work that would be lost"


class Outage:
    """Refuses all names that have ``within`` until it is over; ``reached`` once it was tried again."""

    def __init__(self, within: str) -> None:
        self._within = within
        self._num_refused = 0
        self.reached, self.is_over = threading.Event(), threading.Event()

    def __call__(self, name: str) -> None:
        if self._within in name and not self.is_over.is_set():
            self._num_refused += 1
            if self._num_refused > 1:
                self.reached.set()
            raise StorageTimeoutError("no answer")


def test_training_whose_checkpoints_are_refused_ends_within_a_step(
    fresh: Callable[[], tuple[TinyTraining, HookedStore]],
) -> None:
    tiny, store = fresh()
    refused = store.before = Errors([StorageDeniedError("no permission")] * 100, CHECKPOINTS)
    questions = []

    def should_stop() -> bool:
        _let_writes_end()
        questions.append(len(refused.left))
        return False

    with pytest.raises(StorageDeniedError, match="no permission"):
        tiny.run(tiny.training(execution=Execution(checkpoint_every_steps=4)), should_stop=should_stop)
    assert questions == [100, 100, 100, 100, 98]  # a write and the deletion of what it left are refused


def test_training_that_fails_lets_the_checkpoint_in_flight_through(
    fresh: Callable[[], tuple[TinyTraining, HookedStore]],
) -> None:
    tiny, store = fresh()
    gate = store.before = Gate("manifest.json")

    def should_stop() -> bool:
        if not gate.reached.is_set():
            return False
        threading.Timer(0.05, gate.open).start()
        raise ZeroDivisionError

    request = tiny.training(execution=Execution(checkpoint_every_steps=4))
    with pytest.raises(ZeroDivisionError):
        tiny.run(request, should_stop=should_stop)
    assert committed_steps(store, request.key) == [4]


def test_training_with_automatic_interval_saves_as_failures_ask(
    fresh: Callable[[], tuple[TinyTraining, HookedStore]],
) -> None:
    rare, often = fresh(), fresh()
    steps: list[set[int]] = []
    for (tiny, store), mtbf_s in ((rare, 1e9), (often, 1e-9)):
        names: list[str] = []
        store.after = names.append
        tiny.run(tiny.training(execution=Execution(checkpoint_mtbf_s=mtbf_s)))
        steps.append({int(name.split("/")[-2].partition("-")[0]) for name in names if name.endswith("manifest.json")})
    assert steps == [{1}, set(range(1, 15))]  # of 15 steps; the artifact follows the last one


def test_training_metrics_reach_the_store_before_the_checkpoint_after_them(
    fresh: Callable[[], tuple[TinyTraining, HookedStore]],
) -> None:
    tiny, store = fresh()
    durable_step, seen = 0, []

    def after(name: str) -> None:
        nonlocal durable_step
        if name.startswith("metrics/"):
            durable_step = max(json.loads(line)["step"] for line in store.get(name).splitlines())
        if name.endswith("manifest.json") and store.exists(name):
            seen.append((durable_step, json.loads(store.get(name))["step"]))

    store.after = after
    tiny.run(tiny.training())
    assert seen == [(6, 6), (12, 12)]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_save_killed_at_any_change_leaves_an_intact_checkpoint(tmp_path: Path, moment: str) -> None:
    for changes in range(100):
        root = tmp_path / str(changes)
        folder = CheckpointFolder(LocalStore(root), KEY)
        for step in (1, 2):
            save_at_once(folder, checkpoint_of(step))
        was_killed = _save_in_child(root, moment, changes)
        store = LocalStore(root)
        found = CheckpointFolder(store, KEY).load_newest()
        assert found is not None
        assert_equal(found, checkpoint_of(found.step))
        assert found.step in {2, 3}
        assert found.step == 2 or store.exists(SEGMENT)
        later = CheckpointFolder(store, KEY)
        later.load_newest()
        save_at_once(later, checkpoint_of(4))
        assert committed_steps(store) == [found.step, 4]
        if not was_killed:
            assert changes == 9
            return
    pytest.fail("saving never ended")


def _save_in_child(root: Path, moment: str, changes: int) -> bool:
    """Save step 3 in a process that is killed at its n-th change; whether it was."""
    pid = os.fork()
    if pid:
        return os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    try:  # the child: it must never return into the test run
        store = HookedStore(root)
        folder = CheckpointFolder(store, KEY)
        folder.load_newest()
        setattr(store, moment, Deaths(changes, kill_this))
        writer = CheckpointWriter(folder)
        writer.save(checkpoint_of(3), before={SEGMENT: b""})
        writer.drain()
        os._exit(0)
    finally:
        os._exit(1)


def test_checkpoint_in_a_bucket_comes_back_and_falls_back(
    s3_server: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = s3_store(tmp_path)
    writer = CheckpointWriter(CheckpointFolder(store, KEY))
    for step in (1, 2, 3):
        writer.save(checkpoint_of(step))
    writer.drain()
    writer.close()
    assert committed_steps(store) == [2, 3]
    assert_equal(CheckpointFolder(store, KEY).load_newest(), checkpoint_of(3))
    name = object_of(store, 3, "model.safetensors")
    store.put(name, store.get(name)[:-1])
    assert_equal(CheckpointFolder(store, KEY).load_newest(), checkpoint_of(2))
    assert "model.safetensors" in caplog.text


def _at_question(number: int) -> Callable[[], bool]:
    questions = itertools.count()
    return lambda: next(questions) == number


def _let_writes_end() -> None:
    deadline_s = time.monotonic() + 60
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint-"):
            thread.join(deadline_s - time.monotonic())
            assert not thread.is_alive()
