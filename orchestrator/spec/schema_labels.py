"""The part of a sweep.yaml that defines label spaces."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.spec.fields import Seed, Strict


class RandomIds(Strict):
    """Random label ids, balanced: a keyed permutation of the samples modulo ``num_classes``."""

    num_classes: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)] = Field(
        description="One label space per number."
    )
    seed: Seed = Field(0, description="Seed of the permutation; never follows the pretrain seed.")


class LabelEntry(Strict):
    """One entry of ``labels``: a data set and exactly one rule."""

    RULES: ClassVar[tuple[str, ...]] = ("hierarchy", "random", "modulo")

    dataset: str = Field(description="Name of an entry of datasets.")
    hierarchy: Annotated[list[str], Field(min_length=1)] | None = Field(None, description="Levels of the hierarchy.")
    random: RandomIds | None = Field(None, description="Random ids.")
    modulo: int | None = Field(None, ge=2, description="Leaf class modulo this number.")

    @model_validator(mode="after")
    def _exactly_one_rule(self) -> LabelEntry:
        given = [rule for rule in self.RULES if getattr(self, rule) is not None]
        if len(given) != 1:
            context = {"given": ", ".join(given) or "none", "rules": ", ".join(self.RULES)}
            raise PydanticCustomError("one_rule", "needs exactly one of {rules}; it has {given}", context)
        return self
