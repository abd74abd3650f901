"""`model:` and `init:`: their schema, and checks of a model and its recipe without timm. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.core.data_plane import ModelProblem
from orchestrator.core.errors import StorageError
from orchestrator.core.plugins import MODELS, is_reference, short_name
from orchestrator.storage.open import check_store_uri, split_object_uri
from orchestrator.sweepfile.fields import BACKBONE_KEY, Pixels, Strict, canonical
from orchestrator.sweepfile.known_models import ModelTable, TimmModel
from orchestrator.sweepfile.parse.tree import Path, Tree
from orchestrator.sweepfile.plugin_uses import PluginUses
from orchestrator.sweepfile.problems import Complaints
from orchestrator.sweepfile.values import Model

# Arguments that the data plane sets itself; a test keeps this equal to its list.
RESERVED_KWARGS = frozenset({"checkpoint_path", "features_only", "in_chans", "num_classes", "pretrained", "scriptable"})
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
_MAX_ARGUMENT = 1_000_000
_RATE = re.compile(r"drop.*_rate$")
# Networks whose patch size is of a stem that pads, or of one branch that sees enlarged images.
_TAKE_LARGE_PATCHES = ("crossvit", "visformer", "xcit")


def _not_reserved(name: str) -> str:
    """The name of an argument that a sweep may set."""
    if name in RESERVED_KWARGS:
        raise PydanticCustomError("reserved", "every sweep sets this argument by itself; remove it")
    return name


class ModelSpec(Strict):
    """A network by its timm name, or of an installed package."""

    HINTS: ClassVar[Mapping[str, str]] = {"pretrained": "weights to start from are init: {timm: TAG}, beside model"}

    name: Annotated[str, Field(min_length=1)] = Field(description="Any timm model name, or that of an installed model.")
    image_size: Pixels = Field(description="Side of the square input, pixels.")
    kwargs: dict[Annotated[str, AfterValidator(_not_reserved)], Annotated[Any, AfterValidator(canonical)]] = Field(
        default_factory=dict,
        description="Arguments for timm.create_model, or of the installed model: plain JSON, none that is reserved.",
    )


def _readable_uri(uri: str) -> str:
    """A URI of a file in a store that can be opened."""
    try:
        check_store_uri(uri)  # first the whole URI, so that messages have it as written
        if uri.endswith("/"):
            raise PydanticCustomError("refused", "this names a folder; give the URI of a weights file")
        split_object_uri(uri)
    except StorageError as error:
        why = str(error).replace("store ", "URI ", 1) if str(error).startswith("store ") else str(error)
        raise PydanticCustomError("refused", "{why}", {"why": why}) from None
    return uri


class InitialSpec(Strict):
    """Initial weights of a network; exactly one of ``artifact``, ``uri`` and ``timm``."""

    SOURCES: ClassVar[tuple[str, ...]] = ("artifact", "uri", "timm")

    artifact: Annotated[str, Field(pattern=BACKBONE_KEY)] | None = Field(
        None, description="Key of a finished pretrain or finetune job in the sweep's store."
    )
    uri: Annotated[str, AfterValidator(_readable_uri)] | None = Field(
        None, description="Path or URI of a weights file (safetensors, or a .pth of tensors); needs sha256."
    )
    sha256: Annotated[str, Field(pattern=r"[0-9a-f]{64}")] | None = Field(
        None, description="Sha256 of the file at uri: results must not depend on who changes it (sha256sum FILE)."
    )
    timm: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="Tag of timm's pretrained weights of this architecture (augreg_in21k)."
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [name for name in self.SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            found, known = " and ".join(given) or "none of them", ", ".join(self.SOURCES[:-1])
            raise PydanticCustomError("one_rule", f"give exactly one of {known} and {self.SOURCES[-1]}; here: {found}")
        if (self.uri is None) != (self.sha256 is None):
            message = "uri and sha256 belong together: a file may change, and results must not; run sha256sum FILE"
            raise PydanticCustomError("one_rule", message)
        return self


# ----------------------------------------------------------------------------------------------- what planning can tell


def resolve_model(path: Path, spec: ModelSpec, table: ModelTable, plugins: PluginUses, tree: Tree) -> Model:
    """The model at ``path``: timm's of that name, else an installed one, by its reference."""
    name = spec.name
    if table.find(name) is None and name in plugins.known(MODELS):
        name = plugins.use(MODELS, name, spec.kwargs, tree, (*path, "kwargs") if spec.kwargs else path)
    return Model(name=name, image_size=spec.image_size, kwargs=spec.kwargs)


def check_model(path: Path, model: Model, table: ModelTable, complaints: Complaints) -> None:
    """Complain about a model that timm does not have, or an image size that it is known to refuse."""
    if is_reference(model.name):  # which checks its own arguments
        return
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


