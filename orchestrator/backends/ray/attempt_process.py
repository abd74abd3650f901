"""The setup that all processes share that run an attempt: runners, ranks of gangs and actors of trials.

The attempt has its own scratch folder, the node's cache, and a log with everything that the process prints until the
attempt has ended, including the traceback of a failure. The data plane is loaded by name.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import ray

from orchestrator.backends.ray.attempt_log import AttemptLog, LoggedProcess, logged_process
from orchestrator.backends.ray.settings import RunnerSettings, make_cache
from orchestrator.core.contract import ExecutionContext, JobFailure, JobRequest, JobResult
from orchestrator.core.errors import FailureKind
from orchestrator.storage.files import scratch_folder
from orchestrator.storage.open import open_store
from orchestrator.storage.protocol import ObjectStore

Execute: TypeAlias = Callable[[JobRequest, ExecutionContext], JobResult]
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
WARM_UP = "warm_up"
"""Optional function beside the entry point that imports what most jobs need."""
_DEVICE_ERROR = re.compile(
    r"CUDA error|CUDA driver|CUDA-capable device|AcceleratorError|cuDNN error|CUDNN_STATUS|CUBLAS_STATUS|"
    r"NCCL (error|Error)|ncclUnhandled|device-side assert|illegal memory access|uncorrectable ECC|HIP error"
)
"""After one of these a process's CUDA context may be broken for good, or its memory in pieces."""


class EntryPoint:
    """``package.module:function`` of the data plane, loaded by name so that the control plane never imports it."""

    def __init__(self, name: str) -> None:
        self._module, _, self._function = name.partition(":")
        self.is_warm = False

    def warm_up(self) -> None:
        """Import ahead of the attempts. A failing import fails again in the attempt that needs it, which reports it."""
        self.is_warm = True
        try:
            self.load()
            getattr(importlib.import_module(self._module), WARM_UP, lambda: None)()
        except Exception:  # noqa: BLE001 - see above
            traceback.print_exc()

    def load(self) -> Execute:
        """The function itself. Raises whatever its import raises."""
        execute: Execute = getattr(importlib.import_module(self._module), self._function)
        return execute


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlace:
    """The store, folders and log of an attempt in this process."""

    store: ObjectStore
    scratch: Path
    cache: Path
    process: LoggedProcess
    gpu_share: float
    """Of the GPU of this process, in (0, 1]."""
    has_gpu: bool
    """Whether Ray gave one to it."""


def _nothing(_error: BaseException) -> None:
    return None


@contextmanager
def attempt_place(
    request: JobRequest,
    log_name: str,
    settings: RunnerSettings,
    *,
    folder: str = "attempt",
    on_error: Callable[[BaseException], None] = _nothing,
) -> Iterator[AttemptPlace]:
    """Set up the store, folders and log of an attempt, and clean up at the end; the log is stored last.

    Args:
        request: of the attempt.
        log_name: name of its log in the store.
        settings: of its runner.
        folder: first part of the scratch folder's name.
        on_error: called with the error that ends the attempt, before its log is stored, which may take long.
    """
    num_gpus = assigned_gpus()
    if not num_gpus:
        # Ray leaves the variable as the node has it. Where that names GPUs, as on Slurm, a job that asked for none
        # would compute on one of them, beside the attempt to which it is assigned.
        os.environ[VISIBLE_GPUS] = ""
    store, cache = open_store(request.store_uri), make_cache()
    with scratch_folder(folder) as scratch:
        # The log lies beside the scratch directory: a job may empty its scratch.
        log_path = scratch.with_suffix(".log")
        with AttemptLog(store, log_name, log_path, every_s=settings.log_every_s):
            try:
                process = logged_process(log_path, log_name)
                yield AttemptPlace(
                    store=store,
                    scratch=scratch,
                    cache=cache,
                    process=process,
                    gpu_share=min(1.0, num_gpus or 1.0),
                    has_gpu=num_gpus > 0,
                )
            except BaseException as error:
                traceback.print_exc(file=sys.stderr)  # into the attempt's log
                on_error(error)
                raise


def assigned_gpus() -> float:
    """GPUs that Ray has assigned to this process, or the part of one; 1 outside of Ray's workers."""
    context = ray.get_runtime_context()
    if context.worker.mode != ray.WORKER_MODE:
        return 1.0
    return float(context.get_assigned_resources().get("GPU", 0.0))  # type: ignore[no-untyped-call]


def retire_reason(outcome: JobFailure) -> str:
    """Why a process that had this failure must not run another attempt; empty = it may."""
    text = f"{outcome.message}\n{outcome.traceback}"
    if outcome.kind is FailureKind.OUT_OF_MEMORY or _DEVICE_ERROR.search(text):
        return f"attempt {outcome.attempt_id} ended with: {outcome.message}"
    return ""
