"""Minimisation of smooth convex functions by preconditioned L-BFGS, deterministic on one device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

import torch
from torch import Tensor

_MEMORY: Final = 10
_SUFFICIENT: Final = 1e-4
_MOST_HALVINGS: Final = 30
_NEGLIGIBLE: Final = 1e-7
"""Of an objective whose scale is that of a mean loss: float32 sums do not resolve less."""
_NOTHING: Final = 0.1 * _NEGLIGIBLE
"""Three steps in a row that gain no more than this tell of rounding, whatever the model promises of the next."""
_NUM_GAINS: Final = 5
"""The newest ones, which tell the rate."""
_SLOWEST: Final = 0.9
"""Of gains from step to step, as far as they can be told: slower ones look like this."""

Value = tuple[float, Tensor]
"""Objective and gradient."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """A step, and by how much it changed the gradient: the Hessian times the step, roughly."""

    step: Tensor
    change: Tensor
    curvature: float
    """Along the step: positive where the function is strictly convex; rounding may spoil it close to the end."""

    @classmethod
    def of(cls, step: Tensor, change: Tensor) -> Self:
        """Two tensors of one shape."""
        return cls(step=step, change=change, curvature=float(step.ravel() @ change.ravel()))


def newest_pairs(pairs: Iterable[Pair] = ()) -> deque[Pair]:
    """As many as L-BFGS remembers, the newest last; those without curvature are left out."""
    return deque((pair for pair in pairs if pair.curvature > 0), maxlen=_MEMORY)


class End(StrEnum):
    """Why a minimisation ended."""

    CONVERGED = "converged"
    ROUNDING = "rounding"
    """No step lowers the objective any more, or hardly: what is left is below the rounding of its sums."""
    MAX_ITERATIONS = "max_iterations"


@dataclass(frozen=True, slots=True, eq=False)
class Minimum:
    """Where a minimisation ended."""

    x: Tensor
    value: float
    num_iterations: int
    num_evaluations: int
    end: End


def minimize(
    function: Callable[[Tensor], Value],
    start: Tensor,
    *,
    precondition: Callable[[Tensor], Tensor],
    tolerance: float,
    max_iterations: int,
    pairs: deque[Pair] | None = None,
    min_steps: int = 1,
) -> Minimum:
    """L-BFGS (Nocedal and Wright, algorithm 7.4) with backtracking; ``H0 = gamma * precondition``.

    Ends when what is left is estimated to be at most ``tolerance`` times the objective (or 1e-7). The next step gains
    what the last one did or what the quadratic model promises of it (``-g'd / 2``), whichever is more; those after it
    gain less and less, at the rate of the last steps (a geometric series). No scale of the variables changes this.

    Args:
        function: objective and gradient; strictly convex, so that all curvatures are positive.
        start: where to begin, float64.
        precondition: multiplies by an approximate inverse of the Hessian.
        tolerance: relative, in (0, 1).
        max_iterations: steps at most.
        pairs: of a function like this one, to begin with; the newest of this one are left there. All are dropped if
            no step is found while any of the former is left, which counts as an iteration.
        min_steps: whose gains must be known before it may end as converged. More than one where it goes on with a
            minimisation that was long already: one small step of that tells of no end.
    """
    x, pairs = start, newest_pairs() if pairs is None else pairs
    value, gradient = function(x)
    num_evaluations, num_foreign = 1, len(pairs)
    gains: deque[float] = deque(maxlen=_NUM_GAINS)
    for iteration in range(max_iterations):
        direction = -_times_inverse_hessian(gradient, pairs, precondition)
        slope = float(gradient.ravel() @ direction.ravel())
        is_little = _left(gains, promised=-slope / 2) <= max(tolerance * value, _NEGLIGIBLE)
        if is_little and len(gains) >= min_steps:
            return Minimum(x, value, iteration, num_evaluations, End.CONVERGED)
        if len(gains) > 2 and max(gains[-1], gains[-2], gains[-3]) <= _NOTHING:
            return Minimum(x, value, iteration, num_evaluations, End.ROUNDING)
        found = _backtrack(function, x, value, direction, slope)
        num_evaluations += found.num_evaluations
        if found.x is None and num_foreign:
            pairs.clear()  # they may be why
            num_foreign = 0
            continue
        if found.x is None:
            return Minimum(x, value, iteration, num_evaluations, End.ROUNDING)
        pair = Pair.of(found.x - x, found.gradient - gradient)
        if pair.curvature > 0:
            num_foreign -= int(num_foreign > 0 and len(pairs) == _MEMORY)  # the oldest one goes
            pairs.append(pair)
        gains.append(value - found.value)
        x, value, gradient = found.x, found.value, found.gradient
    return Minimum(x, value, max_iterations, num_evaluations, End.MAX_ITERATIONS)


def _left(gains: deque[float], *, promised: float) -> float:
    """What all further steps may gain together; infinite before the first one."""
    if not gains:
        return float("inf")
    rate = 0.0
    if len(gains) > 1 and gains[-1] > 0:
        rate = min((gains[-1] / gains[0]) ** (1 / (len(gains) - 1)), _SLOWEST) if gains[0] > 0 else _SLOWEST
    return max(gains[-1], promised) / (1 - rate)


def _times_inverse_hessian(gradient: Tensor, pairs: deque[Pair], precondition: Callable[[Tensor], Tensor]) -> Tensor:
    """The two loops of algorithm 7.4; gamma fits the preconditioner to the newest pair."""
    result, weights = gradient.clone(), []
    for pair in reversed(pairs):
        weight = float(pair.step.ravel() @ result.ravel()) / pair.curvature
        weights.append(weight)
        result -= weight * pair.change
    result = precondition(result)
    if pairs:
        newest = pairs[-1]
        result *= newest.curvature / float(newest.change.ravel() @ precondition(newest.change).ravel())
    for pair, weight in zip(pairs, reversed(weights), strict=True):
        result += (weight - float(pair.change.ravel() @ result.ravel()) / pair.curvature) * pair.step
    return result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Found:
    x: Tensor | None
    value: float
    gradient: Tensor
    num_evaluations: int


def _backtrack(function: Callable[[Tensor], Value], x: Tensor, value: float, direction: Tensor, slope: float) -> _Found:
    """The first point along a direction that lowers the objective enough (Armijo); None if none does."""
    length = 1.0
    for number in range(1, _MOST_HALVINGS + 1):
        there = x + length * direction
        found, gradient = function(there)
        if found <= value + _SUFFICIENT * length * slope:
            return _Found(x=there, value=found, gradient=gradient, num_evaluations=number)
        # The minimum of the parabola through both values and the slope, kept within reason.
        bend = found - value - length * slope
        length *= min(max(-slope * length / (2 * bend), 0.1), 0.5) if bend > 0 and torch.isfinite(there).all() else 0.5
    return _Found(x=None, value=value, gradient=direction, num_evaluations=_MOST_HALVINGS)
