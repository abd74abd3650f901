"""Parts of a split: stratified, seeded, nested; and samples without a label."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from orchestrator.sweepfile.parse.tree import parse_tree
from orchestrator.sweepfile.problems import Complaints
from orchestrator.sweepfile.subset import thinned
from orchestrator.sweepfile.values import Dataset
from workloads.data.index import SplitIndex
from workloads.data.order import SampleOrder
from workloads.data.subset import SampleView, Subset
from workloads.labels.label_map import ClassLabels

LEAVES = np.repeat([2, 0, 1, 2, 0], [40, 100, 7, 60, 100])
SPLIT = SplitIndex.in_memory(leaves=LEAVES, shard_sizes=(100, 0, 107, 100))


def chosen(subset: Subset | None, split: SplitIndex = SPLIT) -> NDArray[np.int64]:
    return SampleView.of(split, None, subset).ordinals()


def counts(ordinals: NDArray[np.int64]) -> list[int]:
    return [int(count) for count in np.bincount(LEAVES[ordinals], minlength=3)]


def test_subset_fraction_is_taken_of_every_class() -> None:
    assert counts(chosen(Subset(fraction=0.1))) == [20, 1, 10]
    assert counts(chosen(Subset(fraction=0.01))) == [2, 1, 1]
    assert counts(chosen(Subset(fraction=1.0))) == [200, 7, 100]


def test_subset_caps_and_totals() -> None:
    assert counts(chosen(Subset(max_per_class=30))) == [30, 7, 30]
    assert counts(chosen(Subset(fraction=0.1, max_per_class=15))) == [15, 1, 10]
    assert counts(chosen(Subset(num_samples=67))) == [30, 7, 30]
    assert sorted(counts(chosen(Subset(num_samples=20)))) == [6, 7, 7]
    assert len(chosen(Subset(num_samples=307))) == 307


LIMITS = st.one_of(
    st.floats(0.001, 1).map(lambda fraction: {"fraction": fraction}),
    st.integers(1, 200).map(lambda limit: {"max_per_class": limit}),
    st.integers(1, 307).map(lambda number: {"num_samples": number}),
)


@given(LIMITS, LIMITS, st.integers(0, 2**40))
def test_subset_smaller_limits_are_contained_in_larger_ones(
    one: dict[str, Any], other: dict[str, Any], seed: int
) -> None:
    if one.keys() != other.keys():
        one = other
    smaller, larger = sorted((one, other), key=lambda limits: next(iter(limits.values())))
    inner, outer = (chosen(Subset(**limits, seed=seed)) for limits in (smaller, larger))
    assert np.isin(inner, outer).all()
    assert (np.diff(outer) > 0).all()


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(0, 2),
    st.floats(0.01, 1.0),
    st.one_of(st.none(), st.integers(1, 9)),
)
def test_subset_that_can_be_taken_is_not_refused_at_plan_time(
    sizes: list[int], unlabelled: int, fraction: float, cap: int | None
) -> None:
    leaves = np.repeat(np.arange(-1, len(sizes)), [unlabelled, *sizes])
    limits: dict[str, Any] = {"fraction": fraction} | ({} if cap is None else {"max_per_class": cap})
    split = SplitIndex.in_memory(leaves=leaves)
    kept = len(chosen(Subset(**limits), split))
    assert len(chosen(Subset(**limits, num_samples=kept), split)) == kept
    dataset = Dataset(
        name="photos",
        readable="",
        parameters={},
        levels={},
        num_classes=len(sizes),
        num_train=len(leaves),
        multi_label=unlabelled > 0,
    )
    complaints = Complaints(parse_tree("subset: {}", "sweep.yaml"))
    part = thinned(dataset, {**limits, "num_samples": kept}, ("subset",), complaints)
    assert (part.num_train, complaints.problems) == (kept, ())


def test_subset_other_seed_takes_other_samples() -> None:
    first, again, other = (set(chosen(Subset(fraction=0.2, seed=seed)).tolist()) for seed in (0, 0, 1))
    assert first == again
    assert len(first & other) < 0.5 * len(first)


def test_subset_known_choice_never_changes() -> None:
    assert chosen(Subset(num_samples=6, seed=3)).tolist() == [54, 91, 145, 146, 155, 173]


def test_subset_same_samples_whatever_the_label_space() -> None:
    """Chosen by leaf class among labelled samples: dropping other classes changes nothing."""
    without_1 = ClassLabels.of_sets([[0], [], [1]], ["a", "b"]).resolve_targets(SPLIT)
    view = SampleView.of(SPLIT, without_1, Subset(fraction=0.1))
    every = chosen(Subset(fraction=0.1))
    assert view.ordinals().tolist() == [ordinal for ordinal in every.tolist() if LEAVES[ordinal] != 1]


def test_view_drops_samples_without_a_label_and_keeps_shards() -> None:
    labels = ClassLabels.of_sets([[], [0], [1]], ["a", "b"]).resolve_targets(SPLIT)
    view = SampleView.of(SPLIT, labels)
    assert view.ordinals().tolist() == np.flatnonzero(LEAVES > 0).tolist()
    assert view.shard_sizes.tolist() == [40, 0, 67, 0]


def test_view_of_everything_holds_no_table() -> None:
    view = SampleView.of(SPLIT, ClassLabels.of_sets([[0], [0], [1]], ["a", "b"]).resolve_targets(SPLIT))
    assert view.chosen is None
    assert view.ordinals().tolist() == list(range(307))


def test_order_over_a_view_visits_its_samples_once_per_epoch() -> None:
    view = SampleView.of(SPLIT, None, Subset(fraction=0.3, seed=1))
    order = SampleOrder.over(view, 5, 2)
    for epoch in range(2):
        seen = order.ordinals(epoch * view.num_samples, (epoch + 1) * view.num_samples)
        assert sorted(seen.tolist()) == view.ordinals().tolist()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"fraction": 0.0}, "fraction 0.0"),
        ({"fraction": 1.5}, "fraction 1.5"),
        ({"max_per_class": 0}, "max_per_class 0"),
        ({"num_samples": 0}, "num_samples 0"),
        ({"num_samples": 308}, "there are 307"),
    ],
)
def test_subset_impossible_limits_are_user_errors(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        chosen(Subset(**limits))


def test_view_without_any_labelled_sample_is_a_user_error() -> None:
    labels = ClassLabels.of_sets([[], [], [], [0]], ["a"]).resolve_targets(SPLIT)
    with pytest.raises(UserError, match="no sample of split 'train' has a label"):
        SampleView.of(SPLIT, labels)
