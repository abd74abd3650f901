"""Checkpoints: what of their policy is identity, and what is execution. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.sweepfile.complaints import Complaints
from orchestrator.sweepfile.model import Checkpoints
from orchestrator.sweepfile.parse.tree import Path
from orchestrator.sweepfile.schema_checkpoints import CheckpointsSpec, IntervalSpec, KeepSpec


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
