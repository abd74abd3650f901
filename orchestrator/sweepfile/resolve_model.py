"""What planning can tell of a model and its recipe without timm: names, image sizes, batches for BatchNorm, dropout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.sweepfile.complaints import Complaints
from orchestrator.sweepfile.model import Model
from orchestrator.sweepfile.parse.tree import Path
from orchestrator.sweepfile.timm_table import ModelTable, TimmModel

# The same rule as workloads.models.batchnorm, which a test compares.
DEFAULT_NORM_GROUP = 64
# Arguments that change neither which images a network takes nor its layers; with any other, only the data plane knows.
_HARMLESS = frozenset(
    {
        "attn_drop_rate",
        "drop_path_rate",
        "drop_rate",
        "init_values",
        "mlp_ratio",
        "num_heads",
        "patch_drop_rate",
        "pos_drop_rate",
        "proj_drop_rate",
        "qk_norm",
        "qkv_bias",
    }
)
# Networks whose patch size is of a stem that pads, or of one branch that sees enlarged images.
_TAKE_LARGE_PATCHES = ("crossvit", "visformer", "xcit")


def check_model(path: Path, model: Model, table: ModelTable, complaints: Complaints) -> None:
    """Complain about a model that timm does not have, or an image size that it is known to refuse."""
    problem = table.name_problem(model.name)
    if problem:
        complaints.add((*path, "name"), problem)
        return
    known = table.find(model.name)
    if known is not None and not model.kwargs.keys() - _HARMLESS:
        problem = known.size_problem(model.image_size)
        if problem:
            complaints.add((*path, "image_size"), f"image_size {model.image_size} is refused: {problem}")
    _check_patches(path, model, complaints)


def check_recipe_of_model(
    path: Path,
    recipe: Mapping[str, Any],
    model: Model,
    table: ModelTable,
    complaints: Complaints,
    *,
    num_workers: int = 1,
) -> None:
    """Complain about a resolved recipe that the network at hand cannot be trained with by so many workers."""
    known = table.find(model.name)
    if known is None or not recipe:
        return
    if known.has_batchnorm and not any("norm" in name for name in model.kwargs):
        _check_groups(path, recipe, known, complaints)
        _check_shares(path, recipe, num_workers, complaints)
    missing = {"dropout": known.has_dropout, "drop_path": known.has_drop_path}
    for field, has_it in missing.items():
        if recipe.get(field) and not has_it:
            complaints.add((*path, field), f"timm model {known.name} has no {field}; remove it or choose another model")


def check_resize(path: Path, look: Mapping[str, Any], models: Iterable[Model], complaints: Complaints) -> None:
    """Complain about a shorter side (``look["resize"]``) from which no square of a network's size could be cut."""
    resize = look.get("resize")
    for model in models:
        if resize is not None and resize < model.image_size:
            message = f"resize {resize} is below the model's image_size {model.image_size}: no square of that size "
            complaints.add((*path, "resize"), f"{message}could be cut out; use {model.image_size} or more, or null")


def _check_patches(path: Path, model: Model, complaints: Complaints) -> None:
    """Patches (a side, or one in each direction) larger than the image: not a single one fits."""
    given = model.kwargs.get("patch_size")
    sides = [side for side in (given if isinstance(given, list | tuple) else (given,)) if isinstance(side, int)]
    if model.kwargs.get("dynamic_img_pad") or model.name.startswith(_TAKE_LARGE_PATCHES):
        return
    if sides and max(sides) > model.image_size:
        message = (
            f"image_size {model.image_size} is refused: kwargs.patch_size {given} is larger, so that no patch fits"
        )
        remedy = f"use image_size {max(sides)} or more, or smaller patches"
        complaints.add((*path, "image_size"), f"{message}; {remedy}")


def _check_shares(path: Path, recipe: Mapping[str, Any], num_workers: int, complaints: Complaints) -> None:
    """Every worker takes whole norm groups of a batch, at least one."""
    batch_size = recipe["batch_size"]
    group = recipe.get("norm_group") or min(batch_size, DEFAULT_NORM_GROUP)
    if num_workers > max(1, batch_size // group):
        message = f"batch_size {batch_size} has {batch_size // group} norm groups of {group} samples, fewer than the"
        complaints.add(
            (*path, "norm_group" if recipe.get("norm_group") else "batch_size"),
            f"{message} {num_workers} workers that share it, and BatchNorm cuts none; use fewer workers"
            f"{_smaller_groups(recipe, num_workers)}",
        )


def _smaller_groups(recipe: Mapping[str, Any], num_workers: int) -> str:
    """The other remedy: the largest groups of which every worker has one; nothing where there are none."""
    batch_size, unit = recipe["batch_size"], 2 if recipe.get("mixup") or recipe.get("cutmix") else 1
    largest = batch_size // num_workers
    fitting = [group for group in range(unit, largest + 1, unit) if batch_size % group == 0]
    return f", or set norm_group to at most {fitting[-1]} (this changes the key)" if fitting else ""


def _check_groups(path: Path, recipe: Mapping[str, Any], model: TimmModel, complaints: Complaints) -> None:
    batch_size = recipe["batch_size"]
    group = min(batch_size, DEFAULT_NORM_GROUP)
    if recipe.get("norm_group") is None and batch_size % group:
        message = (
            f"batch_size {batch_size} is not a multiple of {group}, and {model.name} has BatchNorm, whose statistics"
        )
        complaints.add(
            (*path, "batch_size"),
            f"{message} are over groups of {group} samples by default; set norm_group to a divisor of {batch_size}",
        )
