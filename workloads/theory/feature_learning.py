"""Features learned from inputs in two gradient steps: parity, interval and code labels, by six methods.

Source: Shi, Wei, Liang, "A Theoretical Analysis on Feature Learning in Neural Networks: Emergence from Inputs and
Advantage over Fixed Features" (ICLR 2022), sections 3 and 6, appendices E.1 to E.3; the same text is chapter 2 of
Z. Shi's thesis. An input is ``x = (M phi - E[M phi]) / sigma`` with an orthonormal dictionary M (d x D) and hidden bits
phi; the label depends on k relevant bits. All methods share the network ``g(x) = sum_i a_i sigma(<w_i, x> + b_i)``,
``sigma`` = :func:`~workloads.theory.two_layer.clipped_relu`, with 2m neurons and the hinge loss.

The inputs lie in the span of M, so the network is simulated in R^D: ``M^T w`` of normal weights is normal, gradients
stay in the span, and what initial weights have outside of it counts in their cosine only, where it is a chi-square
variable with d - D degrees of freedom. This is exact in distribution, so accuracies do not depend on d.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional

from workloads.theory.context import ShippedParameters, SimulationContext
from workloads.theory.two_layer import (
    adam,
    batches,
    clipped_relu,
    hinge,
    largest_cosine,
    logistic,
    no_rows,
    sgd,
    sign_accuracy,
    smoothed_clipped_relu,
    stream,
    train,
    unit_rows,
)

_CHUNK: Final = 5_000
"""Samples at a time where the whole data set passes through the network."""
_CLUSTERED: Final = 0.9
"""The absolute cosine to the mean of y x from which on a neuron counts as clustered."""
_NO_GAP: Final = 1e-9

Method = Literal["network", "ntk", "random_features", "one_step", "two_steps", "unstructured"]


class FeatureLearningParameters(ShippedParameters):
    """What labels mean, how much data there is, and which method learns; defaults are the parity table's."""

    labels: Literal["parity", "interval", "codes"] = Field(
        "parity",
        description="parity: an odd number of relevant bits is +1; interval: their sum lies in `interval`; "
        "codes: 50 random patterns of the relevant bits per label",
    )
    method: Method = Field(
        "network",
        description="network: all steps on both layers; ntk: the network linearised at its initial weights; "
        "random_features: the initial first layer is frozen; one_step, two_steps: the first layer is frozen after so "
        "many gradient steps; unstructured: the network on uniform bits",
    )
    dim: int = Field(500, ge=2, le=100_000, description="d, the inputs' dimension, at least `dictionary`")
    dictionary: int = Field(100, ge=2, le=10_000, description="D, the number of hidden bits")
    relevant: int = Field(5, ge=1, le=1_000, description="k, the number of relevant bits; odd for parity")
    irrelevant_rate: float = Field(
        0.5, gt=0, le=0.5, description="p_o: Pr[irrelevant bit = 1]; for parity the share of uniform inputs, too"
    )
    relevant_rate: float = Field(2 / 3, gt=0, lt=1, description="interval: Pr[relevant bit = 1]")
    interval: tuple[int, int] = Field((20, 30), description="interval: least and greatest sum with the label +1")
    codes_per_label: int = Field(50, ge=1, le=10_000, description="codes: patterns of each label")
    negative_share: float = Field(0.5, gt=0, lt=1, description="parity: the share of samples with the label -1")
    neurons: int = Field(300, ge=1, le=20_000, description="m; the network has 2m neurons, in pairs that cancel")
    samples: int = Field(50_000, ge=100, le=1_000_000, description="training samples; the first two steps use all")
    test_samples: int = Field(10_000, ge=100, le=1_000_000, description="fresh samples for the accuracy")
    batch: int = Field(1_000, ge=1, le=100_000, description="samples of a step after the second one")
    steps: int = Field(600, ge=1, le=100_000, description="T, steps after the second one")
    schedule: Literal["adam", "printed"] = Field(
        "adam",
        description="after the second step: adam at `learning_rate`, or the printed rates of gradient descent; ntk "
        "has no such steps and uses adam at `ntk_learning_rate` always",
    )
    learning_rate: float = Field(0.01, gt=0, le=10, description="of Adam; the paper prints none")
    head_learning_rate: float = Field(
        0.1, gt=0, le=10, description="of Adam where the first layer is frozen; the paper prints none"
    )
    ntk_learning_rate: float = Field(1e-4, gt=0, le=10, description="of Adam for ntk; the paper prints none")
    feature_scale: float = Field(
        20.0,
        gt=0,
        le=1e12,
        description="factor of the first layer's weights after the second step (adam only); the paper prints none",
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.relevant > self.dictionary or self.dictionary > self.dim:
            sizes = f"relevant {self.relevant}, dictionary {self.dictionary}, dim {self.dim}"
            message = f"{sizes}: relevant bits are part of the dictionary, which spans part of the inputs; "
            raise ValueError(message + "lower relevant or dictionary, or raise dim")
        if self.labels == "parity" and self.relevant % 2 == 0:
            message = f"relevant {self.relevant} is even: all bits 0 and all bits 1 would have the same label; "
            raise ValueError(message + "take an odd number")
        if self.labels == "codes" and self.method == "unstructured":
            raise ValueError("uniform bits have no label where codes define labels: leave out the method unstructured")
        if self.labels == "interval" and abs(label_gap(self)) < _NO_GAP:
            message = f"interval {list(self.interval)}: the label says nothing of a single bit (its gap is 0); "
            raise ValueError(message + "choose another interval, or more relevant bits")
        if self.labels != "parity" and self.negative_share != 0.5:
            raise ValueError(f"negative_share {self.negative_share} is for parity labels only; leave it out")
        return self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabelledBits:
    """Centred and scaled hidden bits (the relevant ones first) and their labels."""

    inputs_ND: Tensor
    signs_N: Tensor
    scale: float
    """sigma: the root of the bits' summed variances."""


def label_gap(parameters: FeatureLearningParameters) -> float:
    """The gap gamma = E[y phi_i] - E[y] E[phi_i] of a relevant bit, for balanced labels (assumption A1); for codes its
    mean size.
    """
    if parameters.labels == "parity":
        return (1.0 - parameters.irrelevant_rate) / 2
    if parameters.labels == "codes":
        return 0.5 * math.sqrt(2 * 0.25 / parameters.codes_per_label) * math.sqrt(2 / math.pi)
    rate, rest = parameters.relevant_rate, parameters.relevant - 1
    low, high = parameters.interval
    weights = [math.comb(rest, n) * rate**n * (1 - rate) ** (rest - n) for n in range(rest + 1)]
    with_bit = sum(weight for n, weight in enumerate(weights) if low <= n + 1 <= high)
    without_bit = sum(weight for n, weight in enumerate(weights) if low <= n <= high)
    return float(2 * rate * (1 - rate) * (with_bit - without_bit))


def draw_bits(
    parameters: FeatureLearningParameters, num_samples: int, generator: torch.Generator, codes_CK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Hidden bits (N, D) with the relevant ones first, and labels (N,): both float, labels +1 or -1."""
    k, is_structured = parameters.relevant, parameters.method != "unstructured"
    uniform_ND = torch.rand(num_samples, parameters.dictionary, generator=generator)
    if parameters.labels == "interval":
        rates_D = torch.full((parameters.dictionary,), parameters.irrelevant_rate if is_structured else 0.5)
        rates_D[:k] = parameters.relevant_rate if is_structured else 0.5
        bits_ND = (uniform_ND < rates_D).float()
        sums_N = bits_ND[:, :k].sum(1)
        inside_N = (sums_N >= parameters.interval[0]) & (sums_N <= parameters.interval[1])
        return bits_ND, inside_N.float() * 2 - 1
    if codes_CK is not None:
        bits_ND = (uniform_ND < parameters.irrelevant_rate).float()
        chosen_N = torch.randint(len(codes_CK), (num_samples,), generator=generator)
        bits_ND[:, :k] = codes_CK[chosen_N]
        return bits_ND, (chosen_N < len(codes_CK) // 2).float() * 2 - 1
    signs_N = (torch.rand(num_samples, generator=generator) >= parameters.negative_share).float() * 2 - 1
    bits_ND = (uniform_ND < 0.5).float()
    parity_N = bits_ND[:, : k - 1].sum(1) % 2
    bits_ND[:, k - 1] = ((signs_N > 0).float() - parity_N).abs()
    if is_structured:
        rate = parameters.irrelevant_rate
        is_aligned_N = torch.rand(num_samples, generator=generator) >= rate
        bits_ND[is_aligned_N, :k] = (signs_N[is_aligned_N, None] > 0).float()
        bits_ND[is_aligned_N, k:] = (uniform_ND[is_aligned_N, k:] < rate / (2 - 2 * rate)).float()
    return bits_ND, signs_N


class _Data:
    """The training and test samples of a seed, on the device."""

    def __init__(self, parameters: FeatureLearningParameters, seed: int, device: torch.device) -> None:
        codes_CK = None
        if parameters.labels == "codes":
            shape = (2 * parameters.codes_per_label, parameters.relevant)
            codes_CK = (torch.rand(shape, generator=stream(seed, 0)) < 0.5).float()
        bits_ND, signs_N = draw_bits(parameters, parameters.samples, stream(seed, 1), codes_CK)
        mean_D = bits_ND.mean(0)
        scale = float((bits_ND - mean_D).square().mean(0).sum().sqrt())
        self.train = self._labelled(bits_ND, signs_N, mean_D, scale, device)
        bits_ND, signs_N = draw_bits(parameters, parameters.test_samples, stream(seed, 2), codes_CK)
        self.test = self._labelled(bits_ND, signs_N, mean_D, scale, device)

    @staticmethod
    def _labelled(bits_ND: Tensor, signs_N: Tensor, mean_D: Tensor, scale: float, device: torch.device) -> LabelledBits:
        return LabelledBits(inputs_ND=((bits_ND - mean_D) / scale).to(device), signs_N=signs_N.to(device), scale=scale)


@dataclass(slots=True, kw_only=True, eq=False)
class _Network:
    """The weights; the second half of the neurons starts as the first half with the sign of ``head_M`` turned."""

    weights_MD: Tensor
    bias_M: Tensor
    head_M: Tensor

    @classmethod
    def initial(cls, parameters: FeatureLearningParameters, data: LabelledBits, generator: torch.Generator) -> Self:
        k, half = parameters.relevant, parameters.neurons
        weights_MD = torch.randn(half, parameters.dictionary, generator=generator) / k
        bias_M = torch.randn(half, generator=generator) / k**2
        head_M = torch.randn(half, generator=generator) * data.scale**2 / (label_gap(parameters) * k**2)
        device = data.inputs_ND.device
        return cls(
            weights_MD=weights_MD.repeat(2, 1).to(device),
            bias_M=bias_M.repeat(2).to(device),
            head_M=torch.cat([head_M, -head_M]).to(device),
        )

    def scores(self, inputs_ND: Tensor) -> Tensor:
        return clipped_relu(inputs_ND @ self.weights_MD.T + self.bias_M) @ self.head_M

    def negative_gradient(self, data: LabelledBits, noise_std: float) -> tuple[Tensor, Tensor]:
        """Of the mean hinge loss with noise of that size in the neurons, by the weights and by the head."""
        weights_MD, head_M = torch.zeros_like(self.weights_MD), torch.zeros_like(self.head_M)
        for inputs_ND, signs_N in zip(
            torch.split(data.inputs_ND, _CHUNK), torch.split(data.signs_N, _CHUNK), strict=True
        ):
            z_NM = inputs_ND @ self.weights_MD.T + self.bias_M
            active_NM, slope_NM = smoothed_clipped_relu(z_NM, noise_std)
            pull_N = signs_N * (signs_N * (active_NM @ self.head_M) < 1.0)
            head_M += pull_N @ active_NM
            weights_MD += (slope_NM * pull_N[:, None]).T @ inputs_ND
        return weights_MD * self.head_M[:, None] / len(data.signs_N), head_M / len(data.signs_N)


def first_steps(parameters: FeatureLearningParameters, network: _Network, data: LabelledBits, num_steps: int) -> None:
    """The first one or two full-batch steps; their weight decay 1 / (2 eta) replaces the weights by the gradient.

    Decays and noise of the full theorem (appendix of the thesis): no decay of the head at first; then eta_2 = 1 with a
    decay of 1/2 for both layers; noise 1 / k^2 in both. The theorem prints eta_1 = gamma^2 sigma^2 / (k m^3), its lemma
    gamma^2 sigma / (k m^3): the code follows the lemma.
    """
    k, m = parameters.relevant, parameters.neurons
    rate = label_gap(parameters) ** 2 * data.scale / (k * m**3)
    weights_MD, head_M = network.negative_gradient(data, 1 / k**2)
    network.weights_MD, network.head_M = rate * weights_MD, network.head_M + rate * head_M
    if num_steps > 1:
        network.weights_MD, network.head_M = network.negative_gradient(data, 1 / k**2)


def simulate_feature_learning(
    parameters: FeatureLearningParameters, seeds: Sequence[int], context: SimulationContext
) -> Iterator[Mapping[str, float]]:
    """Accuracies in [0, 1], the largest cosine of a neuron to the sum of the relevant atoms, and controls.

    Metrics: ``train_accuracy``, ``test_accuracy``; ``cosine`` (of the first layer that the method uses);
    ``majority_rate`` (the share of the more frequent label in the test samples); ``clustered_share`` (neurons whose
    cosine to the mean of y x is beyond 0.9 in size).
    """
    for seed in seeds:
        data = _Data(parameters, seed, context.device)
        network = _Network.initial(parameters, data.train, stream(seed, 3))
        outside_M = _squared_norm_outside(parameters, stream(seed, 4)).to(context.device)
        if parameters.method not in ("ntk", "random_features"):
            first_steps(parameters, network, data.train, 1 if parameters.method == "one_step" else 2)
            outside_M = torch.zeros_like(outside_M)
        scores = _fit(parameters, network, data.train, stream(seed, 5))
        target_D = (torch.arange(parameters.dictionary) < parameters.relevant).float().to(context.device)
        weights_MD = torch.cat([network.weights_MD, outside_M.sqrt()[:, None]], dim=1)
        yield {
            "train_accuracy": sign_accuracy(scores(data.train.inputs_ND), data.train.signs_N),
            "test_accuracy": sign_accuracy(scores(data.test.inputs_ND), data.test.signs_N),
            "cosine": largest_cosine(weights_MD, functional.pad(target_D, (0, 1))),
            "majority_rate": 0.5 + abs(float((data.test.signs_N > 0).float().mean()) - 0.5),
            "clustered_share": _clustered_share(network.weights_MD, data.train),
        }


def _squared_norm_outside(parameters: FeatureLearningParameters, generator: torch.Generator) -> Tensor:
    """Squared norms (2m,) of what initial weights have outside of the span of the dictionary."""
    freedom = parameters.dim - parameters.dictionary
    if freedom == 0:
        return torch.zeros(2 * parameters.neurons)
    outside_MD = torch.randn(parameters.neurons, freedom, generator=generator) / parameters.relevant
    return outside_MD.square().sum(1).repeat(2)


def _fit(
    parameters: FeatureLearningParameters, network: _Network, data: LabelledBits, generator: torch.Generator
) -> Callable[[Tensor], Tensor]:
    """Train as the method says; returns the scores (N,) of inputs (N, D)."""
    rows = batches(len(data.signs_N), min(parameters.batch, len(data.signs_N)), parameters.steps, generator)
    if parameters.method == "ntk":
        return _fit_linearised(parameters, network, data, rows)
    is_frozen = parameters.method in ("random_features", "one_step", "two_steps")
    optimizer = adam(parameters.head_learning_rate if is_frozen else parameters.learning_rate)
    if parameters.schedule == "printed":
        optimizer = sgd(parameters.relevant**2 / (parameters.steps * parameters.neurons ** (1 / 3)))
    elif parameters.method != "random_features":
        network.weights_MD = network.weights_MD * parameters.feature_scale
    if parameters.method in ("network", "unstructured"):
        weights = [network.weights_MD, network.head_M]
        train(weights, lambda at: hinge(network.scores(data.inputs_ND[at]), data.signs_N[at]), rows, optimizer)
        return network.scores
    parts = torch.split(data.inputs_ND, _CHUNK)
    features_NM = torch.cat([clipped_relu(part @ network.weights_MD.T + network.bias_M) for part in parts])
    train([network.head_M], lambda at: hinge(features_NM[at] @ network.head_M, data.signs_N[at]), rows, optimizer)
    return network.scores


def _fit_linearised(
    parameters: FeatureLearningParameters, network: _Network, data: LabelledBits, rows: Iterator[Tensor]
) -> Callable[[Tensor], Tensor]:
    """The neural tangent kernel's model: linear in the changes of both layers, at the initial weights."""
    weights_MD, head_M = torch.zeros_like(network.weights_MD), torch.zeros_like(network.head_M)

    def scores(inputs_ND: Tensor) -> Tensor:
        z_NM = inputs_ND @ network.weights_MD.T + network.bias_M
        slope_NM = ((z_NM > 0) & (z_NM < 1)) * network.head_M
        return clipped_relu(z_NM) @ head_M + (slope_NM * (inputs_ND @ weights_MD.T)).sum(1)

    loss = lambda at: hinge(scores(data.inputs_ND[at]), data.signs_N[at])  # noqa: E731
    train([weights_MD, head_M], loss, rows, adam(parameters.ntk_learning_rate))
    return scores


def _clustered_share(weights_MD: Tensor, data: LabelledBits) -> float:
    mean_D = data.signs_N @ data.inputs_ND
    cosines_M = unit_rows(weights_MD) @ functional.normalize(mean_D, dim=0)
    return float((cosines_M.abs() > _CLUSTERED).float().mean())


class HypercubeParameters(ShippedParameters):
    """Appendix E.3.2: 2^k clusters at the corners of a cube, labelled by the product of their signs; k <= d."""

    dim: int = Field(100, ge=2, le=10_000, description="d")
    relevant: int = Field(4, ge=1, le=8, description="k")
    noise: float = Field(
        1.0, gt=0, le=10, description="sigma_r; the noise of a coordinate has the variance sigma_r^2 k / d"
    )
    neurons: int = Field(800, ge=1, le=20_000, description="m")
    init_std: float = Field(0.02, gt=0, le=10, description="of the first layer; unprinted")
    batch: int = Field(500, ge=1, le=100_000, description="fresh samples of a step; unprinted")
    steps: int = Field(800, ge=1, le=100_000, description="of Adam; unprinted")
    learning_rate: float = Field(0.003, gt=0, le=10, description="unprinted")
    test_samples: int = Field(10_000, ge=100, le=1_000_000, description="fresh samples for the accuracy")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.relevant > self.dim:
            message = f"relevant {self.relevant} of dim {self.dim}: relevant coordinates are some of the inputs; "
            raise ValueError(message + "lower relevant or raise dim")
        return self


def simulate_hypercube(
    parameters: HypercubeParameters, seeds: Sequence[int], context: SimulationContext
) -> Iterator[Mapping[str, float]]:
    """``covered``: mean over the 2^k centres of the largest cosine of a neuron to it, ``worst_covered`` the least of
    them, ``covered_at_start`` before training; ``test_accuracy``, and ``bayes_accuracy``, of the signs of the k
    relevant coordinates.
    """
    p = parameters
    for seed in seeds:
        generator = stream(seed, 0)
        weights_MD = (torch.randn(p.neurons, p.dim, generator=generator) * p.init_std).to(context.device)
        head_M = (torch.randint(2, (p.neurons,), generator=generator) * 2.0 - 1).to(context.device) / p.neurons**0.5
        corners_CK = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * p.relevant).reshape(-1, p.relevant)
        centres_CD = functional.pad(corners_CK, (0, p.dim - p.relevant)).to(context.device)
        at_start = _cover(weights_MD, centres_CD)
        samples = stream(seed, 1)

        def loss(_: Tensor) -> Tensor:
            inputs_ND, signs_N = _cube(p, p.batch, samples, context.device)  # noqa: B023 - called within the iteration
            return logistic((inputs_ND @ weights_MD.T).relu() @ head_M, signs_N)  # noqa: B023

        train([weights_MD, head_M], loss, no_rows(p.steps), adam(p.learning_rate))
        inputs_ND, signs_N = _cube(p, p.test_samples, samples, context.device)
        at_end = _cover(weights_MD, centres_CD)
        yield {
            "covered": float(at_end.mean()),
            "worst_covered": float(at_end.min()),
            "covered_at_start": float(at_start.mean()),
            "test_accuracy": sign_accuracy((inputs_ND @ weights_MD.T).relu() @ head_M, signs_N),
            "bayes_accuracy": sign_accuracy(inputs_ND[:, : p.relevant].sign().prod(1), signs_N),
        }


def _cube(
    parameters: HypercubeParameters, num_samples: int, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Samples (N, d), in the coordinates of the dictionary, and labels (N,)."""
    p = parameters
    inputs_ND = torch.randn(num_samples, p.dim, generator=generator) * p.noise * (p.relevant / p.dim) ** 0.5
    signs_NK = torch.randint(2, (num_samples, p.relevant), generator=generator) * 2.0 - 1
    inputs_ND[:, : p.relevant] += signs_NK
    return inputs_ND.to(device), signs_NK.prod(1).to(device)


def _cover(weights_MD: Tensor, centres_CD: Tensor) -> Tensor:
    """The largest cosine of a neuron to each centre, (C,)."""
    return (functional.normalize(centres_CD, dim=1) @ functional.normalize(weights_MD, dim=1).T).max(1).values
