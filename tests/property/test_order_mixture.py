"""Mixtures: exact shares, every component in its own order, any cut."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.errors import UserError
from workloads.data.index import MixtureShares
from workloads.data.order import WINDOW, MixtureOrder, SampleOrder, make_order, quotas
from workloads.data.subset import SampleView

SIZES = ((30, 50), (7, 8, 9))
# Down to the share of one sample in a window, below which weights are refused: 0.011 of 100.011.
WEIGHTS = st.lists(st.floats(0.011, 100), min_size=2, max_size=2)


def mixture_of(weights: list[float], seed: int = 0) -> MixtureOrder:
    view = SampleView(shard_sizes=np.array([size for sizes in SIZES for size in sizes]))
    shares = MixtureShares(weights=tuple(weights), num_shards=tuple(map(len, SIZES)))
    mixture = make_order(view, shares, seed, 2)
    assert isinstance(mixture, MixtureOrder)
    return mixture


@settings(max_examples=12)
@given(WEIGHTS, st.lists(st.integers(WINDOW // 2, 2 * WINDOW), min_size=2, max_size=5), st.integers(0, 2**60))
def test_order_mixture_any_cut_gives_the_same_sequence(weights: list[float], cuts: list[int], seed: int) -> None:
    cuts = sorted(cuts)
    whole = mixture_of(weights, seed).ordinals(cuts[0], cuts[-1])
    pieces = [mixture_of(weights, seed).ordinals(start, stop) for start, stop in pairwise(cuts)]
    assert np.array_equal(np.concatenate(pieces), whole)


@settings(max_examples=5)
@given(WEIGHTS)
def test_order_mixture_components_keep_their_own_orders(weights: list[float]) -> None:
    """With the components' samples picked out, what is left is each one's own order over its own epochs."""
    seen = mixture_of(weights).ordinals(0, 2 * WINDOW)
    for first, end, sizes in ((0, 80, SIZES[0]), (80, 104, SIZES[1])):
        own = seen[(seen >= first) & (seen < end)] - first
        assert np.array_equal(own, SampleOrder(sizes, 0, 2).ordinals(0, len(own)))
    assert np.count_nonzero(seen < 80) == 2 * quotas(weights, 2)[0]


@pytest.mark.parametrize(
    ("weights", "expected"), [([3, 1], [7500, 2500]), ([0.5, 0.5], [5000, 5000]), ([1, 1, 1], [3334, 3333, 3333])]
)
def test_order_mixture_quotas_are_shares_of_a_window(weights: list[float], expected: list[int]) -> None:
    assert quotas(weights, len(weights)).tolist() == expected


@pytest.mark.parametrize("weights", [[1], [1, 0], [1, -1], [1, 1e-6]])
def test_order_mixture_impossible_weights_are_user_errors(weights: list[float]) -> None:
    with pytest.raises(UserError, match="weights"):
        quotas(weights, 2)


@given(st.integers(0, 2 * WINDOW))
def test_order_mixture_looks_ahead_and_replaces_within_components(position: int) -> None:
    mixture = mixture_of([3, 1])
    ordinal = int(mixture.ordinals(position, position + 1)[0])
    replaced = mixture.replacement(position, 0)
    assert replaced != ordinal
    assert (replaced < 80) == (ordinal < 80)
    shard = int(np.searchsorted([30, 80, 87, 95, 104], ordinal, side="right"))
    assert shard in mixture.shards_ahead(position, position + 1).tolist()
