"""What is particular to the local store: other processes, left-overs, names on disk."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from orchestrator.core.errors import PreconditionFailedError, StorageError
from orchestrator.storage import local, open_store
from orchestrator.storage.files import stat_and_real_path
from orchestrator.storage.local import LocalStore

_RACER = """
import sys
from pathlib import Path
from orchestrator.core.errors import PreconditionFailedError
from orchestrator.storage.local import LocalStore

store, me = LocalStore(Path(sys.argv[1])), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
won = 0
for turn in range(50):
    try:
        store.put_if_absent(f"turn/{turn}", me.encode())
        won += 1
    except PreconditionFailedError:
        pass
    while True:  # a counter that loses no increment
        content, stat = store.get_with_stat("counter")
        try:
            store.put_if_match("counter", f"{int(content.split()[0]) + 1} {me}".encode(), stat.etag)
            break
        except PreconditionFailedError:
            continue
print(won, flush=True)
"""


def test_conditional_writes_of_racing_processes_lose_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("counter", b"0 nobody")
    command = [sys.executable, "-c", _RACER, str(tmp_path)]
    racers = [
        subprocess.Popen([*command, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for n in range(4)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    outputs = [racer.communicate("go\n", timeout=60)[0] for racer in racers]
    assert sum(int(output) for output in outputs) == 50
    assert store.get("counter").split()[0] == b"200"


def test_objects_are_plain_files_under_their_names(tmp_path: Path) -> None:
    LocalStore(tmp_path).put("sweeps/s/plan-0001.json", b"{}")
    assert (tmp_path / "sweeps/s/plan-0001.json").read_bytes() == b"{}"


def test_failed_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"one")
    with pytest.raises(StorageError):
        store.put("a/below", b"two")  # "a" is an object, not a folder
    assert list((tmp_path / ".tmp").iterdir()) == []


def test_reader_that_has_opened_an_object_sees_one_version(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"one")
    with (tmp_path / "a").open("rb") as opened:
        store.put("a", b"two")
        assert opened.read() == b"one"


@pytest.mark.parametrize("uri", ["s4://bucket/x", "file:relative", "file://host/abs", "/plain/path"])
def test_open_store_of_an_unsupported_uri_says_what_is_supported(uri: str) -> None:
    with pytest.raises(StorageError, match="file:///absolute/path"):
        open_store(uri)


def test_conditional_write_goes_by_the_file_itself_not_by_what_nfs_remembers(tmp_path: Path, monkeypatch) -> None:
    """A client of NFS may answer ``stat`` from memory although another node has replaced the file."""
    store = LocalStore(tmp_path)
    former = store.put("lease", b"one")
    remembered = stat_and_real_path(tmp_path / "lease")
    store.put("lease", b"two")
    monkeypatch.setattr(local, "stat_and_real_path", lambda _: remembered)
    assert store.stat("lease") == former
    with pytest.raises(PreconditionFailedError):
        store.put_if_match("lease", b"three", former.etag)
    assert store.get("lease") == b"two"


def test_conditional_write_compares_after_its_content_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write without a condition takes no lock: one that comes while the disk is slow must not be undone."""
    store, others = LocalStore(tmp_path), LocalStore(tmp_path)
    former = store.put("drain", b"one")
    stage = store._staged

    @contextmanager
    def stage_slowly(fill: Callable[[BinaryIO], None]) -> Iterator[Path]:
        with stage(fill) as staged:
            others.put("drain", b"two")
            yield staged

    monkeypatch.setattr(store, "_staged", stage_slowly)
    with pytest.raises(PreconditionFailedError):
        store.put_if_match("drain", b"noted", former.etag)
    assert store.get("drain") == b"two"
