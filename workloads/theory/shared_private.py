"""Diversity against label efficiency in a linear model (section 7.2.2 and appendix F.2 of Z. Shi's thesis).

T tasks share s coordinates S of z, and each has r - s private ones P_t. An input of task t has z ~ N(0, 1) on S and
P_t, 0 on other tasks' coordinates, and spurious coordinates U ~ N(0, 1) that are drawn anew for the positive x+. The
features are W z with |W| <= 1 and |W|_F <= sqrt(r) (the mixing matrix M is orthonormal, so it is left out); the
contrastive loss is log(1 + exp(-phi(x)^T phi(x+))), as the mean of phi(x-) is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

import numpy as np
from pydantic import Field
from scipy.linalg import svd
from scipy.special import expit

from workloads.theory.context import Floats, ShippedParameters, SimulationContext
from workloads.theory.two_layer import fit_margins

_ROUNDS: Final = 3
"""Alternating projections onto the ball around the initial weights and the spectral ball."""


class _Tasks(ShippedParameters):
    tasks: int = Field(10, ge=1, le=100, description="T, pretraining tasks; the target is the first")
    shared: int = Field(5, ge=1, le=100, description="s, coordinates that all tasks share")
    private: int = Field(5, ge=1, le=100, description="r - s, coordinates of one task only")

    @property
    def rank(self) -> int:
        """r, also the bound of |W|_F^2."""
        return self.shared + self.private


class DiversityParameters(_Tasks):
    """Contrastive pretraining on all tasks, on the target alone, or on the target from the universal solution on."""

    pretraining: Literal["universal", "specific", "regularized"] = Field(
        "universal",
        description="universal: an even mixture of the tasks; specific: the target task; regularized: contrastive "
        "regularisation on the target task within |W - W*|_F <= gamma of the universal solution W*",
    )
    gamma: float = Field(0.5, ge=0, le=10, description="regularized: gamma")
    spurious: int = Field(25, ge=0, le=1_000, description="coordinates that are drawn anew for x+")
    batch: int = Field(256, ge=1, le=100_000, description="pairs of a step; unprinted")
    learning_rate: float = Field(
        1.0, gt=0, le=100, description="at the first step, falling linearly to a tenth; unprinted"
    )
    steps: int = Field(1_500, ge=1, le=1_000_000, description="projected gradient steps on fresh pairs; unprinted")


class LabelEfficiencyParameters(_Tasks):
    """A probe on the features of proposition F.8, for a target label sign(<u, z>) with random u."""

    shared: int = Field(10, ge=1, le=100, description="s, coordinates that all tasks share")
    private: int = Field(10, ge=1, le=100, description="r - s, coordinates of one task only")
    labels: int = Field(20, ge=1, le=100_000, description="m, labelled samples of the target task")
    weight: float = Field(0.2, gt=0, le=100, description="of (1/2) |w|^2 beside the summed logistic loss; unprinted")


def universal_weights(tasks: int, shared: int, private: int) -> tuple[float, float]:
    """(alpha, beta) of proposition F.8: squared feature weights of shared and private coordinates, for s >= r / 2 or T
    large.

    alpha = 1 and beta = min(1, (r - alpha s) / (T (r - s))).
    """
    rank = shared + private
    return 1.0, min(1.0, (rank - shared) / (tasks * private))


def regularized_weight(tasks: int, private: int, gamma: float) -> float:
    """The weight beta of the target after contrastive regularisation: min(1, sqrt(1/T) + gamma / sqrt(r - s))^2.

    Proposition F.9 prints gamma / sqrt(s), for r = 2 s: it is the r - s private weights that share gamma.
    """
    return float(min(1.0, tasks**-0.5 + gamma * private**-0.5) ** 2)


def simulate_diversity(
    parameters: DiversityParameters, seeds: Sequence[int], context: SimulationContext
) -> Iterator[Mapping[str, float]]:
    """Mean squared feature weights (diagonal of W^T W): ``shared``, ``target`` (private ones of the target), ``others``
    (of all other tasks), ``spurious``; closed forms ``shared_closed_form``, ``target_closed_form`` and
    ``target_ratio`` of the two.
    """
    p = parameters
    alpha, beta = universal_weights(p.tasks, p.shared, p.private)
    closed = {"universal": beta, "specific": 1.0, "regularized": regularized_weight(p.tasks, p.private, p.gamma)}
    first_other, first_spurious = p.shared + p.private, p.shared + p.tasks * p.private
    for seed in seeds:
        squares_D = np.square(_pretrained(p, alpha, beta, np.random.default_rng(seed))).sum(0)
        target = float(squares_D[p.shared : first_other].mean())
        yield {
            "shared": float(squares_D[: p.shared].mean()),
            "target": target,
            "others": float(squares_D[first_other:first_spurious].mean()) if p.tasks > 1 else 0.0,
            "spurious": float(squares_D[first_spurious:].mean()) if p.spurious else 0.0,
            "shared_closed_form": alpha,
            "target_closed_form": closed[p.pretraining],
            "target_ratio": target / closed[p.pretraining],
        }


def _pretrained(parameters: DiversityParameters, alpha: float, beta: float, rng: np.random.Generator) -> Floats:
    """W (d, d) after projected stochastic gradient descent."""
    p = parameters
    dim = p.shared + p.tasks * p.private + p.spurious
    if p.pretraining == "regularized":
        diagonal_D = np.zeros(dim)
        diagonal_D[: p.shared + p.tasks * p.private] = beta**0.5
        diagonal_D[: p.shared] = alpha**0.5
        start_DD = np.diag(diagonal_D)
    else:
        start_DD = np.linalg.qr(rng.standard_normal((dim, dim)))[0] * (p.rank / dim) ** 0.5
    w_DD = start_DD.copy()
    for step in range(p.steps):
        x_ND, positive_ND = _pairs(p, dim, rng)
        features_ND, positives_ND = x_ND @ w_DD.T, positive_ND @ w_DD.T
        pull_N = expit(-(features_ND * positives_ND).sum(1)) / p.batch
        gradient_DD = (features_ND * pull_N[:, None]).T @ positive_ND + (positives_ND * pull_N[:, None]).T @ x_ND
        w_DD += p.learning_rate * (1 - 0.9 * step / p.steps) * gradient_DD
        w_DD = _in_ball(w_DD, start_DD, p.gamma) if p.pretraining == "regularized" else _in_norms(w_DD, p.rank)
    return w_DD


def _pairs(parameters: DiversityParameters, dim: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Inputs and their positives, (N, d) each."""
    p = parameters
    z_ND = rng.standard_normal((p.batch, dim))
    tasks_N = rng.integers(p.tasks, size=p.batch) if p.pretraining == "universal" else np.zeros(p.batch, dtype=np.int64)
    private_ND = z_ND[:, p.shared : dim - p.spurious]
    private_ND *= np.repeat(np.arange(p.tasks) == tasks_N[:, None], p.private, axis=1)
    positive_ND = z_ND.copy()
    positive_ND[:, dim - p.spurious :] = rng.standard_normal((p.batch, p.spurious))
    return z_ND, positive_ND


