"""Checks that timm's models accept a sweep's arguments, when the sweep is read.

A model is built, and shown an image, on the meta device: nothing is computed, and no memory is needed. If an
architecture cannot be built like that even without arguments, nothing is reported, and the job decides.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator
from typing import Final

import timm
import torch
from torch import nn

from orchestrator.core.data_plane import ModelProblem, ModelsAnswer, ModelsRequest
from workloads.models.spec import ModelSpec
from workloads.models.table import REFUSALS, is_vector, meta_backbone

_UNEXPECTED: Final = re.compile(r"unexpected keyword argument '(\w+)'")

_NO_VARIANCE: Final = "Expected more than 1 value per channel"
"""What torch says, in the forward pass of a layer in training."""


def check(request: ModelsRequest) -> ModelsAnswer:
    """All that is wrong with the arguments of some models that timm has."""
    problems: list[ModelProblem] = []
    for number, asked in enumerate(request["models"]):
        spec = ModelSpec.from_mapping(asked)
        for path, message in _alone_problems(spec) if asked.get("is_alone") else _problems(spec):
            problems.append(ModelProblem(model=number, path=path, message=message))
    return ModelsAnswer(problems=problems)


def _problems(spec: ModelSpec) -> Iterator[tuple[list[str], str]]:
    """Path below the model, and what is wrong there."""
    try:
        backbone = meta_backbone(spec)
    except REFUSALS as error:
        plain = _plain(spec)
        if plain is None:
            return
        named = _UNEXPECTED.search(str(error))
        if named is not None and named[1] in spec.kwargs:
            yield ["kwargs", named[1]], f"timm model {spec.name} has no argument '{named[1]}': {_hint(named[1], plain)}"
            return
        yield _blamed(spec, plain, error)
        return
    yield from _forward_problems(spec, backbone)


def _forward_problems(spec: ModelSpec, backbone: nn.Module) -> Iterator[tuple[list[str], str]]:
    try:
        features = _features(backbone, spec.image_size)
    except REFUSALS as error:
        cfg = timm.get_pretrained_cfg(spec.name, allow_unregistered=True)
        plain, side = _plain(spec), int(cfg.input_size[-1]) if cfg is not None else spec.image_size
        try:
            if plain is not None:
                _features(plain, side)
                yield _blamed(spec, plain, error)
        except REFUSALS:
            return
        return
    if not is_vector(features):
        yield ["kwargs"], f"with these arguments timm model {spec.name} gives no feature vector per image; change them"


def _alone_problems(spec: ModelSpec) -> Iterator[tuple[list[str], str]]:
    """What is wrong with training on norm groups of one sample: where images shrink to a pixel, nothing varies."""
    try:
        backbone = meta_backbone(spec).train()
        _features(backbone, spec.image_size)
    except REFUSALS as error:
        if _NO_VARIANCE in str(error):
            message = (
                f"with one sample in a norm group, BatchNorm of {spec.name} has a single value per channel at "
                f"image_size {spec.image_size}, and no variance"
            )
            yield [], f"{message}; use batch_size and norm_group of 2 or more"


def _plain(spec: ModelSpec) -> nn.Module | None:
    """The architecture as it is; None if it cannot be built without computing."""
    cfg = timm.get_pretrained_cfg(spec.name, allow_unregistered=True)
    try:
        return meta_backbone(ModelSpec(name=spec.name, image_size=int(cfg.input_size[-1]) if cfg is not None else 224))
    except REFUSALS:
        return None


def _features(backbone: nn.Module, image_size: int) -> object:
    with torch.inference_mode():
        return backbone(torch.empty(1, 3, image_size, image_size, device="meta"))


def _blamed(spec: ModelSpec, plain: nn.Module, error: Exception) -> tuple[list[str], str]:
    """The argument that alone is refused, with its default; else all of them, with what the model says."""
    defaults = _parameters(plain)
    for name, value in spec.kwargs.items():
        try:
            _features(
                meta_backbone(ModelSpec(name=spec.name, image_size=spec.image_size, kwargs={name: value})),
                spec.image_size,
            )
        except REFUSALS as alone:
            default, why = defaults.get(name), " ".join(str(alone).split()) or type(alone).__name__
            wanted, given = _kind(default), _kind(value)
            if wanted and given and wanted != given:
                message = f"{value!r} is {given}, and {name} of timm model {spec.name} is {wanted}, such as {default!r}"
                return ["kwargs", name], f"{message}; write {wanted}"
            usual = "" if default is None else f"; its class has {default!r}"
            return [
                "kwargs",
                name,
            ], f"timm model {spec.name} refuses {value!r} at image_size {spec.image_size} ({why}){usual}"
    return ["kwargs"], _refused(spec, error)


def _kind(value: object) -> str:
    """What people call the type of a plain value; empty for others, of which nothing is known."""
    if isinstance(value, bool):
        return "true or false"
    kinds = {int: "a number", float: "a number", str: "text", list: "a list", tuple: "a list", dict: "a mapping"}
    return kinds.get(type(value), "")


def _refused(spec: ModelSpec, error: Exception) -> str:
    why = " ".join(str(error).split()) or type(error).__name__
    return f"timm model {spec.name} refuses image_size {spec.image_size} with these arguments ({why}); change them"


def _hint(name: str, model: nn.Module) -> str:
    """The nearest arguments of the constructors of a model."""
    known = _parameters(model)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean '{near[0]}'?" if near else f"it has {', '.join(sorted(known))}"


def _parameters(model: nn.Module) -> dict[str, object]:
    """Arguments of the constructors of a model with their defaults; None where there is none."""
    return {
        parameter.name: None if parameter.default is parameter.empty else parameter.default
        for kind in reversed(type(model).__mro__)
        if issubclass(kind, nn.Module) and kind is not nn.Module
        for parameter in inspect.signature(kind.__init__).parameters.values()
        if parameter.name != "self" and parameter.kind not in {parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL}
    }
