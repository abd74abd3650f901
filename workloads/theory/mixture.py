"""A Gaussian mixture with coarse labels: do the hidden representations keep the clusters apart that share a label?

Source: S1, appendix B and B.1. Cluster c has its mean from N(0, sigma^2 I) and its samples from N(mean, I); two
clusters share each coarse label. A network with one hidden layer of rectified units learns the coarse labels by
full-batch gradient descent of the cross-entropy. ``D_ij`` is the mean squared distance of hidden representations
between clusters i and j, and MSDR the mean of D_ij over pairs of one label, over the mean of D_ii: about 1 if nothing
of the clusters is left. In half of the labels the clusters may be similar: both means from N(mu, tau^2 I), and mu from
N(0, sigma^2 I).

Learning rate, initial weights and loss are not printed: ours are 0.1, torch's usual ones, and the cross-entropy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from pydantic import Field
from torch import Tensor

from workloads.theory.context import ShippedParameters, SimulationContext


class MixtureParameters(ShippedParameters):
    """What ``mixture-msdr`` takes."""

    variance: float = Field(gt=0, description="sigma^2 of the means in each coordinate; that of the samples is 1.")
    similar_variance: float | None = Field(
        None, ge=0, description="tau^2: in half of the labels both means lie so close to each other; null = in none."
    )
    clusters: int = Field(8, ge=4, multiple_of=4, description="Clusters; pairs of them share a label.")
    samples: int = Field(500, ge=2, description="Samples of each cluster.")
    d_in: int = Field(128, ge=1, description="Dimension of the samples; the paper's is 512.")
    d_hidden: int = Field(128, ge=1, description="Hidden units; the paper has 512.")
    weight_decay: float = Field(0.0, ge=0, description="Factor of L2 weight decay of both layers; 0 = none.")
    lr: float = Field(0.1, gt=0, description="Learning rate.")
    steps: int = Field(1000, ge=0, description="Steps of gradient descent.")


def simulate_mixture(
    parameters: MixtureParameters, seeds: Sequence[int], context: SimulationContext
) -> Iterator[Mapping[str, float]]:
    """For each seed ``msdr``, ``train_accuracy``, and, where labels have similar clusters, ``similar_msdr``."""
    for seed in seeds:
        generator = torch.Generator(device="cpu").manual_seed(seed)
        x_ND = _samples(parameters, generator).to(context.device)
        labels_N = torch.arange(len(x_ND), device=context.device) // (2 * parameters.samples)
        hidden_NH, accuracy = _train(parameters, x_ND, labels_N, generator)
        distances_CC = _distances(hidden_NH.double().view(parameters.clusters, parameters.samples, -1))
        yield {"train_accuracy": accuracy, **_ratios(parameters, distances_CC)}


def _samples(p: MixtureParameters, generator: torch.Generator) -> Tensor:
    """Samples (clusters * samples, d_in), cluster after cluster; clusters 2 i and 2 i + 1 share label i."""
    means_CD = torch.randn((p.clusters, p.d_in), generator=generator) * math.sqrt(p.variance)
    if p.similar_variance is not None:
        half = p.clusters // 2
        centers_KD = means_CD[:half:2].repeat_interleave(2, dim=0)
        spread = math.sqrt(p.similar_variance)
        means_CD[:half] = centers_KD + spread * torch.randn((half, p.d_in), generator=generator)
    noise_ND = torch.randn((p.clusters * p.samples, p.d_in), generator=generator)
    return means_CD.repeat_interleave(p.samples, dim=0) + noise_ND


def _train(p: MixtureParameters, x_ND: Tensor, labels_N: Tensor, generator: torch.Generator) -> tuple[Tensor, float]:
    """Hidden representations (N, d_hidden) after training, and the share of samples whose label is right."""
    num_labels = p.clusters // 2
    first = _uniform((p.d_hidden, p.d_in), p.d_in, generator).to(x_ND.device)
    second = _uniform((num_labels, p.d_hidden), p.d_hidden, generator).to(x_ND.device)
    biases = [
        _uniform((size,), fan_in, generator).to(x_ND.device)
        for size, fan_in in ((p.d_hidden, p.d_in), (num_labels, p.d_hidden))
    ]
    for _ in range(p.steps):
        hidden_NH = torch.addmm(biases[0], x_ND, first.T).relu_()
        errors_NK = torch.addmm(biases[1], hidden_NH, second.T).softmax(1)
        errors_NK[torch.arange(len(x_ND)), labels_N] -= 1
        errors_NK /= len(x_ND)
        back_NH = (errors_NK @ second).mul_(hidden_NH > 0)
        gradients = (back_NH.T @ x_ND, errors_NK.T @ hidden_NH)
        first -= p.lr * (gradients[0] + p.weight_decay * first)
        second -= p.lr * (gradients[1] + p.weight_decay * second)
        biases[0] -= p.lr * back_NH.sum(0)
        biases[1] -= p.lr * errors_NK.sum(0)
    hidden_NH = torch.addmm(biases[0], x_ND, first.T).relu_()
    guesses_N = torch.addmm(biases[1], hidden_NH, second.T).argmax(1)
    return hidden_NH, float((guesses_N == labels_N).double().mean())


def _uniform(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    """Uniform in +- 1 / sqrt(fan_in), as ``torch.nn.Linear`` begins."""
    return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(fan_in)


def _distances(hidden_CSH: Tensor) -> Tensor:
    """D (C, C): mean squared distances between samples of two clusters, a sample with itself included."""
    means_CH, squares_C = hidden_CSH.mean(1), hidden_CSH.square().sum(2).mean(1)
    return squares_C[:, None] + squares_C[None] - 2 * means_CH @ means_CH.T


def _ratios(p: MixtureParameters, distances_CC: Tensor) -> dict[str, float]:
    between = distances_CC[torch.arange(0, p.clusters, 2), torch.arange(1, p.clusters, 2)]
    within = distances_CC.diagonal().mean()
    if p.similar_variance is None:
        return {"msdr": float(between.mean() / within)}
    half = p.clusters // 4
    return {"msdr": float(between[half:].mean() / within), "similar_msdr": float(between[:half].mean() / within)}
