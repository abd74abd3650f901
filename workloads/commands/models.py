"""Checks that timm's models accept a sweep's arguments, when the sweep is read.

A model is built, and shown an image, on the meta device: nothing is computed, and weights need no memory. If an
architecture cannot be built like that even without arguments, nothing is reported, and the job decides.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final
from unittest.mock import patch

import timm
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from orchestrator.core.data_plane import ModelProblem, ModelsAnswer, ModelsRequest
from orchestrator.core.suggest import did_you_mean
from workloads.models.refusals import REFUSALS, explain_refusal
from workloads.models.spec import RESERVED, ModelSpec
from workloads.models.table import is_vector, meta_backbone

_UNEXPECTED: Final = re.compile(r"unexpected keyword argument '(\w+)'")
_SET_BY_US: Final = RESERVED | {"device", "dtype"}
_NO_VARIANCE: Final = "Expected more than 1 value per channel"
"""What torch says, in the forward pass of a layer in training."""
_MOST_ARGUMENTS: Final = 60
"""More than the constructors of timm's models have: a refused name is often a synonym of any of them."""
_MAX_MODULES: Final = 100_000
"""Parts of a network that are built for a check; the largest of timm have some thousands."""
_MAX_PARAMETERS: Final = 100_000_000_000
"""400 GB in single precision: more than any GPU holds, and each holds the whole network."""
Problem = tuple[list[str], str]
"""The path below the model, and what is wrong there."""


def check(request: ModelsRequest) -> ModelsAnswer:
    """All that is wrong with the arguments of some models that timm has."""
    problems: list[ModelProblem] = []
    for number, asked in enumerate(request["models"]):
        spec = ModelSpec.from_mapping(asked)
        for path, message in _single_sample_problems(spec) if asked.get("is_alone") else _problems(spec):
            problems.append(ModelProblem(model=number, path=path, message=message))
    return ModelsAnswer(problems=problems)


class _TooLargeError(Exception):
    """A network has more parts or parameters than can be built."""


_STOPS: Final[tuple[type[Exception], ...]] = (*REFUSALS, _TooLargeError)


