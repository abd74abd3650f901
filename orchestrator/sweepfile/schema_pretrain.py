"""What ``pretrain:`` may say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.sweepfile.fields import Name, Seed, Strict
from orchestrator.sweepfile.schema_checkpoints import CheckpointsSpec
from orchestrator.sweepfile.schema_labels import SubsetSpec
from orchestrator.sweepfile.schema_model import InitialSpec, ModelSpec

SAME = "same"


class BackboneInitSpec(InitialSpec):
    """Initial weights of a backbone; exactly one of ``artifact``, ``uri``, ``timm`` and ``pretrain``."""

    SOURCES: ClassVar[tuple[str, ...]] = (*InitialSpec.SOURCES, "pretrain")

    pretrain: str | None = Field(
        None, description="Block of this sweep whose backbone it starts from; the block's own name is allowed."
    )
    labels: str = Field(
        SAME, description="With pretrain: label space of that backbone, by its path; same: that of this backbone."
    )
    seed: Seed | str = Field(SAME, description="With pretrain: seed of that backbone; same: that of this backbone.")

    @model_validator(mode="after")
    def _chooses_one_backbone(self) -> Self:
        if isinstance(self.seed, str) and self.seed != SAME:
            context = {"seed": repr(self.seed), "at": ("seed",)}
            raise PydanticCustomError("refused", "{seed} is no seed; write a whole number or same", context)
        for field in ("labels", "seed"):
            if self.pretrain is None and field in self.model_fields_set:
                message = (
                    f"it says which backbone of this sweep to start from, but there is no 'pretrain'; remove {field}"
                )
                raise PydanticCustomError("refused", message, {"at": (field,)})
        return self


class PretrainSpec(Strict):
    """The backbones: label spaces x seeds."""

    model: ModelSpec = Field(description="The network.")
    init: BackboneInitSpec | None = Field(
        None, description="Initial weights of the backbone; default: random, by the seed."
    )
    labels: Annotated[list[str], Field(min_length=1)] = Field(description="Label spaces by name or glob (levels/*).")
    recipe: str | dict[str, Any] = Field(
        description="Name of a recipe, or its fields; base: NAME takes those of another recipe first."
    )
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field([0], description="Pretraining seeds.")
    subset: SubsetSpec | None = Field(None, description="Part of the training split to train on; default: all.")
    checkpoints: CheckpointsSpec = Field(CheckpointsSpec(), description="How often it is saved, and what of it stays.")


_ONE, _NAMED = "one block", "named blocks"  # no key of a sweep.yaml, or errors would point there


def _form(value: object) -> str:
    """Several blocks if no key is a field of a block, and what stands below the keys could be blocks."""
    if isinstance(value, Mapping) and value and not PretrainSpec.model_fields.keys() & value.keys():
        return _NAMED if all(isinstance(block, Mapping | PretrainSpec) for block in value.values()) else _ONE
    return _ONE


PretrainBlocks = Annotated[
    Annotated[PretrainSpec, Tag(_ONE)] | Annotated[dict[Name, PretrainSpec], Tag(_NAMED)], Discriminator(_form)
]
