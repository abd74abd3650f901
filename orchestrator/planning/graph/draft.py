"""Jobs before they have keys, and what the names and parameters of jobs are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.contract import JobKind
from orchestrator.sweepfile.values import LabelSpace, Model, Pretrain


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A job without its key; ``inputs`` maps roles to job names."""

    kind: JobKind
    name: str
    readable: str
    parameters: Mapping[str, Any]
    inputs: Mapping[str, str]
    facets: Mapping[str, str | int]
    execution: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``Execution`` that belong to this job alone."""
    like: JobKind | None = None
    """Kind whose resources and execution it has; None = its own."""
    copies: int = 1
    """Times what a job of that kind occupies."""
    after: tuple[str, ...] = ()
    """Jobs that must be done before, though nothing of theirs is identity."""


def pretrain_job(block: str, space: str, seed: int) -> str:
    """Name of the job that pretrains a backbone; a single block of no name does not show in it."""
    return "/".join(part for part in ("pretrain", block, space, f"seed{seed}") if part)


def model_parameters(model: Model) -> dict[str, Any]:
    """What of a model is identity."""
    return {"name": model.name, "image_size": model.image_size, "kwargs": dict(model.kwargs)}


def subset_parameters(subset: Mapping[str, Any]) -> dict[str, Any]:
    """Identity only where it thins something: whole data sets keep the keys that they always had."""
    return {"subset": subset} if subset else {}


def space_facets(space: LabelSpace) -> dict[str, str | int]:
    """Without ``granularity`` where only the record will know it."""
    counted = {"granularity": space.num_classes} if space.num_classes else {}
    return {"dataset": space.dataset, "label_space": space.name, "level": space.level, **counted}


def pretrain_facets(pretrain: Pretrain, space: LabelSpace, seed: int) -> dict[str, str | int]:
    """What backbones are compared by."""
    named = {"pretrain": pretrain.name} if pretrain.name else {}
    baseline = {"baseline": "one_pass"} if space.name in pretrain.baselines else {}
    return {**space_facets(space), **named, "pretrain_seed": seed, **baseline}
