"""The numerics of this machine: how they are set, and the fingerprint for which results are bit-exact."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

import numpy as np
import PIL
import torch
import torch.utils.deterministic

from orchestrator.core.contract import ExecutionContext
from orchestrator.core.errors import FailureKind, OrchestratorError
from workloads.runtime.enums import Precision

Fingerprint = Mapping[str, str | int]
GRAD_REDUCTION = "grad_reduction"
"""In fingerprints of gangs that round gradients before they sum them."""


WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
REPRODUCIBLE_WORKSPACES: Final = (":4096:8", ":16:8")
"""https://docs.nvidia.com/cuda/cublas/#results-reproducibility; the first is also what Hopper GPUs use by default."""
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_parts: dict[int, float] = {}
"""Of the memory of each GPU, by its number, what this process was limited to."""


class NoDeviceError(OrchestratorError):
    """The GPU that an attempt was given cannot be used by its process; the message blames the node."""

    failure_kind = FailureKind.NODE_LOST


def pick_device(context: ExecutionContext | None = None) -> torch.device:
    """The GPU that the backend gave to this attempt, with its part of the memory, else the CPU.

    Raises:
        NoDeviceError: the backend gave one, and this process cannot use it.
    """
    visible = os.environ.get(_VISIBLE, "")
    if visible in {"", "-1"}:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if context is not None and context.has_gpu:
            # The CPU would take a hundred times as long, and the GPU would be held meanwhile. These words blame the
            # node: ``orchestrator.state.failure_policy`` knows them.
            raise NoDeviceError(
                f"no CUDA-capable device is detected, although this attempt was given one ({_VISIBLE}={visible}; "
                f"{_why_not()}): its GPU is broken, its driver was changed while Ray ran, or torch is a build for "
                "CPUs; the attempt goes to another node, and this one is excluded for a while: see nvidia-smi there, "
                "and restart Ray after a change of the driver"
            )
        return torch.device("cpu")
    choose_workspace()
    # With its number: a gang's workers may see all GPUs of their node, and the current one is a thread's own.
    index = torch.cuda.current_device()
    device, part = torch.device("cuda", index), 1.0 if context is None else context.gpu_share
    if part != part_of(device):
        torch.cuda.empty_cache()  # what an earlier job left counts
        torch.cuda.set_per_process_memory_fraction(part, device)
        _parts[index] = part
    return device


def part_of(device: torch.device) -> float:
    """The part of a GPU that this process was given, in (0, 1]."""
    return _parts.get(device.index, 1.0)


def choose_workspace() -> str:
    """The workspaces of cuBLAS, which reads them once per process, at its first product: all its jobs have the same."""
    return os.environ.setdefault(WORKSPACE, REPRODUCIBLE_WORKSPACES[0])


def _why_not() -> str:
    """What torch says of the GPUs that it cannot use."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        return f"torch: {(str(error).splitlines() or [type(error).__name__])[0]}"
    return "torch finds none"


@contextmanager
def deterministic_numerics(num_threads: int) -> Iterator[None]:
    """Deterministic kernels and a fixed number of threads, for the calling thread, until the body ends.

    Torch's thread count belongs to the thread that sets it, so this must run in the thread that trains.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling every fresh tensor guards against reads of uninitialised memory; it is slow and no kernel here reads any.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


def numerics_fingerprint(
    device: torch.device,
    *,
    num_threads: int,
    micro_batch: int,
    world_size: int = 1,
    grad_reduction: Precision = Precision.FP32,
) -> dict[str, str | int]:
    """Everything that may change the last bits of a result on equal input.

    ``grad_reduction``: the format in which the ranks sum gradients. Below fp32, their number changes more than the last
    bits.
    """
    rounds = world_size > 1 and grad_reduction is not Precision.FP32
    return {
        "torch": torch.__version__,
        "timm": version("timm"),
        "numpy": np.__version__,
        "pillow": PIL.__version__,  # decoders make the pixels
        "simplejpeg": version("simplejpeg"),
        "device": _cpu_model() if device.type == "cpu" else torch.cuda.get_device_name(device),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": num_threads,
        "world_size": world_size,
        "micro_batch": micro_batch,
        "optimizer_form": "fused",
        **({GRAD_REDUCTION: f"{grad_reduction.value} of {world_size} workers"} if rounds else {}),
    }


def difference(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Readable list of the entries that differ."""
    names = sorted(before.keys() | now.keys())
    return [f"{name}: {before.get(name)} -> {now.get(name)}" for name in names if before.get(name) != now.get(name)]


@cache
def _cpu_model() -> str:
    """Model of the processor: equal instruction sets with other cache sizes already choose other blockings."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{platform.machine()} {next(named, platform.processor())}".strip()
