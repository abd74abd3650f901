"""How classes lie in feature space: neural collapse, and distances between classes by what they have in common.

Sources: "Are Neurons Actually Collapsed? On the Fine-Grained Structure in Neural Representations", sections 3 and 4 and
appendix B, for NC1, NC2, the class-distance matrix and MSDR; Galanti, Gyorgy and Hutter, "On the Role of Neural
Collapse in Transfer Learning", for CDNV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from workloads.analysis.features import ClassMoments

MAX_MATRIX: Final = 2000
"""Classes of which the whole distance matrix is kept: 16 MB in float32."""
ROOT: Final = ""
"""What pairs of classes share that have nothing else in common."""
_CLASSES_AT_ONCE: Final = 1024
_ROUNDING: Final = 64 * float(np.finfo(np.float64).eps)
"""Of a squared distance, relative to the squares that it is computed from."""
_MANY_CLASSES: Final = 16 * 1024
_NUMBERS_AT_ONCE: Final = _MANY_CLASSES * _CLASSES_AT_ONCE
"""Of a block of a matrix over pairs of classes: 128 MiB in float64. Fewer rows are taken above 16,384 classes."""


def no_tick() -> None:
    """Nobody watches."""


def nc1(moments: ClassMoments) -> float | None:
    """``Tr(S_W S_B^+) / C``: scatter within classes, relative to that of their means; 0 = collapsed.

    None where all class means are equal, which no scatter can be compared with.
    """
    centred_CD = moments.centred_CD
    between_DD = centred_CD.T @ centred_CD / len(centred_CD)
    values, vectors = np.linalg.eigh(between_DD)
    is_there = values > values[-1] * max(centred_CD.shape) * np.finfo(np.float64).eps
    if not values[-1] > 0:
        return None
    basis_DR = vectors[:, is_there]
    inner_R = np.einsum("dr,dr->r", basis_DR, moments.within_DD @ basis_DR)
    return float((inner_R / values[is_there]).sum() / len(centred_CD))


def nc2(moments: ClassMoments, tick: Callable[[], None] = no_tick) -> float | None:
    """``|| M M^T / ||M M^T||_F - (I - 1 1^T / C) / sqrt(C - 1) ||_F``; 0 = the means are a simplex.

    ``M`` (C, D) are class means minus their mean. None where all class means are equal. ``tick`` is called again and
    again: the time grows with the square of C.
    """
    centred_CD = moments.centred_CD
    num_classes, dim = centred_CD.shape
    if num_classes > max(_MANY_CLASSES, 2 * dim):
        # Both matrices have norm 1, so it follows from their inner product. That is below 0.71 here, because M M^T has
        # at most D eigenvalues: no digits are lost, as they would be near a simplex.
        norm = float(np.linalg.norm(centred_CD.T @ centred_CD))
        inner = float((centred_CD**2).sum()) / np.sqrt(num_classes - 1)
        return float(np.sqrt(2 - 2 * inner / norm)) if norm > 0 else None
    norm = float(np.sqrt(sum((gram_BC**2).sum() for _, gram_BC in _grams(centred_CD, tick))))
    if not norm > 0:
        return None
    total = 0.0
    for start, gram_BC in _grams(centred_CD, tick):
        rows = np.arange(len(gram_BC))
        apart_BC = gram_BC / norm + 1 / (num_classes * np.sqrt(num_classes - 1))
        apart_BC[rows, start + rows] -= 1 / np.sqrt(num_classes - 1)
        total += float((apart_BC**2).sum())
    return float(np.sqrt(total))


def cdnv(moments: ClassMoments, tick: Callable[[], None] = no_tick) -> float | None:
    """Mean over pairs of classes of ``(v_i + v_j) / (2 ||m_i - m_j||^2)``, v the variance and m the mean of a class.

    None where two classes have the same mean. ``tick`` as in ``nc2``.
    """
    num_classes, total = len(moments.means_CD), 0.0
    norms_C = (moments.centred_CD**2).sum(1)
    for start, squared_BC in _squared_distances(moments.centred_CD, tick):
        rows = np.arange(len(squared_BC))
        squared_BC[rows, start + rows] = np.inf
        # The squares and the product are rounded, so the distance of equal means is not exactly 0.
        if not (squared_BC > _ROUNDING * (norms_C[start + rows, None] + norms_C)).all():
            return None
        sums_BC = moments.variances_C[start + rows, None] + moments.variances_C
        total += float((sums_BC / (2 * squared_BC)).sum())
    return total / (num_classes * (num_classes - 1))


def distance_matrix(moments: ClassMoments) -> NDArray[np.float64]:
    """``D_ij`` (C, C), the mean squared distance of a sample of class i and one of class j; the diagonal included.

    A sample is also paired with itself, as in the source: ``D_ii`` is twice the variance of class i.
    """
    means_CC = np.concatenate([squared_BC for _, squared_BC in _squared_distances(moments.centred_CD)])
    np.fill_diagonal(means_CC, 0)
    return means_CC + moments.variances_C[:, None] + moments.variances_C


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMean:
    """Mean class distance over some pairs of different classes; None where there is no such pair."""

    num_pairs: int
    mean: float | None


def self_distance(moments: ClassMoments) -> float:
    """Mean of ``D_ii``."""
    return float(2 * moments.variances_C.mean())


def distances_by_group(moments: ClassMoments, groups_C: NDArray[np.int64]) -> tuple[PairMean, PairMean]:
    """Over pairs of different classes of one group, and over pairs of different groups; in time linear in C."""
    centred_CD, variances_C = moments.centred_CD, moments.variances_C
    num_classes = len(groups_C)
    everywhere = _pair_sum(centred_CD, variances_C, np.zeros(num_classes, np.int64))
    within = _pair_sum(centred_CD, variances_C, groups_C)
    between = (everywhere[0] - within[0], everywhere[1] - within[1])
    return _pair_mean(*within), _pair_mean(*between)


def distances_by_ancestor(moments: ClassMoments, levels: Mapping[str, NDArray[np.int64]]) -> dict[str, PairMean]:
    """Mean distance of pairs of different classes by their deepest common level, coarsest first; ``ROOT`` = none.

    Args:
        moments: of the classes.
        levels: group (C,) of each class at each level, coarsest first. Two classes share a level if they share it and
            all levels before it; see ``unnested``.
    """
    centred_CD, variances_C = moments.centred_CD, moments.variances_C
    groups_C = np.zeros(len(centred_CD), np.int64)
    sums, names = [_pair_sum(centred_CD, variances_C, groups_C)], [ROOT, *levels]
    for level_C in levels.values():
        groups_C = np.unique(np.stack([groups_C, level_C]), axis=1, return_inverse=True)[1].reshape(-1)
        sums.append(_pair_sum(centred_CD, variances_C, groups_C))
    deeper = [*sums[1:], (0, 0.0)]
    return {
        name: _pair_mean(num - num_deeper, total - total_deeper)
        for name, (num, total), (num_deeper, total_deeper) in zip(names, sums, deeper, strict=True)
    }


def unnested(levels: Mapping[str, NDArray[np.int64]]) -> list[tuple[str, str]]:
    """Neighbouring levels, coarsest first, of which classes share the second and not the first."""
    pairs = zip(levels.items(), [*levels.items()][1:], strict=False)
    return [
        (coarse, fine)
        for (coarse, coarse_C), (fine, fine_C) in pairs
        if len(np.unique(np.stack([coarse_C, fine_C]), axis=1).T) > len(np.unique(fine_C))
    ]


def msdr(same: PairMean, own: float) -> float | None:
    """Mean ``D_ij`` over different classes of one trained class, relative to the mean ``D_ii``; 1 = no fine structure,
    n / (n - 1) with n samples of each class: ``D_ii`` is too small by 1 / n of it.

    None where no trained class holds two classes, or all variances are 0.

    Args:
        same: see ``distances_by_group``.
        own: see ``self_distance``.
    """
    return None if same.mean is None or not own else same.mean / own


def order_of(levels: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Classes (C,) in the order of the hierarchy, so that relatives stand beside each other; levels coarsest first."""
    return np.lexsort(tuple(reversed(levels)))


