"""Slow ranks are told by their own time, whatever it is that makes them slow."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from orchestrator.storage.local import LocalStore
from tests.memory_images import NUM_CLASSES, MemoryImages, memory_loop
from tests.rank_processes import RankPool, raise_errors
from workloads.runtime.ranks import Ranks
from workloads.train.step import RankTimes
from workloads.train.task import TrainInputs

DELAY_S = 0.03
RECIPE = {"epochs": 4, "batch_size": 8, "lr": 0.01}


class _Delayed(nn.Module):
    """A linear model whose forward pass takes its time."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self._delay_s = nn.Linear(48, NUM_CLASSES), delay_s

    def forward(self, images: Tensor) -> Tensor:
        time.sleep(self._delay_s)
        logits: Tensor = self.linear(images.flatten(1))
        return logits


class _LateImages(MemoryImages):
    """Images that come late."""

    delay_s = 0.0

    def batches(self, first: int, stop: int, *, unit: int) -> Generator[TrainInputs, None, None]:
        for batch in super().batches(first, stop, unit=unit):
            time.sleep(self.delay_s)
            yield batch


def _train(rank: int, world_size: int, folder: Path, slow: str) -> dict[str, float]:
    ranks = Ranks(rank=rank, world_size=world_size)
    delay_s = DELAY_S if rank == 1 else 0.001
    model = _Delayed(delay_s if slow == "compute" else 0.001)
    task = _LateImages(model, batch_size=8, num_samples=64, image_size=4, ranks=ranks)
    task.delay_s = delay_s if slow == "data" else 0.0
    loop = memory_loop(task, LocalStore(folder), RECIPE, ranks=ranks)
    loop.run()
    return loop.counters()


@pytest.mark.parametrize("slow", ["compute", "data"])
def test_rank_that_is_slow_is_named_on_all_ranks_with_its_time(pool: RankPool, tmp_path: Path, slow: str) -> None:
    for counters in raise_errors(pool.run(tmp_path, 3, _train, tmp_path / slow, slow)):
        assert counters["slow_rank"] == 1
        assert counters["slow_rank_slowdown"] > 2
        part = {"compute": "slow_rank_compute_s", "data": "slow_rank_data_wait_s"}[slow]
        assert counters[part] >= DELAY_S * 0.9
        other = {"compute": "slow_rank_data_wait_s", "data": "slow_rank_compute_s"}[slow]
        assert counters[other] < DELAY_S


def test_ranks_with_unlike_shares_are_compared_by_the_sample() -> None:
    # Twelve samples in groups of four on two ranks: 8 and 4. The first takes twice as long, as it should.
    times = RankTimes(Ranks(rank=0, world_size=2), torch.device("cpu"), weight=6 / 8)
    times._compute_s = 0.2
    (mine,) = times.fields(0.0, like=torch.zeros((), dtype=torch.float64))
    assert mine.tolist() == pytest.approx([0.15, 0.0, 0.0, 0.0])
    for _ in range(20):
        times.take([0.15, 0.0, 0.1 * 6 / 4, 0.0])
    found = times.slowest()
    assert found is not None
    assert found.slowdown == pytest.approx(1.0)


def test_rank_alone_and_short_runs_tell_no_slow_rank() -> None:
    alone = RankTimes(Ranks(), torch.device("cpu"))
    assert alone.fields(1.0, like=torch.zeros(())) == []
    assert alone.slowest() is None
    times = RankTimes(Ranks(rank=0, world_size=2), torch.device("cpu"))
    for _ in range(19):
        times.take([1.0, 0.0, 2.0, 0.0])
    assert times.slowest() is None
    times.take([1.0, 0.0, 2.0, 0.0])
    assert times.slowest() is not None
