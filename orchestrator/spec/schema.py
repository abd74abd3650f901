"""The edge: what a sweep.yaml may say. Strict pydantic; nothing behind this module sees it.

Every field has a description with its unit and range, because the schema is also the reference of the language.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from orchestrator.spec.fields import Count, Name, Seed, Strict
from orchestrator.spec.schema_checkpoints import CheckpointsSpec
from orchestrator.spec.schema_datasets import DatasetSpec
from orchestrator.spec.schema_labels import LabelEntry, SubsetSpec
from orchestrator.spec.schema_model import ComputeSpec, InitialSpec, ModelSpec


class PretrainSpec(Strict):
    """The backbones: label spaces x seeds."""

    model: ModelSpec
    init: InitialSpec | None = Field(None, description="Initial weights of the backbone; default: random, by the seed.")
    labels: Annotated[list[str], Field(min_length=1)] = Field(description="Label spaces by name or glob (levels/*).")
    recipe: str | dict[str, Any] = Field(description="A shipped recipe's name, or the fields themselves.")
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field([0], description="Pretraining seeds.")
    subset: SubsetSpec | None = Field(None, description="Part of the training split to train on; default: all.")
    checkpoints: CheckpointsSpec = CheckpointsSpec()


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


class ReportSpec(Strict):
    """The answer."""

    baseline: str | None = Field(
        None, description="Label space to compare with: pretrained on the target's own labels."
    )
    metric: Literal["val_error", "best_val_error"] = Field("val_error", description="What is compared.")


class ResourcesSpec(Strict):
    """What one attempt occupies."""

    cpus: float = Field(1, ge=0, description="CPU cores; the attempt computes with as many threads.")
    gpus: float = Field(0, ge=0, description="GPUs.")
    memory_gib: float = Field(0, ge=0, description="Memory to reserve, GiB; 0 = not reserved.")
    workers: Count | None = Field(
        None, description="Processes that train one job together and share all of the above; default: one per GPU."
    )

    @property
    def num_workers(self) -> int:
        """Processes of an attempt."""
        return self.workers or max(1, math.ceil(self.gpus))

    @field_validator("workers")
    @classmethod
    def _uses_all_gpus(cls, workers: int | None, others: ValidationInfo) -> int | None:
        gpus = others.data.get("gpus", 0)
        if workers and gpus > workers:
            message = (
                "a process trains on one GPU, so {gpus} GPUs need as many workers; leave workers out or lower gpus"
            )
            raise PydanticCustomError("idle_gpus", message, {"gpus": f"{gpus:g}"})
        return workers


class ResourceGroups(Strict):
    """Resources by group of kinds: data = dataset, index, labels; transfer = finetune, probe; others are kinds."""

    data: ResourcesSpec = ResourcesSpec()
    embed: ResourcesSpec = ResourcesSpec()
    cluster: ResourcesSpec = ResourcesSpec()
    pretrain: ResourcesSpec = ResourcesSpec()
    transfer: ResourcesSpec = ResourcesSpec()

    @field_validator("data", "cluster")
    @classmethod
    def _runs_alone(cls, data: ResourcesSpec) -> ResourcesSpec:
        if data.num_workers > 1:
            message = "these jobs run as one process; set workers to 1 and gpus to at most 1"
            raise PydanticCustomError("no_gang", message)
        return data


class TrackingSpec(Strict):
    """Where MLflow is."""

    uri: str = Field("", description="Tracking URI without user and password; default: the project's own.")
    experiment: str = Field("", description="Experiment; default: the sweep's name.")

    @field_validator("uri")
    @classmethod
    def _refuse_credentials(cls, uri: str) -> str:
        # No message shows the URI: what stands before an @ may be a password.
        try:
            authority = urlsplit(uri).netloc
        except ValueError:
            message = "this is not a URI; write http(s)://host:port or sqlite:///absolute/path"
            raise PydanticCustomError("refused", message) from None
        if "@" in authority:
            message = (
                "a URI with a user or password is refused, because sweeps are stored and shared; "
                "remove it and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
            )
            raise PydanticCustomError("refused", message)
        return uri


class PolicySpec(Strict):
    """What to do when jobs fail."""

    failures: Count = Field(3, description="Failed attempts before a job fails; preemptions do not count.")


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
