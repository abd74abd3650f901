"""A network with one hidden layer under an unhinged loss: clusters of one label part while it learns.

Source: S1, section 7, theorem 7.1. Four classes have orthogonal means of norm tau and noise N(0, kappa^2 I), with
label +1 for the first two and -1 for the others, n / 4 samples each. ``f(x) = sum_r s(<w_r, x>)`` with m hidden units,
a second layer of ones, ``s(z) = z^3 / 3`` for ``|z| <= 1`` and slope 1 beyond, learns by gradient descent of
``-y f(x) / 2`` from ``w ~ N(0, omega^2 I)``. The paper's example: kappa = 1, tau = d^0.52, omega = d^-0.53, m = log d,
n = d^0.32.

The theorem is asymptotic, and its constants are not printed: descent runs for ``duration / d`` (learning rate times
steps), and what is reported is the ratio of distances between classes of one label to those within a class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from workloads.theory.context import Floats, ShippedParameters, SimulationContext


class UnhingedParameters(ShippedParameters):
    """What ``unhinged-clusters`` takes."""

    d: int = Field(ge=16, description="Dimension of the samples.")
    duration: float = Field(20.0, gt=0, description="Learning rate times steps, in units of 1 / d.")
    steps: int = Field(200, ge=1, description="Steps of gradient descent.")


def simulate_unhinged(
    parameters: UnhingedParameters, seeds: Sequence[int], context: SimulationContext
) -> Iterator[Mapping[str, float]]:
    """For each seed ``ratio_before``, ``ratio_after`` and ``gain``, the second over the first."""
    for seed in seeds:
        before, after = _ratios(parameters, np.random.default_rng(seed))
        yield {"ratio_before": before, "ratio_after": after, "gain": after / before}


def _ratios(p: UnhingedParameters, rng: np.random.Generator) -> tuple[float, float]:
    num_each = max(2, round(p.d**0.32 / 4))
    classes_N = np.repeat(np.arange(4), num_each)
    x_ND = rng.normal(size=(len(classes_N), p.d))
    x_ND[np.arange(len(classes_N)), classes_N] += p.d**0.52
    weights_MD = rng.normal(size=(max(2, round(math.log(p.d))), p.d)) * p.d**-0.53
    # Weights move in the span of the samples, so the units' inputs and the samples' products say all.
    inputs_MN, products_NN = weights_MD @ x_ND.T, x_ND @ x_ND.T
    signs_N = np.where(classes_N < 2, 1.0, -1.0)
    before = _ratio(inputs_MN, classes_N)
    rate = p.duration / p.d / p.steps / (2 * len(classes_N))
    for _ in range(p.steps):
        slopes_MN = np.where(np.abs(inputs_MN) <= 1, inputs_MN**2, 1.0)
        inputs_MN = inputs_MN + rate * (slopes_MN * signs_N) @ products_NN
    return before, _ratio(inputs_MN, classes_N)


def _ratio(inputs_MN: Floats, classes_N: NDArray[np.int64]) -> float:
    """Mean distance between samples of the two classes of a label, over that between two samples of a class."""
    size = np.abs(inputs_MN)
    hidden_NM = np.where(size <= 1, inputs_MN**3 / 3, np.sign(inputs_MN) * (size - 2 / 3)).T
    distances_NN = np.linalg.norm(hidden_NM[:, None] - hidden_NM[None], axis=2)
    is_same_NN = (classes_N[:, None] == classes_N[None]) & ~np.eye(len(classes_N), dtype=bool)
    is_partner_NN = classes_N[:, None] == (classes_N[None] ^ 1)
    return float(distances_NN[is_partner_NN].mean() / distances_NN[is_same_NN].mean())
