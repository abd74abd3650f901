"""What a run keeps for its artifact: a pure function of its evaluations, safe in the store until the commit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.contract import JobRequest
from orchestrator.core.errors import StorageError, UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.retention.gc_rules import GcAction, Reason
from orchestrator.storage.artifacts import ArtifactWriter, read_part, read_record
from orchestrator.storage.layout import attempt_name
from orchestrator.storage.protocol import ObjectStore
from orchestrator.testing import Fault, FaultyStore, Moment, SimulatedCrash
from orchestrator.testing.memory_store import MemoryStore
from tests.checkpoint_cases import KEY, committed_steps, object_of, save_at_once
from tests.gc_store import GRACE_S, TRASH_S, Lab, make_job
from workloads.checkpoint.retention import KEPT, Keeper, KeepPolicy, Kept, add_kept_parts
from workloads.checkpoint.store import Checkpoint, CheckpointFolder


@dataclass(frozen=True)
class Length:
    """10 steps per epoch."""

    total_steps: int = 100
    num_samples: int = 160
    batch_size: int = 16


def keeper(kept: Any = (), **policy: Any) -> Keeper:
    return Keeper(KeepPolicy(**policy), Length(), kept)


def evaluate(target: Keeper, *errors: float) -> None:
    """At the ends of epochs 1, 2, ..."""
    for epoch, error in enumerate(errors, start=1):
        target.after_evaluation(10 * epoch, {"val_error": error, "val_loss": 2 * error})


def named_steps(target: Keeper) -> dict[str, int]:
    return {place: kept.step for place, kept in target.named().items()}


# ------------------------------------------------------------------------------------------------------- what is kept
def test_keeper_without_policy_keeps_nothing() -> None:
    plain = Keeper(KeepPolicy.of({"seed": 0}), Length())
    evaluate(plain, 0.5, 0.4)
    assert plain.is_idle
    assert plain.to_json() == []
    assert not plain.must_keep(10)


def test_keeper_listed_epochs_stay_whatever_their_metrics() -> None:
    listed = keeper(epochs=(1, 3))
    evaluate(listed, 0.9, 0.1, 0.8, 0.2)
    assert named_steps(listed) == {"epochs/1": 10, "epochs/3": 30}
    assert [listed.is_listed(step) for step in (9, 10, 20, 30)] == [False, True, False, True]


def test_keeper_best_are_the_lowest_with_ties_to_the_earlier() -> None:
    best = keeper(num_best=2)
    evaluate(best, 0.5, 0.3, 0.3, 0.4, 0.3)
    assert named_steps(best) == {"best/1": 20, "best/2": 30}


def test_keeper_one_step_may_be_kept_for_several_reasons() -> None:
    both = keeper(epochs=(2,), num_best=1)
    evaluate(both, 0.5, 0.3, 0.4)
    assert named_steps(both) == {"epochs/2": 20, "best/1": 20}
    assert [entry["step"] for entry in both.to_json()] == [20]


def test_keeper_last_step_needs_no_checkpoint_of_its_own() -> None:
    last = keeper(epochs=(10,), num_best=1)
    evaluate(last, *[0.9] * 9, 0.1)
    assert not last.must_keep(100)
    assert named_steps(last) == {"epochs/10": 100, "best/1": 100}


@pytest.mark.parametrize("epoch", [11, 0])
def test_keeper_epoch_beyond_the_training_is_refused(epoch: int) -> None:
    with pytest.raises(UserError, match=f"epoch {epoch}"):
        keeper(epochs=(epoch,))


def test_keeper_metric_that_is_not_measured_is_refused() -> None:
    with pytest.raises(UserError, match="val_error"):
        keeper(num_best=1).after_evaluation(10, {"val_top5_error": 0.1})
    with pytest.raises(UserError, match="accuracy"):
        KeepPolicy.of({"keep": {"best": {"metric": "accuracy", "k": 1}}})


@given(
    errors=st.lists(st.floats(0, 1), min_size=1, max_size=9),
    epochs=st.sets(st.integers(1, 10)),
    num_best=st.integers(0, 4),
    resumed_after=st.integers(0, 9),
)
def test_keeper_resumed_anywhere_keeps_the_same(errors, epochs, num_best, resumed_after) -> None:
    policy = {"epochs": tuple(sorted(epochs)), "num_best": num_best}
    through = keeper(**policy)
    evaluate(through, *errors)
    first = keeper(**policy)
    evaluate(first, *errors[:resumed_after])
    second = keeper(json.loads(json.dumps(first.to_json())), **policy)
    for epoch, error in enumerate(errors, start=1):
        if epoch > resumed_after:
            second.after_evaluation(10 * epoch, {"val_error": error, "val_loss": 2 * error})
    assert second.to_json() == through.to_json()
    ranked = sorted(range(len(errors)), key=lambda position: (errors[position], position))
    expected = {f"best/{rank}": 10 * (at + 1) for rank, at in enumerate(ranked[:num_best], start=1)}
    expected |= {f"epochs/{epoch}": 10 * epoch for epoch in epochs if epoch <= len(errors)}
    assert named_steps(through) == expected


# ------------------------------------------------------------------------------------------------------- in the store
def checkpoint_of(step: int, target: Keeper | None = None) -> Checkpoint:
    model = {"backbone.w": torch.full((4,), float(step)), "head.w": torch.full((2,), -float(step))}
    return Checkpoint(step=step, model=model, optimizer={}, state={KEPT: target.to_json() if target else []})


def train(
    folder: CheckpointFolder, target: Keeper, errors: dict[int, float], *, start: int = 0, stop: int = 10
) -> None:
    """A checkpoint at each epoch's end."""
    for epoch in range(start + 1, stop + 1):
        target.after_evaluation(10 * epoch, {"val_error": errors.get(epoch, 0.9), "val_loss": 1.0})
        if epoch < 10:
            save_at_once(folder, checkpoint_of(10 * epoch, target))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_folder_kept_checkpoints_stay_beside_the_newest(store: MemoryStore) -> None:
    target = keeper(epochs=(2, 5))
    train(CheckpointFolder(store, KEY), target, {})
    assert committed_steps(store) == [20, 50, 80, 90]


