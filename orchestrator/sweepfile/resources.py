"""`resources:` and `compute:`: the resources of attempts, and how they compute. Pure."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.core.contract import Resources
from orchestrator.sweepfile.fields import Count, Strict, at_most

_AVAILABLE = at_most(1_000_000, "no cluster has more for one job")


class ResourcesSpec(Strict):
    """What one attempt occupies, and on which nodes it may."""

    cpus: Annotated[float, _AVAILABLE] = Field(
        1, ge=0, description="CPU cores; the attempt computes with as many threads."
    )
    gpus: Annotated[float, _AVAILABLE] = Field(
        0, ge=0, description="GPUs; below 1 = a part of one and of its memory, which other jobs share."
    )
    min_gpus: float = Field(
        0,
        ge=0,
        description=(
            "Fewest GPUs that the job also runs on, one worker each, with cpus and memory_gib in proportion: it starts "
            "smaller when the cluster is full and grows later, each time from a checkpoint. 0 = always on all of gpus."
        ),
    )
    memory_gib: Annotated[float, _AVAILABLE] = Field(0, ge=0, description="Memory to reserve, GiB; 0 = not reserved.")
    workers: Count | None = Field(
        None, description="Processes that train one job together and share all of the above; default: one per GPU."
    )
    accelerator: str = Field(
        "", max_length=63, description="Type of GPU that the nodes must have, as Ray calls it (A100, H100); '' = any."
    )
    spot: Literal["allow", "require", "never"] = Field(
        "allow", description="Whether to run on spot nodes, which their provider may take back: allow, require, never."
    )
    labels: dict[str, str] = Field(
        default_factory=dict, max_length=32, description="Labels that the nodes must have, with these values."
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

    @field_validator("min_gpus")
    @classmethod
    def _is_a_smaller_gang(cls, min_gpus: float, others: ValidationInfo) -> float:
        gpus = others.data.get("gpus", 0)
        if min_gpus and (min_gpus > gpus or min_gpus != int(min_gpus) or gpus != int(gpus)):
            message = "min_gpus must be a whole number of GPUs, at most gpus ({gpus}), which must be whole too"
            raise PydanticCustomError("not_elastic", message, {"gpus": f"{gpus:g}"})
        return min_gpus

    @field_validator("accelerator")
    @classmethod
    def _has_gpus(cls, accelerator: str, others: ValidationInfo) -> str:
        if accelerator and not others.data.get("gpus", 0):
            message = "an accelerator is given, but no gpus; add 'gpus: ...', or leave accelerator out"
            raise PydanticCustomError("no_gpus", message)
        return accelerator

    @model_validator(mode="after")
    def _elastic_runs_one_worker_per_gpu(self) -> Self:
        if self.min_gpus and self.workers and self.workers != self.gpus:
            message = "with min_gpus, the number of workers follows from the GPUs given, one each; leave workers out"
            raise PydanticCustomError("elastic_workers", message)
        return self


class ResourceGroups(Strict):
    """Resources by group of kinds: data = dataset, index, labels; transfer = finetune, probe; others are kinds."""

    data: ResourcesSpec = Field(ResourcesSpec(), description="Of dataset, index and labels jobs.")
    embed: ResourcesSpec = Field(ResourcesSpec(), description="Of embed jobs: features of a backbone.")
    cluster: ResourcesSpec = Field(ResourcesSpec(), description="Of cluster jobs: k-means.")
    pretrain: ResourcesSpec = Field(ResourcesSpec(), description="Of pretrain jobs.")
    transfer: ResourcesSpec = Field(ResourcesSpec(), description="Of finetune, probe and knn jobs.")
    analyze: ResourcesSpec = Field(ResourcesSpec(), description="Of analyze jobs: measures of features, on CPUs.")
    simulate: ResourcesSpec = Field(ResourcesSpec(), description="Of theory jobs: blocks of seeds of a simulation.")

    @field_validator("data", "cluster", "analyze", "simulate")
    @classmethod
    def _runs_alone(cls, data: ResourcesSpec) -> ResourcesSpec:
        if data.num_workers > 1:
            message = "these jobs run as one process; set workers to 1 and gpus to at most 1"
            raise PydanticCustomError("no_gang", message)
        return data

    @field_validator("pretrain", "transfer")
    @classmethod
    def _has_a_gpu_for_each_worker(cls, gang: ResourcesSpec) -> ResourcesSpec:
        if gang.num_workers > 1 and 0 < gang.gpus <= gang.num_workers / 2:
            message = (
                "several of {workers} workers with gpus: {gpus} would share a GPU, which NCCL refuses; leave workers "
                "out for one per GPU, or raise gpus to {workers}"
            )
            raise PydanticCustomError("shared_gpus", message, {"workers": gang.num_workers, "gpus": f"{gang.gpus:g}"})
        return gang


class ComputeSpec(Strict):
    """How training jobs compute. Changes results by rounding only, and so no key."""

    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = Field(
        "off", description="torch.compile; reduce-overhead uses CUDA graphs. Falls back with a note."
    )
    activation_checkpointing: bool = Field(
        default=False,
        description=(
            "Compute activations of timm's blocks again in the backward pass instead of keeping them: larger "
            "micro-batches, about a third more time."
        ),
    )
    deterministic: bool = Field(
        default=False, description="Bit-exact results on GPUs, at a price; CPUs always give them."
    )
    micro_batch: Annotated[int, Field(ge=0)] = Field(
        0, description="Samples per forward pass, whole norm groups; 0 = found automatically on GPUs."
    )


def resolve_resources(spec: ResourcesSpec) -> Resources:
    """What one attempt occupies."""
    return Resources(**spec.model_dump(exclude={"workers"}))
