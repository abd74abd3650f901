"""How long work takes by its arithmetic: the model of speed behind estimates, before anything was measured.

Seconds = start + steps x overhead + max(operations / rate, images x decoding / cores) on a GPU, whose loader works
beside it, and the sum of both on a CPU. Operations of a training step are three forward passes (a backward pass takes
the products of inputs and of weights; "PaLM", arXiv:2204.02311, appendix B), two per multiply-add. Multiply-adds and
parameters are those of the generated table of timm's models, scaled by the square of the image size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.planning.estimate.accelerators import Machine, operations_per_s
from orchestrator.sweepfile.timm_table import shipped_models

_VARIANTS = Path(__file__).with_name("variants.json")
FORWARD_PASSES_PER_STEP = 3
OPERATIONS_PER_MAC = 2

_CPU_START_S, _GPU_START_S = 1.0, 15.0
"""Of an attempt on a warm runner: opening data and network; on a GPU also its first, slow steps."""
_CPU_STEP_S, _GPU_STEP_S = 0.004, 0.012
"""Per update, whatever its size: launches of kernels, the optimizer, the loop."""
_DECODE_FLOOR_S, _DECODE_S = 0.00005, 0.0020
"""Core-seconds to read, decode and crop an image: any, and more for one of 224 pixels (docs/data.md, pillow)."""
_DECODED_SIDE = 224


class Fit(StrEnum):
    """How well the table of models knows a network."""

    KNOWN = "known"
    CHANGED = "changed"
    """Keyword arguments change the network; the numbers are those of the unchanged one."""
    UNKNOWN = "unknown"
    """Not in the table, or not counted there: a ResNet-50 is assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A backbone at one image size."""

    macs: float
    """Multiply-adds of one forward pass of one image."""
    num_parameters: int
    num_features: int
    has_batchnorm: bool
    fit: Fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a job does, in units that do not depend on where it runs."""

    operations: float = 0.0
    """Floating-point operations of training, or of whatever else the job computes."""
    eval_operations: float = 0.0
    images: float = 0.0
    """Images decoded for the same."""
    eval_images: float = 0.0
    image_size: int = 0
    num_steps: int = 0
    core_s: float = 0.0
    """Seconds of a single core, over which all cores share."""
    precision: str = "fp32"
    tf32: bool = False
    has_batchnorm: bool = False

    def without_evaluation(self) -> Work:
        """The same work as measured rates count it: their time includes evaluation, their images do not."""
        return replace(self, eval_operations=0.0, eval_images=0.0)


def network_of(model: Mapping[str, Any]) -> Network:
    """The network that a job's parameter ``model`` (name, image_size, kwargs) names."""
    if variant := _variants().get(json.dumps(model, sort_keys=True)):
        macs, num_parameters, num_features, has_batchnorm = variant
        return Network(
            macs=macs,
            num_parameters=num_parameters,
            num_features=num_features,
            has_batchnorm=has_batchnorm,
            fit=Fit.KNOWN,
        )
    known = shipped_models().find(str(model["name"]))
    if known is None or known.macs is None:
        found, fit = shipped_models().find("resnet50"), Fit.UNKNOWN
    else:
        found, fit = known, Fit.CHANGED if model.get("kwargs") else Fit.KNOWN
    if found is None or found.macs is None:
        message = "the table of timm's models has no resnet50; make it again: python -m workloads.models.table"
        raise LookupError(message)
    return Network(
        macs=found.macs * (int(model["image_size"]) / found.image_size) ** 2,
        num_parameters=found.num_parameters or 0,
        num_features=found.num_features or 0,
        has_batchnorm=bool(found.has_batchnorm),
        fit=fit,
    )


@cache
def _variants() -> Mapping[str, tuple[int, int, int, bool]]:
    """Networks of the shipped sweeps that keyword arguments change; made by ``python -m workloads.models.variants``."""
    found: dict[str, tuple[int, int, int, bool]] = json.loads(_VARIANTS.read_text(encoding="utf-8"))
    return found


def start_s(machine: Machine) -> float:
    """Seconds before the first step."""
    return _GPU_START_S if machine.is_gpu else _CPU_START_S


def steady_s(work: Work, machine: Machine) -> float:
    """Seconds of the work itself, without its start."""
    rate = operations_per_s(machine, work.precision, tf32=work.tf32, has_batchnorm=work.has_batchnorm)
    computing_s = (work.operations + work.eval_operations) / rate
    cores = max(1.0, machine.num_cores)
    decoding_s = (work.images + work.eval_images) * decode_core_s(work.image_size) / cores
    busy_s = max(computing_s, decoding_s) if machine.is_gpu else computing_s + decoding_s
    overhead_s = work.num_steps * (_GPU_STEP_S if machine.is_gpu else _CPU_STEP_S)
    return overhead_s + busy_s + work.core_s / cores


def decode_core_s(image_size: int) -> float:
    """Core-seconds to make an image of this side ready."""
    return _DECODE_FLOOR_S + _DECODE_S * (image_size / _DECODED_SIDE) ** 2
