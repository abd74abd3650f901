"""The recipe of a training job: named hyper-parameters, fully resolved by the planner, checked again here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self

from orchestrator.core.errors import UserError
from workloads.data.augment import Augment
from workloads.data.decode import DecoderName, Interpolation
from workloads.runtime.enums import (
    MIXES,
    AverageName,
    DecayedParameters,
    HeadInit,
    LrEvery,
    OptimizerName,
    Precision,
    ScheduleName,
)
from workloads.train.recipe_values import CONVERSIONS

_OF_FEATURES = ("features", "solver")
"""Of recipes on cached features: what trains them does not need to know."""
SOFTMAX, SIGMOID = "softmax", "sigmoid"

Check = tuple[bool, str, str]
"""Whether a field is accepted, its name, and what it must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Hyper-parameters; ``batch_size`` is the global batch, ``lr`` the learning rate after warm-up.

    ``mean`` and ``std`` normalise pixels in [0, 1], per channel. A field with a default may be missing in a resolved
    recipe: identities leave such fields out at their default, so a default here is part of results and never changes
    without a bump of ``code_version``. ``docs/recipes.md`` says what each field means.
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
    precision: Precision
    shuffle_block_shards: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    eval_every_epochs: int

    loss: str = SOFTMAX
    """``softmax``, ``sigmoid``, or ``<distribution>==<version>:<name>`` of a plug-in."""
    head_bias: float | None = None
    head_init: HeadInit = HeadInit.DEFAULT
    dropout: float = 0.0
    drop_path: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_prob: float = 1.0
    cutmix_share: float = 0.5
    eps: float | None = None
    weight_decay_on: DecayedParameters = DecayedParameters.ALL
    warmup_steps: int = 0
    constant_epochs: float = 0.0
    lr_final: float = 0.0
    lr_every: LrEvery = LrEvery.STEP
    decay_rate: float = 0.1
    decay_every_epochs: float = 1.0
    milestones: tuple[float, ...] = ()
    average: AverageName = AverageName.NONE
    average_decay: float = 0.9999
    average_start_epoch: float = 0.0
    freeze: tuple[str, ...] = ()
    """Globs over parameter names; ``backbone`` has become ``("backbone.*",)``."""
    on_numerics: int | None = None
    """Updates to go back after a numerics failure; None = stop."""
    grad_spike: float = 0.0
    tf32: bool = False
    resize: int | None = None
    interpolation: Interpolation = Interpolation.BILINEAR
    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    color_jitter: float = 0.0
    decoder: DecoderName = DecoderName.PILLOW
    shuffle_chunk_samples: int | None = None
    select_holdout: float = 0.0
    """Share of the training samples kept out of training, for ``select_error``."""

    def __post_init__(self) -> None:
        for accepted, name, wanted in (*_range_checks(self), *_relation_checks(self)):
            if not accepted:
                raise UserError(f"recipe.{name} is {getattr(self, name)!r}; it must be {wanted}")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """From the ``recipe`` of a job's parameters. Raises ``UserError`` naming the field that is wrong."""
        mapping = {name: value for name, value in mapping.items() if name not in _OF_FEATURES}
        required = {field.name for field in fields(cls) if field.default is MISSING}
        missing, unknown = required - mapping.keys(), mapping.keys() - {field.name for field in fields(cls)}
        if missing or unknown:
            wrong = f"missing {sorted(missing)}, unknown {sorted(unknown)}"
            raise UserError(f"recipe is not fully resolved: {wrong}; plan the sweep again")
        converted = {name: convert(name, mapping[name]) for name, convert in CONVERSIONS.items() if name in mapping}
        return cls(**{**mapping, **converted})

    @property
    def is_mixed(self) -> bool:
        """Whether training images are blended or cut together in pairs."""
        return self.mixup > 0 or self.cutmix > 0

    @property
    def rewind_steps(self) -> int | None:
        """Updates to go back after a numerics failure; None = stop."""
        return self.on_numerics


