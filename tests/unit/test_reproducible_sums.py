"""Which sums NCCL may make in gangs that are to be deterministic."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from orchestrator.core.errors import UserError
from workloads.runtime.precision import Arithmetic


def _arithmetic(monkeypatch: pytest.MonkeyPatch, *, world_size: int = 2, deterministic: bool = True) -> Arithmetic:
    """Of a rank of a gang on GPUs that need not be there."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    arithmetic = Arithmetic(torch.device("cpu"), deterministic=deterministic)
    arithmetic.device, arithmetic._deterministic = torch.device("cuda"), deterministic
    return arithmetic


@pytest.fixture
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "")  # so that what a test sets ends with it
    monkeypatch.delenv("NCCL_ALGO")


@pytest.mark.usefixtures("no_choice")
def test_deterministic_gang_on_gpus_sums_in_rings_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    arithmetic = _arithmetic(monkeypatch)
    with arithmetic.numerics():
        assert os.environ["NCCL_ALGO"] == "Ring"
        assert arithmetic.fingerprint()["nccl_algo"] == "Ring"


@pytest.mark.usefixtures("no_choice")
@pytest.mark.parametrize("how", [{"world_size": 1}, {"deterministic": False}])
def test_other_jobs_leave_the_choice_to_nccl(monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]) -> None:
    arithmetic = _arithmetic(monkeypatch, **how)
    with arithmetic.numerics():
        assert "NCCL_ALGO" not in os.environ
    assert "nccl_algo" not in arithmetic.fingerprint()


@pytest.mark.parametrize("chosen", ["Tree", "^NVLS", "ring"])
def test_reproducible_choice_of_a_user_stays(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv("NCCL_ALGO", chosen)
    with _arithmetic(monkeypatch).numerics():
        assert os.environ["NCCL_ALGO"] == chosen


@pytest.mark.parametrize("chosen", ["NVLS", "NVLSTree", "Ring,NVLS", "^Tree", "allreduce:nvls"])
def test_choice_that_allows_sums_in_switches_is_refused(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setenv("NCCL_ALGO", chosen)
    with (
        pytest.raises(UserError, match=r"NCCL_ALGO=.*: NCCL's sums are reproducible with one of Ring, Tree"),
        _arithmetic(monkeypatch).numerics(),
    ):
        pass
