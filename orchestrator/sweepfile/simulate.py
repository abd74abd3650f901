"""`simulate:`: its schema, and the simulations that it resolves to. Pure.

Only the data plane knows the simulations and their parameters; its answers are passed in as values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.core.suggest import did_you_mean
from orchestrator.sweepfile.fields import (
    LEVEL_TEXT,
    MAX_INTEGER,
    Count,
    Name,
    OneRule,
    Strict,
    canonical,
    refuse_unread,
)
from orchestrator.sweepfile.parse.tree import Path
from orchestrator.sweepfile.problems import Complaints
from orchestrator.sweepfile.values import Expectation, Level, SimulatedCell, Simulation

DEFAULT_PER_JOB: Final = 25
"""Part of every key of a simulation: a change of it runs all of them again."""
_MAX_CELLS: Final = 10_000
_MAX_JOBS: Final = 100_000
_NO_METRICS: Final = frozenset({"seed", "num_seeds"})
"""Names that records have besides metrics (``workloads.jobs.theory``): a job whose simulation yields one fails."""

LevelText = Annotated[str, Field(pattern=LEVEL_TEXT)]
LevelValue = Annotated[bool | int | float | LevelText, AfterValidator(canonical)]
Interval = Annotated[list[float], Field(min_length=2, max_length=2)]


class SeedBlocksSpec(Strict):
    """Which seeds a simulation is run with, in blocks that are jobs."""

    count: Count = Field(DEFAULT_PER_JOB, description="Seeds in all; with more of them no full block runs again.")
    first: Annotated[int, Field(ge=0, le=MAX_INTEGER // 2)] = Field(
        0, description="The first seed, a multiple of per_job."
    )
    per_job: Count = Field(
        DEFAULT_PER_JOB, description="Seeds of a job. Part of every key: another number runs all of them again."
    )

    @model_validator(mode="after")
    def _is_aligned(self) -> Self:
        if self.first % self.per_job:
            context = {"first": self.first, "per_job": self.per_job, "at": ("first",)}
            message = "blocks of {per_job} seeds begin at multiples of {per_job}, not at {first}; choose a multiple"
            raise PydanticCustomError("refused", message, context)
        return self


class SlopeSpec(Strict):
    """Slope of the least-squares line through the means over the levels of a factor."""

    of: str = Field(description="The factor; its levels are numbers.")
    log: bool = Field(default=False, description="Logarithms of both the factor and the metric: the exponent of a law.")


class RatioSpec(Strict):
    """Ratio of the means at two levels of a factor."""

    of: str = Field(description="The factor.")
    numerator: LevelValue = Field(description="The level above the line.")
    denominator: LevelValue = Field(description="The level below it.")


class OrderingSpec(Strict):
    """Levels of a factor from the lowest mean to the highest."""

    of: str = Field(description="The factor.")
    ascending: Annotated[list[LevelValue], Field(min_length=2)] = Field(description="Its levels, lowest mean first.")


class MonotoneSpec(Strict):
    """The mean rises, or falls, from each level of a factor to the next larger one."""

    of: str = Field(description="The factor; its levels are numbers.")
    direction: Literal["rising", "falling"] = Field("rising", description="rising or falling.")


class ThresholdSpec(OneRule):
    """A bound of the mean."""

    RULES: ClassVar[tuple[str, ...]] = ("above", "below")

    above: float | None = Field(None, description="The mean is larger.")
    below: float | None = Field(None, description="The mean is smaller.")


class ClosedFormSpec(Strict):
    """The mean agrees with that of another metric, such as a formula that the simulation evaluates."""

    metric: str = Field(description="The other metric.")
    within: float = Field(gt=0, lt=1, description="Largest relative deviation, in (0, 1).")


_RULES: Final = ("slope", "ratio", "ordering", "monotone", "threshold", "closed_form")
_BETWEEN_RULES: Final = ("slope", "ratio")


class ExpectSpec(Strict):
    """What a paper claims of a simulation; without a rule but between, the mean of each cell lies there."""

    slope: SlopeSpec | None = Field(None, description="With between: the slope over a factor.")
    ratio: RatioSpec | None = Field(None, description="With between: the ratio of two levels.")
    ordering: OrderingSpec | None = Field(None, description="The order of levels by their means.")
    monotone: MonotoneSpec | None = Field(None, description="Whether means rise or fall over a factor.")
    threshold: ThresholdSpec | None = Field(None, description="A bound of the mean of each cell.")
    closed_form: ClosedFormSpec | None = Field(None, description="Agreement with another metric in each cell.")
    between: Interval | None = Field(None, description="[low, high] of the slope, the ratio or the mean.")
    where: dict[str, LevelValue | Annotated[list[LevelValue], Field(min_length=1)]] = Field(
        default_factory=dict, description="Factors with the level, or list of levels, that it is about; default: all."
    )
    metric: str = Field("", description="What it is about; default: the simulation's metric.")
    paper: float | None = Field(None, description="The published number, shown next to ours.")
    source: str = Field("", description="Where it is printed: paper and theorem, table or figure.")

    @model_validator(mode="after")
    def _says_one_thing(self) -> Self:
        given = [rule for rule in _RULES if getattr(self, rule) is not None]
        if len(given) > 1 or (not given and self.between is None):
            found = f"{', '.join(given)}; keep one" if given else "none; add one"
            context = {"found": found, "rules": ", ".join((*_RULES, "between"))}
            raise PydanticCustomError("one_rule", "this needs exactly one of {rules}; it has {found}", context)
        if given and given[0] in _BETWEEN_RULES and self.between is None:
            message = "{rule} is compared with an interval; add between: [low, high]"
            raise PydanticCustomError("refused", message, {"rule": given[0]})
        if given and given[0] not in _BETWEEN_RULES:
            refuse_unread(self, ("between",), f"with '{given[0]}'")
        if self.between is not None and self.between[0] >= self.between[1]:
            low, high = (f"{end:g}" for end in self.between)
            message = "{low} to {high} is not an interval; give [low, high], low < high"
            raise PydanticCustomError("refused", message, {"low": low, "high": high, "at": ("between",)})
        return self


class SimulateSpec(Strict):
    """A simulation: every combination of its factors, over the same seeds."""

    run: Annotated[str, Field(min_length=1)] = Field(
        description="Name of a shipped simulation, of one of a package (entry point group "
        "pretraining_orchestrator.simulations), or path.py:function, relative to the sweep file."
    )
    parameters: dict[str, Annotated[Any, AfterValidator(canonical)]] = Field(
        default_factory=dict, description="What it is run with; it says itself which parameters it takes."
    )
    factors: dict[Name, Annotated[list[LevelValue], Field(min_length=1)]] = Field(
        default_factory=dict, description="Parameters with a list of levels each; all combinations are run."
    )
    seeds: SeedBlocksSpec = Field(SeedBlocksSpec(), description="Which seeds, and how many of them a job has.")
    metric: Annotated[str, Field(min_length=1)] = Field(description="The metric that is shown and judged.")
    expect: list[ExpectSpec] = Field(default_factory=list, description="What papers claim, judged with error bars.")


# -------------------------------------------------------------------------------------------------- what it resolves to


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSources:
    """Information about simulations outside of the file."""

    check: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]] | None = None
    """Asks the data plane, see ``workloads.commands.simulations``; None: parameters are taken as they are."""
    plugins: Mapping[str, str] = field(default_factory=dict)
    """Installed ones of other packages: name -> reference, see ``orchestrator.core.plugins``."""
    refusal: Callable[[str], str] | None = None
    """Why the plain file of a ``run`` must not be imported, or nothing; None: all may be."""
    folder: str = ""
    """Of the sweep file; paths of plain files are relative to it."""


def resolve_simulations(
    specs: Mapping[str, SimulateSpec], sources: SimulationSources, complaints: Complaints
) -> tuple[Simulation, ...]:
    """All simulations; complains of what is wrong and goes on."""
    checks = [_SimulationCheck.of(name, spec, complaints) for name, spec in specs.items()]
    for one in checks:
        if sources.refusal is not None and (why := sources.refusal(one.spec.run)):
            complaints.add((*one.path, "run"), why)
    if not checks or sources.check is None or any(complaints.doubts(one.path) for one in checks):
        return tuple(one.resolved() for one in checks)
    reply = sources.check([one.request(sources) for one in checks])
    known = [*reply["shipped"], *sources.plugins]
    return tuple(one.checked(found, known, complaints) for one, found in zip(checks, reply["checked"], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _SimulationCheck:
    """One simulation as it stands in the file."""

    name: str
    spec: SimulateSpec
    cells: tuple[SimulatedCell, ...]

    @classmethod
    def of(cls, name: str, spec: SimulateSpec, complaints: Complaints) -> Self:
        path: Path = ("simulate", name)
        for factor, levels in spec.factors.items():
            if factor in spec.parameters:
                message = "it is a parameter and a factor; remove one of the two"
                complaints.add((*path, "parameters", factor), message)
            complaints.refuse_repeats((*path, "factors", factor), [str(level) for level in levels])
        for position, expected in enumerate(spec.expect):
            _check_expectation((*path, "expect", position), expected, spec.factors, complaints)
        number = math.prod(len(levels) for levels in spec.factors.values())
        blocks = -(-spec.seeds.count // spec.seeds.per_job)
        if number > _MAX_CELLS or number * blocks > _MAX_JOBS:
            message = f"its factors have {number:,} combinations, in {number * blocks:,} jobs; use at most "
            complaints.add(path, f"{message}{_MAX_CELLS:,} combinations and {_MAX_JOBS:,} jobs")
            return cls(name=name, spec=spec, cells=())
        cells = [dict(zip(spec.factors, levels, strict=True)) for levels in product(*spec.factors.values())]
        made = tuple(SimulatedCell(factors=cell, parameters={**spec.parameters, **cell}) for cell in cells)
        return cls(name=name, spec=spec, cells=made)

    @property
    def path(self) -> Path:
        return ("simulate", self.name)

    def request(self, sources: SimulationSources) -> dict[str, Any]:
        cells, run = [cell.parameters for cell in self.cells], self.spec.run
        return {"run": run, "plugin": sources.plugins.get(run, ""), "folder": sources.folder, "cells": cells}

    def checked(self, found: Mapping[str, Any], known: Sequence[str], complaints: Complaints) -> Simulation:
        """The simulation with the data plane's answer."""
        run = self.spec.run
        if found.get("is_unknown"):
            complaints.add((*self.path, "run"), f"'{run}' is not a simulation: {did_you_mean(run, known)}")
            return self.resolved()
        if "problem" in found:
            complaints.add((*self.path, "run"), found["problem"])
            return self.resolved()
        for cell, reply in zip(self.cells, found["cells"], strict=True):
            for at, why in reply.get("problems", ()):
                complaints.add(self._place(cell, at), f"the simulation '{run}' refuses it: {why}")
        known_metrics = found.get("metrics", ())
        for at, metric in self._metrics():
            if metric in _NO_METRICS:
                message = f"no simulation may call a metric '{metric}'; name one that '{run}' yields"
                complaints.add((*self.path, *at), message)
            elif known_metrics and metric not in known_metrics:
                hint = did_you_mean(metric, known_metrics)
                complaints.add((*self.path, *at), f"'{metric}' is not a metric of the simulation '{run}': {hint}")
        cells = tuple(
            SimulatedCell(factors=cell.factors, parameters=reply.get("parameters", {}))
            for cell, reply in zip(self.cells, found["cells"], strict=True)
        )
        return replace(self.resolved(), run=found["name"], file=found["file"], cells=cells)

    def _metrics(self) -> Iterator[tuple[Path, str]]:
        """Metrics that the file names, and where below the simulation."""
        yield ("metric",), self.spec.metric
        for position, expected in enumerate(self.spec.expect):
            if expected.metric:
                yield ("expect", position, "metric"), expected.metric
            if expected.closed_form is not None:
                yield ("expect", position, "closed_form", "metric"), expected.closed_form.metric

    def _place(self, cell: SimulatedCell, at: Sequence[str | int]) -> Path:
        """Place of the parameter that a simulation refuses."""
        factor = at[0] if at else ""
        if factor in cell.factors:
            position = self.spec.factors[str(factor)].index(cell.factors[str(factor)])
            return (*self.path, "factors", str(factor), position)
        return (*self.path, "parameters", *at)

    def resolved(self) -> Simulation:
        spec = self.spec
        return Simulation(
            name=self.name,
            run=spec.run,
            factors={factor: tuple(levels) for factor, levels in spec.factors.items()},
            cells=self.cells,
            first_seed=spec.seeds.first,
            num_seeds=spec.seeds.count,
            per_job=spec.seeds.per_job,
            metric=spec.metric,
            expectations=tuple(_expectation(one) for one in spec.expect),
        )


