"""What somebody else may have put into a store's directory: pipes, sockets, links; nothing hangs, nothing leaks."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from orchestrator.core.errors import CorruptObjectError, NotFoundError, StorageError
from orchestrator.storage.files import read_regular, rewrite_text
from orchestrator.storage.local import LocalStore

SECRET = b"of somebody else"
HANG_S = 5.0
"""Longer than any of these operations, and only waited for by a test that fails."""


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_bytes(SECRET)
    found = LocalStore(tmp_path / "store")
    found.put("folder/good", b"good")
    return found


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # an address has 108 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def make_link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.parent / "pipe")
    path.symlink_to("pipe")


def make_link_out(path: Path) -> None:
    path.symlink_to("../../outside/secret")


def make_absolute_link(path: Path) -> None:
    path.symlink_to(path.parents[2] / "outside/secret")


def make_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


ODD: list[Callable[[Path], None]] = [
    make_pipe,
    make_socket,
    make_link_to_a_pipe,
    make_link_out,
    make_absolute_link,
    make_link_to_a_device,
    make_loop,
]
READS: dict[str, Callable[[LocalStore, Path], object]] = {
    "get": lambda store, _: store.get("folder/odd"),
    "get_bounded": lambda store, _: store.get("folder/odd", max_bytes=10),
    "get_range": lambda store, _: store.get_range("folder/odd", 0, 1),
    "download": lambda store, path: store.download("folder/odd", path / "copy"),
    "stat": lambda store, _: store.stat("folder/odd"),
    "exists": lambda store, _: store.exists("folder/odd"),
    "put_if_absent": lambda store, _: store.put_if_absent("folder/odd", b"mine"),
    "put_if_match": lambda store, _: store.put_if_match("folder/odd", b"mine", "etag"),
}


def within_time(run: Callable[[], object]) -> object:
    """What a call returns or raises; a call that hangs fails the test and leaves its thread behind."""
    done: list[object] = []

    def work() -> None:
        try:
            done.append(run())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            done.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert done, "it hangs"
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]


@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
@pytest.mark.parametrize("operation", READS)
def test_what_is_no_file_of_the_store_is_refused_at_once(
    make: Callable[[Path], None], operation: str, store: LocalStore, tmp_path: Path
) -> None:
    make(store.root / "folder/odd")
    with pytest.raises(StorageError, match="folder/odd") as caught:
        within_time(lambda: READS[operation](store, tmp_path))
    assert not isinstance(caught.value, NotFoundError)
    assert "another writer" not in str(caught.value)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
def test_what_is_no_file_of_the_store_is_not_listed_and_can_be_replaced_and_deleted(
    make: Callable[[Path], None], store: LocalStore, tmp_path: Path
) -> None:
    odd = store.root / "folder/odd"
    make(odd)
    assert [stat.name for stat in store.list_objects("")] == ["folder/good"]
    store.put("folder/odd", b"mine")
    assert store.get("folder/odd") == b"mine"
    odd.unlink()
    (odd.parent / "pipe").unlink(missing_ok=True)
    make(odd)
    store.delete("folder/odd")
    assert not os.path.lexists(odd)
    assert (tmp_path / "outside/secret").read_bytes() == SECRET


def test_pipe_is_named_as_one(store: LocalStore) -> None:
    os.mkfifo(store.root / "folder/odd")
    with pytest.raises(CorruptObjectError, match=r"folder/odd in file:///.*: it is a named pipe \(FIFO\)"):
        within_time(lambda: store.get("folder/odd"))


@pytest.mark.parametrize("write", ["put", "put_if_absent"])
def test_write_where_a_folder_is_says_so(write: str, store: LocalStore) -> None:
    with pytest.raises(StorageError, match="cannot have the name of a folder") as caught:
        getattr(store, write)("folder", b"mine")
    assert not isinstance(caught.value, NotFoundError)
    with pytest.raises(NotFoundError, match="it is a directory"):
        store.get("folder")


FOLDER_OPERATIONS: dict[str, Callable[[LocalStore], object]] = {
    "get": lambda store: store.get("away/secret"),
    "put": lambda store: store.put("away/new", b"mine"),
    "put_if_absent": lambda store: store.put_if_absent("away/deep/new", b"mine"),
    "delete": lambda store: store.delete("away/secret"),
    "list_objects": lambda store: list(store.list_objects("away/")),
    "list_children": lambda store: store.list_children("away/"),
}


@pytest.mark.parametrize("operation", FOLDER_OPERATIONS)
def test_folder_that_is_a_link_out_of_the_store_is_refused(operation: str, store: LocalStore, tmp_path: Path) -> None:
    (store.root / "away").symlink_to(tmp_path / "outside")
    with pytest.raises(CorruptObjectError, match="link out of the store"):
        FOLDER_OPERATIONS[operation](store)
    assert [path.read_bytes() for path in (tmp_path / "outside").rglob("*") if path.is_file()] == [SECRET]
    assert [stat.name for stat in store.list_objects("")] == ["folder/good"]


@pytest.mark.parametrize("folder", [".tmp", ".locks"])
def test_folder_of_the_stores_own_that_is_a_link_is_refused(folder: str, store: LocalStore, tmp_path: Path) -> None:
    etag = store.stat("folder/good").etag
    if (store.root / folder).exists():
        (store.root / folder).rmdir()
    (store.root / folder).symlink_to(tmp_path / "outside")
    with pytest.raises(CorruptObjectError, match=f"{folder} in .* link out of the store"):
        store.put_if_match("folder/good", b"new", etag)
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["secret"]


def test_root_that_is_a_link_is_the_store(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("store")
    linked = LocalStore(tmp_path / "link")
    linked.put("folder/new", b"new")
    assert store.get("folder/new") == linked.get("folder/new") == b"new"
    assert len(list(linked.list_objects(""))) == 2


def test_link_within_the_store_is_followed(store: LocalStore) -> None:
    (store.root / "folder/same").symlink_to("good")
    assert store.get("folder/same") == b"good"
    assert {stat.name for stat in store.list_objects("")} == {"folder/good", "folder/same"}


def test_snapshot_of_a_hub_cache_reads_its_blobs_and_nothing_else(tmp_path: Path) -> None:
    repository = tmp_path / "hub/datasets--lab--images"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs/0a1b").write_bytes(b"a shard")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_bytes(SECRET)
    data = repository / "snapshots/1234/data"
    data.mkdir(parents=True)
    (data / "train-0.tar").symlink_to("../../../blobs/0a1b")
    (data / "odd.tar").symlink_to("../../../refs/main")
    for store, folder in ((LocalStore(data), ""), (LocalStore(data.parent), "data/")):
        assert store.get(f"{folder}train-0.tar") == b"a shard"
        assert [stat.name for stat in store.list_objects("")] == [f"{folder}train-0.tar"]
        with pytest.raises(CorruptObjectError, match="link out of the store"):
            store.get(f"{folder}odd.tar")
    other = tmp_path / "work/snapshots/1234"
    other.mkdir(parents=True)
    (tmp_path / "work/blobs").mkdir()
    (tmp_path / "work/blobs/x").write_bytes(SECRET)
    (other / "x").symlink_to("../../blobs/x")
    with pytest.raises(CorruptObjectError, match="link out of the store"):
        LocalStore(other).get("x")


def test_file_that_becomes_a_link_while_it_is_read_gives_no_other_content(store: LocalStore, tmp_path: Path) -> None:
    """Whoever may write the store exchanges a folder for a link as often as he can."""
    real, away, link = store.root / "f", store.root / "f.real", store.root / "f.link"
    real.mkdir()
    (real / "secret").write_bytes(b"ours")
    link.symlink_to(tmp_path / "outside")
    stop = threading.Event()

    def exchange() -> None:
        while not stop.is_set():
            real.rename(away)
            link.rename(real)
            real.rename(link)
            away.rename(real)

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        for _ in range(2000):
            with suppress(NotFoundError, CorruptObjectError):
                assert store.get("f/secret") == b"ours"
    finally:
        stop.set()
        thread.join()


def test_read_of_a_pipe_as_a_file_ends_with_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="named pipe"):
        within_time(lambda: read_regular(tmp_path / "pipe"))


def test_users_file_that_is_a_pipe_is_written_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        rewrite_text(pipe, "table")
        assert os.read(reader, 9) == b"table"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