@pytest.mark.parametrize("keep_last", [1, 2, 4])
def test_folder_keeps_as_many_of_the_newest_as_asked(store: MemoryStore, keep_last: int) -> None:
    train(CheckpointFolder(store, KEY, keep_last=keep_last), keeper(), {})
    assert committed_steps(store) == [10 * epoch for epoch in range(10 - keep_last, 10)]


def test_folder_best_that_was_beaten_goes_only_once_nothing_resumes_from_where_it_was_best(store: MemoryStore) -> None:
    target, folder = keeper(num_best=1), CheckpointFolder(store, KEY)
    seen = []
    for epoch, error in enumerate((0.5, 0.3, 0.4, 0.4, 0.1, 0.4, 0.4), start=1):
        target.after_evaluation(10 * epoch, {"val_error": error})
        save_at_once(folder, checkpoint_of(10 * epoch, target))
        seen.append(committed_steps(store))
    assert seen == [[10], [10, 20], [20, 30], [20, 30, 40], [20, 40, 50], [50, 60], [50, 60, 70]]


@pytest.mark.parametrize("stop", range(1, 9))
def test_folder_of_a_later_attempt_has_all_that_its_state_names(store: MemoryStore, stop: int) -> None:
    errors = {2: 0.2, 4: 0.3, 6: 0.1}
    first = keeper(epochs=(3,), num_best=2)
    train(CheckpointFolder(store, KEY), first, errors, stop=stop)
    folder = CheckpointFolder(store, KEY)
    loaded = folder.load_newest()
    assert loaded is not None
    second = keeper(loaded.state[KEPT], epochs=(3,), num_best=2)
    train(folder, second, errors, start=stop)
    assert named_steps(second) == {"epochs/3": 30, "best/1": 60, "best/2": 20}
    for kept in second.named().values():
        assert torch.equal(folder.load_kept(kept).model["backbone.w"], torch.full((4,), float(kept.step)))


