"""Mixup and CutMix: pairs by position, the same on every layout, targets that follow the pixels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from orchestrator.core.errors import UserError
from tests.tiny_training import RECIPE
from workloads.runtime.streams import Stage
from workloads.train.mixing import Mixer, build_mixer
from workloads.train.recipe import Recipe

SIDE = 12


def mixer(*, seed: int = 0, stage: Stage = Stage.PRETRAIN, **fields: Any) -> Mixer:
    found = build_mixer(Recipe.from_mapping({**RECIPE, **fields}), seed=seed, stage=stage)
    assert found is not None
    return found


def images(num_images: int) -> Tensor:
    return torch.randn(num_images, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(5))


def test_recipe_without_mixing_has_no_mixer() -> None:
    assert build_mixer(Recipe.from_mapping(RECIPE), seed=0, stage=Stage.PRETRAIN) is None


def test_mixup_blends_each_image_with_its_partner_by_the_weight_of_its_target() -> None:
    given_BCHW, labels = images(16), torch.arange(16)
    mixed_BCHW, targets = mixer(mixup=0.8)(given_BCHW.clone(), labels, 32)
    assert torch.equal(targets.first, labels)
    assert targets.second.tolist() == [label ^ 1 for label in range(16)]
    partner_BCHW = given_BCHW[targets.second]
    weight_B111 = targets.weight_B[:, None, None, None]
    torch.testing.assert_close(mixed_BCHW, weight_B111 * given_BCHW + (1 - weight_B111) * partner_BCHW)
    assert targets.weight_B[0::2].tolist() == targets.weight_B[1::2].tolist()
    assert len(set(targets.weight_B.tolist())) == 8


def test_cutmix_swaps_a_box_whose_share_is_the_weight_of_the_partner() -> None:
    given_BCHW, labels = images(64), torch.arange(64)
    mixed_BCHW, targets = mixer(cutmix=1.0)(given_BCHW.clone(), labels, 0)
    partner_BCHW = given_BCHW[targets.second]
    is_foreign_BHW = (mixed_BCHW == partner_BCHW).all(1)
    is_own_BHW = (mixed_BCHW == given_BCHW).all(1)
    assert bool((is_own_BHW ^ is_foreign_BHW).all())
    share_B = is_foreign_BHW.float().mean((1, 2))
    torch.testing.assert_close(1 - share_B, targets.weight_B)
    for is_foreign_HW in is_foreign_BHW:
        rows, columns = is_foreign_HW.any(1), is_foreign_HW.any(0)
        assert bool((is_foreign_HW == (rows[:, None] & columns[None])).all())


def test_cutmix_of_sets_of_classes_mixes_their_rows() -> None:
    sets = torch.tensor([[0, -1], [1, 2], [3, -1], [4, 5]])
    _, targets = mixer(cutmix=1.0)(images(4), sets, 0)
    assert targets.second.tolist() == [[1, 2], [0, -1], [4, 5], [3, -1]]


@given(
    start=st.integers(0, 2**40).map(lambda pair: 2 * pair),
    cuts=st.lists(st.integers(1, 15), max_size=5),
    alpha=st.sampled_from([{"mixup": 0.2}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0, "mix_prob": 0.7}]),
)
def test_mixed_batch_is_the_same_bits_however_it_is_sliced(start: int, cuts: list[int], alpha: dict[str, Any]) -> None:
    mix, given_BCHW, labels = mixer(**alpha), images(32), torch.arange(32)
    whole, targets = mix(given_BCHW.clone(), labels, start)
    bounds = sorted({0, 32, *(2 * cut for cut in cuts)})
    for low, high in pairwise(bounds):
        part, part_targets = mix(given_BCHW[low:high].clone(), labels[low:high], start + low)
        assert torch.equal(part, whole[low:high])
        assert torch.equal(part_targets.weight_B, targets.weight_B[low:high])


def test_mixing_in_channels_last_is_the_same_and_stays_so() -> None:
    mix, given_BCHW, labels = mixer(mixup=0.4, cutmix=1.0), images(32), torch.arange(32)
    plain, _ = mix(given_BCHW.clone(), labels, 0)
    last, _ = mix(given_BCHW.clone(memory_format=torch.channels_last), labels, 0)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain, last)


def test_mixing_differs_by_seed_and_stage() -> None:
    plans = [
        mixer(mixup=1.0, seed=seed, stage=stage).plan(0, 4, height=SIDE, width=SIDE).weight_P.tolist()
        for seed, stage in ((0, Stage.PRETRAIN), (1, Stage.PRETRAIN), (0, Stage.FINETUNE))
    ]
    assert len({weight for plan in plans for weight in plan}) == 12


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_mixup_weights_follow_the_beta_distribution(alpha: float) -> None:
    plan = mixer(mixup=alpha).plan(0, 4000, height=SIDE, width=SIDE)
    assert stats.kstest(plan.weight_P, stats.beta(alpha, alpha).cdf).pvalue > 1e-3
    assert (plan.boxes_P4[:, 0] == plan.boxes_P4[:, 1]).all()


def test_shares_of_pairs_are_those_of_the_recipe() -> None:
    plan = mixer(mixup=1.0, cutmix=1.0, mix_prob=0.6, cutmix_share=0.25).plan(0, 8000, height=224, width=224)
    is_cut = (plan.blend_P == 1) & (plan.weight_P < 1)
    is_blended = plan.blend_P < 1
    assert is_cut.mean() == pytest.approx(0.15, abs=0.015)
    assert is_blended.mean() == pytest.approx(0.45, abs=0.02)
    # Boxes have Beta(1, 1) areas before the border cuts them: E[kept] = 1/2, and what is cut off adds to it.
    assert 0.5 < plan.weight_P[is_cut].mean() < 0.7


@pytest.mark.parametrize(("start", "num_images"), [(1, 4), (0, 3)])
def test_mixing_of_half_a_pair_is_refused(start: int, num_images: int) -> None:
    with pytest.raises(ValueError, match="not whole pairs"):
        mixer(mixup=1.0)(images(num_images), torch.arange(num_images), start)


@pytest.mark.parametrize("fields", [{"batch_size": 15}, {"batch_size": 15, "norm_group": 5}, {"norm_group": 1}])
def test_recipe_with_mixing_and_odd_groups_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"recipe\.batch_size is .* even"):
        Recipe.from_mapping({**RECIPE, "mixup": 0.2, **fields})


def test_weights_do_not_change_between_releases() -> None:
    # Drawn from raw Philox words and the Beta quantile function: a change of these numbers changes results.
    plan = mixer(mixup=0.4, seed=7).plan(1000, 3, height=SIDE, width=SIDE)
    assert plan.weight_P.tolist() == pytest.approx([0.59096819, 0.00873808, 0.7866922], abs=1e-7)


def same_distribution(values: NDArray[np.float32], alpha: float) -> float:
    """p-value of a Kolmogorov-Smirnov test that these are draws of Beta(alpha, alpha), rounded to float32.

    A rounded value stands for all numbers up to the middle between it and the next one, so that is where the two
    distribution functions are compared. Without that, the 1.6 % of Beta(0.2, 0.2) that round to 1 look like a jump.
    """
    found, counts = np.unique(values, return_counts=True)
    above = np.nextafter(found, np.float32(2.0))
    edges = np.minimum((found.astype(np.float64) + above.astype(np.float64)) / 2, 1.0)
    distance = np.abs(np.cumsum(counts) / len(values) - stats.beta(alpha, alpha).cdf(edges)).max()
    return float(stats.kstwo.sf(distance, len(values)))


@pytest.mark.parametrize("seed", range(4))
def test_mixup_weights_are_draws_of_the_beta_distribution(seed: int) -> None:
    weights_P = mixer(mixup=0.2, seed=seed).plan(0, 200_000, height=SIDE, width=SIDE).blend_P
    assert same_distribution(weights_P, 0.2) > 0.01
    assert same_distribution(weights_P, 0.21) < 1e-4, "the test would find a wrong alpha"


def test_mixup_weights_without_those_that_round_to_one_are_another_distribution() -> None:
    weights_P = mixer(mixup=0.2).plan(0, 200_000, height=SIDE, width=SIDE).blend_P
    assert np.mean(weights_P == 1) == pytest.approx(0.0164, abs=0.001)
    assert same_distribution(weights_P[weights_P < 1], 0.2) < 1e-10
