"""Regularised logistic regression of targets on features, to its optimum.

The objective is ``mean_i loss(W z_i + b, y_i) + l2 / 2 * |W|^2`` with softmax or (several targets) sigmoid
cross-entropy of centred, scaled features z; the bias b is free. It is convex, so the result depends only on the data.

Along a path of strengths the data's part of the Hessian changes slowly, and the strength's own part is known: neither
the pairs of L-BFGS nor the eigenvectors of the preconditioner have to be found again for each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Self

import torch
from torch import Tensor
from torch.nn import functional

from orchestrator.core.hyper_parameters import SOFTMAX
from workloads.solvers.lbfgs import End, Minimum, Pair, Value, minimize, newest_pairs
from workloads.train.linear_form import NO_LABEL, weighted_classes

_STEPS_TO_GO_ON: Final = 3
"""Before a fit that goes on under a new spectrum may end: it is long already, and its gains are uneven. One step was
enough before, and a fit of weak regularisation then ended 0.9 % above its optimum."""
_ROWS_AT_ONCE: Final = 4096
"""8 MiB of 512 features: the second product finds them in the processor's cache."""
_SMALLEST_CURVATURE: Final = 1e-6
_ITERATIONS_PER_SPECTRUM: Final = 25
_LEAST_SAMPLES: Final = 8192
_SAMPLES_PER_FEATURE: Final = 8
_LEAST_LOG: Final = -80.0
"""Of probabilities: smaller ones would be subnormal numbers, which cost processors ten times as much."""

Poll = Callable[[], None]
"""Called between passes over the data; may raise."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scaling:
    """``z = (x - mean) / deviation`` per feature; deviation 1 where a feature never changes."""

    mean_D: Tensor
    deviation_D: Tensor

    @classmethod
    def of(cls, features_ND: Tensor, *, is_standardized: bool) -> Self:
        """That of samples; without standardising they are centred only. Sums are float64."""
        mean_D = torch.stack([rows.double().sum(0) for rows in torch.split(features_ND, _ROWS_AT_ONCE)]).sum(0)
        mean_D /= len(features_ND)
        deviation_D = torch.ones_like(mean_D)
        if is_standardized:
            squares = [(rows.double() - mean_D).square().sum(0) for rows in torch.split(features_ND, _ROWS_AT_ONCE)]
            found_D = (torch.stack(squares).sum(0) / len(features_ND)).sqrt()
            deviation_D = torch.where(found_D > 1e-6 * (1 + mean_D.abs()), found_D, 1.0)
        return cls(mean_D=mean_D, deviation_D=deviation_D)

    def apply_(self, features_ND: Tensor) -> Tensor:
        """Scale float32 features in place; returns them."""
        return features_ND.sub_(self.mean_D.float()).div_(self.deviation_D.float())

    def head(self, solution: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (K, D) and bias (K,) on unscaled features, float32, of a solution (K, D + 1)."""
        weight_KD = solution[:, :-1] / self.deviation_D
        bias_K = solution[:, -1] - weight_KD @ self.mean_D
        return weight_KD.float(), bias_K.float()


