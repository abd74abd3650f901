"""Data groups: one order for every world size, each sample once per epoch, and groups that own shards."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from workloads.data.index import MixtureShares
from workloads.data.order import DataGroups, SampleOrder, make_order, rank_slice
from workloads.data.subset import SampleView

SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any)
SEEDS = st.integers(0, 2**63 - 1)
BLOCKS = st.integers(1, 6)


@st.composite
def groupings(draw: st.DrawFn) -> DataGroups:
    """2 to 6 groups of a batch that they need not divide, in whole norm groups of 1 to 3 samples."""
    number, unit = draw(st.integers(2, 6)), draw(st.integers(1, 3))
    found = DataGroups.of(number, unit * draw(st.integers(number, 3 * number)), unit)
    assert found is not None
    return found


def shard_ids(sizes: list[int], ordinals: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(sizes)), sizes)[ordinals]


def group_ids(groups: DataGroups, start: int, stop: int) -> NDArray[np.int64]:
    """Of each position; counted from the borders alone."""
    return np.searchsorted(groups.borders, np.arange(start, stop) % groups.batch_size, side="right") - 1


@given(SIZES, SEEDS, BLOCKS, groupings(), st.integers(0, 5))
def test_groups_any_epoch_has_each_sample_once(
    sizes: list[int], seed: int, block_shards: int, groups: DataGroups, epoch: int
) -> None:
    total = sum(sizes)
    order = SampleOrder(sizes, seed, block_shards, groups=groups)
    assert sorted(order.ordinals(epoch * total, (epoch + 1) * total).tolist()) == list(range(total))


@given(SIZES, SEEDS, BLOCKS, groupings(), st.data())
def test_groups_a_gang_that_changes_size_sees_the_batches_of_one_rank(
    sizes: list[int], seed: int, block_shards: int, groups: DataGroups, data: st.DataObject
) -> None:
    """Each attempt begins at any step, with another number of ranks, and with nothing but the step."""
    size, unit = groups.batch_size, data.draw(st.sampled_from([1, int(np.gcd.reduce(groups.borders))]))
    alone = SampleOrder(sizes, seed, block_shards, groups=groups)
    step = data.draw(st.integers(0, 3 * sum(sizes) // size))
    for world_size in data.draw(st.permutations([1, 2, 3, 8])):
        if world_size > size // unit:
            continue
        ranks = [SampleOrder(sizes, seed, block_shards, groups=groups) for _ in range(world_size)]
        for _ in range(data.draw(st.integers(1, 3))):
            start, stop = step * size, (step + 1) * size
            parts = [
                order.ordinals(*rank_slice(start, stop, rank=rank, world_size=world_size, group_size=unit))
                for rank, order in enumerate(ranks)
            ]
            assert np.array_equal(np.concatenate(parts), alone.ordinals(start, stop))
            step += 1


@given(SIZES, SEEDS, BLOCKS, groupings(), st.lists(st.integers(0, 200), min_size=2, max_size=6))
def test_groups_any_cut_gives_the_same_sequence(
    sizes: list[int], seed: int, block_shards: int, groups: DataGroups, cuts: list[int]
) -> None:
    cuts = sorted(cuts)
    order = SampleOrder(sizes, seed, block_shards, groups=groups)
    pieces = [order.ordinals(start, stop) for start, stop in pairwise(cuts)]
    again = [SampleOrder(sizes, seed, block_shards, groups=groups).ordinals(*cut) for cut in pairwise(cuts)]
    whole = SampleOrder(sizes, seed, block_shards, groups=groups).ordinals(cuts[0], cuts[-1])
    assert np.array_equal(np.concatenate(pieces), whole)
    assert np.array_equal(np.concatenate(again), whole)


@given(SIZES, SEEDS, BLOCKS, groupings(), st.integers(0, 3))
def test_groups_share_at_most_one_shard_at_each_border_and_that_by_neighbouring_rows(
    sizes: list[int], seed: int, block_shards: int, groups: DataGroups, epoch: int
) -> None:
    total = sum(sizes)
    span = (epoch * total, (epoch + 1) * total)
    ordinals, owners = SampleOrder(sizes, seed, block_shards, groups=groups).ordinals(*span), group_ids(groups, *span)
    shards = shard_ids(sizes, ordinals)
    owned = [np.unique(shards[owners == group]) for group in range(groups.number)]
    assert sum(map(len, owned)) <= np.count_nonzero(sizes) + groups.number - 1
    for group, own in enumerate(owned):
        for shard in own:
            rows = np.sort(ordinals[(owners == group) & (shards == shard)])
            assert np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows)))


@given(st.integers(1, 5), st.integers(2, 6), st.integers(1, 4), SEEDS, BLOCKS, st.integers(0, 3))
def test_groups_of_equal_shards_are_disjoint_where_they_can_be(
    shards_each: int, number: int, slots_each: int, seed: int, block_shards: int, epoch: int
) -> None:
    sizes = [6 * slots_each] * (shards_each * number)
    groups = DataGroups.of(number, number * slots_each)
    total = sum(sizes)
    assert groups is not None
    span = (epoch * total, (epoch + 1) * total)
    ordinals, owners = SampleOrder(sizes, seed, block_shards, groups=groups).ordinals(*span), group_ids(groups, *span)
    owned = [set(shard_ids(sizes, ordinals[owners == group]).tolist()) for group in range(number)]
    assert all(len(own) == shards_each for own in owned)
    assert set().union(*owned) == set(range(len(sizes)))


@given(SIZES, SEEDS, BLOCKS, groupings())
def test_groups_keep_few_shards_open_each(sizes: list[int], seed: int, block_shards: int, groups: DataGroups) -> None:
    total = sum(sizes)
    ordinals, owners = (
        SampleOrder(sizes, seed, block_shards, groups=groups).ordinals(0, total),
        group_ids(groups, 0, total),
    )
    for group in range(groups.number):
        shards = shard_ids(sizes, ordinals[owners == group])
        spans = [np.flatnonzero(shards == shard) for shard in np.unique(shards)]
        num_open = [sum(span[0] <= place <= span[-1] for span in spans) for place in range(len(shards))]
        assert max(num_open, default=0) <= block_shards


@given(SIZES, SEEDS, BLOCKS, groupings(), st.integers(0, 150), st.integers(1, 40))
def test_groups_fetch_the_shards_of_which_they_have_half_or_more_together(
    sizes: list[int], seed: int, block_shards: int, groups: DataGroups, start: int, length: int
) -> None:
    total, stop = sum(sizes), start + length
    order = SampleOrder(sizes, seed, block_shards, groups=groups)
    ahead = order.shards_ahead(start, stop, num_later=0).tolist()
    assert len(set(ahead)) == len(ahead)
    wanted, possible = set(), set()
    shards, owners = shard_ids(sizes, order.ordinals(start, stop)), group_ids(groups, start, stop)
    for epoch in range(start // total, -(-stop // total)):
        span = (epoch * total, (epoch + 1) * total)
        all_shards, all_owners = shard_ids(sizes, order.ordinals(*span)), group_ids(groups, *span)
        inside = np.arange(start, stop) // total == epoch
        read, seen = np.zeros(len(sizes)), np.zeros(len(sizes))
        for group in np.unique(owners[inside]):
            held = np.bincount(all_shards[all_owners == group], minlength=len(sizes))
            read += held
            seen += held * np.isin(np.arange(len(sizes)), shards[inside & (owners == group)])
        wanted |= {shard for shard, size in enumerate(sizes) if size and 2 * seen[shard] >= size}
        possible |= {shard for shard, size in enumerate(sizes) if size and 2 * read[shard] >= size}
    assert wanted <= set(ahead) <= possible
    assert set(ahead) <= set(order.shards_ahead(start, stop).tolist())


@settings(max_examples=50)
@given(SIZES, SEEDS, BLOCKS, groupings(), st.integers(0, 100))
def test_groups_replace_a_sample_by_others_of_its_block(
    sizes: list[int], seed: int, block_shards: int, groups: DataGroups, position: int
) -> None:
    total = sum(sizes)
    order = SampleOrder(sizes, seed, block_shards, groups=groups)
    epoch = position // total * total
    ordinals, owners = order.ordinals(epoch, epoch + total), group_ids(groups, epoch, epoch + total)
    original, group = int(ordinals[position - epoch]), owners[position - epoch]
    found = {order.replacement(position, attempt) for attempt in range(total)}
    own = set(ordinals[owners == group].tolist())
    assert original not in found or total == 1
    assert found <= own or len(found) == total - 1  # a block of one sample takes from the epoch
    assert found == {
        SampleOrder(sizes, seed, block_shards, groups=groups).replacement(position, n) for n in range(total)
    }


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 30))
def test_groups_end_where_nodes_end(
    num_nodes: int, groups_each: int, ranks_each: int, unit: int, further_units: int
) -> None:
    """Whatever the batch, if the number of nodes divides that of the groups and nodes have equally many ranks."""
    number, world_size = num_nodes * groups_each, num_nodes * ranks_each
    batch_size = unit * (max(number, world_size) + further_units)
    groups = DataGroups.of(number, batch_size, unit)
    for node in range(num_nodes):
        first, _ = rank_slice(0, batch_size, rank=node * ranks_each, world_size=world_size, group_size=unit)
        assert groups is None or first in groups.borders


def test_groups_of_one_are_none() -> None:
    assert DataGroups.of(1, 8) is None


def test_groups_known_seed_never_changes() -> None:
    order = SampleOrder((3, 2, 4), seed=7, block_shards=2, groups=DataGroups.of(2, 4))
    assert order.ordinals(0, 9).tolist() == [4, 1, 6, 7, 0, 2, 8, 5, 3]
    assert order.ordinals(9, 18).tolist() == [1, 4, 8, 6, 5, 3, 7, 2, 0]


@pytest.mark.parametrize(("number", "unit"), [(0, 1), (9, 1), (5, 2)])
def test_groups_impossible_numbers_are_user_errors(number: int, unit: int) -> None:
    with pytest.raises(UserError, match=f"data_groups is {number}; use 1 to {8 // unit}: "):
        DataGroups.of(number, 8, unit)


def test_groups_of_a_batch_that_is_no_whole_number_of_units_are_user_errors() -> None:
    with pytest.raises(UserError, match=r"batch_size 9 is not a whole number of units of 2 samples .* data_groups: 1"):
        DataGroups.of(3, 9, 2)


def test_groups_with_chunks_or_weights_are_user_errors() -> None:
    groups = DataGroups.of(2, 4)
    with pytest.raises(UserError, match="data_groups is 2 and shuffle_chunk_samples 4; use one of the two"):
        SampleOrder((3, 2), 0, 1, chunk_samples=4, groups=groups)
    view, shares = SampleView(shard_sizes=np.array([3, 2])), MixtureShares(weights=(1, 1), num_shards=(1, 1))
    with pytest.raises(UserError, match="mixture with weights"):
        make_order(view, shares, 0, 1, groups=groups)
