"""Search spaces (values from numbers in [0, 1)), and the samplers that choose the next trial."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Any, Protocol, Self

import numpy as np

from orchestrator.core.errors import UserError

_DIGITS = 6
"""Significant digits of a float: recipes stay readable, and no search needs more."""
_REDRAWS = 1000
"""Largest number of draws to find a combination that was not tried."""


class Spacing(StrEnum):
    """How values lie between two ends."""

    VALUES = "values"
    UNIFORM = "uniform"
    LOG = "log"
    INTEGER = "integer"
    LOG_INTEGER = "log_integer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One field and its values: a list of them, or a range with both ends."""

    field: str
    scale: Spacing
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0

    @classmethod
    def from_json(cls, field: str, document: Mapping[str, Any]) -> Self:
        """From ``{"values": [...]}`` or ``{"uniform" | "log" | "integer" | "log_integer": [low, high]}``."""
        ((scale, content),) = document.items()
        if scale == Spacing.VALUES:
            return cls(field=field, scale=Spacing.VALUES, values=tuple(content))
        return cls(field=field, scale=Spacing(scale), low=content[0], high=content[1])

    @property
    def size(self) -> float:
        """Number of different values."""
        if self.scale is Spacing.VALUES:
            return len(self.values)
        return self.high - self.low + 1 if self.scale in {Spacing.INTEGER, Spacing.LOG_INTEGER} else math.inf

    @property
    def every(self) -> Sequence[Any]:
        """All values in order; none of a continuous range, which has too many."""
        if self.scale in {Spacing.INTEGER, Spacing.LOG_INTEGER}:
            return range(int(self.low), int(self.high) + 1)
        return self.values

    @property
    def ends(self) -> tuple[Any, ...]:
        """Representative values with which a space is checked."""
        if self.scale is Spacing.VALUES:
            return self.values
        return (self.at(0.0), self.at(math.nextafter(1.0, 0.0)))

    def at(self, unit: float) -> Any:  # noqa: ANN401 - recipe fields are of any JSON type
        """The value at a position ``0 <= unit < 1`` of the range."""
        match self.scale:
            case Spacing.VALUES:
                return self.values[int(unit * len(self.values))]
            case Spacing.UNIFORM:
                return _rounded(self.low + unit * (self.high - self.low), self)
            case Spacing.LOG:
                return _rounded(self.low * (self.high / self.low) ** unit, self)
            case Spacing.INTEGER:
                return int(self.low + math.floor(unit * (self.high - self.low + 1)))
            case Spacing.LOG_INTEGER:
                # From half an integer below to half a one above, so that both ends are as likely as their neighbours.
                low, high = self.low - 0.5, self.high + 0.5
                return int(min(self.high, max(self.low, math.floor(low * (high / low) ** unit + 0.5))))


