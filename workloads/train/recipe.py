"""The recipe of a training job: named hyper-parameters, fully resolved by the planner, checked again here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Self

from orchestrator.errors import UserError
from workloads.data.augment import Augment


class OptimizerName(StrEnum):
    """Optimisers of ``torch.optim``."""

    SGD = "sgd"
    ADAM = "adam"
    ADAMW = "adamw"


class ScheduleName(StrEnum):
    """What the learning rate does after its warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Hyper-parameters; ``batch_size`` is the global batch, ``lr`` the learning rate after warm-up.

    ``weight_decay`` applies to every parameter, as in the plain recipes of the literature. ``mean`` and ``std``
    normalise pixels in [0, 1], per channel.
    """

    epochs: float
    batch_size: int
    optimizer: OptimizerName
    lr: float
    momentum: float
    nesterov: bool
    betas: tuple[float, float]
    weight_decay: float
    schedule: ScheduleName
    warmup_epochs: float
    label_smoothing: float
    grad_clip: float
    augment: Augment
    norm_group: int | None
    precision: str
    shuffle_block_shards: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    eval_every_epochs: int

    def __post_init__(self) -> None:
        for accepted, name, wanted in self._checks():
            if not accepted:
                raise UserError(f"recipe.{name} is {getattr(self, name)!r}; it must be {wanted}")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """From the ``recipe`` of a job's parameters. Raises ``UserError`` naming the field that is wrong."""
        names = {field.name for field in fields(cls)}
        if names != mapping.keys():
            missing, unknown = sorted(names - mapping.keys()), sorted(mapping.keys() - names)
            raise UserError(f"recipe is not fully resolved: missing {missing}, unknown {unknown}; plan the sweep again")
        converted = {name: convert(name, mapping[name]) for name, convert in _CONVERSIONS.items()}
        return cls(**{**mapping, **converted})

    def _checks(self) -> tuple[tuple[bool, str, str], ...]:
        return (
            (self.epochs > 0, "epochs", "> 0"),
            (self.batch_size >= 1, "batch_size", ">= 1"),
            (self.lr >= 0, "lr", ">= 0"),
            (0 <= self.momentum < 1, "momentum", "in [0, 1)"),
            (not self.nesterov or self.momentum > 0, "nesterov", "false when momentum is 0"),
            (all(0 <= beta < 1 for beta in self.betas), "betas", "two numbers in [0, 1)"),
            (self.weight_decay >= 0, "weight_decay", ">= 0"),
            (0 <= self.warmup_epochs <= self.epochs, "warmup_epochs", f"in [0, epochs = {self.epochs:g}]"),
            (0 <= self.label_smoothing < 1, "label_smoothing", "in [0, 1)"),
            (self.grad_clip >= 0, "grad_clip", ">= 0 (0 = none)"),
            (self.precision == "fp32", "precision", "'fp32', the only precision so far"),
            (self.shuffle_block_shards >= 1, "shuffle_block_shards", ">= 1"),
            (all(value > 0 for value in self.std), "std", "three numbers > 0"),
            (self.eval_every_epochs >= 1, "eval_every_epochs", ">= 1"),
        )


def _member(names: type[StrEnum], name: str, value: object) -> StrEnum:
    try:
        return names(str(value))
    except ValueError as error:
        raise UserError(f"recipe.{name} is {value!r}; choose one of {', '.join(names)}") from error


def _numbers(name: str, value: Any, length: int) -> tuple[float, ...]:  # noqa: ANN401 - JSON from an identity
    if not isinstance(value, list | tuple) or len(value) != length:
        raise UserError(f"recipe.{name} is {value!r}; give a list of {length} numbers")
    return tuple(float(item) for item in value)


_CONVERSIONS: dict[str, Callable[[str, Any], Any]] = {
    "optimizer": lambda name, value: _member(OptimizerName, name, value),
    "schedule": lambda name, value: _member(ScheduleName, name, value),
    "augment": lambda name, value: _member(Augment, name, value),
    "betas": lambda name, value: _numbers(name, value, 2),
    "mean": lambda name, value: _numbers(name, value, 3),
    "std": lambda name, value: _numbers(name, value, 3),
}
