"""A sweep whose store fails in the middle: nothing wrong is believed, and the sweep ends when the store is back."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from orchestrator.core.errors import FailureKind, NoSpaceError, StorageDeniedError, StorageError, StorageTimeoutError
from orchestrator.state.transitions import JobState, SweepState
from orchestrator.storage.artifacts import is_committed, read_record
from orchestrator.storage.local import LocalStore
from orchestrator.storage.protocol import ObjectStore
from orchestrator.testing import Fail, ScriptedBackend, Succeed
from tests.gc_store import GRACE_S, Lab
from tests.gc_store import make_job as make_stored_job
from tests.s3_proxy import Damage, Faults
from tests.s3_server import proxy, s3_server, s3_store
from tests.scripted_sweep import World, diamond, make_job

__all__ = ["proxy", "s3_server"]

SHORT_S = 0.2
NUM_BAD_ROUNDS = 6
NUM_LATE_ANSWERS = 50
DISK_BYTES = 512 * 1024


@pytest.fixture
def store(proxy: tuple[str, Faults], s3_server: object, tmp_path: Path) -> ObjectStore:
    """Through the proxy, and impatient: 60 s of silence are 0.2 s here."""
    proxy[1].schedule = lambda _method, _path: None
    return s3_store(tmp_path, endpoint_url=proxy[0], deadline_s=SHORT_S, read_timeout_s=SHORT_S)


def tick_through(world: World) -> list[str]:
    """Some rounds of a controller, whose caller is told of nothing but errors of the store; what it was told."""
    told = []
    for _ in range(NUM_BAD_ROUNDS):
        try:
            world.tick()
        except StorageError as error:
            world.clock.advance(1.0)
            told.append(str(error))
    return told


def patiently(go_on: Callable[[], object]) -> None:
    """A busy machine's server may answer later than a store waits here: then the next round goes on."""
    for _ in range(NUM_LATE_ANSWERS):
        with suppress(StorageTimeoutError):
            go_on()
            return
    pytest.fail("the store is too slow for one round")


def check_ended_well(world: World) -> None:
    snapshot = world.snapshot()
    assert snapshot.state is SweepState.SUCCEEDED
    assert snapshot.counts == {JobState.SUCCEEDED: 5}
    for job in diamond():
        assert read_record(world.store, job.key, identity=job.identity).key == job.key
    assert max(Counter(world.launches()).values()) <= 2, "a job is done again only if its end was not seen"


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        Damage.EXPIRED,
        Damage.BUCKET_GONE,
        Damage.SILENCE,
        Damage.FULL,
        Damage.THROTTLED,
        Damage.ANSWER_LOST,
        Damage.EMPTY_OK,
        Damage.LOGIN_PAGE,
        Damage.LOGIN_PAGE_XHTML,
        Damage.NOT_FOUND_HTML,
        Damage.NOT_FOUND_EMPTY,
        Damage.NO_ETAG,
        Damage.TO_HTTPS,
        Damage.OTHER_FOLDER_LISTED,
        Damage.LISTING_ENDLESS,
    ],
)
def test_sweep_whose_store_fails_in_the_middle_ends_once_it_is_back(
    damage: Damage, store: ObjectStore, proxy: tuple[str, Faults], tmp_path: Path
) -> None:
    world = World(tmp_path, store=store)
    world.store = s3_store(tmp_path)  # who submits and looks is patient
    world.submit(*diamond())
    patiently(lambda: world.tick_until(lambda: "dataset/tree" in world.launches()))
    proxy[1].schedule = lambda _method, _path: damage
    proxy[1].seen.clear()
    told = tick_through(world)
    assert proxy[1].seen, "no request met the fault"
    proxy[1].schedule = lambda _method, _path: None
    patiently(world.finish)
    check_ended_well(world)
    assert all("\n" not in message for message in told)


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", [Damage.EMPTY_OK, Damage.LOGIN_PAGE_XHTML, Damage.OTHER_FOLDER_LISTED, Damage.LISTING_OF_ANOTHER_KIND]
)
def test_collect_believes_no_listing_of_somebody_else(
    damage: Damage, store: ObjectStore, proxy: tuple[str, Faults]
) -> None:
    lab, job = Lab(), make_stored_job(0)
    lab.store = store
    lab.run_sweep("red", [job])
    lab.clock.advance(10 * GRACE_S)
    proxy[1].schedule = lambda method, _path: damage if method == "GET" else None
    with pytest.raises(StorageError, match="not the answer of an S3 server"):
        lab.collect()
    proxy[1].schedule = lambda _method, _path: None
    lab.check_intact([job])


