"""In-context learning by small attention models: closed forms against draws (chapters 5 and 8 of Z. Shi's thesis).

Linear regression (section 5.4): what a linear attention layer of rank r loses on a prompt, theorems 5.4.2 and 5.4.3.
Sparse parity (section 5.5): the optimal heads of theorem 5.5.1, on the expected prompt and on finite prompts.
Looped transformer (chapter 8): a linear layer in a loop is gradient descent, theorems 8.14 and 8.16.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Self

import numpy as np
from pydantic import Field, model_validator

from workloads.theory.context import Floats, ShippedParameters, SimulationContext

_CHUNK: Final = 20_000
"""Prompts at a time. Their number is part of the order of random draws, so it is the same for all sizes."""
_MAX_NUMBERS: Final = 1 << 27
"""Of all examples of the prompts at a time: 1 GiB, of which a few copies are held."""
_QUERIES: Final = 64
"""Queries per finite prompt of sparse parity."""


class PromptRegressionParameters(ShippedParameters):
    """Prompts (x_i, <w, x_i> + noise) with x ~ N(0, Lambda); the model has seen prompts with w ~ N(0, I)."""

    dim: int = Field(8, ge=1, le=256, description="d")
    rank: int = Field(
        4, ge=0, le=256, description="r, of the attention layer; its optimum keeps the largest eigenvalues"
    )
    signal_rank: int = Field(8, ge=1, le=256, description="directions that the evaluated w has, the largest first")
    train_prompt: int = Field(200, ge=1, description="N, examples of a prompt in training")
    prompt: int = Field(16, ge=1, le=4_096, description="M, examples of a prompt in evaluation")
    noise: float = Field(0.7, ge=0, description="sigma, standard deviation of the labels' noise")
    decay: float = Field(
        0.5, ge=0, le=4, description="eigenvalue i of Lambda is i^-decay; the thesis prints no spectrum"
    )
    draws: int = Field(200_000, ge=100, le=100_000_000, description="prompts per seed")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if max(self.rank, self.signal_rank) > self.dim:
            message = f"rank {self.rank}, signal_rank {self.signal_rank}: neither can exceed dim {self.dim}; "
            raise ValueError(message + "lower them or raise dim")
        num_prompts = min(self.draws, _CHUNK)
        size = num_prompts * (self.prompt + 1) * self.dim
        if size > _MAX_NUMBERS:
            held = f"{num_prompts:,} prompts of {self.prompt:,} + 1 examples in {self.dim} dimensions"
            raise ValueError(f"{held} take {size / (1 << 27):.2f} GiB; lower prompt or dim to at most 1 GiB")
        return self


def optimal_gains(eigenvalues_D: Floats, train_prompt: int, rank: int) -> Floats:
    """v* of theorem 5.4.1: N / ((N + 1) lambda_i + tr Lambda) for the first r directions, 0 for the others."""
    gains_D = train_prompt / ((train_prompt + 1) * eigenvalues_D + eigenvalues_D.sum())
    return np.where(np.arange(len(eigenvalues_D)) < rank, gains_D, 0.0)


def prompt_loss(eigenvalues_D: Floats, gains_D: Floats, w_D: Floats, prompt: int, noise: float) -> float:
    """Theorem 5.4.2: the mean squared error on prompts of ``prompt`` examples of the task ``w_D``."""
    energy = (w_D**2 * eigenvalues_D).sum() + noise**2
    is_kept_D = gains_D > 0
    spread = (w_D**2 * gains_D**2 * eigenvalues_D**3).sum() + energy * (gains_D**2 * eigenvalues_D**2).sum()
    missed = (w_D**2 * eigenvalues_D)[~is_kept_D].sum()
    bias = (w_D**2 * eigenvalues_D * (eigenvalues_D * gains_D - 1) ** 2)[is_kept_D].sum()
    return float(spread / prompt + missed + bias)


def simulate_prompt_regression(
    parameters: PromptRegressionParameters, seeds: Sequence[int], context: SimulationContext
) -> Iterator[Mapping[str, float]]:
    """``loss`` (mean of the draws), ``closed_form`` (theorem 5.4.2) and ``ratio``, the first by the second.

    ``excess`` and ``excess_closed_form``: what the layer of full rank loses beyond this one; for ``signal_rank`` <=
    ``rank`` the latter is theorem 5.4.3's sum. One task w ~ N(0, I) per seed.
    """
    p = parameters
    eigenvalues_D = np.arange(1, p.dim + 1, dtype=np.float64) ** -p.decay
    for seed in seeds:
        rng = np.random.default_rng(seed)
        w_D = rng.standard_normal(p.dim) * (np.arange(p.dim) < p.signal_rank)
        gains_2D = np.stack([optimal_gains(eigenvalues_D, p.train_prompt, rank) for rank in (p.rank, p.dim)])
        total_2 = np.zeros(2)
        for at in range(0, p.draws, _CHUNK):
            n = min(_CHUNK, p.draws - at)
            x_NMD = rng.standard_normal((n, p.prompt + 1, p.dim)) * np.sqrt(eigenvalues_D)
            y_NM = x_NMD @ w_D
            y_NM[:, :-1] += p.noise * rng.standard_normal((n, p.prompt))
            moment_ND = np.einsum("nm,nmd->nd", y_NM[:, :-1], x_NMD[:, :-1]) / p.prompt
            answers_N2 = (moment_ND * x_NMD[:, -1]) @ gains_2D.T
            total_2 += ((answers_N2 - y_NM[:, -1:]) ** 2).sum(0)
        loss, full_loss = total_2 / p.draws
        closed, full_closed = (prompt_loss(eigenvalues_D, gains_D, w_D, p.prompt, p.noise) for gains_D in gains_2D)
        yield {
            "loss": loss,
            "closed_form": closed,
            "ratio": loss / closed,
            "excess": full_loss - loss,
            "excess_closed_form": full_closed - closed,
        }


class PromptParityParameters(ShippedParameters):
    """Tasks y = phi_i phi_j on signs phi in {-1, 1}^d; both bits are 1 with probability 1/4 + gamma."""

    small_bits: int = Field(2, ge=1, le=6, description="nu_1; the frequent tasks use the first k = 2^nu_1 coordinates")
    large_bits: int = Field(4, ge=1, le=8, description="nu_2; d = 2^nu_2")
    gap: float = Field(0.2, gt=0, lt=0.25, description="gamma")
    prompt: int = Field(128, ge=1, le=65_536, description="M, examples of a finite prompt")
    prompts: int = Field(200, ge=1, le=1_000_000, description="finite prompts per seed, with 64 queries each")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.small_bits >= self.large_bits:
            message = f"small_bits {self.small_bits} must be less than large_bits {self.large_bits}; "
            raise ValueError(message + "lower small_bits or raise large_bits")
        return self


def parity_heads(bits: int, dim: int, gap: float) -> tuple[Floats, Floats]:
    """Theorem 5.5.1: diagonals (H, d) of the 2 (nu + 1) optimal heads on the first 2^nu coordinates, and signs (H,).

    Head i compares bit i of the two coordinates' numbers; the last head counts the bits. Each is there with both signs.
    """
    numbers_D = np.arange(dim)
    digits_BD = 2.0 * ((numbers_D >> np.arange(bits)[:, None]) & 1) - 1.0
    heads_HD = np.concatenate([digits_BD, np.full((1, dim), -float(bits))]) * (numbers_D < 2**bits) / (4 * gap)
    return np.concatenate([heads_HD, -heads_HD]), np.tile(np.append(-np.ones(bits), 1.0), 2)


def parity_scores(heads: tuple[Floats, Floats], moment_D: Floats, queries_ND: Floats) -> Floats:
    """``g = sum_h a_h relu(moment^T diag(V_h) x)`` for each query; the moment is X^T y / M."""
    diagonals_HD, signs_H = heads
    scores_N: Floats = np.maximum(queries_ND @ (moment_D * diagonals_HD).T, 0.0) @ signs_H
    return scores_N


def simulate_prompt_parity(
    parameters: PromptParityParameters, seeds: Sequence[int], context: SimulationContext
) -> Iterator[Mapping[str, float]]:
    """The optimal heads of the small and the large model.

    ``small_hinge``, ``large_hinge``: the largest hinge loss over the frequent tasks and all queries, on the expected
    prompt (0 by theorem 5.5.1); ``small_rare_accuracy``, ``large_rare_accuracy``: on the expected prompts of all
    other tasks; ``small_accuracy``, ``large_accuracy``: on finite prompts of frequent tasks; ``head_ratio``: (nu_1 +
    1) / (nu_2 + 1).
    """
    p = parameters
    dim, k = 2**p.large_bits, 2**p.small_bits
    models = {"small": parity_heads(p.small_bits, dim, p.gap), "large": parity_heads(p.large_bits, dim, p.gap)}
    pairs = list(itertools.combinations(range(dim), 2))
    frequent = [pair for pair in pairs if pair[1] < k]
    for seed in seeds:
        rng = np.random.default_rng(seed)
        tasks = [frequent[at] for at in rng.integers(len(frequent), size=p.prompts)]
        drawn = [_finite_prompt(p, task, dim, rng) for task in tasks]
        metrics = {"head_ratio": (p.small_bits + 1) / (p.large_bits + 1)}
        for name, heads in models.items():
            worst = max(float(np.max(1 - _margins(heads, pair, dim, p.gap))) for pair in frequent)
            rare = [float(np.mean(_margins(heads, pair, dim, p.gap) > 0)) for pair in pairs if pair[1] >= k]
            hits = [np.mean(parity_scores(heads, moment_D, x_ND) * y_N > 0) for moment_D, x_ND, y_N in drawn]
            metrics[f"{name}_hinge"] = max(worst, 0.0)
            metrics[f"{name}_rare_accuracy"] = float(np.mean(rare))
            metrics[f"{name}_accuracy"] = float(np.mean(hits))
        yield metrics


def _margins(heads: tuple[Floats, Floats], pair: tuple[int, int], dim: int, gap: float) -> Floats:
    """Margins y g on the expected prompt of a task, for the four values of its two coordinates; others do not count."""
    moment_D = np.zeros(dim)
    moment_D[list(pair)] = 2 * gap
    queries_4D = np.ones((4, dim))
    queries_4D[:, list(pair)] = list(itertools.product((-1.0, 1.0), repeat=2))
    return parity_scores(heads, moment_D, queries_4D) * queries_4D[:, pair[0]] * queries_4D[:, pair[1]]


def _finite_prompt(
    parameters: PromptParityParameters, pair: tuple[int, int], dim: int, rng: np.random.Generator
) -> tuple[Floats, Floats, Floats]:
    """The moment (d,) of a prompt's examples, queries (Q, d) and their labels (Q,)."""
    rows = parameters.prompt + _QUERIES
    x_ND = 2.0 * rng.integers(0, 2, (rows, dim)).astype(np.float64) - 1.0
    chances = [0.25 + parameters.gap, 0.25, 0.25, 0.25 - parameters.gap]
    corners_42 = np.array([(1.0, 1.0), (1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0)])
    x_ND[:, list(pair)] = corners_42[rng.choice(4, size=rows, p=chances)]
    y_N: Floats = x_ND[:, pair[0]] * x_ND[:, pair[1]]
    m = parameters.prompt
    moment_D: Floats = x_ND[:m].T @ y_N[:m] / m
    return moment_D, x_ND[m:].copy(), y_N[m:].copy()  # a view would keep the whole prompt


