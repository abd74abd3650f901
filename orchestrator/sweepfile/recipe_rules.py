"""Which fields of a recipe mean nothing beside others, and which ones others cannot do without. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.sweepfile.schema_recipe import RecipeSpec

_ADAMS = ("adam", "adamw", "lamb")
_DECAYS = ("linear", "cosine", "exponential")
_RESIZED_CROPS = ("random_resized_crop", "random_resized_crop_flip")

EXCLUSIVE = (("warmup_epochs", "warmup_steps"),)
"""Pairs of which a recipe gives one: the one that overrides a base displaces the other."""


# The backbone of a probe is frozen whatever its recipe says, and of what training does only drops out; the head is one
# linear layer.
_UNREAD_BY_PROBES = dict.fromkeys(
    ("freeze", "drop_path", "norm_group"),
    "is ignored by protocol: probe, which trains a linear head on a frozen backbone; remove it, or choose finetune",
)
_UNREAD_FROM_CACHE = dict.fromkeys(
    ("augment", "crop_scale", "crop_ratio", "color_jitter", "mixup", "cutmix", "mix_prob", "cutmix_share", "dropout"),
    "is ignored by features: cached, which were computed once, of whole images; remove it, or use features: online",
)


@dataclass(frozen=True, slots=True)
class _Use:
    """Who reads a field: recipes whose field ``of`` is one of ``among``."""

    field: str
    of: str
    among: tuple[str, ...]


_USES = (
    _Use("momentum", "optimizer", ("sgd", "lars")),
    _Use("nesterov", "optimizer", ("sgd", "lars")),
    _Use("betas", "optimizer", _ADAMS),
    _Use("eps", "optimizer", (*_ADAMS, "lars")),
    _Use("constant_epochs", "schedule", _DECAYS),
    _Use("lr_every", "schedule", _DECAYS),
    _Use("lr_final", "schedule", ("linear", "cosine")),
    _Use("decay_rate", "schedule", ("step", "exponential")),
    _Use("decay_every_epochs", "schedule", ("exponential",)),
    _Use("milestones", "schedule", ("step",)),
    _Use("average_decay", "average", ("ema",)),
    _Use("average_start_epoch", "average", ("ema", "polyak")),
    _Use("crop_scale", "augment", _RESIZED_CROPS),
    _Use("crop_ratio", "augment", _RESIZED_CROPS),
)
_NEEDS = (
    _Use("milestones", "schedule", ("step",)),
    _Use("decay_rate", "schedule", ("exponential",)),
    _Use("decay_every_epochs", "schedule", ("exponential",)),
)


def ignored_fields(recipe: RecipeSpec, protocol: str = "") -> dict[str, str]:
    """Fields, given or not, that a training by this recipe never reads, and why; ``protocol`` is a transfer's."""
    found = dict(_UNREAD_BY_PROBES) if protocol == "probe" else {}
    found |= _UNREAD_FROM_CACHE if getattr(recipe, "features", "") == "cached" else {}
    found |= {
        use.field: f"is ignored by {use.of}: {chosen}; remove it, or choose {' or '.join(use.among)}"
        for use in _USES
        if (chosen := getattr(recipe, use.of)) not in use.among
    }
    if not recipe.weight_decay:
        found["weight_decay_on"] = "is ignored without weight_decay; remove it, or set weight_decay > 0"
    if not (recipe.mixup or recipe.cutmix):
        found["mix_prob"] = "is ignored without mixing; remove it, or set mixup or cutmix > 0"
    if not (recipe.mixup and recipe.cutmix):
        found["cutmix_share"] = "is ignored unless images are both blended and cut; remove it, or set both > 0"
    return found


def missing_fields(recipe: RecipeSpec) -> dict[str, str]:
    """Fields that this recipe needs and does not give, and who needs them."""
    return {
        use.field: f"'{use.field}' is missing, which {use.of}: {getattr(recipe, use.of)} needs; add it here"
        for use in _NEEDS
        if getattr(recipe, use.of) in use.among and use.field not in recipe.model_fields_set
    }