def _grams(
    rows_CD: NDArray[np.float64], tick: Callable[[], None] = no_tick
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Runs of rows of ``rows rows^T``, with the first row of each."""
    at_once = max(1, min(_CLASSES_AT_ONCE, _NUMBERS_AT_ONCE // max(1, len(rows_CD))))
    for start in range(0, len(rows_CD), at_once):
        tick()
        yield start, rows_CD[start : start + at_once] @ rows_CD.T


def _squared_distances(
    rows_CD: NDArray[np.float64], tick: Callable[[], None] = no_tick
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    squares_C = np.einsum("cd,cd->c", rows_CD, rows_CD)
    for start, gram_BC in _grams(rows_CD, tick):
        squared_BC = squares_C[start : start + len(gram_BC), None] + squares_C - 2 * gram_BC
        yield start, np.maximum(squared_BC, 0, out=squared_BC)


def _pair_sum(
    centred_CD: NDArray[np.float64], variances_C: NDArray[np.float64], groups_C: NDArray[np.int64]
) -> tuple[int, float]:
    """Ordered pairs of different classes of one group, and the sum of their ``D_ij``.

    Over a group of n classes that is ``2 (n - 1) sum v + 2 n sum ||m - mean||^2``.
    """
    groups, sizes_G = np.unique(groups_C, return_inverse=True)[1].reshape(-1), np.bincount(groups_C)
    sizes_G = sizes_G[sizes_G > 0]
    means_GD = np.zeros((len(sizes_G), centred_CD.shape[1]))
    np.add.at(means_GD, groups, centred_CD)
    means_GD /= sizes_G[:, None]
    spread_C = ((centred_CD - means_GD[groups]) ** 2).sum(axis=1)
    spread_G = np.bincount(groups, weights=spread_C)
    variances_G = np.bincount(groups, weights=variances_C)
    total = 2 * (sizes_G - 1) * variances_G + 2 * sizes_G * spread_G
    return int((sizes_G * (sizes_G - 1)).sum()), float(total.sum())


def _pair_mean(num_pairs: int, total: float) -> PairMean:
    return PairMean(num_pairs=num_pairs, mean=total / num_pairs if num_pairs else None)
