"""Sums modulo p by one hidden layer: single frequencies and the largest margin (chapter 4 of Z. Shi's thesis).

Inputs are all (a_1, ..., a_k) of Z_p^k, the label is their sum modulo p, and the network is
``f(a) = sum_i (sum_j u_{i,j}(a_j))^k w_i`` (section 4.2), trained with cross-entropy + lambda * |theta|_{2,k+1}, where
``|theta|_{2,k+1}^{k+1} = sum_i |theta_i|_2^{k+1}`` over neurons (appendix C.10 has the recipe).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional

from workloads.theory.context import ShippedParameters, SimulationContext
from workloads.theory.two_layer import adam, no_rows, stream, train

_MAX_NUMBERS: Final = 1 << 29
"""Of an array of inputs x neurons in training: 2 GiB in float32; a step holds several of them."""
_NUMBERS_AT_ONCE: Final = 1 << 27
"""Of such an array where the network is only judged: 1 GiB in float64."""


class ModularAdditionParameters(ShippedParameters):
    """Defaults are a reduced size of the thesis' (k, p, m) = (3, 97, 1536): full batches, all inputs in training.

    The thesis' own sizes have too many inputs for full batches.
    """

    terms: int = Field(2, ge=2, le=4, description="k, numbers that are added")
    modulus: int = Field(23, ge=3, le=97, description="p, an odd prime")
    network: Literal["trained", "constructed"] = Field(
        "trained", description="trained, or constructed to have the largest margin"
    )
    neurons: int = Field(88, ge=1, le=10_000, description="m, of the trained network; the thesis has 2^(2k-2) (p - 1)")
    decay: float = Field(0.005, ge=0, le=1, description="lambda, the weight of |theta|_{2,k+1}")
    learning_rate: float = Field(0.005, gt=0, le=1, description="of Adam (0.9, 0.98)")
    steps: int = Field(2_000, ge=1, le=1_000_000, description="full-batch steps; the thesis prints none")
    init_std: float = Field(
        0.3, gt=0, le=10, description="standard deviation of initial weights; the thesis prints none"
    )
    train_share: float = Field(
        1.0, gt=0, le=1, description="share of the inputs that are trained on; 0.5 in the thesis"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if any(self.modulus % divisor == 0 for divisor in range(2, math.isqrt(self.modulus) + 1)):
            message = f"modulus {self.modulus} is not prime: frequencies would not be alike; "
            raise ValueError(message + "take a prime number, as 23")
        if self.modulus**self.terms > 300_000:
            message = f"{self.modulus}^{self.terms} inputs are more than the 300,000 that are held in memory; "
            raise ValueError(message + "take fewer terms or a smaller modulus")
        num_train = _num_train(self)
        if self.network == "trained" and num_train * self.neurons > _MAX_NUMBERS:
            size_gib = num_train * self.neurons / (1 << 28)
            message = f"a step holds several arrays of {num_train:,} inputs x {self.neurons:,} neurons, "
            message += f"{size_gib:.1f} GiB each; at most {_MAX_NUMBERS >> 28} GiB are supported: "
            raise ValueError(message + "lower neurons, terms, modulus or train_share")
        return self


def _num_train(parameters: ModularAdditionParameters) -> int:
    return max(round(parameters.train_share * int(parameters.modulus**parameters.terms)), 1)


def largest_margin(terms: int, modulus: int) -> float:
    """gamma* = 2 k! / ((2k + 2)^((k+1)/2) (p - 1) p^((k-1)/2)): the largest margin of |theta|_{2,k+1} <= 1 (theorem of
    section 4.3).
    """
    k, p = terms, modulus
    return 2.0 * math.factorial(k) / (math.pow(2 * k + 2, (k + 1) / 2) * (p - 1) * math.pow(p, (k - 1) / 2))


@dataclass(slots=True, kw_only=True, eq=False)
class PolynomialNetwork:
    """u (k, p, M) and w (M, p)."""

    u_KPM: Tensor
    w_MP: Tensor

    @classmethod
    def constructed(cls, terms: int, modulus: int) -> Self:
        """Neurons ``u_j(a) = cos(theta_j + 2 pi f a / p)``, ``w(c) = cos(sum_j theta_j + 2 pi f c / p)`` of every
        frequency f.

        The phases are a grid of k + 2 angles in each direction: a mean over it is exact for all harmonics up to k +
        1.
        """
        angles = torch.arange(terms + 2, dtype=torch.float64) * (2 * math.pi / (terms + 2))
        phases_QK = torch.tensor(list(itertools.product(angles.tolist(), repeat=terms)), dtype=torch.float64)
        numbers_P = torch.arange(modulus, dtype=torch.float64)
        frequencies_F = torch.arange(1, (modulus - 1) // 2 + 1, dtype=torch.float64)
        turns_PF = 2 * math.pi / modulus * numbers_P[:, None] * frequencies_F
        u_KPFQ = torch.cos(turns_PF[None, :, :, None] + phases_QK.T[:, None, None, :])
        w_PFQ = torch.cos(turns_PF[:, :, None] + phases_QK.sum(1))
        return cls(u_KPM=u_KPFQ.flatten(2), w_MP=w_PFQ.flatten(1).T)

    @classmethod
    def initial(cls, parameters: ModularAdditionParameters, seed: int, device: torch.device) -> Self:
        """Normal weights."""
        p, m = parameters, parameters.neurons
        generator = stream(seed, 0)
        u_KPM = torch.randn(p.terms, p.modulus, m, generator=generator) * p.init_std
        return cls(
            u_KPM=u_KPM.to(device), w_MP=(torch.randn(m, p.modulus, generator=generator) * p.init_std).to(device)
        )

    def scores(self, inputs_NK: Tensor) -> Tensor:
        """(N, p)."""
        sums_NM = sum((u_PM[inputs_NK[:, j]] for j, u_PM in enumerate(self.u_KPM)), start=torch.zeros(()))
        return sums_NM ** len(self.u_KPM) @ self.w_MP

    def margins(self, inputs_NK: Tensor, labels_N: Tensor) -> Tensor:
        """The label's score less the largest other one, (N,); in chunks of inputs."""
        rows = max(1, _NUMBERS_AT_ONCE // len(self.w_MP))
        chunks = zip(torch.split(inputs_NK, rows), torch.split(labels_N, rows), strict=True)
        return torch.cat([margins(self.scores(inputs_BK), labels_B) for inputs_BK, labels_B in chunks])

    def norm_power(self) -> Tensor:
        """|theta|_{2,k+1}^{k+1}."""
        squares_M = self.u_KPM.square().sum((0, 1)) + self.w_MP.square().sum(1)
        return ((squares_M + 1e-30) ** ((len(self.u_KPM) + 1) / 2)).sum()

    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Of every u_{i,j}: the share of its largest frequency's power (all but frequency 0), and that frequency; (k,
        M).
        """
        power_KFM = torch.fft.rfft(self.u_KPM, dim=1).abs().square()[:, 1:]
        largest_KM, at_KM = power_KFM.max(1)
        return largest_KM / power_KFM.sum(1).clamp_min(1e-30), at_KM + 1


def all_inputs(terms: int, modulus: int) -> tuple[Tensor, Tensor]:
    """Inputs (p^k, k) and their sums modulo p, int64."""
    inputs_NK = torch.cartesian_prod(*[torch.arange(modulus)] * terms)
    return inputs_NK, inputs_NK.sum(1) % modulus


def margins(scores_NP: Tensor, labels_N: Tensor) -> Tensor:
    """The label's score less the largest other one, (N,)."""
    label_N = scores_NP.gather(1, labels_N[:, None])[:, 0]
    others_NP = scores_NP.scatter(1, labels_N[:, None], -torch.inf)
    return label_N - others_NP.max(1).values


