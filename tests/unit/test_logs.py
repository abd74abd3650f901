"""Logs in the store: segments while a process runs, one object afterwards."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backends.ray.log import AttemptLog
from orchestrator.storage.local import LocalStore
from orchestrator.storage.logs import append_log, finish_log, log_exists, put_segment, read_log
from orchestrator.testing.memory_store import MemoryStore

NAME = "logs/sweep/pretrain/a/000001/rank0.log"
FOLDER = NAME.removesuffix(".log") + "/"


@given(parts=st.lists(st.binary(min_size=1, max_size=5), max_size=6), start=st.integers(0, 30))
def test_log_of_any_segments_is_read_from_any_byte(parts: list[bytes], start: int) -> None:
    store, whole = MemoryStore(), b""
    for part in parts:
        put_segment(store, NAME, len(whole), part)
        whole += part
    assert read_log(store, NAME, start) == whole[start:]
    assert log_exists(store, NAME) == bool(parts)
    finish_log(store, NAME, whole)
    assert read_log(store, NAME, start) == whole[start:]
    assert store.list_children(FOLDER) == []


def test_log_with_a_gap_is_read_up_to_it() -> None:
    store = MemoryStore()
    put_segment(store, NAME, 0, b"first")
    put_segment(store, NAME, 9, b"third")
    assert read_log(store, NAME) == b"first"


def test_log_that_two_write_is_read_once() -> None:
    store = MemoryStore()
    put_segment(store, NAME, 0, b"first")
    assert append_log(store, NAME, b"first, then stacks") == len(b", then stacks")
    put_segment(store, NAME, 5, b", then")
    assert read_log(store, NAME) == b"first, then stacks"
    assert append_log(store, NAME, b"first") == 0


def test_attempt_log_stores_only_what_is_new_and_the_whole_at_its_end(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    with AttemptLog(store, NAME, tmp_path / "log", every_s=3600.0) as log:
        sys.stdout.write("one\n")
        log._upload_news()
        sys.stderr.write("two\n")
        log._upload_news()
        log._upload_news()
        assert store.list_children(FOLDER) == ["000000000000-000000000004.log", "000000000004-000000000008.log"]
        assert read_log(store, NAME) == b"one\ntwo\n"
        sys.stdout.write("three\n")
    assert store.list_children(FOLDER) == []
    assert store.get(NAME) == b"one\ntwo\nthree\n"
