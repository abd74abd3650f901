"""The table of timm's models that planning reads: ``python -m workloads.models.table FILE [--check]``.

Every model is built on the meta device, so nothing is computed and nothing is downloaded, and the table depends on the
versions of timm and torch alone. Planning must know these facts without importing either.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from orchestrator.core.plugins import is_reference
from workloads.models.batchnorm import batchnorm_layers
from workloads.models.refusals import REFUSALS
from workloads.models.spec import ModelSpec

_SIZE_STEPS = (1, 2, 4, 7, 8, 12, 14, 16, 20, 24, 28, 32, 48, 56, 64, 96, 128)
"""Tried in this order: the first step by which an input may grow is the divisor of all accepted sizes."""
ASKED_ARGUMENTS: Mapping[str, Any] = {
    "drop_rate": 0.1,
    "drop_path_rate": 0.1,
    "proj_drop_rate": 0.1,
    "pos_drop_rate": 0.1,
}
_SMALL_SIZES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """What the table says of one architecture; ``None`` = could not be found out."""

    num_parameters: int | None
    """Of the backbone, without a head."""
    num_features: int | None
    """Features per image that the backbone returns."""
    macs: int | None
    """Multiply-adds of one forward pass of one image of ``image_size``; FLOPs are twice as many."""
    image_size: int
    """Side of the input that timm's default weights take, pixels."""
    is_fixed_size: bool
    """Whether the network is built for one size (our builds pass ``img_size`` then)."""
    size_step: int | None
    """Accepted sizes differ from ``image_size`` by multiples of this; larger inputs are accepted in such steps."""
    too_small: int | None
    """The largest size found to be too small; 0 = none was."""
    has_batchnorm: bool | None
    accepts: tuple[str, ...]
    """Which of ``img_size`` and ``ASKED_ARGUMENTS`` its constructor takes."""
    tags: tuple[str, ...]
    """Tags of pretrained weights, the default one first."""


COLUMNS = tuple(field.name for field in fields(ModelRow))


def count_macs(model: nn.Module, image_size: int) -> tuple[int, Tensor]:
    """Multiply-adds of one forward pass of one image, and what a model on the meta device returns for it.

    Raises:
        RuntimeError, ...: whatever the model raises at this size.
    """
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        features: Tensor = model(torch.empty(1, 3, image_size, image_size, device="meta"))
    return int(counter.get_total_flops()) // 2, features


def timm_kwargs(spec: ModelSpec) -> dict[str, Any]:
    """Constructor arguments with which timm builds the backbone; ``img_size`` only where the model's size is fixed.

    Of a plug-in, its own arguments.
    """
    if is_reference(spec.name):
        return dict(spec.kwargs)
    fixed = timm.get_pretrained_cfg(spec.name, allow_unregistered=True)
    size = {"img_size": spec.image_size} if fixed is not None and fixed.fixed_input_size else {}
    return {**size, **spec.kwargs}


def meta_backbone(spec: ModelSpec) -> nn.Module:
    """The backbone of a spec in evaluation mode, without storage."""
    with torch.device("meta"):
        backbone: nn.Module = timm.create_model(spec.name, num_classes=0, **timm_kwargs(spec))
    # Torch's counter follows modules by their gradients, and stumbles over parameters that are inputs of one.
    return backbone.eval().requires_grad_(requires_grad=False)


def measure_model(name: str) -> ModelRow:
    """The row of one architecture of the installed timm."""
    cfg = timm.get_pretrained_cfg(name, allow_unregistered=True)
    image_size = int(cfg.input_size[-1]) if cfg is not None else 224
    spec = ModelSpec(name=name, image_size=image_size)
    backbone = _attempt(spec)
    macs, num_features = _forward(backbone, image_size) if backbone is not None else (None, None)
    return ModelRow(
        num_parameters=None if backbone is None else sum(tensor.numel() for tensor in backbone.parameters()),
        num_features=num_features,
        macs=macs,
        image_size=image_size,
        is_fixed_size=bool(cfg is not None and cfg.fixed_input_size),
        size_step=(size_step := _size_step(name, image_size) if num_features else None),
        too_small=None if size_step is None else _too_small(name, image_size, size_step),
        has_batchnorm=None if backbone is None else bool(batchnorm_layers(backbone)),
        accepts=_accepted(name, {"img_size": image_size, **ASKED_ARGUMENTS}),
        tags=_tags(name),
    )


