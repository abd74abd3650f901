"""From the JSON of an identity to the typed values of a recipe, field by field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

from orchestrator.core.errors import UserError
from workloads.data.augment import Augment
from workloads.data.decode import DecoderName, Interpolation
from workloads.runtime.enums import (
    AverageName,
    DecayedParameters,
    HeadInit,
    LrEvery,
    OptimizerName,
    Precision,
    ScheduleName,
)

Choice = TypeVar("Choice", bound=StrEnum)

_NAMED_FREEZES: dict[str, tuple[str, ...]] = {"none": (), "backbone": ("backbone.*",)}


def _member(names: type[Choice], name: str, value: object) -> Choice:
    try:
        return names(str(value))
    except ValueError as error:
        raise UserError(f"recipe.{name} is {value!r}; choose one of {', '.join(names)}") from error


def _numbers(length: int | None, name: str, value: Any) -> tuple[float, ...]:  # noqa: ANN401 - JSON from an identity
    if not isinstance(value, list | tuple) or (length is not None and len(value) != length):
        raise UserError(f"recipe.{name} is {value!r}; give a list of {length or 'ascending'} numbers")
    return tuple(float(item) for item in value)


def _patterns(name: str, value: Any) -> tuple[str, ...]:  # noqa: ANN401 - JSON from an identity
    if isinstance(value, str) and value in _NAMED_FREEZES:
        return _NAMED_FREEZES[value]
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        wanted = "choose none, backbone or a list of patterns of parameter names"
        raise UserError(f"recipe.{name} is {value!r}; {wanted}")
    return tuple(value)


def _rewind(name: str, value: Any) -> int | None:  # noqa: ANN401 - JSON from an identity
    if value is None or value == "stop":
        return None
    if isinstance(value, Mapping) and value.keys() == {"rewind"}:
        return int(value["rewind"])
    raise UserError(f"recipe.{name} is {value!r}; choose stop or {{rewind: number of updates}}")


CONVERSIONS: Mapping[str, Callable[[str, Any], Any]] = {
    "optimizer": partial(_member, OptimizerName),
    "schedule": partial(_member, ScheduleName),
    "augment": partial(_member, Augment),
    "decoder": partial(_member, DecoderName),
    "interpolation": partial(_member, Interpolation),
    "precision": partial(_member, Precision),
    "head_init": partial(_member, HeadInit),
    "weight_decay_on": partial(_member, DecayedParameters),
    "lr_every": partial(_member, LrEvery),
    "average": partial(_member, AverageName),
    "betas": partial(_numbers, 2),
    "mean": partial(_numbers, 3),
    "std": partial(_numbers, 3),
    "crop_scale": partial(_numbers, 2),
    "crop_ratio": partial(_numbers, 2),
    "milestones": partial(_numbers, None),
    "freeze": _patterns,
    "on_numerics": _rewind,
}
