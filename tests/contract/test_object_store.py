"""What every ``ObjectStore`` must do."""

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from orchestrator.core.errors import NotFoundError, PreconditionFailedError, StorageError
from orchestrator.storage import ObjectStore, open_store
from orchestrator.storage.local import LocalStore
from orchestrator.storage.open import is_initialised
from orchestrator.storage.overlay import OverlayStore
from orchestrator.storage.probe import probe_store
from orchestrator.storage.protocol import OpenableStore
from orchestrator.storage.s3.store import S3Store
from orchestrator.testing import FaultyStore
from orchestrator.testing.memory_store import MemoryStore
from tests.s3_server import s3_store

MakeStore = Callable[[Path], ObjectStore]

IMPLEMENTATIONS: dict[str, MakeStore] = {
    "local": LocalStore,
    "overlay": lambda root: OverlayStore(LocalStore(root / "top"), LocalStore(root / "base")),
    "faulty": lambda root: FaultyStore(LocalStore(root)),
    "memory": lambda root: MemoryStore(),
    "s3": s3_store,
}
SHARED = ["local", "faulty", "s3"]
"""Several stores of these, opened at one place, hold the same objects."""
NUM_RACERS = {"local": 16, "faulty": 16, "s3": 4}  # contended rounds are slow on the server
NUM_ROUNDS = {"local": 4, "faulty": 4, "s3": 2}


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "s3":
        request.getfixturevalue("s3_server")
    return str(request.param)


