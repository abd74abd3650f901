"""Losses that are linear in the targets, and targets that stand for two samples at once.

Softmax and sigmoid cross-entropy have one form: a normaliser of all logits minus a weighted sum of few of them. It is
what a chunked head computes without ever holding all logits, and what makes mixed and multi-label targets exact without
a dense (B, K) target matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

NO_LABEL = -1
"""Fills the rows of multi-label targets."""


class Normalizer(StrEnum):
    """What all logits of a sample contribute."""

    SOFTMAX = "softmax"
    """``log(sum_k exp(z_k))``"""
    SIGMOID = "sigmoid"
    """``sum_k log(1 + exp(z_k))``"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearForm:
    """``loss_b = norm(z_b) - sum_m weights_bm z_b[indices_bm] - uniform sum_k z_bk``.

    ``indices_BM`` are classes, -1 where a row has fewer; ``weights_BM`` float32, 0 there.
    """

    normalizer: Normalizer
    indices_BM: Tensor
    weights_BM: Tensor
    uniform: float

    def losses(self, logits_BK: Tensor) -> Tensor:
        """The losses (B,) of float32 logits."""
        if self.normalizer is Normalizer.SOFTMAX:
            norms_B = torch.logsumexp(logits_BK, 1)
        else:
            norms_B = functional.softplus(logits_BK).sum(1)
        picked_BM = logits_BK.gather(1, self.indices_BM.clamp(min=0))
        losses_B: Tensor = norms_B - (self.weights_BM * picked_BM).sum(1)
        return losses_B - self.uniform * logits_BK.sum(1) if self.uniform else losses_B


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedTargets:
    """Sample b counts as ``first`` with ``weight_B[b]`` and as ``second`` with the rest.

    Both are targets of the same shape, (B,) or (B, M); ``weight_B`` is float32 in [0, 1].
    """

    first: Tensor
    second: Tensor
    weight_B: Tensor

    def __len__(self) -> int:
        return len(self.weight_B)

    def __getitem__(self, part: slice) -> Self:
        """The targets of a run of samples."""
        return type(self)(first=self.first[part], second=self.second[part], weight_B=self.weight_B[part])

    @property
    def heavier(self) -> Tensor:
        """The target with the larger weight, the first one on ties: what counts as right."""
        is_first_B = self.weight_B >= 0.5
        return torch.where(is_first_B if self.first.ndim == 1 else is_first_B[:, None], self.first, self.second)


Targets: TypeAlias = Tensor | MixedTargets
"""Classes (B,) int64; or sets of classes (B, M) int64, distinct, padded with -1; or a mixture of two of either."""


def weighted_classes(targets: Targets) -> tuple[Tensor, Tensor]:
    """The classes (B, M) of each sample and their weights: 1, or those of a mixture; 0 for padding."""
    if isinstance(targets, MixedTargets):
        (first_BM, ones_BM), (second_BM, others_BM) = weighted_classes(targets.first), weighted_classes(targets.second)
        weight_B1 = targets.weight_B[:, None]
        weights_BM = torch.cat([weight_B1 * ones_BM, (1 - weight_B1) * others_BM], 1)
        return torch.cat([first_BM, second_BM], 1), weights_BM
    indices_BM = targets if targets.ndim == 2 else targets[:, None]
    return indices_BM, (indices_BM != NO_LABEL).float()
