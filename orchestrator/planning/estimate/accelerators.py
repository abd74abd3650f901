"""What planning assumes of accelerators: their peaks, and the share of them that training reaches.

The peaks are those of ``workloads.train.step_metrics``, which a test compares. The shares are assumptions for eager
PyTorch without measurements: plans are made before anything has run. As soon as a store holds results of a device,
estimates are corrected by them (``orchestrator.planning.estimate.history``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_TERA = 1e12


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
"""By a part of the device's name, as data sheets give them."""

CPU = ""
"""The accelerator of jobs without GPUs."""
DEFAULT_ACCELERATOR = "A100"
"""Assumed where neither the sweep, the command nor the store's results say what the GPUs are."""

_CPU_CORE_OPERATIONS_PER_S = 20e9
"""Float32, a fifth of what a core with AVX2 reaches at 3 GHz (2 units x 8 lanes x 2 operations): small layers."""
# Shares of the peak, by arithmetic: networks with BatchNorm are bound by memory, those of large products less so.
_WITH_BATCHNORM = {"half": 0.08, "tf32": 0.12, "fp32": 0.45}
_WITHOUT_BATCHNORM = {"half": 0.25, "tf32": 0.35, "fp32": 0.55}
_GANG_EFFICIENCY = 0.95
"""Of each doubling of the number of workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What one attempt computes on."""

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
