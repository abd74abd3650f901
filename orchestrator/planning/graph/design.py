"""The factors of a plan: differences between its backbones other than seeds, from the facets of its jobs. Pure.

Backbones are those of pretrainings, and those that searches find. Label spaces are a factor of every plan
(``labels``). Blocks with values of factors (``factor.<name>`` facets) have these; without any, several named blocks are
one factor (``block``), except those that start from another block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from orchestrator.planning.graph.pairing import makes_backbone
from orchestrator.planning.graph.plan import FACTOR_PREFIX, Job, Plan
from orchestrator.sweepfile.values import BLOCK_FACTOR, LABELS_FACTOR

Cell = tuple[str, ...]
"""A value of each factor."""


@dataclass(frozen=True, kw_only=True)  # no slots: it remembers what it has read
class PlanDesign:
    """The factors of a plan. Created by ``of``."""

    factors: Mapping[str, tuple[str, ...]]
    """Values of each factor in the order of the plan; ``labels`` last. Factors of one value are among them."""
    blocks: Mapping[str, Mapping[str, str]]
    """By the name of a block its values in the order of ``factors``, without that of ``labels``."""

    @classmethod
    def of(cls, plan: Plan) -> PlanDesign:
        """The design of a plan, without backbones that lack values of factors or that continue others."""
        backbones = [job for job in plan.jobs if makes_backbone(job) and "baseline" not in job.facets]
        values_by_block = {_block(job): _declared_values(job) for job in backbones}
        names = _ordered(values_by_block)
        if names:
            whole = {block: values for block, values in values_by_block.items() if values.keys() == set(names)}
            blocks = {block: {name: values[name] for name in names} for block, values in whole.items()}
        else:
            chained = {_block(job) for job in backbones if "initial" in job.identity["inputs"]}
            blocks = {block: {BLOCK_FACTOR: block} for block in values_by_block if block not in chained}
            names = (BLOCK_FACTOR,)
            if len(blocks) < 2:
                blocks, names = {block: {} for block in blocks}, ()
        found = {name: _unique(values[name] for values in blocks.values()) for name in names}
        compared = (job for job in backbones if _block(job) in blocks)
        spaces = _unique(str(job.facets["label_space"]) for job in compared if "label_space" in job.facets)
        return cls(factors={**found, LABELS_FACTOR: spaces}, blocks=blocks)

    @cached_property
    def varied(self) -> tuple[str, ...]:
        """Factors of several values."""
        return tuple(name for name, values in self.factors.items() if len(values) > 1)

    @property
    def has_factors(self) -> bool:
        """Whether anything but label spaces is compared."""
        return any(name != LABELS_FACTOR for name in self.varied)

    def values_of(self, job: Job) -> dict[str, str] | None:
        """The values of a backbone, or of a transfer of one; None for those that are no part of the design."""
        values = self.blocks.get(_block(job))
        if values is None or "label_space" not in job.facets:
            return None
        return {**values, LABELS_FACTOR: str(job.facets["label_space"])}

    def rows_of(self, plan: Plan) -> tuple[str, ...]:
        """The factors of the report's rows: those that the sweep asks for, else those that its blocks declare, else
        ``labels`` alone.
        """
        backbones = filter(makes_backbone, plan.jobs)
        declared = {name for job in backbones for name in _declared_values(job)}
        return plan.rows or tuple(name for name in self.varied if name in declared) or (LABELS_FACTOR,)

    def baseline_of(self, plan: Plan) -> dict[str, str]:
        """By factor the value that others are compared with; of ``labels`` only where the sweep names one."""
        first = {name: values[0] for name, values in self.factors.items() if name != LABELS_FACTOR and values}
        space = {LABELS_FACTOR: plan.baseline} if plan.baseline else {}
        return {**first, **space, **plan.baseline_values}

    def columns_of(self, job: Job) -> dict[str, str]:
        """The value of every factor of several values, by the name of its column: ``factor.optimizer``, as the facet.

        Empty where only label spaces differ, and for jobs that are no part of the design.
        """
        values = self.values_of(job) if self.has_factors else None
        return {} if values is None else {f"{FACTOR_PREFIX}{name}": values[name] for name in self.varied}

    def is_ordered(self, factor: str) -> bool:
        """Whether all values of a factor are numbers, which have an order and distances."""
        return all(number_of(value) is not None for value in self.factors[factor])


def number_of(value: str) -> float | None:
    """The number that a value is written as; None for other text."""
    try:
        return float(value)
    except ValueError:
        return None


def _block(job: Job) -> str:
    return str(job.facets.get("pretrain", ""))


def _declared_values(job: Job) -> dict[str, str]:
    """The values that a job's block declares."""
    return {
        name.removeprefix(FACTOR_PREFIX): str(value)
        for name, value in job.facets.items()
        if name.startswith(FACTOR_PREFIX)
    }


def _ordered(values_by_block: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    """All factors in the order of the file, which the names of blocks have; other factors by name.

    Facets have no order to go by: those of a stored plan are sorted.
    """
    block = max(values_by_block, key=lambda name: len(values_by_block[name]), default="")

    def place(factor: str) -> tuple[bool, int, str]:
        found = f"_{block}".find(f"_{factor}-")
        return found < 0, found, factor

    return tuple(sorted({name for values in values_by_block.values() for name in values}, key=place))


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))
