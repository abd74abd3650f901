"""What ``search:`` of a transfer may say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.sweepfile.fields import Count, OneRule, Seed, Strict

Ends = Annotated[list[float], Field(min_length=2, max_length=2)]
WholeEnds = Annotated[list[int], Field(min_length=2, max_length=2)]


class AshaSpec(Strict):
    """Random draws, of which those that fall behind are stopped (asynchronous successive halving)."""

    reduction: float = Field(3.0, gt=1, le=100, description="At each rung the best 1/reduction go on, > 1.")
    grace_epochs: Count | None = Field(
        None,
        description="Epochs of the first rung; each further one is reduction times as far. Default: the first "
        "validation.",
    )


class RandomSpec(Strict):
    """Independent draws, all of which run to their end."""


class OptunaSpec(Strict):
    """Optuna's tree-structured Parzen estimator; all trials run to their end. Needs the extra ``optuna``."""

    startup_trials: Count = Field(10, description="Random trials before the estimator proposes any.")


class RangeSpec(OneRule):
    """All numbers between two ends, both included."""

    RULES: ClassVar[tuple[str, ...]] = ("uniform", "log", "integer", "log_integer")

    uniform: Ends | None = Field(None, description="[low, high], equally likely.")
    log: Ends | None = Field(None, description="[low, high] > 0, equally likely on a logarithmic scale.")
    integer: WholeEnds | None = Field(None, description="[low, high], whole numbers, equally likely.")
    log_integer: WholeEnds | None = Field(None, description="[low, high] >= 1, whole numbers on a logarithmic scale.")

    @property
    def rule(self) -> str:
        """Which of the rules it is."""
        return next(rule for rule in self.RULES if getattr(self, rule) is not None)

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        low, high = getattr(self, self.rule)
        if low >= high:
            context = {"low": f"{low:g}", "high": f"{high:g}", "at": (self.rule,)}
            raise PydanticCustomError("refused", "{low} to {high} is no range; give [low, high], low < high", context)
        if self.rule.startswith("log") and low <= 0:
            message = "a logarithmic scale needs ends above 0, and this begins at {low}; use a small positive number"
            raise PydanticCustomError("refused", message, {"low": f"{low:g}", "at": (self.rule,)})
        return self


def _form_of(values: object) -> str:
    """Only the form that was meant is complained of."""
    return "range" if isinstance(values, Mapping | RangeSpec) else "values"


Values = Annotated[
    Annotated[list[Any], Tag("values")] | Annotated[RangeSpec, Tag("range")],
    Discriminator(_form_of),
]


class SearchSpec(OneRule):
    """Trials of values for a recipe, or of label spaces, in place of a grid; the best one is used."""

    RULES: ClassVar[tuple[str, ...]] = ("asha", "random", "optuna")

    asha: AshaSpec | None = Field(None, description="Random draws; those that fall behind are stopped at rungs.")
    random: RandomSpec | None = Field(None, description="Random draws, all to their end.")
    optuna: OptunaSpec | None = Field(None, description="Proposals that learn from trials that ended.")
    over: Literal["recipe", "pretrain", "labels"] = Field(
        "recipe",
        description="recipe: fields of this transfer's recipe, for each label space; pretrain: fields of the "
        "pretraining's, for each label space; labels: which label space to pretrain with. The latter two are judged by "
        "a cached probe of the target, never by accuracy on their own labels.",
    )
    space: dict[str, Values] | None = Field(
        None, description="Recipe fields, each with a list of values or a range; not with over: labels."
    )
    trials: Count | None = Field(
        None, description="Trials in all; default: 16, or as many as there are combinations; with labels: all of them."
    )
    concurrent: Count = Field(
        1, description="Trials at the same time: the search holds so many times what one of them needs. Changes no key."
    )
    seed: Seed = Field(0, description="Of the draws.")