# ------------------------------------------------------------------------------------------------------ directories


@contextmanager
def mounted(folder: Path) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    size = f"size={DISK_BYTES}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], check=False).returncode:
        pytest.skip("a small file system needs the right to mount one")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    with mounted(folder):
        yield folder


@contextmanager
def full(disk: Path) -> Iterator[None]:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                break
    yield
    ballast.unlink()


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    yield
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)


WRITES: dict[str, Callable[[LocalStore, Path], object]] = {
    "put": lambda store, _: store.put("folder/new", bytes(9000)),
    "put_file": lambda store, source: store.put_file("folder/new", source),
    "put_if_absent": lambda store, _: store.put_if_absent("folder/new", bytes(9000)),
    "put_if_match": lambda store, _: store.put_if_match("folder/a", bytes(9000), store.stat("folder/a").etag),
}


@pytest.mark.parametrize("operation", WRITES)
@pytest.mark.parametrize(("state", "kind"), [(full, NoSpaceError), (read_only, StorageDeniedError)])
def test_write_to_a_disk_that_takes_nothing_is_one_clear_error_and_reads_go_on(
    state: Callable[[Path], object], kind: type[StorageError], operation: str, disk: Path, tmp_path: Path
) -> None:
    (tmp_path / "source").write_bytes(bytes(9000))
    store = LocalStore(disk / "store")
    store.put("folder/a", b"here")
    with state(disk):  # type: ignore[attr-defined]
        with pytest.raises(kind, match=r"store failed: \[Errno \d+\]") as caught:
            WRITES[operation](store, tmp_path / "source")
        assert "\n" not in str(caught.value)
        assert store.get("folder/a") == b"here"
        assert [stat.name for stat in store.list_objects("")] == ["folder/a"]
        if state is full:
            store.delete("folder/a")
            assert list(store.list_objects("")) == []
        else:
            with pytest.raises(StorageDeniedError, match="mount it for writing"):
                store.delete("folder/a")
    WRITES["put"](store, tmp_path)
    assert list(store.leftovers()) == []


@pytest.mark.parametrize("state", [full, read_only])
def test_download_to_a_disk_that_takes_nothing_is_one_clear_error(
    state: Callable[[Path], object], disk: Path, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path / "store")
    store.put("a", bytes(9000))
    with state(disk), pytest.raises((NoSpaceError, StorageDeniedError), match="copying a from"):  # type: ignore[attr-defined]
        store.download("a", disk / "copy")
    store.download("a", disk / "copy")
    assert (disk / "copy").stat().st_size == 9000


@pytest.mark.parametrize("state", [full, read_only])
def test_sweep_whose_disk_takes_nothing_for_a_while_ends_once_it_does(
    state: Callable[[Path], object], disk: Path, tmp_path: Path
) -> None:
    world = World(tmp_path, store=LocalStore(disk / "store"))
    world.submit(*diamond())
    world.tick_until(lambda: "dataset/tree" in world.launches())
    with state(disk):  # type: ignore[attr-defined]
        tick_through(world)
    world.finish()
    check_ended_well(world)


def test_job_whose_node_has_a_full_disk_for_minutes_is_not_failed_for_good(tmp_path: Path) -> None:
    world = World(tmp_path)
    failures = [Fail(kind=FailureKind.STORAGE)] * 6
    world.backend = ScriptedBackend(world.store, {"dataset/tree": [*failures, Succeed()]})
    world.new_controller()
    started_s = world.clock()
    world.submit(make_job("dataset/tree"), max_failures=1)
    world.finish()
    view = world.job("dataset/tree")
    assert (view.state, view.num_attempts) == (JobState.SUCCEEDED, 7)
    assert world.clock() - started_s > 3 * 60.0
    assert is_committed(world.store, make_job("dataset/tree").key)