def simulate_modular_addition(
    parameters: ModularAdditionParameters, seeds: Sequence[int], context: SimulationContext
) -> Iterator[Mapping[str, float]]:
    """``margin_ratio`` (the normalised margin by gamma*), ``accuracy``, ``test_accuracy`` (of inputs left out of
    training; of all if none is), ``max_power`` (mean share of a neuron's largest frequency) and ``frequency_share``
    (the share of the (p - 1) / 2 frequencies that are the largest of some u).
    """
    p = parameters
    for seed in seeds:
        inputs_NK, labels_N = (tensor.to(context.device) for tensor in all_inputs(p.terms, p.modulus))
        if p.network == "constructed":
            network, held_out_N = PolynomialNetwork.constructed(p.terms, p.modulus), torch.ones(len(labels_N)) > 0
            inputs_NK, labels_N = inputs_NK.cpu(), labels_N.cpu()
        else:
            order_N = torch.randperm(len(labels_N), generator=stream(seed, 1)).to(context.device)
            num_train = _num_train(p)
            network = _trained(p, seed, inputs_NK[order_N[:num_train]], labels_N[order_N[:num_train]])
            held_out_N = torch.ones(len(labels_N), dtype=torch.bool, device=context.device)
            held_out_N[order_N[:num_train]] = num_train == len(labels_N)
        gaps_N = network.margins(inputs_NK, labels_N)
        shares_KM, frequencies_KM = network.spectrum()
        yield {
            "margin_ratio": float(gaps_N.min() / network.norm_power()) / largest_margin(p.terms, p.modulus),
            "accuracy": float((gaps_N > 0).float().mean()),
            "test_accuracy": float((gaps_N[held_out_N] > 0).float().mean()),
            "max_power": float(shares_KM.mean()),
            "frequency_share": len(set(frequencies_KM.flatten().tolist())) / ((p.modulus - 1) // 2),
        }


def _trained(
    parameters: ModularAdditionParameters, seed: int, inputs_NK: Tensor, labels_N: Tensor
) -> PolynomialNetwork:
    network = PolynomialNetwork.initial(parameters, seed, inputs_NK.device)

    def loss(_: Tensor) -> Tensor:
        norm = network.norm_power() ** (1 / (parameters.terms + 1))
        return functional.cross_entropy(network.scores(inputs_NK), labels_N) + parameters.decay * norm

    optimizer = adam(parameters.learning_rate, betas=(0.9, 0.98))
    train([network.u_KPM, network.w_MP], loss, no_rows(parameters.steps), optimizer)
    return network
