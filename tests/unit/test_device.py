"""Which device a job computes on, and how much of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orchestrator.backends.classify import failure_from
from orchestrator.backends.ray.attempt_process import retire_reason
from orchestrator.core.contract import ExecutionContext
from orchestrator.core.errors import FailureKind
from orchestrator.state.failure_policy import signature_of
from orchestrator.storage.local import LocalStore
from tests.builders import make_job, request_of
from workloads.models.spec import ModelSpec
from workloads.runtime import device as runtime_device
from workloads.runtime.device import NoDeviceError, pick_device
from workloads.runtime.enums import Precision
from workloads.train.step_metrics import Throughput

CPU = torch.device("cpu")


@pytest.fixture
def context(tmp_path: Path) -> ExecutionContext:
    return ExecutionContext(store=LocalStore(tmp_path / "store"), scratch=tmp_path, cache=tmp_path, has_gpu=True)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int | None]]:
    """A GPU that need not be there; the parts of its memory that were set."""
    told: list[tuple[float, int | None]] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr(runtime_device, "_parts", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, device: told.append((part, device.index))
    )
    return told


def test_gpu_that_was_given_and_cannot_be_used_is_an_error_that_blames_the_node(
    context: ExecutionContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoDeviceError, match=r"given one \(CUDA_VISIBLE_DEVICES=3; torch.*nvidia-smi") as caught:
        pick_device(context)
    failure = failure_from(caught.value, request_of(make_job("pretrain/x"), context.store.uri))
    blamed = signature_of(failure.message)
    assert failure.kind is FailureKind.NODE_LOST
    assert blamed is not None
    assert blamed.blames_node
    assert retire_reason(failure)


@pytest.mark.parametrize(
    ("visible", "has_gpu"),
    [("", True), ("-1", True), (None, True), ("0", False)],
    ids=["hidden", "none", "of another maker", "of the environment alone"],
)
def test_cpu_where_no_gpu_was_given(
    visible: str | None, has_gpu: bool, context: ExecutionContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device(replace(context, has_gpu=has_gpu)) == CPU


@pytest.mark.parametrize("visible", [None, ""])
def test_gpu_that_was_given_without_its_number_is_an_error(
    limits: list[tuple[float, int | None]],
    visible: str | None,
    context: ExecutionContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where Ray is told to leave the variable alone: the job would hold a GPU and compute on the CPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(NoDeviceError, match=r"CUDA_VISIBLE_DEVICES does not say which.*RAY_EXPERIMENTAL_NOSET_CUDA"):
        pick_device(context)
    assert pick_device(replace(context, has_gpu=False)) == CPU


def test_part_of_a_gpu_limits_memory_until_a_later_job_has_more(
    limits: list[tuple[float, int | None]], context: ExecutionContext
) -> None:
    for part in (1.0, 0.5, 0.5, 0.25, 1.0, 1.0):
        pick_device(replace(context, gpu_share=part))
    assert limits == [(0.5, 0), (0.25, 0), (1.0, 0)]


def test_share_of_the_peak_is_unknown_on_a_part_of_a_gpu(
    limits: list[tuple[float, int | None]], context: ExecutionContext
) -> None:
    spec, found = ModelSpec(name="test_resnet", image_size=32), {}
    for part in (1.0, 0.5):
        device = pick_device(replace(context, gpu_share=part))
        found[part] = Throughput.of(spec, device, Precision.BF16, tf32=False).mfu(100)
    assert found[1.0]
    assert found[0.5] is None


def test_workspaces_of_cublas_are_chosen_before_a_job_computes(
    limits: list[tuple[float, int | None]], context: ExecutionContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS reads them once per process: jobs of a warm runner that come before a training fix those of it."""
    pick_device(context)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    pick_device(context)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
