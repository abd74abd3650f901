"""How well a run uses its accelerator: model FLOPs utilisation (MFU) and memory.

MFU is the share of the device's peak that the model's own arithmetic makes up ("PaLM", arXiv:2204.02311, appendix B). A
training step counts as three forward passes (a backward pass takes the products of inputs and of weights), a
multiply-add as two operations. What is computed twice (chunked heads) does not count twice.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from workloads.models.spec import ModelSpec
from workloads.models.table import REFUSALS, count_macs, meta_backbone
from workloads.train.choices import Precision

_FORWARD_PASSES_PER_STEP = 3
_OPERATIONS_PER_MAC = 2


@dataclass(frozen=True, slots=True)
class Peak:
    """Dense peaks of an accelerator in 10^12 operations/s: 16-bit with float32 accumulation, TF32, float32."""

    half: float
    tf32: float
    fp32: float


# Data sheets, dense (without sparsity), boost clock. A name is a part of torch.cuda.get_device_name(); of several that
# fit the longest counts.
PEAKS: Mapping[str, Peak] = {
    # NVIDIA Blackwell B200 data sheet (HGX B200, per GPU)
    "B200": Peak(half=2250, tf32=1100, fp32=75),
    # NVIDIA H200 and H100 Tensor Core GPU data sheets; SXM unless the name says otherwise
    "H200": Peak(half=989.4, tf32=494.7, fp32=66.9),
    "H200 NVL": Peak(half=835.5, tf32=417.7, fp32=60.3),
    "GH200": Peak(half=989.4, tf32=494.7, fp32=66.9),
    "H100": Peak(half=989.4, tf32=494.7, fp32=66.9),
    "H100 PCIe": Peak(half=756.4, tf32=378.2, fp32=51.2),
    "H100 NVL": Peak(half=835.5, tf32=417.7, fp32=60.3),
    # NVIDIA A100 data sheet
    "A100": Peak(half=311.8, tf32=155.9, fp32=19.5),
    # NVIDIA A10, A40, L4 and L40S data sheets; A10G: AWS' variant, NVIDIA Ampere GA102 whitepaper's rates at its clock
    "A10": Peak(half=125.0, tf32=62.5, fp32=31.2),
    "A10G": Peak(half=70.0, tf32=35.0, fp32=31.5),
    "A40": Peak(half=149.7, tf32=74.8, fp32=37.4),
    "L4": Peak(half=121.0, tf32=60.0, fp32=30.3),
    "L40S": Peak(half=362.1, tf32=183.2, fp32=91.6),
    # NVIDIA V100 and T4 data sheets: no bf16 and no TF32, which then run as float32
    "V100": Peak(half=125.0, tf32=15.7, fp32=15.7),
    "T4": Peak(half=65.1, tf32=8.1, fp32=8.1),
    # NVIDIA Ada and Ampere GA102 whitepapers, GeForce rates with float32 accumulation
    "RTX 4090": Peak(half=165.2, tf32=82.6, fp32=82.6),
    "RTX 3090": Peak(half=71.2, tf32=35.6, fp32=35.6),
}


def peak_flops(device_name: str, precision: Precision, *, tf32: bool) -> float | None:
    """Operations/s at the peak of a device in this arithmetic; ``None`` for a device that is not in the table."""
    words = f" {device_name.replace('-', ' ')} "
    fitting = [name for name in PEAKS if f" {name} " in words]
    if not fitting:
        return None
    peak = PEAKS[max(fitting, key=len)]
    if precision is Precision.FP32:
        return 1e12 * (peak.tf32 if tf32 else peak.fp32)
    return 1e12 * peak.half


def training_flops(spec: ModelSpec, num_classes: int = 0) -> float | None:
    """Operations of forward and backward pass of one image; ``None`` where torch cannot count them."""
    try:
        macs, features = count_macs(meta_backbone(spec), spec.image_size)
        head = num_classes * int(features.shape[1])
    except REFUSALS:
        return None
    return float(_OPERATIONS_PER_MAC * _FORWARD_PASSES_PER_STEP * (macs + head))


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What turns images/s into MFU; ``None`` = not known for this model or device."""

    flops_per_image: float | None
    peak_flops: float | None

    @classmethod
    def of(
        cls, spec: ModelSpec, device: torch.device, precision: Precision, *, tf32: bool, num_classes: int = 0
    ) -> Self:
        """For a model that is trained on a device. On a CPU nothing is known, and nothing counted."""
        if device.type != "cuda":
            return cls(flops_per_image=None, peak_flops=None)
        peak = peak_flops(torch.cuda.get_device_name(device), precision, tf32=tf32)
        return cls(flops_per_image=training_flops(spec, num_classes), peak_flops=peak)

    def mfu(self, images_per_s: float) -> float | None:
        """Share of the peak in [0, 1], given the images/s of one device."""
        if not self.flops_per_image or not self.peak_flops:
            return None
        return images_per_s * self.flops_per_image / self.peak_flops


def gpu_usage(device: torch.device) -> dict[str, float]:
    """Memory of a GPU at its peak (GiB, and share of all) and its utilisation in [0, 1] where it is known."""
    if device.type != "cuda":
        return {}
    total = torch.cuda.get_device_properties(device).total_memory
    peak = torch.cuda.max_memory_reserved(device)
    measured = {"gpu_memory_gib": peak / 2**30, "gpu_memory": peak / total}
    try:
        measured["gpu_utilization"] = torch.cuda.utilization(device) / 100
    except (ImportError, RuntimeError):  # without NVIDIA's management library, or without the right to ask it
        return measured
    return measured


def host_usage() -> dict[str, float]:
    """CPU seconds of this process so far, over all its threads, and its memory at the peak in GiB."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    kibibytes = usage.ru_maxrss  # getrusage(2)
    return {"cpu_s": usage.ru_utime + usage.ru_stime, "memory_gib": kibibytes / 2**20}


def usage(throughput: Throughput | None, device: torch.device, images_per_s: float) -> dict[str, float]:
    """MFU where it is known, given the images/s of this device, and what the machine and the device are used."""
    mfu = None if throughput is None else throughput.mfu(images_per_s)
    return ({} if mfu is None else {"mfu": mfu}) | host_usage() | gpu_usage(device)
