"""Nearest neighbours: exact, whatever the blocks, and votes as the literature weighs them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from orchestrator.core.errors import NumericsError
from workloads.data.index import LeafSets, SplitIndex
from workloads.data.split_targets import LeafSetTargets
from workloads.data.subset import SampleView
from workloads.features.artifact import FeatureTable
from workloads.jobs import knn
from workloads.jobs.cached_features import CachedSamples, CachedSplit, Rows
from workloads.jobs.knn import NeighbourVotes, find_neighbours, measure
from workloads.runtime.publish import publish
from workloads.train.objective import is_wrong


def rows(num_samples: int, *, seed: int, num_classes: int = 4, num_targets: int = 1) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.stack([torch.randperm(num_classes, generator=generator)[:num_targets] for _ in range(num_samples)])
    features = torch.randn(num_samples, 8, generator=generator)
    subsets = np.zeros(num_samples, dtype=np.int16)
    return Rows(features_ND=features, targets=targets[:, 0] if num_targets == 1 else targets, subsets_N=subsets)


@pytest.fixture(params=[1 << 16, 37])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Samples of the bank that are looked at together."""
    monkeypatch.setattr(knn, "_NEIGHBOURS_AT_ONCE", request.param)
    monkeypatch.setattr(knn, "_QUERIES_AT_ONCE", 16)
    return int(request.param)


def cosines(bank: Tensor, queries: Tensor) -> Tensor:
    bank, queries = bank.double(), queries.double()
    lengths: Tensor = queries.norm(dim=1)[:, None] * bank.norm(dim=1)
    return (queries @ bank.T) / lengths


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("temperature", [0.07, None])
def test_votes_are_those_of_a_search_by_hand(temperature: float | None) -> None:
    bank, queries = rows(150, seed=1), rows(40, seed=2)
    found = find_neighbours(bank, queries, 20, lambda _: None)
    similarity = cosines(bank.features_ND, queries.features_ND)
    order = similarity.argsort(1, descending=True)[:, :20]
    assert torch.equal(found.targets, bank.targets[order])
    votes = NeighbourVotes(num_classes=4, is_multi_label=False, temperature=temperature)
    for k in (1, 7, 20):
        shares = votes.logits(found.cosines_QK[:, :k], found.targets[:, :k]).softmax(1)
        for query in range(40):
            expected = torch.zeros(4, dtype=torch.float64)
            for neighbour in order[query, :k].tolist():
                weight = np.exp(float(similarity[query, neighbour]) / temperature) if temperature else 1.0
                expected[bank.targets[neighbour]] += weight
            assert shares[query].numpy() == pytest.approx((expected / expected.sum()).numpy(), abs=1e-4)


@pytest.mark.usefixtures("block")
def test_votes_of_sets_are_shares_of_each_class() -> None:
    bank, queries = rows(60, seed=1, num_targets=2), rows(10, seed=2, num_targets=2)
    found = find_neighbours(bank, queries, 5, lambda _: None)
    votes = NeighbourVotes(num_classes=4, is_multi_label=True, temperature=None)
    shares = votes.logits(found.cosines_QK, found.targets).sigmoid()
    expected = torch.stack([(found.targets == k).any(2).float().mean(1) for k in range(4)], 1)
    assert shares.numpy() == pytest.approx(expected.numpy(), abs=1e-5)
    assert not is_wrong(expected.argmax(1), found.targets.flatten(1)).any()


def test_votes_of_a_cold_temperature_are_finite_and_those_of_the_nearest() -> None:
    bank, queries = rows(60, seed=1), rows(10, seed=2)
    found = find_neighbours(bank, queries, 20, lambda _: None)
    logits = NeighbourVotes(num_classes=4, is_multi_label=False, temperature=1e-4).logits(
        found.cosines_QK, found.targets
    )
    assert torch.isfinite(logits).all()
    assert torch.equal(logits.argmax(1), found.targets[:, 0])


def test_find_neighbours_takes_features_of_zeros() -> None:
    bank, queries = rows(30, seed=1), rows(3, seed=2)
    queries.features_ND[1] = 0
    assert torch.isfinite(find_neighbours(bank, queries, 5, lambda _: None).cosines_QK).all()


