"""A recipe in one line, for people who read logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any, Final

from workloads.train.recipe import Recipe

_ALWAYS: Final = ("epochs", "batch_size", "optimizer", "lr", "schedule")

# What the sweep language resolves these fields to where a sweep is silent (a test compares the two). They decide what
# is worth telling and nothing else: a recipe holds them always.
LANGUAGE_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "momentum": 0.9,
        "nesterov": False,
        "betas": (0.9, 0.999),
        "weight_decay": 0.0,
        "warmup_epochs": 0.0,
        "label_smoothing": 0.0,
        "grad_clip": 0.0,
        "augment": "none",
        "norm_group": None,
        "precision": "fp32",
        "shuffle_block_shards": 16,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "eval_every_epochs": 1,
    }
)


def tell_recipe(recipe: Recipe) -> str:
    """``name=value`` of the fields that every reader asks for, and of all others that are not at their default."""
    defaults = {field.name: field.default for field in fields(recipe) if field.default is not MISSING}
    defaults |= LANGUAGE_DEFAULTS
    others = [name for name in defaults if getattr(recipe, name) != defaults[name]]
    return " ".join(f"{name}={_plain(getattr(recipe, name))}" for name in (*_ALWAYS, *others))


def _plain(value: object) -> str:
    """As a sweep would have it: ``[0.9, 0.99]``, ``adamw``, ``0.001``."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_plain, value))}]"
    return f"{value:.12g}" if isinstance(value, float) else str(value)
