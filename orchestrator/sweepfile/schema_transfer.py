"""What an entry of ``transfer:`` may say."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from orchestrator.sweepfile.fields import Count, Name, Seed, Strict
from orchestrator.sweepfile.schema_labels import SubsetSpec
from orchestrator.sweepfile.schema_search import SearchSpec


class TransferSpec(Strict):
    """One measurement of every backbone."""

    name: Name = Field(description="What tables and job names call it.")
    target: str = Field(
        description="Label space to transfer to, by its path (levels/depth1); of any data set of the sweep."
    )
    protocol: Literal["finetune", "probe", "knn"] = Field(
        description="Train everything, a linear head on a frozen backbone, or nothing (nearest neighbours)."
    )
    pretrain: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="Blocks whose backbones are measured, by name or glob; default: all."
    )
    labels: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="Label spaces whose backbones are measured, by path or glob (levels/*); default: all."
    )
    recipe: str | dict[str, Any] | None = Field(
        None, description="As in pretrain; default: the protocol's shipped one. probe: features: cached reads features."
    )
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field([0], description="Transfer seeds.")
    subset: SubsetSpec | None = Field(None, description="Part of the training split to train on; default: all.")
    fractions: Annotated[list[Annotated[float, Field(gt=0, le=1)]], Field(min_length=1)] | None = Field(
        None,
        description="Label fractions, one job each: nested, stratified parts of the training split in (0, 1], drawn by "
        "the transfer seed, or by subset.seed.",
    )
    from_checkpoints: Annotated[list[Count], Field(min_length=1)] | None = Field(
        None,
        description="Epochs of the pretraining to measure: kept ones (pretrain.checkpoints.keep.epochs) or its last; "
        "default: the final weights.",
    )
    grid: dict[str, list[Any]] | None = Field(
        None, description="Recipe fields and the values to try; every combination is a cell, run with all seeds."
    )
    search: SearchSpec | None = Field(
        None, description="Trials of recipe values or label spaces; the best one is used. In place of a grid."
    )
    select_on: Literal["train", "val"] | None = Field(
        None,
        description="Where a grid's cell, or a search's trial, is chosen, per label space: train (default): on a keyed "
        "tenth of the training samples, which the runs do not train on; val: on the validation split itself, and "
        "labelled so.",
    )
    baselines: Annotated[list[Literal["one_pass", "retrain"]], Field(min_length=1)] | None = Field(
        None,
        description="one_pass: train on the target's own labels by the pretraining's recipe; retrain: the same, then "
        "this transfer from it.",
    )
