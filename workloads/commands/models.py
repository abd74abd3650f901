"""Whether timm's models take the arguments that a sweep gives them, asked when the sweep is read.

A model is built, and shown an image, on the meta device: nothing is computed, and no memory is needed. Where an
architecture cannot be built like that even without arguments, nothing is said, and the job decides.
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


def check(request: ModelsRequest) -> ModelsAnswer:
    """All that is wrong with the arguments of some models that timm has."""
    problems: list[ModelProblem] = []
    for number, asked in enumerate(request["models"]):
        for path, message in _problems(ModelSpec.from_mapping(asked)):
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
        yield ["kwargs"], _refused(spec, error)
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
                yield ["kwargs"], _refused(spec, error)
        except REFUSALS:
            return
        return
    if not is_vector(features):
        yield ["kwargs"], f"with these arguments timm model {spec.name} gives no feature vector per image; change them"


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


def _refused(spec: ModelSpec, error: Exception) -> str:
    why = " ".join(str(error).split()) or type(error).__name__
    return f"timm model {spec.name} refuses image_size {spec.image_size} with these arguments ({why}); change them"


def _hint(name: str, model: nn.Module) -> str:
    """The nearest arguments of the constructors of a model."""
    known = {
        parameter.name: None
        for kind in type(model).__mro__
        if issubclass(kind, nn.Module) and kind is not nn.Module
        for parameter in inspect.signature(kind.__init__).parameters.values()
        if parameter.name != "self" and parameter.kind not in {parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL}
    }
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean '{near[0]}'?" if near else f"it has {', '.join(sorted(known))}"