def _rounded(value: float, dimension: Dimension) -> float:
    rounded = float(f"{value:.{_DIGITS}g}")
    return min(max(rounded, dimension.low), dimension.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """All dimensions, in the order of their fields' names."""

    dimensions: tuple[Dimension, ...]

    @classmethod
    def from_json(cls, document: Mapping[str, Mapping[str, Any]]) -> Self:
        """From fields and their dimensions."""
        return cls(dimensions=tuple(Dimension.from_json(field, document[field]) for field in sorted(document)))

    @property
    def size(self) -> float:
        """Number of different combinations."""
        return math.prod(dimension.size for dimension in self.dimensions)

    def at(self, units: Mapping[str, float]) -> dict[str, Any]:
        """The combination at a place of the unit cube."""
        return {dimension.field: dimension.at(units[dimension.field]) for dimension in self.dimensions}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A trial that is over, and its value; None where it failed."""

    params: Mapping[str, Any]
    value: float | None


class Sampler(Protocol):
    """Proposes combinations that were not tried."""

    def ask(self, number: int, tried: Sequence[Mapping[str, Any]], answered: Sequence[Answered]) -> Mapping[str, Any]:
        """Values for trial ``number``; ``tried`` are those of all earlier ones, ``answered`` of those that ended."""


class RandomSampler:
    """Independent draws: trial n is a function of seed and n alone, whatever the results and the number of parallel
    trials.

    The place in the unit cube is drawn from ``SeedSequence(seed, spawn_key=(n, redraw))``.
    """

    def __init__(self, space: Space, seed: int) -> None:
        self._space, self._seed = space, seed

    def ask(self, number: int, tried: Sequence[Mapping[str, Any]], answered: Sequence[Answered]) -> Mapping[str, Any]:
        """See ``Sampler``."""
        known = {mark_of(params) for params in tried}
        for redraw in range(_REDRAWS):
            params = self._draw(number, redraw)
            if mark_of(params) not in known:
                return params
        return first_untried(self._space, known)

    def _draw(self, number: int, redraw: int) -> dict[str, Any]:
        generator = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(number, redraw)))
        return self._space.at({one.field: float(generator.random()) for one in self._space.dimensions})


class InOrder:
    """Every combination of a space of lists once, in order."""

    def __init__(self, space: Space) -> None:
        self._space = space

    def ask(self, number: int, tried: Sequence[Mapping[str, Any]], answered: Sequence[Answered]) -> Mapping[str, Any]:
        """See ``Sampler``."""
        return first_untried(self._space, {mark_of(params) for params in tried})


class OptunaSampler:
    """Optuna's tree-structured Parzen estimator, which gets every trial that ended.

    A function of the seed and of what has ended when it is asked, in the order of the trials: the same on every run
    with one trial at a time, and up to timing with more.
    """

    def __init__(self, space: Space, seed: int, num_startup: int) -> None:
        self._optuna = _import_optuna()
        self._space, self._seed, self._num_startup = space, seed, num_startup

    def ask(self, number: int, tried: Sequence[Mapping[str, Any]], answered: Sequence[Answered]) -> Mapping[str, Any]:
        """See ``Sampler``. A new study each time: nothing of it must survive a crash."""
        known, study = {mark_of(params) for params in tried}, self._study(number, answered)
        fallback = RandomSampler(self._space, self._seed)
        distributions = {one.field: self._distribution(one) for one in self._space.dimensions}
        for _ in range(10):
            trial = study.ask(distributions)
            params = {one.field: _value_of(one, trial.params[one.field]) for one in self._space.dimensions}
            if mark_of(params) not in known:
                return params
            study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return fallback.ask(number, tried, answered)

    def _study(self, number: int, answered: Sequence[Answered]) -> Any:  # noqa: ANN401 - optuna is optional
        optuna = self._optuna
        seed = int(np.random.SeedSequence(self._seed, spawn_key=(number,)).generate_state(1)[0])
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=self._num_startup)
        study = optuna.create_study(direction="minimize", sampler=sampler)
        distributions = {one.field: self._distribution(one) for one in self._space.dimensions}
        for one in answered:
            if one.value is not None:
                params = {field: _mark(self._dimension(field), value) for field, value in one.params.items()}
                study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=one.value))
        return study

    def _dimension(self, field: str) -> Dimension:
        return next(one for one in self._space.dimensions if one.field == field)

    def _distribution(self, one: Dimension) -> Any:  # noqa: ANN401 - optuna is optional
        kinds = self._optuna.distributions
        if one.scale is Spacing.VALUES:
            return kinds.CategoricalDistribution([json.dumps(value) for value in one.values])
        if one.scale in {Spacing.INTEGER, Spacing.LOG_INTEGER}:
            return kinds.IntDistribution(int(one.low), int(one.high), log=one.scale is Spacing.LOG_INTEGER)
        return kinds.FloatDistribution(one.low, one.high, log=one.scale is Spacing.LOG)


def first_untried(space: Space, known: Collection[str]) -> Mapping[str, Any]:
    """The first combination, in order, that is not among the known ones (by ``mark_of``). Raises ``UserError``."""
    fields = [one.field for one in space.dimensions]
    # So many values of a field have one that is not known; ``product`` would hold all of a long range.
    enough = len(known) + 1
    for values in product(*(one.every[:enough] for one in space.dimensions)):
        params = dict(zip(fields, values, strict=True))
        if params and mark_of(params) not in known:
            return params
    message = f"all {space.size:g} combinations of the space are tried; lower trials, or add values to search.space"
    raise UserError(message)


def mark_of(params: Mapping[str, Any]) -> str:
    """Text that is equal for equal combinations."""
    return json.dumps(params, sort_keys=True)


def _mark(one: Dimension, value: Any) -> Any:  # noqa: ANN401 - any JSON value
    return json.dumps(value) if one.scale is Spacing.VALUES else value


def _value_of(one: Dimension, value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if one.scale is Spacing.VALUES:
        return json.loads(value)
    return int(value) if one.scale in {Spacing.INTEGER, Spacing.LOG_INTEGER} else float(f"{value:.6g}")


def _import_optuna() -> Any:  # noqa: ANN401 - optuna is optional
    try:
        import optuna
    except ImportError as error:
        message = (
            "search: {optuna: ...} needs the package optuna, which is not installed here; "
            "install pretraining-orchestrator[optuna] on every node, or choose asha or random"
        )
        raise UserError(message) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
