"""The edge: what a sweep.yaml may say. Strict pydantic; nothing behind this module sees it.

Every field has a description with its unit and range, because the schema is also the reference of the language.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orchestrator.spec.fields import Name, Strict
from orchestrator.spec.schema_datasets import DatasetSpec
from orchestrator.spec.schema_labels import LabelEntry
from orchestrator.spec.schema_model import ComputeSpec
from orchestrator.spec.schema_policy import PolicySpec
from orchestrator.spec.schema_pretrain import PretrainSpec
from orchestrator.spec.schema_report import ReportSpec, TrackingSpec
from orchestrator.spec.schema_resources import ResourceGroups
from orchestrator.spec.schema_transfer import TransferSpec


class SweepSpec(Strict):
    """A whole sweep.yaml."""

    version: Literal[1]
    name: Name
    datasets: Annotated[dict[Name, DatasetSpec], Field(min_length=1)]
    labels: Annotated[dict[Name, LabelEntry], Field(min_length=1)]
    pretrain: PretrainSpec
    transfer: list[TransferSpec] = Field(default_factory=list)
    report: ReportSpec = ReportSpec()
    resources: ResourceGroups = ResourceGroups()
    compute: ComputeSpec = ComputeSpec()
    store: str = Field("", description="URI of the object store; default: the project's own directory.")
    tracking: TrackingSpec = TrackingSpec()
    policy: PolicySpec = PolicySpec()
