"""Mixup and CutMix of consecutive pairs of images, as pure functions of the position.

The partner of position p is p XOR 1, and both draw from one counter, that of the pair: for any number of
ranks and micro-batches, and after any resume, the same images are mixed in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaincinv
from torch import Tensor

from orchestrator.core.hyper_parameters import MIXES
from workloads.runtime.streams import Purpose, Stage, seed_sequence
from workloads.train.linear_form import MixedTargets
from workloads.train.recipe import Recipe

MIX_GROUP: Final = MIXES
"""Slices of a batch begin and end at multiples of this many positions."""

# Tells this stream from that of flips and shifts, which has no detail. The stream that places crops and jitters colours
# (``data.augment``) has the same detail: the numbers of a pair are also those of one position, which lies far before
# the pair except at the start. It stays so, because another detail would change the results of existing keys.
_MIX_STREAM = 1
_WORDS_PER_PAIR = 4  # Philox4x64 yields four 64-bit words for each value of its counter
_KIND, _WEIGHT, _ROW, _COLUMN = range(_WORDS_PER_PAIR)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """What happens to P pairs: the share that each image keeps of itself, and the box that each pair swaps.

    ``blend_P`` float32 in [0, 1] is 1 where nothing is blended; ``boxes_P4`` int64 holds top, bottom, left, right (half
    open), empty where nothing is cut; ``weight_P`` float32 is the weight of an image's own target.
    """

    blend_P: NDArray[np.float32]
    boxes_P4: NDArray[np.int64]
    weight_P: NDArray[np.float32]


class Mixer:
    """Mixes the images of one run. mixup: arXiv:1710.09412, equation 2. CutMix: arXiv:1905.04899, section 3.1.

    Each pair is mixed with probability ``mix_prob``; where both ways are on, ``cutmix_share`` of the mixed pairs are
    cut. Weights are Beta(alpha, alpha), drawn by inversion of its distribution.
    """

    def __init__(self, recipe: Recipe, *, seed: int, stage: Stage) -> None:
        self._recipe = recipe
        self._key = seed_sequence(seed, stage, Purpose.AUGMENT, _MIX_STREAM).generate_state(2, np.uint64)

    def __call__(self, images_BCHW: Tensor, targets: Tensor, start: int) -> tuple[Tensor, MixedTargets]:
        """Mix the images of positions ``start, start + 1, ...`` IN PLACE; ``start`` and their number are even.

        Images are of a floating dtype, normalised or not; targets are (B,) or (B, M).
        """
        if start % MIX_GROUP or len(images_BCHW) % MIX_GROUP:
            stop = start + len(images_BCHW)
            raise ValueError(f"positions {start} to {stop} are not whole pairs; slice batches at multiples of 2")
        height, width = images_BCHW.shape[-2:]
        plan = self.plan(start // MIX_GROUP, len(images_BCHW) // MIX_GROUP, height=height, width=width)
        _blend_(images_BCHW, plan)
        _cut_(images_BCHW, plan)
        partners = targets.view(-1, MIX_GROUP, *targets.shape[1:]).flip(1).view(targets.shape)
        weight_B = torch.from_numpy(plan.weight_P.repeat(MIX_GROUP)).to(images_BCHW.device, non_blocking=True)
        return images_BCHW, MixedTargets(first=targets, second=partners, weight_B=weight_B)

    def plan(self, first_pair: int, num_pairs: int, *, height: int, width: int) -> PairPlan:
        """What happens to the pairs ``first_pair, first_pair + 1, ...``; pair q has its plan in any call."""
        units = self._units(first_pair, num_pairs)
        is_mixed, is_cut = self._kinds(units[:, _KIND])
        alphas = np.where(is_cut, self._recipe.cutmix, self._recipe.mixup)
        kept = np.where(is_mixed, _beta(units[:, _WEIGHT], alphas), 1.0)
        boxes = _boxes(np.where(is_cut, kept, 1.0), units[:, _ROW], units[:, _COLUMN], height=height, width=width)
        # A box that reaches over the border is cut off: the targets follow the pixels that were really swapped.
        swapped = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2]) / (height * width)
        return PairPlan(
            blend_P=np.where(is_cut, 1.0, kept).astype(np.float32),
            boxes_P4=boxes,
            weight_P=np.where(is_cut, 1.0 - swapped, kept).astype(np.float32),
        )

    def _units(self, first_pair: int, num_pairs: int) -> NDArray[np.float64]:
        """Numbers in (0, 1) [num_pairs, 4]; a pair has its numbers in any call."""
        philox = np.random.Philox(key=self._key, counter=first_pair)
        words = philox.random_raw(_WORDS_PER_PAIR * num_pairs).reshape(-1, _WORDS_PER_PAIR)
        return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53

    def _kinds(self, units: NDArray[np.float64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which pairs are mixed, and which of these are cut."""
        recipe = self._recipe
        is_mixed = units < recipe.mix_prob
        if not (recipe.mixup and recipe.cutmix):
            return is_mixed, is_mixed & (recipe.cutmix > 0)
        return is_mixed, units < recipe.mix_prob * recipe.cutmix_share


