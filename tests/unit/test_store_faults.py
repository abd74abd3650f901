"""Stores that refuse, forget and damage: every kind of error, and never a wrong read taken for a right one."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from orchestrator.core.contract import Outcome
from orchestrator.core.errors import (
    ControllerError,
    CorruptObjectError,
    NoSpaceError,
    NotFoundError,
    StorageDeniedError,
    StorageError,
    StorageThrottledError,
    StorageTimeoutError,
)
from orchestrator.state.transitions import SweepState
from orchestrator.storage.artifacts import ArtifactWriter, download_part, is_committed, read_part, read_record
from orchestrator.storage.local import LocalStore
from orchestrator.testing import Fault, FaultyStore, Harm, Moment, ReadFault
from orchestrator.testing.memory_store import MemoryStore
from tests.gc_store import GRACE_S, Lab, make_job
from tests.scripted_sweep import World
from tests.scripted_sweep import make_job as scripted_job
from tests.unit.test_artifacts import KEY, request

KINDS = [StorageThrottledError, StorageTimeoutError, StorageDeniedError, NoSpaceError, NotFoundError, StorageError]
LOST = [Moment.ERROR_BEFORE, Moment.ERROR_AFTER]


# ----------------------------------------------------------------------------------------------------------- writing
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", LOST)
def test_commit_that_fails_at_any_write_is_whole_or_none(kind: type[StorageError], moment: Moment) -> None:
    for nth in (1, 2, 3):
        store = MemoryStore()
        writer = ArtifactWriter(FaultyStore(store, [Fault(moment=moment, nth=nth, error=kind)]), request())
        with pytest.raises(kind):  # noqa: PT012 - it may come at any of these lines
            writer.add("one", b"1")
            writer.add("two", b"2")
            writer.commit(now=0.0)
        assert is_committed(store, KEY) is (nth == 3 and moment is Moment.ERROR_AFTER)
        if is_committed(store, KEY):
            record = read_record(store, KEY)
            assert [read_part(store, record, name) for name in ("one", "two")] == [b"1", b"2"]


@pytest.mark.parametrize("kind", KINDS)
def test_commit_repeated_after_a_lost_acknowledgement_is_the_same_commit(kind: type[StorageError]) -> None:
    store = MemoryStore()
    faulty = FaultyStore(store, [Fault(moment=Moment.ERROR_AFTER, within="record", error=kind)])
    writer = ArtifactWriter(faulty, request())
    writer.add("one", b"1")
    with pytest.raises(kind):
        writer.commit(now=0.0)
    assert writer.commit(now=0.0) is Outcome.COMMITTED


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", LOST)
def test_sweep_over_a_store_that_fails_now_and_then_ends_well(
    kind: type[StorageError], moment: Moment, tmp_path: Path
) -> None:
    jobs = (scripted_job("dataset/tree"), scripted_job("pretrain/a", "dataset/tree"))
    world = World(tmp_path)
    world.new_controller(
        FaultyStore(world.store, [Fault(moment=moment, nth=nth, error=kind) for nth in range(3, 40, 4)])
    )
    world.submit(*jobs)
    for _ in range(200):
        try:
            world.tick()
        except StorageError as error:
            assert type(error) is kind  # noqa: PT017 - the controller's own writes of its lease
            world.clock.advance(1.0)
        if world.snapshot().state.is_final:
            break
    assert world.snapshot().state is SweepState.SUCCEEDED
    assert Counter(world.launches()) == {job.name: 1 for job in jobs}


@pytest.mark.parametrize("kind", KINDS)
def test_gc_over_a_store_that_fails_loses_nothing_reachable(kind: type[StorageError]) -> None:
    dataset, gone = make_job(0), make_job(8)
    for nth in range(1, 40):
        lab = Lab()
        lab.run_sweep("kept", [dataset])
        lab.commit(gone)
        lab.write_metrics(gone)
        lab.clock.advance(GRACE_S + 1)
        faulty = FaultyStore(lab.store, read_faults=[ReadFault(harm=Harm.REFUSED, nth=nth, error=kind)])
        try:
            lab.collect(faulty)
            struck = False
        except (StorageError, ControllerError):
            struck = True
        lab.check_intact([dataset])
        assert is_committed(lab.store, dataset.key)
        lab.clock.advance(GRACE_S)
        lab.collect_until_freed()
        assert lab.names("artifacts/") == lab.names(f"artifacts/{dataset.kind}/{dataset.key}/")
        if not struck and kind is not NotFoundError:
            break
    assert nth > 3


# ----------------------------------------------------------------------------------------------------------- reading
def test_artifact_read_through_damage_is_right_or_an_error(tmp_path: Path) -> None:
    choice = random.Random(3)  # noqa: S311 - the same damages every time
    store = MemoryStore()
    contents = {f"part{number}": choice.randbytes(choice.randrange(1, 400)) for number in range(4)}
    writer = ArtifactWriter(store, request())
    for name, content in contents.items():
        writer.add(name, content)
    writer.commit(now=0.0)
    outcomes: Counter[bool] = Counter()
    for _ in range(1000):
        harm, nth = choice.choice([Harm.FLIPPED, Harm.CUT]), choice.randrange(1, 4)
        faulty = FaultyStore(store, read_faults=[ReadFault(harm=harm, nth=nth)])
        name = choice.choice(list(contents))
        try:
            record = read_record(faulty, KEY, identity=request().identity)
            if choice.random() < 0.5:
                content = read_part(faulty, record, name)
            else:
                content = download_part(faulty, record, name, tmp_path / "part").read_bytes()
            assert content == contents[name]
            outcomes[True] += 1
        except CorruptObjectError:
            outcomes[False] += 1
    assert outcomes[False] > 500
    assert outcomes[True] > 100


# -------------------------------------------------------------------------------------------------------- directories
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, NoSpaceError),
        (errno.EDQUOT, NoSpaceError),
        (errno.EACCES, StorageDeniedError),
        (errno.EROFS, StorageDeniedError),
        (errno.EIO, StorageError),
    ],
)
def test_directory_error_of_the_system_is_one_of_ours_and_leaves_nothing(
    number: int, expected: type[StorageError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)

    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("orchestrator.storage.local.os.fsync", fail)
    for write in (lambda: store.put("a", b"1"), lambda: store.put_if_absent("a", b"1")):
        with pytest.raises(StorageError, match=os.strerror(number)) as caught:
            write()
        assert type(caught.value) is expected
    monkeypatch.undo()
    assert not store.exists("a")
    assert list(store.leftovers()) == []