def _check_expectation(
    path: Path, spec: ExpectSpec, factors: Mapping[str, Sequence[Level]], complaints: Complaints
) -> None:
    """Complain of factors and levels that the simulation does not have."""
    for place, factor, levels in _mentioned(spec):
        if factor not in factors:
            hint = did_you_mean(factor, factors) if factors else "it has no factors"
            complaints.add((*path, *place), f"'{factor}' is not a factor of this simulation: {hint}")
            continue
        for level in levels:
            if level not in factors[factor]:
                hint = did_you_mean(str(level), [str(one) for one in factors[factor]])
                complaints.add((*path, *place), f"'{level}' is not a level of the factor {factor}: {hint}")
    rule = next((name for name in _RULES if hasattr(getattr(spec, name), "of")), "")
    if rule:
        _check_own_factor(path, spec, rule, complaints)
    over = spec.slope or spec.monotone
    if over is not None and over.of in factors:
        _check_numbers((*path, "slope" if spec.slope else "monotone"), spec, factors[over.of], complaints)


def _check_own_factor(path: Path, spec: ExpectSpec, rule: str, complaints: Complaints) -> None:
    """Complain of a ``where`` that leaves a rule too few levels of the factor that it goes over."""
    of = str(getattr(spec, rule).of)
    left = _levels_at(spec, of)
    needed = [level for place, _, levels in _mentioned(spec) if place[0] == rule for level in levels]
    if left is not None and (len(left) < 2 or not set(needed) <= set(left)):
        message = f"'{of}' is the factor that the {rule} goes over, and this leaves it too few levels; leave it out"
        complaints.add((*path, "where", of), message)