def build_mixer(recipe: Recipe, *, seed: int, stage: Stage) -> Mixer | None:
    """The mixer of a recipe, or None if images stay apart."""
    return Mixer(recipe, seed=seed, stage=stage) if recipe.is_mixed else None


def _beta(units: NDArray[np.float64], alphas: NDArray[np.float64]) -> NDArray[np.float64]:
    """Quantiles of Beta(alpha, alpha); alpha 0, which is never used, stands for 1."""
    safe = np.where(alphas > 0, alphas, 1.0)
    quantiles: NDArray[np.float64] = betaincinv(safe, safe, units)
    return np.clip(quantiles, 0.0, 1.0)


def _boxes(
    kept: NDArray[np.float64],
    rows: NDArray[np.float64],
    columns: NDArray[np.float64],
    *,
    height: int,
    width: int,
) -> NDArray[np.int64]:
    """Boxes [P, 4] of area ``1 - kept`` around uniform centres, cut off at the border; empty where ``kept`` is 1."""
    sides = np.sqrt(1.0 - kept)
    edges = []
    for units, length in ((rows, height), (columns, width)):
        size = np.floor(sides * length).astype(np.int64)
        low = np.floor(units * length).astype(np.int64) - size // 2
        edges += [np.clip(low, 0, length), np.clip(low + size, 0, length)]
    return np.stack(edges, 1)


def _blend_(images_BCHW: Tensor, plan: PairPlan) -> None:
    """Each image of a pair becomes ``blend x + (1 - blend) partner``."""
    if (plan.blend_P == 1).all():
        return
    given_P = torch.from_numpy(1 - plan.blend_P).to(images_BCHW.device, non_blocking=True)
    first_PCHW, second_PCHW = images_BCHW[0::2], images_BCHW[1::2]
    change_PCHW = (second_PCHW - first_PCHW) * given_P.to(images_BCHW.dtype)[:, None, None, None]
    first_PCHW += change_PCHW
    second_PCHW -= change_PCHW


def _cut_(images_BCHW: Tensor, plan: PairPlan) -> None:
    """The images of a pair swap what lies in the pair's box."""
    top, bottom, left, right = plan.boxes_P4.T
    if (top == bottom).all() or (left == right).all():
        return
    # Made on the device: to copy a mask there, the host would wait until the device has done all that it was asked.
    boxes_P4 = torch.from_numpy(plan.boxes_P4).to(images_BCHW.device, non_blocking=True)
    height, width = images_BCHW.shape[-2:]
    rows_PH, columns_PW = _between(boxes_P4[:, :2], height), _between(boxes_P4[:, 2:], width)
    is_inside_P1HW = rows_PH[:, None, :, None] & columns_PW[:, None, None, :]
    first_PCHW, second_PCHW = images_BCHW[0::2], images_BCHW[1::2]
    swapped_PCHW = torch.where(is_inside_P1HW, second_PCHW, first_PCHW)
    second_PCHW.copy_(torch.where(is_inside_P1HW, first_PCHW, second_PCHW))
    first_PCHW.copy_(swapped_PCHW)


def _between(edges_P2: Tensor, length: int) -> Tensor:
    """Whether each of ``length`` places lies between the edges, ``low <= place < high``; [P, length]."""
    places = torch.arange(length, device=edges_P2.device)
    return (edges_P2[:, :1] <= places) & (places < edges_P2[:, 1:])
