"""Contrastive learning of sparse codes with and without random masks, without normalisation and without a head.

Source: Wen, Li, "Toward Understanding the Feature Learning Process of Self-supervised Contrastive Learning" (ICML
2021), sections 2 and 3, appendices A.1 and F. Inputs are ``x = M z + xi``: M (d_1 x d) orthonormal, z sparse signs,
xi normal noise that is larger than the signal. Two disjoint random masks of one input share the code but not the
noise, so masked pairs teach the code and unmasked pairs the noise. The paper prints theorems and rates, but no
constants of a simulation: all sizes below are choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional

from workloads.theory.context import ShippedParameters, SimulationContext
from workloads.theory.two_layer import fit_margins, stream

_COVERED: Final = 0.5
"""The absolute cosine of a neuron to an atom from which on the atom counts as covered."""
_RIDGE: Final = 1e-3
"""Of the linear probes, beside mean losses on features of variance 1."""


class SparseCodingParameters(ShippedParameters):
    """Every value is a choice within the paper's rates; K must be large, or noise of the steps hides the difference."""

    augmentation: Literal["mask", "none"] = Field(
        "mask", description="mask: x+ = 2 D x and x++ = 2 (I - D) x with Bernoulli(1/2) masks D; none: x with itself"
    )
    atoms: int = Field(32, ge=2, le=1_024, description="d")
    dim: int = Field(256, ge=2, le=16_384, description="d_1")
    active: float = Field(2.0, gt=0, description="mean number of non-zero codes; Pr(|z_j| = 1) = active / d")
    noise_variance: float = Field(0.12, ge=0, le=10, description="sigma_xi^2; twice the codes' variance or more")
    neurons: int = Field(64, ge=1, le=16_384, description="m")
    init_std: float = Field(0.05, gt=0, le=10, description="sigma_0")
    temperature: float = Field(8.0, gt=0, le=1_000, description="tau")
    decay: float = Field(0.002, ge=0, le=1, description="lambda, of the squared weights")
    learning_rate: float = Field(0.3, gt=0, le=100, description="eta")
    pairs: int = Field(2_048, ge=2, le=1_000_000, description="K, fresh pairs of a step")
    negatives: int = Field(256, ge=1, le=1_000_000, description="negatives of a step, without masks")
    free_steps: int = Field(200, ge=0, le=1_000_000, description="T_1, steps with b = 0")
    steps: int = Field(
        500, ge=1, le=1_000_000, description="all steps; b = sqrt(2 ln d / d) |w| after T_1, and growing"
    )
    probe_samples: int = Field(
        4_000, ge=10, le=1_000_000, description="for training a probe, and as many for testing it"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.atoms > self.dim or self.active > self.atoms:
            message = f"atoms {self.atoms}: must be at most dim {self.dim} and at least active {self.active:g}; "
            raise ValueError(message + "change atoms, raise dim or lower active")
        return self


class _Source:
    """Draws of one seed: the dictionary, and inputs with their codes."""

    def __init__(self, parameters: SparseCodingParameters, seed: int, device: torch.device) -> None:
        self._parameters, self._device = parameters, device
        square_DA = torch.randn(parameters.dim, parameters.atoms, generator=stream(seed, 0))
        self.dictionary_DA = torch.linalg.qr(square_DA).Q.to(device)
        self._generator = stream(seed, 1)

    def inputs(self, num: int) -> tuple[Tensor, Tensor]:
        """Inputs x (N, d_1) and codes z (N, d)."""
        p = self._parameters
        uniform_NA = torch.rand(num, p.atoms, generator=self._generator).to(self._device)
        rate = p.active / (2 * p.atoms)
        codes_NA = (uniform_NA < rate).float() - (uniform_NA > 1 - rate).float()
        noise_ND = torch.randn(num, p.dim, generator=self._generator).to(self._device)
        return codes_NA @ self.dictionary_DA.T + p.noise_variance**0.5 * noise_ND, codes_NA

    def pair(self) -> tuple[Tensor, Tensor]:
        """x+ and x++, (K, d_1) each."""
        x_ND, _ = self.inputs(self._parameters.pairs)
        if self._parameters.augmentation == "none":
            return x_ND, x_ND
        mask_ND = torch.randint(2, x_ND.shape, generator=self._generator, dtype=torch.uint8).to(self._device)
        return 2 * x_ND * mask_ND, 2 * x_ND * (1 - mask_ND)


def features(inputs_ND: Tensor, weights_MD: Tensor, bias_M: Tensor) -> Tensor:
    """``relu(<w, x> - b) - relu(-<w, x> - b)``, (N, M)."""
    return _shrink(inputs_ND @ weights_MD.T, bias_M)


def train_contrastive(parameters: SparseCodingParameters, source: _Source, seed: int) -> tuple[Tensor, Tensor]:
    """Weights (M, d_1) and biases (M,) after gradient descent with the bias schedule of appendix A.1."""
    p = parameters
    device = source.dictionary_DA.device
    weights_MD = (torch.randn(p.neurons, p.dim, generator=stream(seed, 2)) * p.init_std).to(device)
    bias_M = torch.zeros(p.neurons, device=device)
    largest = math.log(p.atoms) / p.atoms**0.5
    for step in range(p.steps):
        norm_M = weights_MD.norm(dim=1)
        if step == p.free_steps:
            bias_M = math.sqrt(2 * math.log(p.atoms) / p.atoms) * norm_M
        weights_MD = weights_MD - p.learning_rate * _gradient(p, source, weights_MD, bias_M)
        if step >= p.free_steps:
            growth_M = (weights_MD.norm(dim=1) / norm_M - 1).clamp_min(p.learning_rate / p.atoms)
            bias_M = torch.where(bias_M <= largest, bias_M * (1 + growth_M), bias_M)
    return weights_MD, bias_M


def _gradient(parameters: SparseCodingParameters, source: _Source, weights_MD: Tensor, bias_M: Tensor) -> Tensor:
    """Of the mean of ``-tau log(e^{s+ / tau} / (e^{s+ / tau} + sum e^{s- / tau}))``, s = <f(x+), stop f(x')>, and the
    decay.
    """
    p = parameters
    anchor_ND, positive_ND = source.pair()
    negative_ND, _ = source.inputs(p.negatives)
    z_NM = anchor_ND @ weights_MD.T
    anchors_NM = _shrink(z_NM, bias_M)
    positives_NM = anchors_NM if positive_ND is anchor_ND else features(positive_ND, weights_MD, bias_M)
    negatives_NM = features(negative_ND, weights_MD, bias_M)
    similarity_NB = torch.cat([(anchors_NM * positives_NM).sum(1, keepdim=True), anchors_NM @ negatives_NM.T], dim=1)
    share_NB = torch.softmax(similarity_NB / p.temperature, dim=1)
    pull_NM = share_NB[:, 1:] @ negatives_NM - (1 - share_NB[:, :1]) * positives_NM
    return (pull_NM * (z_NM.abs() > bias_M)).T @ anchor_ND / p.pairs + 2 * p.decay * weights_MD


def simulate_sparse_coding(
    parameters: SparseCodingParameters, seeds: Sequence[int], context: SimulationContext
) -> Iterator[Mapping[str, float]]:
    """``span_share`` (mean share of |w_i|^2 in span(M)), ``covered_share`` (atoms with a neuron of absolute cosine >
    0.5), ``mean_cosine`` (mean over neurons of the largest absolute cosine to an atom); linear probes on frozen
    features and, as controls with the prefix ``raw_``, on x: ``accuracy`` of sign <w*, z>, ``error`` of <w*, z> by
    its variance.
    """
    for seed in seeds:
        source = _Source(parameters, seed, context.device)
        weights_MD, bias_M = train_contrastive(parameters, source, seed)
        cosines_MA = (functional.normalize(weights_MD, dim=1) @ source.dictionary_DA).abs()
        drawn = [source.inputs(parameters.probe_samples) for _ in range(2)]
        target_A = (0.5 + torch.rand(parameters.atoms, generator=stream(seed, 3))).to(context.device)
        learned = [features(x_ND, weights_MD, bias_M) for x_ND, _ in drawn]
        answers = [codes_NA @ target_A for _, codes_NA in drawn]
        probes = _probe(learned, answers)
        raw = {f"raw_{name}": value for name, value in _probe([x_ND for x_ND, _ in drawn], answers).items()}
        yield {
            "span_share": float(cosines_MA.square().sum(1).mean()),
            "covered_share": float((cosines_MA.max(0).values > _COVERED).float().mean()),
            "mean_cosine": float(cosines_MA.max(1).values.mean()),
            **probes,
            **raw,
        }


def _shrink(z_NM: Tensor, bias_M: Tensor) -> Tensor:
    return z_NM - z_NM.clamp(-bias_M, bias_M)


def _probe(inputs: Sequence[Tensor], answers: Sequence[Tensor]) -> dict[str, float]:
    """Trained on the first, tested on the second set; samples with the answer 0 have no sign and count for the error
    only.
    """
    std_M = inputs[0].std(0).clamp_min(1e-6)
    train_NM, test_NM = ((part / std_M).double() for part in inputs)
    train_N, test_N = (part.double() for part in answers)
    gram_MM = train_NM.T @ train_NM / len(train_N) + _RIDGE * torch.eye(
        len(std_M), dtype=torch.float64, device=std_M.device
    )
    linear_M = torch.linalg.solve(gram_MM, train_NM.T @ train_N / len(train_N))
    signed_NM = (train_NM * train_N.sign()[:, None])[train_N != 0]
    probe_M = torch.from_numpy(fit_margins(signed_NM.cpu().numpy(), _RIDGE)).to(std_M.device)
    is_signed_N = test_N != 0
    hits_N = (test_NM @ probe_M * test_N)[is_signed_N] > 0
    error = (test_NM @ linear_M - test_N).square().mean() / test_N.square().mean()
    return {"accuracy": float(hits_N.float().mean()), "error": float(error)}
