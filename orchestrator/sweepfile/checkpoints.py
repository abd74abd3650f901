"""`checkpoints:` of a block: how often a run is saved (execution), and which checkpoints are kept (identity). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.sweepfile.fields import Count, Strict, refuse_unread
from orchestrator.sweepfile.parse.tree import Path
from orchestrator.sweepfile.problems import Complaints
from orchestrator.sweepfile.values import Checkpoints

MAX_BEST = 100


class IntervalSpec(Strict):
    """A distance between checkpoints: exactly one of the fields."""

    UNITS: ClassVar[tuple[str, ...]] = ("steps", "epochs")

    steps: Count | None = Field(None, description="Updates.")
    epochs: Count | None = Field(None, description="Passes over the training split.")

    @model_validator(mode="after")
    def _exactly_one_unit(self) -> IntervalSpec:
        given = [unit for unit in self.UNITS if getattr(self, unit) is not None]
        if len(given) != 1:
            context = {"given": ", ".join(given) or "none", "rules": ", ".join(self.UNITS)}
            raise PydanticCustomError("one_rule", "this needs exactly one of {rules}; it has {given}", context)
        return self


class BestSpec(Strict):
    """The evaluations with the lowest metric."""

    metric: Literal["val_error", "val_loss"] = Field("val_error", description="What is compared; lower is better.")
    k: Annotated[int, Field(ge=1, le=MAX_BEST)] = Field(1, description="How many are kept; of equal ones the earlier.")


class KeepSpec(Strict):
    """What stays: the newest while the run goes on, listed and best ones as parts of the artifact."""

    last: Count = Field(2, description="Newest checkpoints that stay until the job is done; never changes a result.")
    best: BestSpec | None = Field(None, description="Best evaluations, kept as best/<rank>/ in the artifact.")
    epochs: list[Count] = Field(default_factory=list, description="Epochs kept as epochs/<epoch>/ in the artifact.")


class CheckpointsSpec(Strict):
    """Checkpoints of the backbones."""

    every: Annotated[
        Annotated[Literal["auto"], Tag("automatic")] | Annotated[IntervalSpec, Tag("interval")],
        Discriminator(lambda every: "automatic" if every == "auto" else "interval"),
    ] = Field(IntervalSpec(epochs=1), description="auto: from what a checkpoint costs and how often attempts die.")
    mtbf_s: float = Field(
        21_600.0,
        gt=0,
        description="For auto: mean time between deaths of an attempt to start from, seconds; observed ones move it.",
    )
    keep: KeepSpec = Field(KeepSpec(), description="Which checkpoints stay.")

    @model_validator(mode="after")
    def _time_between_deaths_is_used(self) -> Self:
        if self.every != "auto":
            refuse_unread(self, ("mtbf_s",), "without every: auto")
        return self

    @field_validator("every", mode="before")
    @classmethod
    def _has_a_unit(cls, every: object) -> object:
        if every == "auto" or isinstance(every, Mapping | IntervalSpec):
            return every
        steps = every if isinstance(every, int) and every > 1 else 1000
        why = f"{every!r} has no unit; write {{steps: {steps}}}, {{epochs: 1}} or auto"
        raise PydanticCustomError("refused", "{why}", {"why": why})


def resolve_keep(spec: KeepSpec, recipe: Mapping[str, Any], path: Path, complaints: Complaints) -> dict[str, Any]:
    """What the artifact holds besides its final weights; empty if nothing, so that plain sweeps share their keys.

    ``recipe`` is the resolved one; ``path`` is where ``keep`` stands.
    """
    complaints.refuse_repeats((*path, "epochs"), [str(epoch) for epoch in spec.epochs])
    num_epochs = recipe.get("epochs")
    for position, epoch in enumerate(spec.epochs):
        if num_epochs is not None and epoch > num_epochs:
            message = f"epoch {epoch} never ends: the recipe trains {num_epochs:g} epochs; list epochs up to that"
            complaints.add((*path, "epochs", position), message)
    epochs = {"epochs": sorted(spec.epochs)} if spec.epochs else {}
    best = {"best": spec.best.model_dump()} if spec.best is not None else {}
    return epochs | best


def resolve_checkpoints(spec: CheckpointsSpec) -> Checkpoints:
    """How often to save; none of it changes a result."""
    last, every = spec.keep.last, spec.every
    if not isinstance(every, IntervalSpec):
        return Checkpoints(mtbf_s=spec.mtbf_s, keep_last=last)
    return Checkpoints(every_steps=every.steps or 0, every_epochs=every.epochs or 1, keep_last=last)
