"""Corrections for many comparisons at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values of Holm's step-down method, in the order given: they bound the chance of any false finding.

    Holm: A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6 (1979). Holds
    for any dependence between the tests, which comparisons with one baseline always have.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values that bound the expected share of false findings among the findings.

    Benjamini and Hochberg: Controlling the false discovery rate, JRSS B 57 (1995). Assumes independent or positively
    dependent tests.
    """
    if not p_values:
        return []
    # Rather than by scipy.stats, whose import takes 0.7 s of every report; the tests hold it to statsmodels.
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p)
    scaled = p[order] * (len(p) / np.arange(1, len(p) + 1))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum.accumulate(scaled[::-1])[::-1].clip(max=1.0)
    found: list[float] = adjusted.tolist()
    return found