@pytest.fixture(params=IMPLEMENTATIONS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "s3":
        request.getfixturevalue("s3_server")
    return IMPLEMENTATIONS[request.param](tmp_path)


def race(contenders: Sequence[Callable[[], object]]) -> list[int]:
    """Start all at the same moment; positions of those that did not lose a precondition."""
    barrier = threading.Barrier(len(contenders))

    def run(contender: Callable[[], object]) -> bool:
        barrier.wait(timeout=60)
        try:
            contender()
        except PreconditionFailedError:
            return False
        return True

    with ThreadPoolExecutor(len(contenders)) as pool:
        won = list(pool.map(run, contenders))
    return [position for position, has_won in enumerate(won) if has_won]


def test_put_then_get_returns_the_content(store: ObjectStore) -> None:
    stat = store.put("a/b.json", b"one")
    assert store.get("a/b.json") == b"one"
    assert (stat.name, stat.size_bytes) == ("a/b.json", 3)
    assert store.stat("a/b.json") == stat


def test_put_over_an_object_replaces_it_and_its_etag(store: ObjectStore) -> None:
    first = store.put("a", b"one")
    second = store.put("a", b"two")
    assert store.get_with_stat("a") == (b"two", second)
    assert first.etag != second.etag


def test_put_empty_content_is_an_object(store: ObjectStore) -> None:
    store.put("empty", b"")
    assert store.exists("empty")
    assert store.get("empty") == b""


def test_put_file_then_download_returns_the_content(store: ObjectStore, tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000
    (tmp_path / "source").write_bytes(content)
    assert store.put_file("big", tmp_path / "source").size_bytes == len(content)
    store.download("big", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == content


def test_put_if_absent_on_a_free_name_writes(store: ObjectStore) -> None:
    stat = store.put_if_absent("a", b"one")
    assert store.get_with_stat("a") == (b"one", stat)


def test_put_if_absent_on_a_taken_name_fails_and_changes_nothing(store: ObjectStore) -> None:
    store.put("a", b"one")
    with pytest.raises(PreconditionFailedError, match="a"):
        store.put_if_absent("a", b"two")
    assert store.get("a") == b"one"


def test_put_if_absent_with_its_own_content_is_success(store: ObjectStore) -> None:
    first = store.put_if_absent("a", b"one")
    assert store.put_if_absent("a", b"one") == first


def test_put_if_match_with_the_current_etag_replaces(store: ObjectStore) -> None:
    first = store.put("a", b"one")
    second = store.put_if_match("a", b"two", first.etag)
    assert store.get_with_stat("a") == (b"two", second)


def test_put_if_match_with_a_former_etag_fails_and_changes_nothing(store: ObjectStore) -> None:
    first = store.put("a", b"one")
    store.put("a", b"two")
    with pytest.raises(PreconditionFailedError):
        store.put_if_match("a", b"three", first.etag)
    assert store.get("a") == b"two"


def test_put_if_match_on_a_missing_object_fails(store: ObjectStore) -> None:
    with pytest.raises(PreconditionFailedError):
        store.put_if_match("a", b"one", "etag")
    assert not store.exists("a")


@pytest.mark.parametrize("operation", ["get", "get_with_stat", "stat"])
def test_reading_a_missing_object_raises_not_found(store: ObjectStore, operation: str) -> None:
    store.put("folder/x", b"")
    for name in ("nothing", "folder", "folder/x/below"):
        with pytest.raises(NotFoundError, match=name):
            getattr(store, operation)(name)


def test_get_range_returns_the_bytes_that_are_there(store: ObjectStore) -> None:
    store.put("a", b"0123456789")
    assert store.get_range("a", 2, 3) == b"234"
    assert store.get_range("a", 8, 5) == b"89"
    assert store.get_range("a", 20, 5) == b""
    with pytest.raises(NotFoundError):
        store.get_range("b", 0, 1)


def test_delete_removes_and_repeats_without_error(store: ObjectStore) -> None:
    store.put("a", b"one")
    store.delete("a")
    store.delete("a")
    assert not store.exists("a")


def test_deleted_name_can_be_written_again_under_another_etag(store: ObjectStore) -> None:
    first = store.put_if_absent("a", b"one")
    store.delete("a")
    second = store.put_if_absent("a", b"two")
    assert second.etag != first.etag


def test_list_objects_takes_any_prefix(store: ObjectStore) -> None:
    for name in ("x/1", "x/10", "x/y/2", "xz", "y"):
        store.put(name, name.encode())
    assert {stat.name for stat in store.list_objects("x/1")} == {"x/1", "x/10"}
    assert {stat.name for stat in store.list_objects("x")} == {"x/1", "x/10", "x/y/2", "xz"}
    assert {stat.name: stat.size_bytes for stat in store.list_objects("")}["x/y/2"] == 5
    assert list(store.list_objects("nothing/")) == []


def test_list_children_names_one_level_sorted(store: ObjectStore) -> None:
    for name in ("x/b/1", "x/a", "x/c/2/3", "y"):
        store.put(name, b"")
    assert store.list_children("x/") == ["a", "b", "c"]
    assert store.list_children("") == ["x", "y"]
    assert store.list_children("nothing/") == []


def test_list_children_behind_a_name(store: ObjectStore) -> None:
    for name in ("x/1", "x/2/1", "x/2.b", "x/3", "x/4/1", "y"):
        store.put(name, b"")
    assert store.list_children("x/", start_after="1") == ["2", "2.b", "3", "4"]
    assert store.list_children("x/", start_after="2") == ["2.b", "3", "4"]
    assert store.list_children("x/", start_after="2.c") == ["3", "4"], "none need have this name"
    assert store.list_children("x/", start_after="4") == []


@pytest.mark.parametrize("kind", ["local", "s3"], indirect=True)
def test_what_other_programs_put_there_under_refused_names_is_in_no_listing(kind: str, tmp_path: Path) -> None:
    """Nothing could read or delete it by its name: a garbage collection that finds it would stop there, every time."""
    store = IMPLEMENTATIONS[kind](tmp_path)
    store.put("x/good", b"one")
    for name in ("x/.nfs0000", "x/.model.safetensors.aBcDeF", "x/.git/config", "x/notes 1.txt"):
        if isinstance(store, S3Store):
            store._bucket.repeat("put_object", f"{store._root}{name}", Body=b"theirs")
        else:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(b"theirs")
    assert [stat.name for stat in store.list_objects("")] == ["x/good"]
    assert [stat.name for stat in store.list_objects("x/")] == ["x/good"]
    assert store.list_children("x/") == ["good"]
    assert cast("OpenableStore", store).refused_children("x/") == ["notes 1.txt"]


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", ".hidden", "a/.b", "a b", "a\n"])
def test_name_that_could_leave_the_store_is_refused(store: ObjectStore, name: str) -> None:
    with pytest.raises(StorageError, match="refused"):
        store.put(name, b"")


def test_put_file_over_an_object_replaces_it_and_its_etag(store: ObjectStore, tmp_path: Path) -> None:
    first = store.put("a", b"one")
    (tmp_path / "source").write_bytes(b"two")
    second = store.put_file("a", tmp_path / "source")
    assert store.get_with_stat("a") == (b"two", second)
    assert first.etag != second.etag


def test_download_of_an_empty_object_makes_an_empty_file(store: ObjectStore, tmp_path: Path) -> None:
    store.put("empty", b"")
    store.download("empty", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b""


def test_download_of_a_missing_object_leaves_the_file_as_it_was(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/target").write_bytes(b"before")
    with pytest.raises(NotFoundError, match="nothing"):
        store.download("nothing", tmp_path / "folder/target")
    assert [path.read_bytes() for path in (tmp_path / "folder").iterdir()] == [b"before"]


def test_deleted_objects_leave_no_children(store: ObjectStore) -> None:
    store.put("x/y/z", b"")
    store.delete("x/y/z")
    assert list(store.list_objects("x/")) == []


def test_listing_gives_the_etag_that_a_condition_takes(store: ObjectStore) -> None:
    store.put("a", b"one")
    (listed,) = store.list_objects("a")
    assert listed == store.stat("a")
    store.put_if_match("a", b"two", listed.etag)


def test_probe_of_a_store_that_keeps_its_promises_leaves_nothing(store: ObjectStore) -> None:
    probe_store(store)
    assert list(store.list_objects("")) == []


@pytest.mark.parametrize("kind", SHARED, indirect=True)
def test_pickled_store_is_the_same_store(kind: str, tmp_path: Path) -> None:
    store = IMPLEMENTATIONS[kind](tmp_path)
    store.put("a", b"one")
    assert pickle.loads(pickle.dumps(store)).get("a") == b"one"  # noqa: S301 - our own


@pytest.mark.parametrize("kind", SHARED, indirect=True)
def test_open_store_of_a_uri_is_the_same_store(kind: str, tmp_path: Path) -> None:
    store = IMPLEMENTATIONS[kind](tmp_path / "a store")
    store.put("a", b"one")
    assert open_store(store.uri).get("a") == b"one"
    assert is_initialised(store.uri)


@pytest.mark.parametrize("kind", SHARED, indirect=True)
def test_put_if_absent_racing_writers_have_one_winner(kind: str, tmp_path: Path) -> None:
    for turn in range(NUM_ROUNDS[kind]):
        stores = [IMPLEMENTATIONS[kind](tmp_path) for _ in range(NUM_RACERS[kind])]
        name = f"commits/{turn}"
        puts = [partial(store.put_if_absent, name, b"%d" % n) for n, store in enumerate(stores)]
        (winner,) = race(puts)
        assert stores[0].get(name) == b"%d" % winner


@pytest.mark.parametrize("kind", SHARED, indirect=True)
def test_put_if_match_racing_writers_have_one_winner(kind: str, tmp_path: Path) -> None:
    etag = IMPLEMENTATIONS[kind](tmp_path).put("lease", b"start").etag
    for turn in range(NUM_ROUNDS[kind]):
        stores = [IMPLEMENTATIONS[kind](tmp_path) for _ in range(NUM_RACERS[kind])]
        puts = [partial(store.put_if_match, "lease", b"%d %d" % (turn, n), etag) for n, store in enumerate(stores)]
        (winner,) = race(puts)
        content, stat = stores[0].get_with_stat("lease")
        assert content == b"%d %d" % (turn, winner)
        etag = stat.etag
