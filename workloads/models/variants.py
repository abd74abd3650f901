"""Networks of shipped sweeps that are changed by keyword arguments: ``python -m workloads.models.variants FILE
[--check]``.

The table of timm's models has unchanged architectures; estimates of the shipped sweeps need these variants. Like that
table, this one is made on the meta device, and planning reads it without importing torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from workloads.models.batchnorm import batchnorm_layers
from workloads.models.spec import ModelSpec
from workloads.models.table import count_macs, meta_backbone

SWEEPS = Path(__file__).parents[1] / "sweeps"


def changed_models() -> list[dict[str, Any]]:
    """Every ``model`` with ``kwargs`` of the shipped sweeps, as jobs name it; sorted, without repetitions."""
    found = {}
    for file in sorted(SWEEPS.glob("*.yaml")):
        for model in _models(yaml.safe_load(file.read_text(encoding="utf-8"))):
            found[json.dumps(model, sort_keys=True)] = model
    return [found[text] for text in sorted(found)]


def encode_variants(models: list[dict[str, Any]]) -> str:
    """The table as JSON, one line per network: multiply-adds, parameters, features, whether it has BatchNorm."""
    lines = [f" {json.dumps(json.dumps(model, sort_keys=True))}: {json.dumps(_measure(model))}" for model in models]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(arguments: list[str] | None = None) -> int:
    """Write the table, or with ``--check`` say whether the file is current."""
    parser = argparse.ArgumentParser(description="Table of the shipped sweeps' networks for planning.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file differs")
    options = parser.parse_args(arguments)
    text = encode_variants(changed_models())
    if options.check:
        return int(not options.file.is_file() or options.file.read_text(encoding="utf-8") != text)
    options.file.write_text(text, encoding="utf-8")
    return 0


def _models(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        for item in value:
            yield from _models(item)
    elif isinstance(value, Mapping):
        if {"name", "image_size", "kwargs"} <= value.keys():
            yield {name: value[name] for name in ("name", "image_size", "kwargs")}
        for item in value.values():
            yield from _models(item)


def _measure(model: Mapping[str, Any]) -> list[Any]:
    spec = ModelSpec.from_mapping(model)
    backbone = meta_backbone(spec)
    macs, features = count_macs(backbone, spec.image_size)
    num_parameters = sum(tensor.numel() for tensor in backbone.parameters())
    return [macs, num_parameters, int(features.shape[1]), bool(batchnorm_layers(backbone))]


if __name__ == "__main__":
    sys.exit(main())
