"""The order of samples is a pure function of the position."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workloads.data.order import SampleOrder, rank_slice, total_steps
from workloads.runtime.streams import stable_order, stable_order_between

SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any)
SEEDS = st.integers(0, 2**63 - 1)
BLOCKS = st.integers(1, 10)


@given(SIZES, SEEDS, BLOCKS, st.integers(0, 5))
def test_order_any_epoch_has_each_sample_once(sizes: list[int], seed: int, block_shards: int, epoch: int) -> None:
    total = sum(sizes)
    ordinals = SampleOrder(sizes, seed, block_shards).ordinals(epoch * total, (epoch + 1) * total)
    assert sorted(ordinals.tolist()) == list(range(total))


@given(SIZES, SEEDS, BLOCKS, st.lists(st.integers(0, 200), min_size=2, max_size=6))
def test_order_any_cut_gives_the_same_sequence(sizes: list[int], seed: int, block_shards: int, cuts: list[int]) -> None:
    cuts = sorted(cuts)
    whole = SampleOrder(sizes, seed, block_shards).ordinals(cuts[0], cuts[-1])
    pieces = [SampleOrder(sizes, seed, block_shards).ordinals(start, stop) for start, stop in pairwise(cuts)]
    assert np.array_equal(np.concatenate(pieces), whole)


@given(SIZES, SEEDS, BLOCKS)
def test_order_a_block_holds_whole_shards(sizes: list[int], seed: int, block_shards: int) -> None:
    """Within an epoch, at most ``block_shards`` shards are open at any position."""
    shard_of = np.repeat(np.arange(len(sizes)), sizes)[SampleOrder(sizes, seed, block_shards).ordinals(0, sum(sizes))]
    spans = [np.flatnonzero(shard_of == shard) for shard in np.unique(shard_of)]
    num_open = [sum(span[0] <= position <= span[-1] for span in spans) for position in range(len(shard_of))]
    assert max(num_open) <= block_shards


@given(st.integers(0, 1000), st.integers(1, 8), st.integers(1, 8), st.integers(1, 6))
def test_order_rank_slices_join_to_the_batch(start: int, num_groups: int, group_size: int, world_size: int) -> None:
    world_size = min(world_size, num_groups)
    stop = start + num_groups * group_size
    slices = [
        rank_slice(start, stop, rank=rank, world_size=world_size, group_size=group_size) for rank in range(world_size)
    ]
    assert [position for first, last in slices for position in range(first, last)] == list(range(start, stop))
    sizes = [(last - first) / group_size for first, last in slices]
    assert max(sizes) - min(sizes) <= 1
    assert all(size == int(size) for size in sizes)


@given(st.integers(0, 50), st.integers(1, 10_000), st.integers(1, 512))
def test_order_epochs_end_within_half_a_batch_of_their_samples(epoch: int, num_samples: int, batch_size: int) -> None:
    steps = total_steps(epoch, num_samples, batch_size)
    assert -batch_size < 2 * (steps * batch_size - epoch * num_samples) <= batch_size


@given(st.data())
def test_streams_a_part_of_the_stable_order_is_that_of_the_whole(data: st.DataObject) -> None:
    # Few different upper bits, so that words agree in them within the part and across its ends.
    words = np.array(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=40)), dtype=np.uint64)
    words <<= np.uint64(data.draw(st.integers(0, 62)))
    words ^= np.random.default_rng(0).integers(
        0, data.draw(st.sampled_from([1, 2, 1 << 5])), len(words), dtype=np.uint64
    )
    start = data.draw(st.integers(0, len(words) - 1))
    stop = data.draw(st.integers(start + 1, len(words)))
    assert np.array_equal(stable_order_between(words, start, stop), stable_order(words)[start:stop])


@given(SIZES, SEEDS, BLOCKS, st.one_of(st.none(), st.integers(1, 9)), st.lists(st.integers(0, 400), max_size=8))
def test_order_looks_anywhere_see_the_same_sequence(
    sizes: list[int], seed: int, block_shards: int, chunk: int | None, starts: list[int]
) -> None:
    def order() -> SampleOrder:
        return SampleOrder(sizes, seed, block_shards, chunk_samples=chunk)

    whole, looking = order().ordinals(0, 420), order()
    for start in starts:
        assert np.array_equal(looking.ordinals(start, start + 20), whole[start : start + 20])
        assert np.array_equal(order().ordinals(start, start + 20), whole[start : start + 20])
