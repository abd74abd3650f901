"""What ``pretrain:`` may say."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from orchestrator.spec.fields import Seed, Strict
from orchestrator.spec.schema_checkpoints import CheckpointsSpec
from orchestrator.spec.schema_labels import SubsetSpec
from orchestrator.spec.schema_model import InitialSpec, ModelSpec


class PretrainSpec(Strict):
    """The backbones: label spaces x seeds."""

    model: ModelSpec
    init: InitialSpec | None = Field(None, description="Initial weights of the backbone; default: random, by the seed.")
    labels: Annotated[list[str], Field(min_length=1)] = Field(description="Label spaces by name or glob (levels/*).")
    recipe: str | dict[str, Any] = Field(description="A shipped recipe's name, or the fields themselves.")
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field([0], description="Pretraining seeds.")
    subset: SubsetSpec | None = Field(None, description="Part of the training split to train on; default: all.")
    checkpoints: CheckpointsSpec = CheckpointsSpec()
