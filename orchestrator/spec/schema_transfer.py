"""What an entry of ``transfer:`` may say."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from orchestrator.spec.fields import Name, Seed, Strict
from orchestrator.spec.schema_labels import SubsetSpec


class TransferSpec(Strict):
    """One measurement of every backbone."""

    name: Name
    target: str = Field(description="Label space to transfer to, by its path (levels/depth1).")
    protocol: Literal["finetune", "probe"] = Field(
        description="Train everything, or a linear head on a frozen backbone."
    )
    recipe: str | dict[str, Any] | None = Field(
        None, description="As in pretrain; default: the protocol's shipped one."
    )
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field([0], description="Transfer seeds.")
    subset: SubsetSpec | None = Field(None, description="Part of the training split to train on; default: all.")