class LoopedTransformerParameters(ShippedParameters):
    """Prompts X ~ N(0, 1)^(n x d), y = X theta*, |theta*| = 1; the layer is applied T times."""

    examples: int = Field(16, ge=1, le=4_096, description="n, rows of X")
    dim: int = Field(4, ge=1, le=256, description="d")
    loops: int = Field(200, ge=1, le=100_000, description="T, applications of the layer")
    alpha: float = Field(1.0, description="the entry beside q in the query's row; not 0")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.alpha == 0:
            raise ValueError("alpha 0: the layer would see no labels; give any other number")
        if self.examples < self.dim:
            raise ValueError(
                f"examples {self.examples} < dim {self.dim}: theta* would not be determined; raise examples"
            )
        return self


def attention_layer(z_RD: Floats, rate: float) -> Floats:
    """Z - eta (M * (Z Q Z^T)) Z P with Q = I, P = diag(I_d, 0) and M = 1 in the last row's entries but the last."""
    mask_RR = np.zeros((len(z_RD), len(z_RD)))
    mask_RR[-1, :-1] = 1.0
    projection_D = np.append(np.ones(z_RD.shape[1] - 1), 0.0)
    changed_RD: Floats = z_RD - rate * (mask_RR * (z_RD @ z_RD.T)) @ (z_RD * projection_D)
    return changed_RD