def _range_checks(recipe: Recipe) -> tuple[Check, ...]:
    """What each field must be by itself."""
    return (
        (recipe.epochs > 0, "epochs", "> 0"),
        (recipe.batch_size >= 1, "batch_size", ">= 1"),
        (recipe.lr >= 0, "lr", ">= 0"),
        (0 <= recipe.momentum < 1, "momentum", "in [0, 1)"),
        (all(0 <= beta < 1 for beta in recipe.betas), "betas", "two numbers in [0, 1)"),
        (recipe.eps is None or recipe.eps > 0, "eps", "> 0, or null for the optimiser's own"),
        (recipe.weight_decay >= 0, "weight_decay", ">= 0"),
        (recipe.warmup_steps >= 0, "warmup_steps", ">= 0"),
        (recipe.lr_final >= 0, "lr_final", ">= 0"),
        (0 < recipe.decay_rate <= 1, "decay_rate", "in (0, 1]"),
        (recipe.decay_every_epochs > 0, "decay_every_epochs", "> 0"),
        (0 <= recipe.label_smoothing < 1, "label_smoothing", "in [0, 1)"),
        (recipe.grad_clip >= 0, "grad_clip", ">= 0 (0 = none)"),
        (recipe.grad_spike == 0 or recipe.grad_spike > 1, "grad_spike", "> 1, or 0 for none"),
        (recipe.on_numerics is None or recipe.on_numerics >= 1, "on_numerics", "stop, or rewind by >= 1 steps"),
        (0 <= recipe.dropout < 1, "dropout", "in [0, 1)"),
        (0 <= recipe.drop_path < 1, "drop_path", "in [0, 1)"),
        (recipe.mixup >= 0, "mixup", ">= 0 (0 = none)"),
        (recipe.cutmix >= 0, "cutmix", ">= 0 (0 = none)"),
        (0 < recipe.mix_prob <= 1, "mix_prob", "in (0, 1]"),
        (0 < recipe.cutmix_share < 1, "cutmix_share", "in (0, 1)"),
        (0 <= recipe.average_decay < 1, "average_decay", "in [0, 1)"),
        (recipe.shuffle_block_shards >= 1, "shuffle_block_shards", ">= 1"),
        ((recipe.shuffle_chunk_samples or 1) >= 1, "shuffle_chunk_samples", ">= 1, or null for whole shards"),
        (all(value > 0 for value in recipe.std), "std", "three numbers > 0"),
        (0 <= recipe.select_holdout <= 0.5, "select_holdout", "in [0, 0.5]"),
        (recipe.eval_every_epochs >= 1, "eval_every_epochs", ">= 1"),
        (recipe.resize is None or recipe.resize >= 1, "resize", ">= 1, or null for the model's image size"),
        (0 < recipe.crop_scale[0] <= recipe.crop_scale[1] <= 1, "crop_scale", "two ascending numbers in (0, 1]"),
        (0 < recipe.crop_ratio[0] <= recipe.crop_ratio[1], "crop_ratio", "two ascending numbers > 0"),
        (0 <= recipe.color_jitter <= 1, "color_jitter", "in [0, 1]"),
    )


def _relation_checks(recipe: Recipe) -> tuple[Check, ...]:
    """What fields must be because of others."""
    epochs, last = recipe.epochs, (0.0, *recipe.milestones)
    is_even = recipe.batch_size % MIXES == 0 and (recipe.norm_group or MIXES) % MIXES == 0
    ascending = all(low < high for low, high in zip(last, recipe.milestones, strict=False))
    stepped = recipe.schedule is not ScheduleName.STEP or bool(recipe.milestones)
    rests = recipe.warmup_epochs + recipe.constant_epochs
    return (
        (not recipe.nesterov or recipe.momentum > 0, "nesterov", "false when momentum is 0"),
        (0 <= recipe.warmup_epochs <= epochs, "warmup_epochs", f"in [0, epochs = {epochs:g}]"),
        (not (recipe.warmup_epochs and recipe.warmup_steps), "warmup_steps", "0 when warmup_epochs is given"),
        (recipe.constant_epochs >= 0 and rests <= epochs, "constant_epochs", f"within epochs = {epochs:g}"),
        (recipe.lr_final <= recipe.lr, "lr_final", f"at most lr = {recipe.lr:g}"),
        (ascending, "milestones", "ascending epochs > 0"),
        (stepped, "milestones", "given with schedule: step"),
        (not recipe.is_mixed or is_even, "batch_size", "even, and norm_group too, because images are mixed in pairs"),
        (0 <= recipe.average_start_epoch < epochs, "average_start_epoch", f"in [0, epochs = {epochs:g})"),
    )
