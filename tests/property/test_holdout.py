"""Training samples held out to choose by: stratified, seeded, and never a class's only one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.errors import UserError
from workloads.data.index import SplitIndex
from workloads.data.subset import SampleView, Subset, hold_out

CLASS_SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def split_of(sizes: list[int]) -> SplitIndex:
    leaves = np.repeat(np.arange(len(sizes)), sizes)
    shuffled = np.random.default_rng(1).permutation(leaves)
    return SplitIndex.in_memory(leaves=shuffled, shard_sizes=(len(leaves),))


@given(sizes=CLASS_SIZES, share=st.sampled_from([0.05, 0.1, 0.3, 0.5]), seed=st.integers(0, 5))
def test_hold_out_divides_evenly_over_classes(sizes: list[int], share: float, seed: int) -> None:
    split = split_of(sizes)
    if sum(sizes) < 2:
        with pytest.raises(UserError, match="held out"):
            hold_out(split, SampleView.whole(split), share, seed)
        return
    kept, held_out = (view.ordinals() for view in hold_out(split, SampleView.whole(split), share, seed))
    assert sorted([*kept, *held_out]) == list(range(sum(sizes)))
    candidates = sum(sizes) - len(sizes)
    if not candidates:
        assert len(held_out) == max(1, int(share * sum(sizes) + 0.5))
        return
    assert len(held_out) == min(candidates, max(1, int(share * sum(sizes) + 0.5)))
    per_class = np.bincount(split.leaves[held_out], minlength=len(sizes))
    expected = (np.array(sizes) - 1) * len(held_out) / candidates
    assert (np.abs(per_class - expected) <= 1).all()
    assert (np.bincount(split.leaves[kept], minlength=len(sizes)) >= 1).all()


def test_hold_out_is_a_matter_of_the_seed_and_the_sample_alone() -> None:
    split = split_of([30, 50])
    whole = SampleView.whole(split)
    first, again, other = (hold_out(split, whole, 0.1, seed)[1].ordinals().tolist() for seed in (0, 0, 1))
    assert first == again != other


def test_hold_out_of_a_subset_stays_within_it() -> None:
    split = split_of([40, 40, 40])
    view = SampleView.of(split, None, Subset(fraction=0.25, seed=3))
    kept, held_out = hold_out(split, view, 0.2, 0)
    assert sorted([*kept.ordinals(), *held_out.ordinals()]) == view.ordinals().tolist()
    assert held_out.num_samples == 6