def test_folder_falls_back_behind_a_damaged_checkpoint_and_still_has_what_that_one_keeps(store: MemoryStore) -> None:
    """The best of before is beaten by the newest checkpoint, which turns out to be damaged."""
    target, folder = keeper(num_best=1), CheckpointFolder(store, KEY)
    for epoch, error in enumerate((0.3, 0.4, 0.4, 0.1), start=1):
        target.after_evaluation(10 * epoch, {"val_error": error})
        save_at_once(folder, checkpoint_of(10 * epoch, target))
    store.put(object_of(store, 40, "model.safetensors"), b"damaged")
    again = CheckpointFolder(store, KEY)
    loaded = again.load_newest()
    assert loaded is not None
    assert loaded.step == 30
    (kept,) = keeper(loaded.state[KEPT], num_best=1).named().values()
    assert again.load_kept(kept).step == 10


def test_folder_of_an_attempt_with_a_successor_deletes_nothing_that_was_kept_once(store: MemoryStore) -> None:
    target = keeper(num_best=1)
    zombie = CheckpointFolder(store, KEY, attempt_number=1)
    train(zombie, target, {1: 0.5}, stop=2)
    store.put(attempt_name(KEY, 2), b"{}")
    successor = CheckpointFolder(store, KEY, attempt_number=2)
    loaded = successor.load_newest()
    assert loaded is not None
    train(zombie, target, {3: 0.1}, start=2, stop=9)
    (kept,) = keeper(loaded.state[KEPT], num_best=1).named().values()
    assert successor.load_kept(kept).step == 10


def test_folder_kept_checkpoint_of_another_evaluation_is_not_taken(store: MemoryStore) -> None:
    target, folder = keeper(epochs=(1,)), CheckpointFolder(store, KEY)
    train(folder, target, {1: 0.5}, stop=2)
    with pytest.raises(StorageError, match="another evaluation"):
        folder.load_kept(Kept(step=10, metrics={"val_error": 0.4}))
    with pytest.raises(StorageError, match="there is none"):
        folder.load_kept(Kept(step=70, metrics={}))


def test_folder_after_going_back_has_no_later_checkpoints(store: MemoryStore) -> None:
    target, folder = keeper(epochs=(2, 5)), CheckpointFolder(store, KEY, keep_last=3)
    train(folder, target, {}, stop=6)
    folder.delete_after(40)
    assert committed_steps(store) == [20, 40]
    found = folder.load_at_most(39)
    assert found is not None
    assert found.step == 20
    assert folder.load_at_most(19) is None
    train(folder, target, {}, start=3, stop=4)  # the run writes what it goes on from
    assert committed_steps(store) == [20, 40, 40]
    folder.delete_after(40)
    assert committed_steps(store) == [20, 40], "an attempt could resume from the state before the rewind"


def test_folder_after_going_back_keeps_as_many_as_before(store: MemoryStore) -> None:
    """What goes next does not count among the newest."""
    folder = CheckpointFolder(store, KEY, keep_last=3)
    train(folder, keeper(), {}, stop=5)
    assert committed_steps(store) == [30, 40, 50]
    train(folder, keeper(), {}, start=3, stop=4)
    folder.delete_after(40)
    assert committed_steps(store) == [30, 40]


def test_folder_goes_back_to_no_checkpoint_that_names_a_deleted_one(store: MemoryStore) -> None:
    """That of step 20 stays as one of the best two; the other one of its time, that of step 10, does not."""
    folder = CheckpointFolder(store, KEY)
    train(folder, keeper(num_best=2), {1: 0.5, 2: 0.4, 3: 0.3}, stop=5)
    assert committed_steps(store) == [20, 30, 40, 50]
    assert folder.load_at_most(29) is None
    found = folder.load_at_most(39)
    assert found is not None
    assert found.step == 30


