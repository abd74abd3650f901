"""Shards of a directory in which other things lie, too."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from orchestrator.core.errors import NotFoundError, StorageError
from orchestrator.storage import listing
from orchestrator.storage.listing import folder_shards, list_shards
from orchestrator.testing.memory_store import MemoryStore
from tests.unit.test_storage_local_errors import failing


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a-000.tar", "a-001.tar", "a-001 copy.txt", "b.tar", "deeper/a-002.tar", "closed/a-003.tar"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    (tmp_path / "data" / "a-004.tar").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_shards_of_a_folder_are_those_directly_in_it_whatever_lies_deeper(
    folder: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing(monkeypatch, number, folder / "closed"):
        assert folder_shards(folder.as_uri()) == ["a-000.tar", "a-001.tar", "b.tar"]
        assert [shard.name for shard in list_shards([f"{folder.as_uri()}/"])] == ["a-000.tar", "a-001.tar", "b.tar"]
        assert [shard.name for shard in list_shards([f"{folder.as_uri()}/a-{{000..001}}.tar"])] == [
            "a-000.tar",
            "a-001.tar",
        ]
        with pytest.raises(NotFoundError, match=r"1 of 3 shards are not in .*: a-002\.tar"):
            list_shards([f"{folder.as_uri()}/a-{{000..002}}.tar"])


class _Bucket(MemoryStore):
    """A bucket with a shard whose name no object of ours may have."""

    def refused_children(self, _: str) -> list[str]:
        return ["a-001 copy.tar"]


def test_shard_with_a_name_that_is_refused_is_not_left_out_without_a_word(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a-001 copy.tar").write_bytes(b"a shard")
    with pytest.raises(StorageError, match=r"'a-001 copy\.tar' is refused"):
        folder_shards(folder.as_uri())
    monkeypatch.setattr(listing, "open_store", lambda _: _Bucket())
    with pytest.raises(StorageError, match=r"'a-001 copy\.tar' is refused"):
        folder_shards("s3://bucket/data")