CheckModels = Callable[[Sequence[Mapping[str, Any]]], Sequence[ModelProblem]]
"""Asks the data plane which of some models of timm do not take their arguments."""


def _check_numbers(path: Path, given: Any, complaints: Complaints) -> None:  # noqa: ANN401 - plain JSON
    """Complain about numbers that no network has, with which building one would take all memory."""
    if isinstance(given, Mapping | list):
        for step, value in given.items() if isinstance(given, Mapping) else enumerate(given):
            _check_numbers((*path, step), value, complaints)
    elif isinstance(given, int | float) and not isinstance(given, bool):
        if abs(given) > _MAX_ARGUMENT:
            complaints.add(path, f"{given} is refused: at most {_MAX_ARGUMENT:,}, because no layer is larger")
        elif _RATE.search(str(path[-1])) and not 0 <= given < 1:
            complaints.add(path, f"{given} is refused: a rate of dropout is a probability; use 0 to below 1")


def check_arguments(
    models: Mapping[Path, Model],
    alone: Mapping[Path, Model],
    table: ModelTable,
    check: CheckModels,
    complaints: Complaints,
) -> None:
    """Complain about errors that only a built model shows.

    Args:
        models: by where they stand; those without ``kwargs`` are known from the table.
        alone: models that are trained with recipes whose norm groups have one sample, by where the recipes stand.
        table: of all models.
        check: builds them.
        complaints: takes what is wrong.
    """
    for path, model in models.items():
        if not is_reference(model.name):
            _check_numbers((*path, "kwargs"), model.kwargs, complaints)
    checked = [
        (path, model, False)
        for path, model in models.items()
        if model.kwargs and not complaints.doubts((*path, "kwargs"))
    ]
    checked += [((*path, "batch_size"), model, True) for path, model in alone.items()]
    checked = [one for one in checked if not is_reference(one[1].name) and table.find(one[1].name) is not None]
    if not checked:
        return
    described = [
        {"name": model.name, "image_size": model.image_size, "kwargs": dict(model.kwargs)}
        | ({"is_alone": True} if single else {})
        for _, model, single in checked
    ]
    for problem in check(described):
        complaints.add((*checked[problem["model"]][0], *problem["path"]), problem["message"])


def is_alone(recipe: Mapping[str, Any], model: Model, table: ModelTable) -> bool:
    """Whether a network with BatchNorm is trained on norm groups of one sample."""
    known = table.find(model.name)
    if known is None or known.has_batchnorm is False or not recipe:
        return False
    return 1 in {recipe.get("norm_group"), recipe["batch_size"]}


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
    if is_reference(model.name):
        for field in ("dropout", "drop_path"):
            if recipe.get(field):
                message = f"{field} is timm's; '{short_name(model.name)}' takes what it has in model.kwargs; remove it"
                complaints.add((*path, field), message)
    known = table.find(model.name)
    if known is None or not recipe:
        return
    if known.has_batchnorm and not any("norm" in name for name in model.kwargs):
        _check_groups(path, recipe, known, complaints)
        _check_shares(path, recipe, num_workers, complaints)
        _check_data_groups(path, recipe, complaints)
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
        message = f"batch_size {batch_size} has {batch_size // group} norm groups of {group} samples, and each of"
        complaints.add(
            (*path, "norm_group" if recipe.get("norm_group") else "batch_size"),
            f"{message} {num_workers} workers needs a whole one for BatchNorm; use fewer workers"
            f"{_smaller_groups(recipe, num_workers)}",
        )


def _smaller_groups(recipe: Mapping[str, Any], num_workers: int) -> str:
    """The other remedy: the largest groups of which every worker has one; nothing where there are none."""
    batch_size, unit = recipe["batch_size"], 2 if recipe.get("mixup") or recipe.get("cutmix") else 1
    largest = batch_size // num_workers
    fitting = [group for group in range(unit, largest + 1, unit) if batch_size % group == 0]
    return f", or set norm_group to at most {fitting[-1]} (this changes the key)" if fitting else ""


def _check_data_groups(path: Path, recipe: Mapping[str, Any], complaints: Complaints) -> None:
    """Every data group fills whole norm groups of a batch, at least one."""
    batch_size, groups = recipe["batch_size"], recipe.get("data_groups", 1)
    norm_group = recipe.get("norm_group") or min(batch_size, DEFAULT_NORM_GROUP)
    if groups > max(1, batch_size // norm_group):
        message = f"batch_size {batch_size} has {batch_size // norm_group} norm groups of {norm_group} samples, fewer"
        remedy = f"use at most {max(1, batch_size // norm_group)}"
        complaints.add((*path, "data_groups"), f"{message} than {groups} data groups, which take whole ones; {remedy}")


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
