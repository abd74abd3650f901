"""What ``resources:`` may say."""

from __future__ import annotations

import math

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from orchestrator.spec.fields import Count, Strict


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