def encode_rows(rows: Mapping[str, ModelRow]) -> str:
    """The table as JSON, one line per model, sorted by name."""
    lines = [f"  {json.dumps(name)}: {json.dumps(astuple(rows[name]))}" for name in sorted(rows)]
    head = {"timm": timm.__version__, "torch": torch.__version__.partition("+")[0], "columns": COLUMNS}
    return json.dumps(head)[:-1] + ', "models": {\n' + ",\n".join(lines) + "\n}}\n"


def _attempt(spec: ModelSpec) -> nn.Module | None:
    try:
        return meta_backbone(spec)
    except REFUSALS:
        return None


def _forward(backbone: nn.Module, image_size: int) -> tuple[int | None, int | None]:
    """Multiply-adds and number of features; ``None`` where the model does not run on the meta device."""
    try:
        macs, features = count_macs(backbone, image_size)
    except REFUSALS:
        return None, None
    return (macs, int(features.shape[1])) if is_vector(features) else (None, None)


def is_vector(features: object) -> bool:
    """Whether a backbone returned one vector per image; some return maps, sequences or several tensors."""
    return isinstance(features, Tensor) and features.ndim == 2


def _size_step(name: str, image_size: int) -> int | None:
    """The smallest step by which the input may grow."""
    return next((step for step in _SIZE_STEPS if _accepts(name, image_size + step)), None)


def _too_small(name: str, image_size: int, size_step: int) -> int:
    """The last refused size when sizes of the right step grow from almost nothing."""
    refused = 0
    for small in _SMALL_SIZES:
        size = small + (image_size - small) % size_step
        if size >= image_size or _accepts(name, size):
            break
        refused = size
    return refused


def _accepts(name: str, image_size: int) -> bool:
    backbone = _attempt(ModelSpec(name=name, image_size=image_size))
    if backbone is None:
        return False
    try:
        with torch.no_grad():
            backbone(torch.empty(1, 3, image_size, image_size, device="meta"))
    except REFUSALS:
        return False
    return True


def _accepted(name: str, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    if takes(name, arguments):
        return tuple(arguments)
    return tuple(argument for argument, value in arguments.items() if takes(name, {argument: value}))


def takes(name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether the constructor of an architecture takes arguments (that they have an effect is timm's business)."""
    try:
        with torch.device("meta"):
            timm.create_model(name, num_classes=0, **arguments)
    except REFUSALS:
        return False
    return True


def _tags(name: str) -> tuple[str, ...]:
    """Tags of weights that timm knows for an architecture, its default first."""
    default = timm.get_pretrained_cfg(name, allow_unregistered=True)
    first = (default.tag or "") if default is not None and default.has_weights else ""
    others = sorted(full.partition(".")[2] for full in timm.list_models(f"{name}.*", pretrained=True))
    return tuple(dict.fromkeys(tag for tag in (first, *others) if tag))


def measure_models(names: Iterable[str]) -> dict[str, ModelRow]:
    """Rows of several architectures; progress goes to standard error."""
    rows: dict[str, ModelRow] = {}
    for name in names:
        rows[name] = measure_model(name)
        sys.stderr.write(f"\r{len(rows)} {name:60}")
    sys.stderr.write("\n")
    return rows


def main() -> int:
    """Write the table, or with ``--check`` compare; 1 = they differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    arguments = parser.parse_args()
    text = encode_rows(measure_models(timm.list_models()))
    if arguments.check:
        return int(arguments.file.read_text(encoding="utf-8") != text)
    arguments.file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
