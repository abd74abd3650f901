"""Two-layer networks of theory papers: random streams, activations with their noise averaged out, losses, training.

Shapes: N samples, D inputs, M neurons, C classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import expit
from torch import Tensor
from torch.nn import functional

from workloads.theory.context import Floats

BatchLoss = Callable[[Tensor], Tensor]
"""Rows of the data set, int64 of shape (B,) -> the mean loss over them."""


def stream(seed: int, *details: int) -> torch.Generator:
    """A generator on the CPU for one use of a seed; ``details`` tell the uses apart.

    Draws are made on the CPU and moved, so that they do not depend on the device.
    """
    words = np.random.SeedSequence(seed, spawn_key=details).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0]) >> 1)


def clipped_relu(z: Tensor) -> Tensor:
    """``min(1, max(z, 0))``."""
    return z.clamp(0.0, 1.0)


def smoothed_clipped_relu(z: Tensor, noise_std: float) -> tuple[Tensor, Tensor]:
    """The mean of ``clipped_relu(z + xi)`` over ``xi ~ N(0, noise_std^2)`` in closed form, and its derivative by z.

    The derivative is ``Pr[0 < z + xi < 1]``.
    """
    low, low_probability = _smoothed_relu(z, noise_std)
    high, high_probability = _smoothed_relu(z - 1.0, noise_std)
    return low - high, low_probability - high_probability


def _smoothed_relu(z: Tensor, noise_std: float) -> tuple[Tensor, Tensor]:
    """The mean of ``max(z + xi, 0)`` and its derivative, ``Pr[z + xi > 0]``."""
    scaled = z / noise_std
    density = torch.exp(-0.5 * scaled.square()) / math.sqrt(2 * math.pi)
    probability = _normal_cdf(scaled)
    return z * probability + noise_std * density, probability


def _normal_cdf(z: Tensor) -> Tensor:
    return 0.5 * (1.0 + torch.erf(z / math.sqrt(2.0)))


def hinge(scores_N: Tensor, signs_N: Tensor) -> Tensor:
    """Mean of ``max(0, 1 - y g(x))``; y is +1 or -1."""
    return (1.0 - signs_N * scores_N).clamp_min(0.0).mean()


def logistic(scores_N: Tensor, signs_N: Tensor) -> Tensor:
    """Mean of ``log(1 + exp(-y g(x)))``; y is +1 or -1."""
    return functional.softplus(-signs_N * scores_N).mean()


def sign_accuracy(scores_N: Tensor, signs_N: Tensor) -> float:
    """The share of samples whose score has the sign of the label; a score of 0 is wrong."""
    return float((scores_N * signs_N > 0).float().mean())


def unit_rows(weights_MD: Tensor) -> Tensor:
    """The weights of each neuron divided by their length, however short they are; zeros stay zeros.

    ``normalize`` divides by 1e-12 at least, and one gradient step of a wide network leaves less. Powers of two bring
    every row to the size of 1 first: they round nothing, so rows of usual lengths keep their bits.
    """
    exponents_M1 = torch.frexp(weights_MD.abs().amax(dim=1, keepdim=True)).exponent
    return functional.normalize(torch.ldexp(weights_MD, -exponents_M1.clamp_min(-126)), dim=1)


def largest_cosine(weights_MD: Tensor, direction_D: Tensor) -> float:
    """The largest cosine between a neuron's weights and a direction; that of a neuron without weights is 0."""
    return float((unit_rows(weights_MD) @ functional.normalize(direction_D, dim=0)).max())


def batches(num_samples: int, batch_size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows of ``steps`` batches: epochs in random orders, whose incomplete last batches are left out."""
    order, at = torch.empty(0, dtype=torch.int64), 0
    for _ in range(steps):
        if at + batch_size > len(order):
            order, at = torch.randperm(num_samples, generator=generator), 0
        yield order[at : at + batch_size]
        at += batch_size


def no_rows(steps: int) -> Iterator[Tensor]:
    """``steps`` empty batches, for losses of the whole data set or of fresh draws."""
    return itertools.repeat(torch.empty(0, dtype=torch.int64), steps)


def train(
    tensors: Sequence[Tensor],
    loss: BatchLoss,
    rows: Iterator[Tensor],
    optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
) -> None:
    """Minimise a loss over ``tensors`` in place, one step per batch."""
    for tensor in tensors:
        tensor.requires_grad = True
    steps = optimizer(tensors)
    for batch in rows:
        steps.zero_grad(set_to_none=True)
        loss(batch).backward()  # type: ignore[no-untyped-call]
        steps.step()
    for tensor in tensors:
        tensor.requires_grad = False


def adam(
    learning_rate: float, betas: tuple[float, float] = (0.9, 0.999)
) -> Callable[[Sequence[Tensor]], torch.optim.Optimizer]:
    """Adam at a fixed rate."""
    return lambda tensors: torch.optim.Adam(tensors, lr=learning_rate, betas=betas, foreach=True)


def sgd(learning_rate: float) -> Callable[[Sequence[Tensor]], torch.optim.Optimizer]:
    """Gradient descent at a fixed rate."""
    return lambda tensors: torch.optim.SGD(tensors, lr=learning_rate)


def fit_margins(margins_ND: Floats, weight: float) -> Floats:
    """The minimum over w of mean log(1 + exp(-<w, z>)) + (weight / 2) |w|^2, for z = features times labels; float64."""

    def objective(w_D: Floats) -> tuple[float, Floats]:
        scores_N = margins_ND @ w_D
        value = np.logaddexp(0.0, -scores_N).mean() + weight / 2 * w_D @ w_D
        return float(value), weight * w_D - expit(-scores_N) @ margins_ND / len(margins_ND)

    start_D = np.zeros(margins_ND.shape[1])
    found = minimize(objective, start_D, jac=True, method="L-BFGS-B", options={"maxiter": 500, "ftol": 1e-12})
    w_D: Floats = found.x
    return w_D
