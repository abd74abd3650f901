"""What logistic regressions along a path of strengths learn of their Hessian, each from those before it.

The data's part of the Hessian changes slowly from strength to strength, and the strength's own part is known: neither
the pairs of L-BFGS nor the eigenvectors of the preconditioner have to be found anew for each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from workloads.transfer.minimize import Pair, newest_pairs


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