@contextmanager
def _bounded() -> Iterator[None]:
    """Stops building networks that no machine holds, before the check itself takes all memory."""
    num_modules = num_parameters = 0

    def count_module(*_: object) -> None:
        nonlocal num_modules
        num_modules += 1
        if num_modules > _MAX_MODULES:
            raise _TooLargeError(f"it has more than {_MAX_MODULES:,} layers")

    def count_parameters(_module: object, _name: object, parameter: object) -> None:
        nonlocal num_parameters
        num_parameters += parameter.numel() if isinstance(parameter, torch.Tensor) else 0
        if num_parameters > _MAX_PARAMETERS:
            raise _TooLargeError(
                f"it has more than {_MAX_PARAMETERS:,} parameters, 400 GB, and each GPU holds them all"
            )

    hooks = (
        register_module_module_registration_hook(count_module),
        register_module_parameter_registration_hook(count_parameters),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _problems(spec: ModelSpec) -> Iterator[Problem]:
    try:
        with _bounded():
            backbone = meta_backbone(spec)
            features = _features(backbone, spec.image_size)
    except _TooLargeError as error:
        yield ["kwargs"], f"timm model {spec.name} is too large with these arguments: {error}; use smaller numbers"
    except REFUSALS as error:
        plain = _plain(spec.name)
        if plain is not None:
            yield _blamed(spec, plain, error)
    else:
        yield from _wrong_kinds(spec, _defaults(backbone), with_lists=False)
        if not is_vector(features):
            message = f"with these arguments timm model {spec.name} gives no feature vector per image; change them"
            yield ["kwargs"], message


def _single_sample_problems(spec: ModelSpec) -> Iterator[Problem]:
    """What is wrong with training on norm groups of one sample: where images shrink to a pixel, nothing varies."""
    try:
        with _bounded():
            backbone = meta_backbone(spec).train()
            _features(backbone, spec.image_size)
    except _TooLargeError:
        return
    except REFUSALS as error:
        if _NO_VARIANCE in str(error):
            message = (
                f"with one sample in a norm group, BatchNorm of {spec.name} has a single value per channel at "
                f"image_size {spec.image_size}, and no variance"
            )
            yield [], f"{message}; use batch_size and norm_group of 2 or more"


@lru_cache(maxsize=16)
def _plain(name: str) -> nn.Module | None:
    """The architecture as it is; None if it cannot be built and run without computing."""
    return _build_plain(name)


def _build_plain(name: str) -> nn.Module | None:
    cfg = timm.get_pretrained_cfg(name, allow_unregistered=True)
    side = int(cfg.input_size[-1]) if cfg is not None else 224
    try:
        backbone = meta_backbone(ModelSpec(name=name, image_size=side))
        _features(backbone, side)
    except REFUSALS:
        return None
    return backbone


def _features(backbone: nn.Module, image_size: int) -> object:
    with torch.inference_mode():
        return backbone(torch.empty(1, 3, image_size, image_size, device="meta"))


def _blamed(spec: ModelSpec, plain: nn.Module, error: Exception) -> Problem:
    """The argument that is at fault, and why; all of them where none is at fault alone."""
    own = _own_values(spec.name, plain)
    defaults = own | _defaults(plain)
    named = _UNEXPECTED.search(str(error))
    if named is not None and named[1] in spec.kwargs:
        hint = did_you_mean(named[1], sorted(defaults.keys() - _SET_BY_US), most=_MOST_ARGUMENTS)
        return ["kwargs", named[1]], f"timm model {spec.name} has no argument '{named[1]}': {hint}"
    for problem in _wrong_kinds(spec, defaults, with_lists=True):
        return problem
    for name in spec.kwargs:
        others = {other: given for other, given in spec.kwargs.items() if other != name}
        if _refusal(replace(spec, kwargs=others)) is None or len(spec.kwargs) == 1:
            return ["kwargs", name], _refused(spec, name, error, own.get(name))
    for name, value in spec.kwargs.items():
        alone = _refusal(replace(spec, kwargs={name: value}))
        if alone is not None:
            return ["kwargs", name], _refused(spec, name, alone, own.get(name))
    why = explain_refusal(error)
    return ["kwargs"], f"timm model {spec.name} refuses image_size {spec.image_size} with these arguments: {why}"


def _refusal(spec: ModelSpec) -> Exception | None:
    """What a model raises with its arguments and size; None if it runs."""
    try:
        with _bounded():
            _features(meta_backbone(spec), spec.image_size)
    except _STOPS as error:
        return error
    return None


def _refused(spec: ModelSpec, name: str, error: Exception, own: object) -> str:
    """That a model refuses an argument, why, and what the architecture has itself (``own``)."""
    why = explain_refusal(error, wanted="a whole number" if _kind(own) == "a number" else "a list")
    usual = f"the default is {_shown(own)}" if _kind(own) else "change or remove it"
    given = f"{name}: {_shown(spec.kwargs[name])} at image_size {spec.image_size}"
    return f"timm model {spec.name} refuses {given}: {why}; {usual}"


def _wrong_kinds(spec: ModelSpec, defaults: Mapping[str, Any], *, with_lists: bool) -> Iterator[Problem]:
    """Values of another kind than the argument's default, where its annotation allows no other.

    Args:
        spec: the model with its arguments.
        defaults: of arguments.
        with_lists: whether lists count, which many arguments take besides a number though nothing says so.
    """
    for name, value in spec.kwargs.items():
        default = defaults.get(name)
        wanted, given = _kind(default), _kind(value)
        is_wrong = given == "text" if not with_lists else given != wanted
        if wanted and given and wanted != given and is_wrong:
            message = f"{_shown(value)} is {given}, and {name} of timm model {spec.name} is {wanted}"
            yield ["kwargs", name], f"{message}, such as {_shown(default)}; write {wanted}"


def _kind(value: object) -> str:
    """What people call the type of a plain value; empty for others, of which nothing is known."""
    if isinstance(value, bool):
        return "true or false"
    kinds = {int: "a number", float: "a number", str: "text", list: "a list", tuple: "a list", dict: "a mapping"}
    return kinds.get(type(value), "")


def _shown(value: object) -> str:
    """A plain value as a sweep file writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value) if isinstance(value, str) else f"{value}"


@lru_cache(maxsize=16)
def _own_values(name: str, plain: nn.Module) -> dict[str, Any]:
    """Arguments with which timm builds an architecture, with the defaults of its constructor for the rest."""
    recorded: dict[str, Any] = {}
    kind = type(plain)
    original = kind.__init__

    def record(self: nn.Module, *positional: Any, **given: Any) -> None:  # noqa: ANN401 - those of any constructor
        recorded.update(given)
        original(self, *positional, **given)

    with patch.object(kind, "__init__", record):
        _build_plain(name)
    return _defaults(plain) | recorded


def _may_be_text(parameter: inspect.Parameter) -> bool:
    """Whether an argument takes text, though its default is something else."""
    return not isinstance(parameter.default, str) and "str" in str(parameter.annotation)


def _defaults(model: nn.Module) -> dict[str, Any]:
    """Arguments of the constructors of a model with their defaults; None where there is none, or several kinds fit."""
    return {
        parameter.name: None if parameter.default is parameter.empty or _may_be_text(parameter) else parameter.default
        for kind in reversed(type(model).__mro__)
        if issubclass(kind, nn.Module) and kind is not nn.Module
        for parameter in inspect.signature(kind.__init__).parameters.values()
        if parameter.name != "self" and parameter.kind not in {parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL}
    }
