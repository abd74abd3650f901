"""Similarity of two networks on the same samples: centred kernel alignment (CKA) of their features (Kornblith, Norouzi,
Lee and Hinton, "Similarity of Neural Network Representations Revisited").

The linear kernel's Hilbert-Schmidt independence criterion (HSIC) is estimated without bias (Song, Smola, Gretton,
Borgwardt and Bedo, "Supervised feature selection via dependence estimation"; for CKA: Nguyen, Raghu and Kornblith, "Do
Wide and Deep Networks Learn the Same Things?", equation 3), over all samples at once: for linear kernels every sum over
pairs of samples follows from sums over samples, in O(N D^2) time and O(D^2) memory. The biased estimate of independent
features is far above 0 unless their dimension is small compared with the number of samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workloads.analysis.features import FeatureStream


class PairSums:
    """Sums over samples x, y of two streams: what the criterion of the pair follows from.

    With ``a_i = ||x_i||^2``, ``b_i = ||y_i||^2``, ``s = sum x_i`` and ``t = sum y_i``.
    """

    def __init__(self, dim_x: int, dim_y: int) -> None:
        self.num_samples = 0
        self._cross_XY = np.zeros((dim_x, dim_y))
        self._s_X, self._t_Y = np.zeros(dim_x), np.zeros(dim_y)
        self._b_x_X, self._a_y_Y = np.zeros(dim_x), np.zeros(dim_y)
        self._a = self._b = self._a_b = 0.0

    def add(self, x_BX: NDArray[np.float64], y_BY: NDArray[np.float64]) -> None:
        """Count samples, which both streams have in the same order."""
        a_B, b_B = np.einsum("bd,bd->b", x_BX, x_BX), np.einsum("bd,bd->b", y_BY, y_BY)
        self.num_samples += len(x_BX)
        self._cross_XY += x_BX.T @ y_BY
        self._s_X += x_BX.sum(axis=0)
        self._t_Y += y_BY.sum(axis=0)
        self._b_x_X += b_B @ x_BX
        self._a_y_Y += a_B @ y_BY
        self._a, self._b, self._a_b = self._a + a_B.sum(), self._b + b_B.sum(), self._a_b + a_B @ b_B

    def hsic(self) -> float:
        """The unbiased criterion; needs 4 samples at least.

        ``n (n - 3) HSIC = ||X^T Y||_F^2 - a.b + (||s||^2 - sum a)(||t||^2 - sum b) / ((n - 1)(n - 2))
        - 2 / (n - 2) sum_i (x_i.s - a_i)(y_i.t - b_i)``.
        """
        n, s_X, t_Y = self.num_samples, self._s_X, self._t_Y
        rows = s_X @ self._cross_XY @ t_Y - s_X @ self._b_x_X - t_Y @ self._a_y_Y + self._a_b
        total = (self._cross_XY**2).sum() - self._a_b
        total += (s_X @ s_X - self._a) * (t_Y @ t_Y - self._b) / ((n - 1) * (n - 2))
        return float((total - 2 / (n - 2) * rows) / (n * (n - 3)))


def linear_cka(streams: Sequence[FeatureStream]) -> NDArray[np.float64]:
    """CKA (S, S) of every pair of streams over the same samples; NaN beside a stream whose features are all equal.

    One pass for each stream over itself and those after it. Values may be below 0, and are 0 in expectation
    for independent features.

    Raises:
        ValueError: streams differ in their number of samples, or there are fewer than 4.
    """
    sizes = {stream.num_samples for stream in streams}
    if len(sizes) != 1 or min(sizes) < 4:
        raise ValueError(f"CKA needs the same samples of each network, 4 at least; there are {sorted(sizes)}")
    found_SS = np.zeros((len(streams), len(streams)))
    # The criterion does not change when a constant is added to all samples; small means cost it no digits.
    shifts = [next(iter(stream)).astype(np.float64).mean(axis=0) for stream in streams]
    for row, first in enumerate(streams):
        later = range(row, len(streams))
        sums = [PairSums(first.dim, streams[column].dim) for column in later]
        for chunks in zip(*(streams[column] for column in later), strict=True):
            moved = [
                chunk_BD.astype(np.float64) - shifts[column] for column, chunk_BD in zip(later, chunks, strict=True)
            ]
            for pair, y_BY in zip(sums, moved, strict=True):
                pair.add(moved[0], y_BY)
        for column, pair in zip(later, sums, strict=True):
            found_SS[row, column] = found_SS[column, row] = pair.hsic()
    own_S = np.where(np.diag(found_SS) > 0, np.diag(found_SS), np.nan)
    cka_SS: NDArray[np.float64] = found_SS / np.sqrt(np.outer(own_S, own_S))
    return cka_SS