def _levels_at(spec: ExpectSpec, factor: str) -> Sequence[Level] | None:
    """The levels of a factor that an expectation is about; None: all."""
    levels = spec.where.get(factor)
    return levels if levels is None or isinstance(levels, list) else [levels]


def _check_numbers(path: Path, spec: ExpectSpec, levels: Sequence[Level], complaints: Complaints) -> None:
    numbers = [level for level in levels if isinstance(level, int | float) and not isinstance(level, bool)]
    if len(numbers) < len(levels) or len(levels) < 2:
        shown = ", ".join(map(str, levels))
        message = f"this needs a factor with two numbers or more as levels, and these are {shown}; name another factor"
        complaints.add((*path, "of"), message)
    elif spec.slope is not None and spec.slope.log and min(numbers) <= 0:
        complaints.add((*path, "log"), f"its level {min(numbers):g} has no logarithm; leave log out, or the level")


def _mentioned(spec: ExpectSpec) -> Iterator[tuple[Path, str, Sequence[Level]]]:
    """Factors with levels that an expectation names, and where."""
    for factor in spec.where:
        yield ("where", factor), factor, _levels_at(spec, factor) or ()
    if spec.slope is not None:
        yield ("slope", "of"), spec.slope.of, ()
    if spec.monotone is not None:
        yield ("monotone", "of"), spec.monotone.of, ()
    if spec.ratio is not None:
        yield ("ratio", "of"), spec.ratio.of, (spec.ratio.numerator, spec.ratio.denominator)
    if spec.ordering is not None:
        yield ("ordering", "of"), spec.ordering.of, spec.ordering.ascending


