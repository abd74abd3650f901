"""Bad samples of a gang: the record names those of all ranks, and the budget is that of the run."""

from __future__ import annotations

import json
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from orchestrator.core.contract import JobResult
from orchestrator.core.errors import BadDataError, PreemptedError
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.artifacts import ArtifactWriter, Record, read_record
from orchestrator.storage.local import LocalStore
from orchestrator.storage.sample_outcomes import SampleOutcomes
from tests.data_jobs import encoded, tar_of
from tests.rank_processes import RankPool, raise_errors
from tests.tiny_training import NO_BATCHNORM, TinyTraining
from tests.training.gang_jobs import Gang
from workloads.runtime.ranks import PeerLostError, Ranks

NUM_TRAIN, NUM_VAL = 64, 32
pytestmark = pytest.mark.xdist_group("ranks")  # one process has loaded for all what ranks begin with

BAD = {"train": {3, 9, 20, 31, 33, 42, 50, 63}, "val": {2, 11}}
RECIPE = {"epochs": 1, "batch_size": 16}  # in a second epoch each rank would meet what the other met in the first


class Damaged(TinyTraining):
    """Training on shards of which some images do not decode."""

    def __init__(self, folder: Path, budget: float) -> None:
        self.store, self.folder = LocalStore(folder / "store"), folder
        request = self.request(JobKind.DATASET, {"damaged": True}, {})
        writer = ArtifactWriter(self.store, request)
        for split, number in (("train", NUM_TRAIN), ("val", NUM_VAL)):
            members = []
            for row in range(number):
                image = _undecodable() if row in BAD[split] else encoded(seed=row)
                members += [(f"{split[0]}{row:02d}.png", image), (f"{split[0]}{row:02d}.cls", str(row % 4).encode())]
            writer.add(f"{split}-0.tar", tar_of(members))
        rows = [{"class": leaf, "name": f"c{leaf}", "depth2": str(leaf)} for leaf in range(4)]
        writer.add("classes.json", json.dumps(rows).encode())
        writer.commit(now=0.0)
        policy = {"bad_samples": {"policy": "replace", "budget": budget}}
        self.index = self.run(self.request(JobKind.INDEX, policy, {"dataset": request.key})).key

    def train(self, world_size: int, *, attempt: int = 1, stop_after: int | None = None) -> list[Any]:
        request = self.training(model=NO_BATCHNORM, recipe=RECIPE, attempt=attempt)
        return [result for result, _ in Gang(self.folder, request, world_size, stop_after=stop_after).results()]

    def record(self) -> Record:
        return read_record(self.store, self.training(model=NO_BATCHNORM, recipe=RECIPE).key)


def _undecodable() -> bytes:
    """A PNG whose checksums are right and whose pixels are not."""
    buffer = BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, format="PNG")
    content = bytearray(buffer.getvalue())
    start = content.index(b"IDAT")
    length = int.from_bytes(content[start - 4 : start], "big")
    content[start + 4 : start + 4 + length] = b"\xff" * length
    checksum = zlib.crc32(content[start : start + 4 + length])
    content[start + 4 + length : start + 8 + length] = checksum.to_bytes(4, "big")
    return bytes(content)


def named(record: Record, split: str) -> set[str]:
    reasons = record.summary["bad_samples"][split].values()
    assert sum(reason["count"] for reason in reasons) == len(BAD[split])
    return {text.partition(" ")[0] for reason in reasons for text in reason["first"]}


def test_gang_record_names_the_bad_samples_of_all_ranks(tmp_path: Path) -> None:
    damaged = Damaged(tmp_path, budget=0.5)
    assert all(isinstance(result, JobResult) for result in damaged.train(2))
    for split, rows in BAD.items():
        assert named(damaged.record(), split) == {f"{split}-0.tar:{split[0]}{row:02d}" for row in rows}
    outcomes = SampleOutcomes.read(damaged.store, damaged.record())
    assert outcomes is not None
    assert set(np.flatnonzero(~outcomes.counted_N).tolist()) == BAD["val"]
    assert outcomes.num_wrong / (NUM_VAL - len(BAD["val"])) == damaged.record().metrics["val_error"]


def test_gang_that_stops_before_an_evaluation_keeps_the_bad_samples_of_all_ranks(tmp_path: Path) -> None:
    damaged = Damaged(tmp_path, budget=0.5)
    found = damaged.train(2, stop_after=3)
    assert all(isinstance(result, PreemptedError) for result in found), found
    assert all(isinstance(result, JobResult) for result in damaged.train(2, attempt=2))
    assert named(damaged.record(), "train") == {f"train-0.tar:t{row:02d}" for row in BAD["train"]}


def test_gang_budget_is_that_of_the_run_and_ends_all_ranks(tmp_path: Path) -> None:
    # Seven of 64 are allowed: neither rank meets more, both together do.
    results = Damaged(tmp_path, budget=7.5 / NUM_TRAIN).train(2)
    told = [str(result) for result in results if isinstance(result, BadDataError)]
    assert told
    assert all("split 'train' has more than 7 samples that cannot be decoded" in text for text in told)
    # A rank may see the other one leave before it has read that they agree.
    assert all(isinstance(result, BadDataError | PeerLostError) for result in results)


def test_ranks_gather_texts_of_any_length(pool: RankPool, tmp_path: Path) -> None:
    expected = ["", "x", "\N{SNOWMAN}" * 2]
    assert raise_errors(pool.run(tmp_path, 3, _gathered)) == [(expected, ["", "", ""])] * 3
    assert Ranks().gather_text("alone") == ["alone"]


def _gathered(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    ranks = Ranks(rank=rank, world_size=world_size)
    return ranks.gather_text("x" if rank == 1 else "\N{SNOWMAN}" * rank), ranks.gather_text("")
