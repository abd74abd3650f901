"""The order of samples: fixed examples and refusals."""

import numpy as np
import pytest

from orchestrator.core.errors import UserError
from workloads.data.order import DataGroups, SampleOrder, rank_slice, total_steps
from workloads.runtime.streams import Purpose, Stage, random_words, seed_sequence, stable_order

KNOWN_REPLACEMENTS = [48, 58, 64]


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


def test_order_replacements_are_other_samples_of_the_same_block_until_it_is_used_up() -> None:
    sizes = (4, 3, 5, 2)
    order = SampleOrder(sizes, seed=1, block_shards=2)
    for position in range(28):
        epoch_start = position // 14 * 14
        epoch = order.ordinals(epoch_start, epoch_start + 14)
        found = [order.replacement(position, attempt) for attempt in range(20)]
        block = set(order.shards_ahead(position, position + 1, num_later=0).tolist())
        of_block = {int(ordinal) for ordinal in epoch if shard_of(sizes, ordinal) in block}
        original = int(order.ordinals(position, position + 1)[0])
        assert set(found) == of_block - {original}
        assert len(set(found[: len(of_block) - 1])) == len(of_block) - 1


def test_order_replacement_depends_on_seed_position_and_attempt_alone() -> None:
    first, again = (SampleOrder((50, 50), seed=4, block_shards=1) for _ in range(2))
    first.ordinals(0, 100)
    assert [first.replacement(7, attempt) for attempt in range(3)] == [again.replacement(7, n) for n in range(3)]
    assert [first.replacement(position, 0) for position in (5, 105, 205)] == KNOWN_REPLACEMENTS


def test_order_replacement_in_a_block_of_one_sample_comes_from_the_epoch() -> None:
    order = SampleOrder((1, 1, 1), seed=0, block_shards=1)
    assert {order.replacement(0, attempt) for attempt in range(4)} == {0, 1, 2} - set(order.ordinals(0, 1).tolist())
    assert SampleOrder((1,), seed=0, block_shards=1).replacement(0, 0) == 0


def test_order_shards_ahead_are_those_of_the_next_blocks_in_order_of_use() -> None:
    sizes = (2, 2, 0, 2, 2, 2)
    order = SampleOrder(sizes, seed=2, block_shards=3)
    firsts = [0]  # positions at which blocks begin; the empty shard makes one of them shorter
    while firsts[-1] < 60:
        shards = order.shards_ahead(firsts[-1], firsts[-1] + 1, num_later=0)
        firsts.append(firsts[-1] + 2 * len(shards))
    for position in range(40):
        block = int(np.searchsorted(firsts, position, side="right")) - 1
        for num_blocks in (1, 2, 3):
            ahead = order.shards_ahead(position, position + 1, num_later=num_blocks - 1).tolist()
            seen = [shard_of(sizes, ordinal) for ordinal in order.ordinals(firsts[block], firsts[block + num_blocks])]
            assert sorted(ahead) == sorted(set(seen))
            assert 2 not in ahead
        own = order.shards_ahead(position, position + 1, num_later=0).tolist()
        assert order.shards_ahead(position, position + 1).tolist()[: len(own)] == own


def test_order_shards_ahead_of_runs_are_the_shards_they_lie_in() -> None:
    order = SampleOrder((6, 6, 6), seed=0, block_shards=1, chunk_samples=2)
    ahead = order.shards_ahead(0, 1, num_later=0).tolist()
    assert sorted(ahead) == sorted({ordinal // 6 for ordinal in order.ordinals(0, 6).tolist()})


@pytest.mark.parametrize("groups", [None, DataGroups.of(2, 4)])
def test_order_shards_ahead_of_the_last_epoch_name_none_of_the_next(groups: DataGroups | None) -> None:
    order = SampleOrder((6, 6, 6, 6), seed=0, block_shards=1, groups=groups)
    last = order.shards_ahead(20, 24, num_later=0).tolist()
    assert order.shards_ahead(20, 24, end=24).tolist() == last
    assert order.shards_ahead(20, 24, end=25).tolist() != last


@pytest.mark.parametrize("chunk", [1, 3, 5, 100])
def test_order_of_runs_has_each_sample_once_and_keeps_runs_in_blocks(chunk: int) -> None:
    sizes = (7, 0, 12, 5)
    order = SampleOrder(sizes, seed=3, block_shards=1, chunk_samples=chunk)
    assert sorted(order.ordinals(24, 48).tolist()) == list(range(24))
    with pytest.raises(UserError, match="shuffle_chunk_samples is 0"):
        SampleOrder(sizes, 0, 1, chunk_samples=0)


def shard_of(sizes: tuple[int, ...], ordinal: int) -> int:
    return int(np.searchsorted(np.cumsum(sizes), ordinal, side="right"))


@pytest.mark.parametrize("num_items", [0, 1, 2, 3, 1000, 70_000])
@pytest.mark.parametrize("bits", [64, 20, 3])
def test_streams_stable_order_is_that_of_a_stable_sort(num_items: int, bits: int) -> None:
    words = random_words(seed_sequence(0, Stage.DATASET, Purpose.ORDER), num_items)
    words = words >> np.uint64(64 - bits) if bits == 20 else words & np.uint64((1 << bits) - 1)
    assert np.array_equal(stable_order(words), np.argsort(words, kind="stable"))
