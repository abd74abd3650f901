"""The order of samples: fixed examples and refusals."""

import numpy as np
import pytest

from orchestrator.errors import UserError
from workloads.data.order import SampleOrder, rank_slice, total_steps
from workloads.data.streams import Stage


def test_order_known_seed_never_changes() -> None:
    order = SampleOrder((3, 2, 4), seed=7, block_shards=2)
    assert order.ordinals(0, 9).tolist() == [4, 1, 0, 2, 3, 6, 7, 8, 5]
    assert order.ordinals(9, 18).tolist() == [1, 6, 8, 5, 7, 2, 0, 4, 3]


@pytest.mark.parametrize("stage", [Stage.FINETUNE, Stage.PROBE])
def test_order_other_stage_has_another_order(stage: Stage) -> None:
    pretrain, other = (SampleOrder((64,), 0, 1, stage=one).ordinals(0, 64) for one in (Stage.PRETRAIN, stage))
    assert not np.array_equal(pretrain, other)


def test_order_one_shard_blocks_keep_shards_together() -> None:
    order = SampleOrder((5, 5, 5, 5), seed=0, block_shards=1).ordinals(0, 20)
    assert all(len(set(order[start : start + 5] // 5)) == 1 for start in range(0, 20, 5))


def test_order_block_of_all_shards_mixes_them() -> None:
    order = SampleOrder((50, 50), seed=0, block_shards=9).ordinals(0, 100)
    assert 10 < np.count_nonzero(order[:50] < 50) < 40


@pytest.mark.parametrize(("sizes", "block_shards"), [((), 1), ((0, 0), 1), ((3,), 0)])
def test_order_impossible_arguments_are_user_errors(sizes: tuple[int, ...], block_shards: int) -> None:
    with pytest.raises(UserError):
        SampleOrder(sizes, 0, block_shards)


@pytest.mark.parametrize(
    ("epochs", "num_samples", "batch_size", "steps"),
    [
        (1, 100, 100, 1),
        (1, 150, 100, 2),
        (1, 149, 100, 1),
        (3, 150, 100, 5),
        (0.7, 15, 1, 11),
        (0.1, 45, 1, 5),
        (0, 9, 2, 0),
    ],
)
def test_order_total_steps_round_half_up(epochs: float, num_samples: int, batch_size: int, steps: int) -> None:
    assert total_steps(epochs, num_samples, batch_size) == steps


@pytest.mark.parametrize(("size", "world_size", "group_size"), [(8, 9, 1), (8, 3, 4), (10, 1, 4)])
def test_order_rank_slice_impossible_layout_is_a_user_error(size: int, world_size: int, group_size: int) -> None:
    with pytest.raises(UserError, match="cannot be shared"):
        rank_slice(0, size, rank=0, world_size=world_size, group_size=group_size)
