"""The shipped simulations of S0 and S1: a seed gives the same bits in any block, and their formulas are the papers'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from workloads.jobs.theory import SavedObjects
from workloads.theory.granularity import GranularityParameters, _Run
from workloads.theory.loading import Simulation
from workloads.theory.mixture import MixtureParameters, _distances, _ratios, _samples
from workloads.theory.unhinged import _ratio

SMALL: Mapping[str, dict[str, Any]] = {
    "two-layer-granularity": {"k": 2, "labels": "fine", "d": 12, "batch": 16, "neurons": 8, "steps": 3},
    "mixture-msdr": {"variance": 1, "similar_variance": 0.1, "samples": 10, "d_in": 8, "d_hidden": 8, "steps": 5},
    "unhinged-clusters": {"d": 200, "steps": 5},
}


def runs(name: str, seeds: Sequence[int]) -> list[Mapping[str, float]]:
    simulation = Simulation.load(name)
    return list(simulation.function(simulation.checked(SMALL[name]), seeds, SavedObjects(device=torch.device("cpu"))))


@pytest.mark.parametrize("name", SMALL)
def test_seed_gives_the_same_bits_alone_and_in_a_block(name: str) -> None:
    block = runs(name, [3, 4, 5])
    assert [runs(name, [seed])[0] for seed in (3, 4, 5)] == block
    assert block[0] != block[1]


def test_training_batches_hold_no_hard_sample_and_as_many_of_each_subclass() -> None:
    parameters = GranularityParameters(k=4, labels="coarse", d=24, batch=800, expected_patches=1.0, noise=0.0)
    x_NPD, subclasses_N = _Run(parameters, torch.Generator().manual_seed(0), torch.device("cpu"))._batch()
    assert torch.bincount(subclasses_N).tolist() == [100] * 8
    common_NP = x_NPD[torch.arange(800), :, subclasses_N // 4]
    assert bool((common_NP > 0.9).any(dim=1).all())
    own_NP = x_NPD[torch.arange(800), :, 2 + subclasses_N]
    assert bool((own_NP[common_NP > 0.9] == 0).all())  # a patch holds one of the two
    others_N = 1 - subclasses_N // 4
    assert float(x_NPD[torch.arange(800), :, others_N].max()) <= parameters.distractor


def test_coarse_training_responds_to_the_common_feature_and_fine_training_to_the_subclass() -> None:
    ratios = {}
    for labels in ("coarse", "fine"):
        parameters = GranularityParameters(k=4, labels=labels, d=16, neurons=24, batch=64, steps=40)
        ratios[labels] = _Run(parameters, torch.Generator().manual_seed(0), torch.device("cpu")).metrics()
    assert ratios["coarse"]["sub_to_common"] < 0.5
    assert ratios["fine"]["sub_to_common"] > 1.5


def test_distances_of_clusters_are_means_over_all_pairs() -> None:
    hidden_CSH = torch.randn(4, 5, 3, dtype=torch.float64)
    pairs = (hidden_CSH[:, None, :, None] - hidden_CSH[None, :, None, :]).square().sum(-1).mean((2, 3))
    assert torch.allclose(_distances(hidden_CSH), pairs)


def test_similar_clusters_are_those_of_the_first_half_of_the_labels() -> None:
    parameters = MixtureParameters(variance=100, similar_variance=0, samples=400, d_in=16)
    means_CD = _samples(parameters, torch.Generator().manual_seed(0)).view(8, 400, 16).mean(1)
    apart = (means_CD[0::2] - means_CD[1::2]).norm(dim=1)
    assert bool((apart[:2] < 1).all())
    assert bool((apart[2:] > 10).all())
    ratios = _ratios(parameters, _distances(means_CD[:, None] + torch.randn(8, 50, 16)))
    assert ratios["similar_msdr"] < 1.5 < ratios["msdr"]


def test_ratio_of_distances_counts_partners_and_no_sample_with_itself() -> None:
    classes_N = np.repeat(np.arange(4), 2)
    inputs_MN = np.array([[2.0, 2.5, 4.0, 4.5, -2.0, -2.5, -4.0, -4.5]])  # one unit, in its linear part
    assert _ratio(inputs_MN, classes_N) == pytest.approx(2.0 / 0.5)
