"""Finished runs of rows of an embedding: found with few requests, side by side, and each is a sign of work."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from orchestrator.storage.local import LocalStore
from orchestrator.storage.protocol import ObjectStat
from workloads.features.artifact import FinishedRows, RowRange

KEY = "embed-x-0123456789abcdef"
NUM_RUNS = 8


class _Asked(LocalStore):
    """Counts its requests, and answers the first two reads only once both are asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.requests: list[str] = []
        self._gets, self._together = itertools.count(), threading.Barrier(2)

    def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
        self.requests.append("get")
        if next(self._gets) < 2:
            self._together.wait(timeout=60)
        return super().get(name, max_bytes=max_bytes)

    def stat(self, name: str) -> ObjectStat:
        self.requests.append("stat")
        return super().stat(name)

    def list_objects(self, prefix: str) -> Iterator[ObjectStat]:
        self.requests.append("list")
        return super().list_objects(prefix)


@pytest.fixture
def runs(tmp_path: Path) -> list[RowRange]:
    rows = FinishedRows(LocalStore(tmp_path), KEY)
    features = np.zeros((2, 3), dtype=np.float16)
    return [rows.write(2 * run, features, np.array([2 * run][: run % 2])) for run in range(NUM_RUNS)]


def test_rows_are_found_by_one_listing_and_manifests_that_are_read_side_by_side(
    runs: list[RowRange], tmp_path: Path
) -> None:
    """Looked at one after the other, thousands of runs take longer on a slow store than a job may show no work."""
    store, ticks = _Asked(tmp_path), list[str]()
    found = FinishedRows(store, KEY).find(lambda: ticks.append(threading.current_thread().name))
    assert found == runs
    assert sorted(store.requests) == ["get"] * NUM_RUNS + ["list"]
    assert ticks == [threading.current_thread().name] * NUM_RUNS


def test_ordinals_without_features_are_read_side_by_side_where_there_are_any(
    runs: list[RowRange], tmp_path: Path
) -> None:
    store, ticks = _Asked(tmp_path), list[int]()
    missing = FinishedRows(store, KEY).missing(runs, lambda: ticks.append(1))
    assert missing.tolist() == [2, 6, 10, 14]
    assert store.requests == ["get"] * len(ticks) == ["get"] * 4


@pytest.mark.parametrize("harm", ["no_manifest", "no_rows", "shortened"])
def test_run_that_is_not_whole_is_not_found(runs: list[RowRange], tmp_path: Path, harm: str) -> None:
    store, first = LocalStore(tmp_path), runs[0]
    if harm == "no_manifest":
        store.delete(f"{first.folder}/manifest.json")
    else:
        store.delete(f"{first.folder}/{first.features}")
    if harm == "shortened":
        store.put(f"{first.folder}/{first.features}", b"")
    assert FinishedRows(store, KEY).find() == runs[1:]