@pytest.mark.parametrize("moment", [Moment.CRASH_BEFORE, Moment.CRASH_AFTER])
def test_folder_crash_at_every_write_loses_nothing_that_is_kept(moment: Moment) -> None:
    errors, nth = {2: 0.2, 3: 0.1, 5: 0.3}, 0
    while True:
        nth += 1
        store = MemoryStore()
        faulty = FaultyStore(store, [Fault(moment=moment, nth=nth)])
        target = keeper(epochs=(1,), num_best=1)
        try:
            train(CheckpointFolder(faulty, KEY), target, errors, stop=7)
        except SimulatedCrash:
            folder = CheckpointFolder(store, KEY)
            loaded = folder.load_newest()
            done = loaded.step // 10 if loaded else 0
            target = keeper(loaded.state[KEPT] if loaded else (), epochs=(1,), num_best=1)
            train(folder, target, errors, start=done, stop=7)
            assert named_steps(target) == {"epochs/1": 10, "best/1": 30}
            assert {folder.load_kept(kept).step for kept in target.named().values()} == {10, 30}
            continue
        break
    assert nth > 30


# ---------------------------------------------------------------------------------------------------- in the artifact
def request() -> JobRequest:
    identity = {"kind": "pretrain", "code_version": 1, "parameters": {}, "inputs": {}}
    return JobRequest(
        attempt_id=f"{KEY}.1",
        attempt_number=1,
        sweep="s",
        job="pretrain/a",
        key=KEY,
        kind=JobKind.PRETRAIN,
        identity=identity,
        store_uri="file:///nowhere",
    )


def commit_kept(store: ObjectStore, folder: CheckpointFolder, target: Keeper) -> None:
    writer = ArtifactWriter(store, request())
    for name in ("backbone", "head"):
        writer.add(name, f"{name} 100".encode())
    add_kept_parts(
        writer,
        target,
        final_step=100,
        final_parts=("backbone", "head"),
        load=folder.load_kept,
        parts_of=lambda checkpoint: {name: f"{name} {checkpoint.step}".encode() for name in ("backbone", "head")},
    )
    writer.commit(now=0.0, summary={"kept": target.summary()})


def test_artifact_holds_what_is_kept_under_its_name(store: MemoryStore) -> None:
    target, folder = keeper(epochs=(2, 10), num_best=2), CheckpointFolder(store, KEY)
    train(folder, target, {2: 0.2, 6: 0.1})
    commit_kept(store, folder, target)
    record = read_record(store, KEY)
    found = {name: read_part(store, record, name).decode() for name in record.parts if name.endswith("head")}
    assert found == {
        "head": "head 100",
        "epochs/2/head": "head 20",
        "epochs/10/head": "head 100",
        "best/1/head": "head 60",
        "best/2/head": "head 20",
    }
    assert record.summary["kept"]["best/1"] == {"step": 60, "metrics": {"val_error": 0.1, "val_loss": 1.0}}
    stored = [stat.name for stat in store.list_objects(f"artifacts/pretrain/{KEY}/parts/")]
    assert len(stored) == 2 * 3, "each step once"


def test_artifact_of_lost_kept_checkpoint_is_not_committed(store: MemoryStore) -> None:
    target, folder = keeper(epochs=(2,)), CheckpointFolder(store, KEY)
    train(folder, target, {})
    store.delete(object_of(store, 20, "state.json"))
    with pytest.raises(StorageError, match="step 20"):
        commit_kept(store, folder, target)


def test_gc_kept_parts_stay_with_their_record_and_kept_checkpoints_until_it_exists() -> None:
    lab, pretrain = Lab(), make_job(3)
    lab.accept("sweep", [pretrain])
    lab.write_checkpoint(pretrain, 20)
    lab.write_checkpoint(pretrain, 90)
    for wait_s in (GRACE_S, TRASH_S, TRASH_S):
        lab.clock.advance(wait_s + 1)
        lab.collect()
    assert len([name for name in lab.names("artifacts/") if name.endswith("manifest.json")]) == 2
    writer = lab.write_parts(pretrain)
    writer.add("epochs/2/backbone.safetensors", b"weights")
    writer.alias("best/1/backbone.safetensors", "epochs/2/backbone.safetensors")
    writer.commit(now=lab.clock())
    lab.clock.advance(GRACE_S + 1)
    tally = lab.collect()
    assert set(tally.amounts) == {(GcAction.HIDE, Reason.SUPERFLUOUS_CHECKPOINT)}
    lab.collect_until_freed()
    lab.check_intact([pretrain])
    assert len(lab.names("artifacts/")) == 3
