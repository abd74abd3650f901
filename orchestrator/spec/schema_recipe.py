"""Training hyper-parameters as a sweep.yaml or a recipe file states them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from orchestrator.spec.fields import Count, Strict

Triple = Annotated[list[float], Field(min_length=3, max_length=3)]
Scales = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=3, max_length=3)]
Betas = Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]


class RecipeSpec(Strict):
    """Training hyper-parameters. ``base`` names a shipped recipe whose fields this one overrides."""

    epochs: float = Field(gt=0, description="Passes over the training split; steps = round(epochs * N / batch_size).")
    batch_size: Count = Field(description="Global batch, samples.")
    lr: float = Field(gt=0, description="Peak learning rate.")
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="Optimiser.")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD momentum.")
    nesterov: bool = Field(default=False, description="Nesterov momentum (SGD); needs momentum > 0.")
    betas: Betas = Field([0.9, 0.999], description="Adam betas, in [0, 1).")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay of all parameters.")
    schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="Shape after warm-up, down to 0.")
    warmup_epochs: float = Field(0.0, ge=0, description="Linear warm-up from 0, epochs; at most epochs.")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Mass spread over all classes.")
    grad_clip: float = Field(0.0, ge=0, description="Largest gradient norm; 0 = no clipping.")
    augment: Literal["none", "flip", "crop_flip"] = Field("none", description="Training augmentation.")
    norm_group: Count | None = Field(
        None, description="Samples per BatchNorm statistic, a divisor of batch_size; default min(batch_size, 64)."
    )
    precision: Literal["fp32"] = Field("fp32", description="Arithmetic of forward and backward passes.")
    shuffle_block_shards: Count = Field(16, description="Shards whose samples are shuffled together.")
    mean: Triple = Field([0.5, 0.5, 0.5], description="Channel means of the input in [0, 1].")
    std: Scales = Field([0.5, 0.5, 0.5], description="Channel standard deviations of the input, > 0.")
    eval_every_epochs: Count = Field(1, description="Epochs between validations; the last epoch is always validated.")

    # The data plane refuses the same; here it is refused before anything is created.
    @field_validator("nesterov")
    @classmethod
    def _needs_momentum(cls, nesterov: bool, others: ValidationInfo) -> bool:  # noqa: FBT001 - pydantic's signature
        if nesterov and others.data.get("momentum") == 0:
            message = "Nesterov's update needs momentum, which is 0; set momentum > 0 or nesterov: false"
            raise PydanticCustomError("no_momentum", message)
        return nesterov

    @field_validator("warmup_epochs")
    @classmethod
    def _ends_before_training(cls, warmup_epochs: float, others: ValidationInfo) -> float:
        epochs = others.data.get("epochs", warmup_epochs)
        if warmup_epochs > epochs:
            message = "the warm-up would last longer than the training of {epochs} epochs; use 0 to {epochs}"
            raise PydanticCustomError("long_warmup", message, {"epochs": f"{epochs:g}"})
        return warmup_epochs

    @field_validator("norm_group")
    @classmethod
    def _divides_the_batch(cls, norm_group: int | None, others: ValidationInfo) -> int | None:
        batch_size = others.data.get("batch_size")
        if norm_group and batch_size and batch_size % norm_group:
            message = "batch_size {batch_size} is not a whole number of norm groups; use a divisor of {batch_size}"
            raise PydanticCustomError("uneven_groups", message, {"batch_size": batch_size})
        return norm_group