def _expectation(spec: ExpectSpec) -> Expectation:
    where = {name: tuple(_levels_at(spec, name) or ()) for name in spec.where}
    common: dict[str, Any] = {"where": where, "metric": spec.metric, "paper": spec.paper, "source": spec.source}
    low, high = spec.between or (None, None)
    return Expectation(**{"rule": "mean", "low": low, "high": high} | _rule(spec) | common)


def _rule(spec: ExpectSpec) -> dict[str, Any]:
    """The fields of the rule, as far as they are not those of an interval of means."""
    if spec.slope is not None:
        return {"rule": "slope", "of": spec.slope.of, "log": spec.slope.log}
    if spec.ratio is not None:
        return {"rule": "ratio", "of": spec.ratio.of, "levels": (spec.ratio.numerator, spec.ratio.denominator)}
    if spec.ordering is not None:
        return {"rule": "ordering", "of": spec.ordering.of, "levels": tuple(spec.ordering.ascending), "low": 0.0}
    if spec.monotone is not None:
        sign = "low" if spec.monotone.direction == "rising" else "high"
        return {"rule": "monotone", "of": spec.monotone.of, sign: 0.0}
    if spec.closed_form is not None:
        metric, within = spec.closed_form.metric, spec.closed_form.within
        return {"rule": "closed_form", "other_metric": metric, "low": 1 - within, "high": 1 + within}
    return {"low": spec.threshold.above, "high": spec.threshold.below} if spec.threshold is not None else {}
