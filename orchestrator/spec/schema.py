"""The edge: what a sweep.yaml may say. Strict pydantic; nothing behind this module sees it.

Every field has a description with its unit and range, because the schema is also the reference of the language.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from orchestrator.spec.fields import Count, Name, Seed, Strict, canonical
from orchestrator.spec.schema_datasets import DatasetSpec
from orchestrator.spec.schema_labels import LabelEntry

# What the data plane passes to timm itself; a test keeps this equal to its list.
RESERVED_KWARGS = frozenset({"checkpoint_path", "features_only", "in_chans", "num_classes", "pretrained", "scriptable"})


def _not_reserved(name: str) -> str:
    """The name of an argument that a sweep may set."""
    if name in RESERVED_KWARGS:
        raise PydanticCustomError("reserved", "the product sets this argument itself; remove it")
    return name


class ModelSpec(Strict):
    """A network by its timm name."""

    name: Annotated[str, Field(min_length=1)] = Field(description="Any timm model name.")
    image_size: Count = Field(description="Side of the square input, pixels.")
    kwargs: dict[Annotated[str, AfterValidator(_not_reserved)], Annotated[Any, AfterValidator(canonical)]] = Field(
        default_factory=dict, description="Arguments for timm.create_model: plain JSON, none that the product sets."
    )


class PretrainSpec(Strict):
    """The backbones: label spaces x seeds."""

    model: ModelSpec
    labels: Annotated[list[str], Field(min_length=1)] = Field(description="Label spaces by name or glob (levels/*).")
    recipe: str | dict[str, Any] = Field(description="A shipped recipe's name, or the fields themselves.")
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field([0], description="Pretraining seeds.")


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


class ResourceGroups(Strict):
    """Resources by group of kinds: data = dataset, index, labels; transfer = finetune, probe."""

    data: ResourcesSpec = ResourcesSpec()
    pretrain: ResourcesSpec = ResourcesSpec()
    transfer: ResourcesSpec = ResourcesSpec()


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
    store: str = Field("", description="URI of the object store; default: the project's own directory.")
    tracking: TrackingSpec = TrackingSpec()
    policy: PolicySpec = PolicySpec()