def test_find_neighbours_asks_before_every_run_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knn, "_QUERIES_AT_ONCE", 16)
    asked: list[int] = []
    find_neighbours(rows(30, seed=1), rows(40, seed=2), 5, asked.append)
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("is_multi_label", [False, True])
def test_votes_of_fewer_classes_than_five_name_no_others(*, is_multi_label: bool) -> None:
    """Whatever the numbers of the classes are: of one neighbour the top-5 error is the error."""
    votes = NeighbourVotes(num_classes=9, is_multi_label=is_multi_label, temperature=0.07)
    cosines_BK = torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4]]).expand(9, 6)
    own = torch.arange(9)
    one = votes.is_out_of_top(cosines_BK[:, :1], torch.full((9, 1), 4), own)
    assert one.tolist() == [number != 4 for number in range(9)]
    neighbours, sets = torch.arange(5, -1, -1).expand(9, 6), torch.stack([own, torch.full((9,), -1)], 1)
    equal = NeighbourVotes(num_classes=9, is_multi_label=is_multi_label, temperature=None)
    cold = NeighbourVotes(num_classes=9, is_multi_label=is_multi_label, temperature=0.01)
    for of in (votes, equal, cold):  # the nearest is of class 5, the farthest of class 0
        for asked in (own, sets):
            assert of.is_out_of_top(cosines_BK, neighbours, asked).tolist() == [n not in range(1, 6) for n in range(9)]
    several = torch.stack([neighbours, torch.full_like(neighbours, -1)], 2)
    assert equal.is_out_of_top(cosines_BK, several, own).tolist() == [n not in range(1, 6) for n in range(9)]


def cached_sets(name: str, num_samples: int) -> CachedSplit:
    """Samples of two of four classes each."""
    drawn = rows(num_samples, seed=num_samples, num_targets=2)
    sets = LeafSets(
        offsets=np.arange(0, 2 * num_samples + 1, 2), values=drawn.targets.sort(1).values.flatten().int().numpy()
    )
    split = SplitIndex.in_memory(name=name, leaves=sets.values[::2], leaf_sets=sets)
    labels = LeafSetTargets(sets, np.arange(4, dtype=np.int32)[:, None], num_classes=4)
    table = FeatureTable(
        key="",
        split=name,
        index_key="",
        dataset_digest="",
        dim=8,
        starts=np.zeros(1, dtype=np.int64),
        parts=(drawn.features_ND.half().numpy(),),
        missing=np.empty(0, dtype=np.int64),
    )
    view = SampleView.of(split, labels, None)
    return CachedSplit(split=split, labels=labels, view=view, tables=(table,), device=torch.device("cpu"))


def test_one_neighbour_with_several_classes_has_finite_losses() -> None:
    """It has all votes: the logit of their share is infinite in float32."""
    samples = CachedSamples(train=cached_sets("train", 40), val=cached_sets("val", 10), levels=())
    recipe = {"k": [1, 2], "votes": "weighted", "temperature": 0.07, "select_holdout": 0.2}
    request: Any = SimpleNamespace(parameters={"recipe": recipe, "seed": 0})
    found = measure(request, samples, lambda _: None)
    told = [*found.metrics.values(), *(row["select_loss"] for row in found.summary["selection"])]
    assert all(map(math.isfinite, told))
    votes = NeighbourVotes(num_classes=4, is_multi_label=True, temperature=None)
    logits = votes.logits(torch.ones(1, 1), torch.tensor([[[0, 2]]]))
    assert logits.tolist() == [pytest.approx([20.72, -20.72, 20.72, -20.72], abs=0.01)]


def test_metrics_that_are_not_finite_are_a_failure_of_numerics() -> None:
    request: Any = SimpleNamespace(job="knn/x")
    with pytest.raises(NumericsError, match="knn/x measures val_loss nan, which no record can hold"):
        publish(SimpleNamespace(), request, metrics={"val_error": 0.5, "val_loss": math.nan}, summary={})  # type: ignore[arg-type]
