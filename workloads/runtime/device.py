"""The device on which a job computes, and what belongs to its process: its part of the memory, cuBLAS's workspaces.

A job that was given a GPU never computes on the CPU in its place.
"""

from __future__ import annotations

import os
from typing import Final

import torch

from orchestrator.core.contract import ExecutionContext
from orchestrator.core.errors import FailureKind, OrchestratorError

WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
REPRODUCIBLE_WORKSPACES: Final = (":4096:8", ":16:8")
"""https://docs.nvidia.com/cuda/cublas/#results-reproducibility; the first is also what Hopper GPUs use by default."""
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_NOT_SET: Final = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
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
    visible, has_gpu = os.environ.get(_VISIBLE, ""), context is not None and context.has_gpu
    if visible in {"", "-1"}:
        if has_gpu and torch.cuda.is_available():
            raise NoDeviceError(
                f"this attempt was given a GPU, but {_VISIBLE} does not say which one, so it would compute on the CPU: "
                f"Ray does not set the variable where {_NOT_SET} is set; unset that on all nodes, restart Ray, and "
                "submit again"
            )
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if has_gpu:
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
