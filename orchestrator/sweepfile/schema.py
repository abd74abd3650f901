"""The edge: what a sweep.yaml may say. Strict pydantic; nothing behind this module sees it.

Every field has a description with its unit and range, because the schema is also the reference of the language.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from orchestrator.sweepfile.fields import Name, Strict
from orchestrator.sweepfile.schema_datasets import DatasetSpec
from orchestrator.sweepfile.schema_labels import LabelEntry
from orchestrator.sweepfile.schema_model import ComputeSpec
from orchestrator.sweepfile.schema_notify import NotifySpec
from orchestrator.sweepfile.schema_policy import PolicySpec
from orchestrator.sweepfile.schema_pretrain import PretrainBlocks
from orchestrator.sweepfile.schema_report import ReportSpec, TrackingSpec
from orchestrator.sweepfile.schema_resources import ResourceGroups
from orchestrator.sweepfile.schema_transfer import TransferSpec


class SweepSpec(Strict):
    """A whole sweep.yaml."""

    version: Literal[1] = Field(description="Version of the language.")
    name: Name = Field(description="Name of the sweep, which is its id: a changed file of the same name revises it.")
    datasets: Annotated[dict[Name, DatasetSpec], Field(min_length=1)] = Field(description="Data sets by name.")
    labels: Annotated[dict[Name, LabelEntry], Field(min_length=1)] = Field(
        description="Label spaces by name; an entry with several levels or numbers makes one each (NAME/LEVEL)."
    )
    recipes: dict[Name, dict[str, Any]] = Field(
        default_factory=dict,
        description="Training hyper-parameters by name, for recipe and base; they win over shipped ones of that name.",
    )
    pretrain: PretrainBlocks = Field(description="The backbones: one block, or a mapping of names to blocks.")
    transfer: list[TransferSpec] = Field(
        default_factory=list, description="How every backbone is measured; none: they are only pretrained."
    )
    report: ReportSpec = Field(ReportSpec(), description="What is compared, and with what.")
    resources: ResourceGroups = Field(ResourceGroups(), description="What attempts occupy. Changes no key.")
    compute: ComputeSpec = Field(ComputeSpec(), description="How training computes. Changes no key.")
    store: str = Field("", description="URI of the object store; default: the project's own directory.")
    tracking: TrackingSpec = Field(TrackingSpec(), description="Where MLflow is. Changes no key.")
    policy: PolicySpec = Field(PolicySpec(), description="Budgets, ranks and failures. Changes no key.")
    notify: list[NotifySpec] = Field(
        default_factory=list, description="Who is told when it ends, stalls or spends its budget. Changes no key."
    )
