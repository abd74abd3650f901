"""A two-layer network that learns coarse or fine labels: which features does it respond to afterwards?

Source: S0, appendix B, theorems 5.1 and 5.2. An input has P patches in R^d. Superclass + or - has a common feature
``v`` and, for each of its k subclasses, a subclass feature; all are orthonormal. A patch holds, with probability s/P,
``alpha`` times the common feature; else, with probability s/P, ``alpha`` times the subclass feature; else small
distractors, multiples in [0, gamma] of the features of the other superclass. Gaussian noise is added to each patch.
The network is ``F_c = sum_r sum_p relu(<w_cr, x_p> + b_cr)`` with its own neurons for each class, trained by SGD of the
softmax cross-entropy on fresh batches; after each step ``b -= |w_new - w_old| / ln(d)^5``.

What differs from the paper: nothing is fine-tuned after fine training, and no hard samples (without a common feature)
are drawn. Its statements are asymptotic, too: its initial bias leaves 1.5e-5 of the neurons active at
d = 64, so the bias is a parameter in units of the initial spread; widths, batches and rates are finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from workloads.theory.context import ShippedParameters, SimulationContext


class GranularityParameters(ShippedParameters):
    """What ``two-layer-granularity`` takes."""

    k: int = Field(ge=1, description="Subclasses of each of the two superclasses; 2 + 2 k features must fit into d.")
    labels: Literal["coarse", "fine"] = Field(description="Train on the 2 superclasses or on all 2 k subclasses.")
    d: int = Field(48, ge=4, description="Dimension of a patch.")
    patches: int = Field(12, ge=2, description="P, patches of an input.")
    expected_patches: float = Field(3.0, gt=0, description="s: common-feature patches of an input, on average.")
    noise: float = Field(0.02, ge=0, description="Standard deviation of the noise in each coordinate.")
    distractor: float = Field(0.05, ge=0, description="gamma: largest multiple of a distracting feature.")
    strength_spread: float = Field(0.1, ge=0, lt=1, description="iota: alpha^2 lies in [1 - iota, 1 + iota].")
    neurons: int = Field(32, ge=1, description="Neurons of each class.")
    initial_std: float = Field(0.003, gt=0, description="sigma_0: spread of the initial weights.")
    initial_bias: float = Field(1.0, ge=0, description="The initial bias is - initial_bias * sigma_0.")
    batch: int = Field(128, ge=2, description="Samples of a batch, as many of each subclass.")
    steps: int = Field(60, ge=0, description="Steps of SGD.")
    lr: float = Field(0.5, gt=0, description="Learning rate.")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if 2 + 2 * self.k > self.d:
            raise ValueError(f"d = {self.d} has no room for {2 + 2 * self.k} features; raise d or lower k")
        if self.expected_patches > self.patches:
            message = f"an input has {self.patches} patches, so that {self.expected_patches:g} cannot be expected; "
            raise ValueError(message + "lower expected_patches or raise patches")
        return self


def simulate_granularity(
    parameters: GranularityParameters, seeds: Sequence[int], context: SimulationContext
) -> Iterator[Mapping[str, float]]:
    """For each seed ``sub_to_common``: response to a subclass feature over that to the common one; and both alone.

    A network that does not respond to the common feature has no ratio.
    """
    for seed in seeds:
        generator = torch.Generator(device="cpu").manual_seed(seed)
        yield _Run(parameters, generator, context.device).metrics()


class _Run:
    """One network of one seed; features are the first 2 + 2 k unit vectors, as rotations change nothing."""

    def __init__(self, parameters: GranularityParameters, generator: torch.Generator, device: torch.device) -> None:
        self._p, self._generator, self._device = parameters, generator, device
        self._num_classes = 2 if parameters.labels == "coarse" else 2 * parameters.k
        shape = (self._num_classes * parameters.neurons, parameters.d)
        self._weights_MD = (torch.randn(shape, generator=generator) * parameters.initial_std).to(device)
        self._biases_M = torch.full((shape[0],), -parameters.initial_bias * parameters.initial_std, device=device)

    def metrics(self) -> dict[str, float]:
        for _ in range(self._p.steps):
            self._step(*self._batch())
        common, sub = self._responses()
        ratio = {"sub_to_common": sub / common} if common else {}
        return {**ratio, "common_response": common, "sub_response": sub}

    def _batch(self) -> tuple[Tensor, Tensor]:
        """Patches (N, P, d) and subclasses (N,), from 0 for + to 2 k - 1; those below k are +."""
        p, generator = self._p, self._generator
        each = max(1, p.batch // (2 * p.k))
        subclasses_N = torch.arange(2 * p.k).repeat_interleave(each)
        supers_N = subclasses_N // p.k
        shape, rate = (len(subclasses_N), p.patches), p.expected_patches / p.patches
        drawn_NP = torch.rand(shape, generator=generator)
        is_common_NP = drawn_NP < rate
        # Every sample has the common feature: hard samples, which lack it, are not trained on.
        first_N = torch.randint(p.patches, (len(subclasses_N), 1), generator=generator)
        is_common_NP |= ~is_common_NP.any(1, keepdim=True) & (torch.arange(p.patches) == first_N)
        is_sub_NP = ~is_common_NP & (drawn_NP < rate + (1 - rate) * rate)
        spread_NP = 1 + p.strength_spread * (2 * torch.rand(shape, generator=generator) - 1)
        alphas_NP = spread_NP.sqrt() * (is_common_NP | is_sub_NP)
        features_NP = torch.where(is_common_NP, supers_N[:, None], 2 + subclasses_N[:, None])
        x_NPD = torch.randn((*shape, p.d), generator=generator) * p.noise
        x_NPD.scatter_add_(2, features_NP[..., None], alphas_NP[..., None])
        # Distractors: the features of the other superclass, in patches without a feature of their own.
        weights_NPF = torch.rand((*shape, 1 + p.k), generator=generator) * p.distractor
        weights_NPF *= ~(is_common_NP | is_sub_NP)[..., None]
        others_N = 1 - supers_N
        others_NF = torch.cat([others_N[:, None], 2 + others_N[:, None] * p.k + torch.arange(p.k)], dim=1)
        x_NPD.scatter_add_(2, others_NF[:, None].expand(-1, p.patches, -1), weights_NPF)
        return x_NPD.to(self._device), subclasses_N.to(self._device)

    def _step(self, x_NPD: Tensor, subclasses_N: Tensor) -> None:
        p = self._p
        targets_N = subclasses_N if p.labels == "fine" else subclasses_N // p.k
        num, flat_QD = len(x_NPD), x_NPD.flatten(0, 1)
        before_QM = torch.addmm(self._biases_M, flat_QD, self._weights_MD.T)
        before_NPCR = before_QM.view(num, p.patches, self._num_classes, p.neurons)
        errors_NC = before_NPCR.relu().sum((1, 3)).softmax(1)
        errors_NC[torch.arange(num), targets_N] -= 1
        gradient_NPCR = (before_NPCR > 0) * (errors_NC / num)[:, None, :, None]
        change_MD = -p.lr * (gradient_NPCR.view_as(before_QM).T @ flat_QD)
        self._weights_MD += change_MD
        self._biases_M -= change_MD.norm(dim=1) / math.log(p.d) ** 5

    def _responses(self) -> tuple[float, float]:
        """Mean response of each class to its common feature, and to its subclass features."""
        p = self._p
        at_features_MF = (self._weights_MD[:, : 2 + 2 * p.k] + self._biases_M[:, None]).relu()
        response_CF = at_features_MF.view(self._num_classes, p.neurons, -1).sum(1).double()
        subclasses = torch.arange(2 * p.k)
        classes = subclasses if p.labels == "fine" else subclasses // p.k
        common = response_CF[classes, subclasses // p.k].mean()
        sub = response_CF[classes, 2 + subclasses].mean()
        return float(common), float(sub)