class LogisticRegression:
    """The objective on N samples; solutions are (K, D + 1) float64, the bias last.

    Args:
        features_ND: scaled, float32.
        targets: (N,) classes, or (N, M) sets of classes padded with -1; on the same device.
        num_classes: K.
        loss: ``softmax`` or ``sigmoid``.
        poll: asked before every pass.
    """

    def __init__(self, features_ND: Tensor, targets: Tensor, *, num_classes: int, loss: str, poll: Poll) -> None:
        self._features_ND, self._targets = features_ND, targets
        self._num_classes, self._is_softmax, self._poll = num_classes, loss == SOFTMAX, poll
        self._last: tuple[Tensor, Value] | None = None

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self._features_ND)

    def start(self) -> Tensor:
        """Weights 0, and the bias that fits how often each class occurs (one sample is added to each)."""
        counts_K = torch.zeros(self._num_classes, dtype=torch.float64, device=self._features_ND.device)
        classes = self._targets[self._targets != NO_LABEL]
        counts_K.index_add_(0, classes, torch.ones_like(classes, dtype=torch.float64))
        shares_K = (counts_K + 1) / (self.num_samples + self._num_classes)
        solution = torch.zeros(self._num_classes, self._features_ND.shape[1] + 1, dtype=torch.float64)
        solution = solution.to(self._features_ND.device)
        solution[:, -1] = shares_K.log() if self._is_softmax else shares_K.logit(1e-9)
        return solution

    def fit(
        self, start: Tensor, l2: float, *, tolerance: float, max_iterations: int, learned: LearnedHessian | None = None
    ) -> Minimum:
        """The optimum at one strength.

        What fits to (nearly) these samples learned before makes this one shorter, and ``learned`` gets what it learns.
        """

        def function(solution: Tensor) -> Value:
            value, gradient = self.loss(solution)
            weights = solution[:, :-1]
            gradient[:, :-1] += l2 * weights
            return value + l2 / 2 * float(weights.square().sum()), gradient

        learned = LearnedHessian() if learned is None else learned
        num_left, num_evaluations, x = max_iterations, 0, start
        while True:
            precondition = self._preconditioner(x, l2, learned)
            found = minimize(
                function,
                x,
                precondition=precondition,
                tolerance=tolerance,
                max_iterations=min(num_left, _ITERATIONS_PER_SPECTRUM - learned.num_iterations),
                pairs=learned.pairs(l2),
                min_steps=1 if num_left == max_iterations else _STEPS_TO_GO_ON,
            )
            x, num_left = found.x, num_left - found.num_iterations
            learned.num_iterations += found.num_iterations
            num_evaluations += found.num_evaluations
            if found.end is not End.MAX_ITERATIONS or not num_left:
                num_iterations = max_iterations - num_left
                return replace(found, num_iterations=num_iterations, num_evaluations=num_evaluations)

    def loss(self, solution: Tensor) -> Value:
        """Mean loss and its gradient, without regularisation: float32 products, float64 sums over runs of rows.

        The last solution is remembered, for a fit at another strength begins where the one before ended: it must not
        be changed in place.
        """
        if self._last is not None and self._last[0] is solution:
            value, gradient = self._last[1]
        else:
            self._last = None  # it need not be held through the pass
            value, gradient = self._pass(solution)
            self._last = solution, (value, gradient)
        return value, gradient.clone()

    def _pass(self, solution: Tensor) -> Value:
        self._poll()
        weight_DK, bias_K = _rounded(solution)
        losses, gradient = [], torch.zeros_like(solution)
        for rows_BD, targets in self._runs():
            logits_BK = torch.addmm(bias_K, rows_BD, weight_DK)
            losses.append(self._subtract_targets_(logits_BK, targets))
            gradient[:, :-1] += (logits_BK.T @ rows_BD).double()
            gradient[:, -1] += logits_BK.double().sum(0)
        total = float(torch.stack(losses).sum())
        return total / self.num_samples, gradient.div_(self.num_samples)

    def _subtract_targets_(self, logits_BK: Tensor, targets: Tensor) -> Tensor:
        """Turn logits into the gradient of the losses by them, in place; the sum of the losses, float64."""
        indices_BM, weights_BM = weighted_classes(targets)
        indices_BM = indices_BM.clamp(min=0)
        picked_BM = logits_BK.gather(1, indices_BM)
        if self._is_softmax:
            norms_B1 = logits_BK.logsumexp(1, keepdim=True)
            logits_BK.sub_(norms_B1).clamp_(min=_LEAST_LOG).exp_()
        else:
            norms_B1 = functional.softplus(logits_BK).sum(1, keepdim=True)
            logits_BK.clamp_(min=_LEAST_LOG).sigmoid_()
        logits_BK.scatter_add_(1, indices_BM, -weights_BM)
        return norms_B1.double().sum() - (weights_BM * picked_BM).double().sum()

    def _preconditioner(self, solution: Tensor, l2: float, learned: LearnedHessian) -> Callable[[Tensor], Tensor]:
        """The inverse of ``c_k C + l2`` for each class k: c_k is the class's mean curvature, C a covariance.

        The Hessian's block of class k is the mean of ``p_ik (1 - p_ik) z_i z_i'`` over the samples. Here all classes
        share one C, in which a sample weighs as much as its curvature of all classes together; L-BFGS learns the rest.
        (Böhning, "Multinomial logistic regression algorithm", 1992, bounds the blocks by equal weights and c = 1/2.)
        c_k is of this solution; C is kept in ``learned`` for ``_ITERATIONS_PER_SPECTRUM`` iterations of the path.
        """
        self._poll()
        # Some 8 D samples tell a covariance of D features well enough.
        wanted = max(_LEAST_SAMPLES, _SAMPLES_PER_FEATURE * self._features_ND.shape[1])
        sampled_MD = self._features_ND[:: max(1, self.num_samples // wanted)]
        total_K, weight_M = self._curvatures(sampled_MD, solution)
        if learned.spectrum is None or learned.num_iterations >= _ITERATIONS_PER_SPECTRUM:
            learned.spectrum = Spectrum.of(_weighted_squares(sampled_MD, weight_M) / total_K.sum())
            learned.num_iterations = 0
        return learned.spectrum.preconditioner(total_K / len(sampled_MD), l2)

    def _curvatures(self, features_MD: Tensor, solution: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of ``p (1 - p)``: those of classes over the samples (K,), float64, and of samples over the classes."""
        weight_DK, bias_K = _rounded(solution)
        total_K, weights = torch.zeros_like(solution[:, -1]), []
        for rows_BD in torch.split(features_MD, _ROWS_AT_ONCE):
            logits_BK = torch.addmm(bias_K, rows_BD, weight_DK)
            shares_BK = logits_BK.softmax(1) if self._is_softmax else logits_BK.sigmoid_()
            curvature_BK = shares_BK * (1 - shares_BK) + _SMALLEST_CURVATURE
            total_K += curvature_BK.double().sum(0)
            weights.append(curvature_BK.sum(1))
        return total_K, torch.cat(weights)

    def _runs(self) -> zip[tuple[Tensor, Tensor]]:
        return zip(
            torch.split(self._features_ND, _ROWS_AT_ONCE), torch.split(self._targets, _ROWS_AT_ONCE), strict=True
        )


def _rounded(solution: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (D, K) and bias (K,), float32."""
    return solution[:, :-1].T.float(), solution[:, -1].float()


def _weighted_squares(features_MD: Tensor, weight_M: Tensor) -> Tensor:
    """The sum of ``w z z'`` (D, D), float64."""
    num_features = features_MD.shape[1]
    total_DD = torch.zeros(num_features, num_features, dtype=torch.float64, device=features_MD.device)
    runs = zip(torch.split(features_MD, _ROWS_AT_ONCE), torch.split(weight_M, _ROWS_AT_ONCE), strict=True)
    for rows_BD, weight_B in runs:
        total_DD += ((rows_BD * weight_B[:, None]).T @ rows_BD).double()
    return total_DD


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spectrum:
    """Eigenvalues (D,) and eigenvectors (D, D), in columns, of a covariance of features; float64."""

    values_D: Tensor
    basis_DD: Tensor

    @classmethod
    def of(cls, covariance_DD: Tensor) -> Self:
        """That of a positive semi-definite matrix; what rounding made negative is 0."""
        values_D, basis_DD = torch.linalg.eigh(covariance_DD)
        return cls(values_D=values_D.clamp(min=0), basis_DD=basis_DD)

    def preconditioner(self, curvature_K: Tensor, l2: float) -> Callable[[Tensor], Tensor]:
        """The inverse of ``c_k C + l2`` for the weights (K, D) of each class k, and of ``c_k`` for its bias."""
        scale_KD = 1 / (curvature_K[:, None] * self.values_D + l2)

        def times(gradient: Tensor) -> Tensor:
            result = torch.empty_like(gradient)
            result[:, :-1] = ((gradient[:, :-1] @ self.basis_DD) * scale_KD) @ self.basis_DD.T
            result[:, -1] = gradient[:, -1] / curvature_K
            return result

        return times


@dataclass(slots=True, kw_only=True, eq=False)
class LearnedHessian:
    """What the fits of a path have learned so far: each changes it for the next, on (nearly) the same samples."""

    spectrum: Spectrum | None = None
    num_iterations: int = 0
    """Since the spectrum was computed."""
    _pairs: deque[Pair] = field(init=False, default_factory=newest_pairs)
    _l2: float = field(init=False, default=0.0)

    def pairs(self, l2: float) -> deque[Pair]:
        """Pairs for a fit at a strength, which puts its own there.

        Those of another strength become what they would have been at this one: it adds ``l2`` times the step to the
        change of the gradient.
        """
        if l2 != self._l2:
            old = self._pairs
            # One by one, so that there are never twice as many: each is twice the head in float64.
            self._pairs = newest_pairs(_shifted(old.popleft(), l2 - self._l2) for _ in range(len(old)))
            self._l2 = l2
        return self._pairs


def _shifted(pair: Pair, l2: float) -> Pair:
    change = pair.change.clone()
    change[:, :-1] += l2 * pair.step[:, :-1]
    return Pair.of(pair.step, change)