def _svd(w_DD: Floats) -> tuple[Floats, Floats, Floats]:
    """Singular values; numpy's divide and conquer may not converge where many values are equal, as here."""
    try:
        u_DD, values_D, vt_DD = np.linalg.svd(w_DD, full_matrices=False)
    except np.linalg.LinAlgError:
        u_DD, values_D, vt_DD = svd(w_DD, full_matrices=False, lapack_driver="gesvd")
    return u_DD, values_D, vt_DD


def _in_norms(w_DD: Floats, squared_norm: float) -> Floats:
    """The nearest matrix with |W| <= 1 and |W|_F^2 <= ``squared_norm``: singular values min(1, c s)."""
    u_DD, values_D, vt_DD = _svd(w_DD)
    low, high = 0.0, 1.0
    if np.minimum(1, values_D) @ np.minimum(1, values_D) > squared_norm:
        for _ in range(40):
            scale = (low + high) / 2
            clipped_D = np.minimum(1, scale * values_D)
            low, high = (low, scale) if clipped_D @ clipped_D > squared_norm else (scale, high)
    projected_DD: Floats = u_DD * np.minimum(1, high * values_D) @ vt_DD
    return projected_DD


def _in_ball(w_DD: Floats, centre_DD: Floats, radius: float) -> Floats:
    """Near the nearest matrix with |W| <= 1 and |W - centre|_F <= radius, and within both."""
    for _ in range(_ROUNDS):
        u_DD, values_D, vt_DD = _svd(w_DD)
        w_DD = u_DD * np.minimum(1, values_D) @ vt_DD
        distance = float(np.linalg.norm(w_DD - centre_DD))
        w_DD = centre_DD + (w_DD - centre_DD) * min(1.0, radius / max(distance, 1e-300))
    return w_DD


def simulate_label_efficiency(
    parameters: LabelEfficiencyParameters, seeds: Sequence[int], context: SimulationContext
) -> Iterator[Mapping[str, float]]:
    """``accuracy`` of the probe on all inputs of the target task: 1 - angle / pi, exact for normal z."""
    p = parameters
    alpha, beta = universal_weights(p.tasks, p.shared, p.private)
    scale_R = np.repeat([alpha**0.5, beta**0.5], [p.shared, p.private])
    for seed in seeds:
        rng = np.random.default_rng(seed)
        u_R, z_NR = rng.standard_normal(p.rank), rng.standard_normal((p.labels, p.rank))
        signs_N = np.sign(z_NR @ u_R)
        probe_R = fit_margins(z_NR * scale_R * signs_N[:, None], p.weight / p.labels) * scale_R
        cosine = probe_R @ u_R / np.linalg.norm(probe_R) / np.linalg.norm(u_R)
        yield {"accuracy": float(1 - np.arccos(np.clip(cosine, -1, 1)) / np.pi)}