def simulate_looped_transformer(
    parameters: LoopedTransformerParameters, seeds: Sequence[int], context: SimulationContext
) -> Iterator[Mapping[str, float]]:
    """``deviation``: the largest |output - alpha theta_t| over loops and entries, theta_t by descent at 1 / |X^T X|;
    ``condition_number`` of X^T X; ``violations``: loops in which the bound exp(-t / (2 kappa)) of theorem
    8.16 does not hold; ``log_error``: the natural logarithm of |theta_T - theta*|^2 (at least 1e-300).
    """
    p = parameters
    for seed in seeds:
        rng = np.random.default_rng(seed)
        x_ND, target_D = rng.standard_normal((p.examples, p.dim)), rng.standard_normal(p.dim)
        target_D /= np.linalg.norm(target_D)
        y_N = x_ND @ target_D
        eigenvalues_D = np.linalg.eigvalsh(x_ND.T @ x_ND)
        rate, kappa = 1 / eigenvalues_D[-1], eigenvalues_D[-1] / eigenvalues_D[0]
        z_RD = np.vstack([np.column_stack([x_ND, y_N]), np.append(np.zeros(p.dim), p.alpha)])
        theta_D, deviation, violations = np.zeros(p.dim), 0.0, 0
        for loop in range(1, p.loops + 1):
            z_RD = attention_layer(z_RD, rate)
            theta_D = theta_D - rate * x_ND.T @ (x_ND @ theta_D - y_N)
            output_D = -z_RD[-1, :-1]
            deviation = max(deviation, float(np.abs(output_D - p.alpha * theta_D).max()))
            bound = abs(p.alpha) * (np.exp(-loop / (2 * kappa)) + 1e-12)
            violations += bool(abs(output_D @ target_D - p.alpha) > bound)
        yield {
            "deviation": deviation,
            "condition_number": float(kappa),
            "violations": float(violations),
            "log_error": float(np.log(max(((theta_D - target_D) ** 2).sum(), 1e-300))),
        }
