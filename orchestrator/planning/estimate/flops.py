"""The model of speed: how long work takes by its number of operations, before anything was measured.

Seconds = start + steps x overhead + max(operations / rate, images x decoding / cores) on a GPU, whose loader runs in
parallel, and the sum of both on a CPU. Operations of a training step are three forward passes (a backward pass takes
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

from orchestrator.sweepfile.known_models import shipped_models

_TERA = 1e12
CPU = ""
"""The accelerator of jobs without GPUs."""
DEFAULT_ACCELERATOR = "A100"
"""Assumed where neither the sweep, the command nor the store's results say what the GPUs are."""
_CPU_CORE_OPERATIONS_PER_S = 20e9
"""Float32, a fifth of what a core with AVX2 reaches at 3 GHz (2 units x 8 lanes x 2 operations): small layers."""
# Shares of the peak that eager PyTorch is assumed to reach: plans are made before anything has run, and corrected by
# results (``history``) as soon as a store holds some. Networks with BatchNorm are bound by memory, those of large
# products less so.
_WITH_BATCHNORM = {"half": 0.08, "tf32": 0.12, "fp32": 0.45}
_WITHOUT_BATCHNORM = {"half": 0.25, "tf32": 0.35, "fp32": 0.55}
_GANG_EFFICIENCY = 0.95
"""Efficiency of each doubling of the number of workers."""
FORWARD_PASSES_PER_STEP = 3
OPERATIONS_PER_MAC = 2
_CPU_START_S, _GPU_START_S = 1.0, 15.0
"""Start-up seconds of an attempt on a warm runner: opening data and network; on a GPU also its first, slow steps."""
_CPU_STEP_S, _GPU_STEP_S = 0.004, 0.012
"""Fixed seconds per update: launches of kernels, the optimizer, the loop."""
_DECODE_FLOOR_S, _DECODE_S = 0.00005, 0.0020
"""Core-seconds to read, decode and crop an image: any, and more for one of 224 pixels (docs/data.md, pillow)."""
_DECODED_SIDE = 224


@dataclass(frozen=True, slots=True)
class Peak:
    """Dense peaks in 10^12 operations/s: 16-bit with float32 accumulation, TF32, float32."""

    half: float
    tf32: float
    fp32: float


PEAKS: Mapping[str, Peak] = {
    "B200": Peak(2250, 1100, 75),
    "H200": Peak(989.4, 494.7, 66.9),
    "H200 NVL": Peak(835.5, 417.7, 60.3),
    "GH200": Peak(989.4, 494.7, 66.9),
    "H100": Peak(989.4, 494.7, 66.9),
    "H100 PCIe": Peak(756.4, 378.2, 51.2),
    "H100 NVL": Peak(835.5, 417.7, 60.3),
    "A100": Peak(311.8, 155.9, 19.5),
    "A10": Peak(125.0, 62.5, 31.2),
    "A10G": Peak(70.0, 35.0, 31.5),
    "A40": Peak(149.7, 74.8, 37.4),
    "L4": Peak(121.0, 60.0, 30.3),
    "L40S": Peak(362.1, 183.2, 91.6),
    "V100": Peak(125.0, 15.7, 15.7),
    "T4": Peak(65.1, 8.1, 8.1),
    "RTX 4090": Peak(165.2, 82.6, 82.6),
    "RTX 3090": Peak(71.2, 35.6, 35.6),
}
"""Peaks by a part of the device's name, from data sheets. A test compares ``workloads.train.step_metrics``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The hardware of one attempt."""

    accelerator: str = CPU
    """A name of ``PEAKS``; empty = the CPU."""
    num_workers: int = 1
    num_cores: float = 1.0

    @property
    def is_gpu(self) -> bool:
        """Whether it computes on GPUs."""
        return self.accelerator != CPU


def find_accelerator(device_name: str) -> str:
    """Name in ``PEAKS`` of a device ("NVIDIA A100-SXM4-80GB" is "A100"); empty for an unknown one or a CPU."""
    words = f" {device_name.replace('-', ' ').replace('_', ' ')} ".lower()
    fitting = [name for name in PEAKS if f" {name.lower()} " in words]
    return max(fitting, key=len, default="")


def operations_per_s(machine: Machine, precision: str, *, tf32: bool, has_batchnorm: bool) -> float:
    """Floating-point operations per second that training is assumed to reach on all workers together."""
    if not machine.is_gpu:
        return machine.num_cores * _CPU_CORE_OPERATIONS_PER_S
    peak = PEAKS.get(machine.accelerator, PEAKS[DEFAULT_ACCELERATOR])
    arithmetic = "half" if precision != "fp32" else "tf32" if tf32 else "fp32"
    share = (_WITH_BATCHNORM if has_batchnorm else _WITHOUT_BATCHNORM)[arithmetic]
    workers = machine.num_workers
    lost: float = _GANG_EFFICIENCY ** (workers.bit_length() - 1)
    peaks = {"half": peak.half, "tf32": peak.tf32, "fp32": peak.fp32}
    return _TERA * peaks[arithmetic] * share * workers * lost


_VARIANTS = Path(__file__).with_name("variants.json")


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
    """The amount of a job's work, in units that do not depend on the hardware."""

    operations: float = 0.0
    """Floating-point operations of training, or of the job's other computations."""
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
    """Core-seconds to decode and crop an image of this size."""
    return _DECODE_FLOOR_S + _DECODE_S * (image_size / _DECODED_SIDE) ** 2
