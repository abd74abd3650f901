"""Few directions generalise to another domain: nuclear norm of features, and the rank-bounded solution.

Source: chapter 6 of Z. Shi's thesis ("domain generalization via nuclear norm regularization"): the two-dimensional
example of section 6.3.1, and proposition 6.3 of section 6.4 (proofs in appendix E.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from workloads.theory.context import Floats, ShippedParameters, SimulationContext
from workloads.theory.two_layer import fit_margins, logistic, no_rows, sgd, sign_accuracy, stream, train


class NuclearNormParameters(ShippedParameters):
    """The 50-step regime: at convergence both methods separate by the stable coordinate alone, and do not differ."""

    method: Literal["erm", "nuclear"] = Field(
        "erm", description="erm: logistic loss; nuclear: with the nuclear norm added"
    )
    weight: float = Field(0.1, ge=0, le=10, description="lambda, of |Phi(X)|_* / sqrt(n); unprinted")
    samples: int = Field(500, ge=2, le=100_000, description="n, training samples; unprinted")
    test_samples: int = Field(10_000, ge=2, le=1_000_000, description="fresh samples of each domain")
    agreement: float = Field(
        0.7, ge=0.5, le=1, description="Pr[x_2 has the label's sign] in training, and Pr[not] out of domain"
    )
    init_std: float = Field(0.1, gt=0, le=10, description="of the 2 x 2 feature matrix and the head; unprinted")
    learning_rate: float = Field(0.1, gt=0, le=10, description="of full-batch gradient descent; unprinted")
    steps: int = Field(50, ge=1, le=100_000, description="unprinted; the text says until convergence")


def simulate_nuclear_norm(
    parameters: NuclearNormParameters, seeds: Sequence[int], context: SimulationContext
) -> Iterator[Mapping[str, float]]:
    """``in_domain`` and ``out_of_domain`` accuracy of a linear feature map with a linear head, and ``reliance``: the
    boundary's weight of x_2 by that of x_1 (an accuracy out of domain of 1 - (agreement / 2) * reliance for values in
    [0, 1]). The test samples of the two domains are paired: they differ in the sign of some x_2 alone.
    """
    p = parameters
    for seed in seeds:
        x_N2, y_N = _plane(p.samples, p.agreement, stream(seed, 0))
        generator = stream(seed, 1)
        map_22, head_2 = (torch.randn(shape, generator=generator) * p.init_std for shape in ((2, 2), (2,)))
        weight = p.weight / p.samples**0.5 if p.method == "nuclear" else 0.0
        _descend(p, (map_22, head_2), (x_N2, y_N), weight)
        boundary_2 = map_22.T @ head_2
        tests = [_plane(p.test_samples, share, stream(seed, 2)) for share in (p.agreement, 1 - p.agreement)]
        inside, outside = (sign_accuracy(test_N2 @ boundary_2, signs_N) for test_N2, signs_N in tests)
        yield {"in_domain": inside, "out_of_domain": outside, "reliance": float(boundary_2[1] / boundary_2[0])}


def _plane(num_samples: int, agreement: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """x_1 has the label's sign, x_2 with probability ``agreement``; sizes are uniform in [0, 1]."""
    signs_N = (torch.rand(num_samples, generator=generator) < 0.5).float() * 2 - 1
    sizes_N2 = torch.rand(num_samples, 2, generator=generator)
    agrees_N = (torch.rand(num_samples, generator=generator) < agreement).float() * 2 - 1
    return sizes_N2 * signs_N[:, None] * torch.stack([torch.ones_like(agrees_N), agrees_N], dim=1), signs_N


def _descend(
    parameters: NuclearNormParameters, model: tuple[Tensor, Tensor], samples: tuple[Tensor, Tensor], weight: float
) -> None:
    (map_22, head_2), (x_N2, y_N) = model, samples

    def loss(_: Tensor) -> Tensor:
        features_N2 = x_N2 @ map_22.T
        value = logistic(features_N2 @ head_2, y_N)
        return value + weight * torch.linalg.svdvals(features_N2).sum() if weight else value

    train([map_22, head_2], loss, no_rows(parameters.steps), sgd(parameters.learning_rate))


class RankBoundParameters(ShippedParameters):
    """Proposition 6.3: r stable features and d - r that have the label's sign with probability 1/2 + gamma."""

    method: Literal["l2", "rank"] = Field(
        "l2",
        description="l2: logistic loss + (lambda / 2) |w|^2; rank: at most r features, those of largest mean margins",
    )
    stable: int = Field(60, ge=21, le=2_000, description="r, invariant features")
    gap: float = Field(0.42, gt=0, lt=0.5, description="gamma, more than 3 / sqrt(r)")
    dim: int = Field(405, ge=22, le=20_000, description="d, more than r / gamma^2 + r")
    weight: float = Field(0.01, gt=0, le=10, description="lambda")
    samples: int = Field(10_000, ge=10, le=1_000_000, description="training samples")
    test_samples: int = Field(10_000, ge=10, le=1_000_000, description="fresh samples of each domain")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.gap <= 3 / self.stable**0.5:
            raise ValueError(f"gap {self.gap} must be more than 3 / sqrt(stable) = {3 / self.stable**0.5:.3f}")
        if self.dim <= self.stable / self.gap**2 + self.stable:
            least = self.stable / self.gap**2 + self.stable
            raise ValueError(f"dim {self.dim} must be more than stable / gap^2 + stable = {least:.1f}")
        return self


def simulate_rank_bound(
    parameters: RankBoundParameters, seeds: Sequence[int], context: SimulationContext
) -> Iterator[Mapping[str, float]]:
    """``in_domain`` and ``out_of_domain`` accuracy, ``bound`` (e^{-r/10}, on the accuracy of l2 out of domain),
    ``weight_ratio`` (the mean weight of stable features by that of the others, 0 if these have none) and
    ``ratio_bound`` (3 / (4 gamma)).
    """
    p = parameters
    for seed in seeds:
        rng = np.random.default_rng(seed)
        z_ND = _agreements(p, p.samples, p.gap, rng)
        used_D = np.ones(p.dim, dtype=bool)
        if p.method == "rank":
            used_D = np.argsort(np.argsort(-z_ND.mean(0), kind="stable"), kind="stable") < p.stable
        w_D = np.zeros(p.dim)
        w_D[used_D] = fit_margins(z_ND[:, used_D], p.weight)
        accuracies = [float((_agreements(p, p.test_samples, gap, rng) @ w_D > 0).mean()) for gap in (p.gap, -p.gap)]
        others = float(w_D[p.stable :].mean())
        yield {
            "in_domain": accuracies[0],
            "out_of_domain": accuracies[1],
            "bound": float(np.exp(-p.stable / 10)),
            "weight_ratio": float(w_D[: p.stable].mean()) / others if others else 0.0,
            "ratio_bound": 3 / (4 * p.gap),
        }


def _agreements(parameters: RankBoundParameters, num_samples: int, gap: float, rng: np.random.Generator) -> Floats:
    """Features times the label, (N, d): stable ones uniform in [0, 1]; others, too, with probability 1/2 + gap, else in
    [-1, 0].
    """
    sizes_ND = rng.random((num_samples, parameters.dim))
    flipped_ND = rng.random((num_samples, parameters.dim - parameters.stable)) >= 0.5 + gap
    sizes_ND[:, parameters.stable :][flipped_ND] -= 1.0
    return sizes_ND
