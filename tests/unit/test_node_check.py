"""Devices that compute or remember wrongly are found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workloads import node_check

CPU = torch.device("cpu")


def test_device_that_is_well_says_how_fast_it_is() -> None:
    found = node_check.check_device(CPU, 0.0)
    assert found["errors"] == []
    assert found["tflops"] > 0
    assert found["memory_gib"] == pytest.approx(1 / 16)


def test_one_wrong_entry_of_a_product_is_found() -> None:
    def flipped(left: Tensor, right: Tensor) -> Tensor:
        found = torch.mm(left, right)
        found[5, 7] += 1
        return found

    with pytest.raises(ArithmeticError, match="1 of 262144 entries of a matrix product are wrong"):
        node_check.multiply(CPU, 0.0, flipped)


def test_one_byte_that_does_not_keep_its_pattern_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        """A chunk of memory whose first bit of one byte stays set."""

        nbytes = 64

        def __init__(self) -> None:
            self._memory = torch.zeros(64, dtype=torch.uint8)

        def fill_(self, value: int) -> None:
            self._memory.fill_(value)
            self._memory[3] |= 1

        def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
            return self._memory != other

        def __hash__(self) -> int:
            return 0

    monkeypatch.setattr(node_check, "_memory", lambda _: iter([Stuck()]))
    found = node_check.check_device(CPU, 1.0)
    assert found["errors"] == ["memory_gib: 1 bytes of chunk 0 of memory did not keep the pattern 0xaa"]


def test_kernel_is_compiled_or_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> object:
        def call(*_: object) -> object:
            raise torch._dynamo.exc.BackendCompilerFailed(lambda: None, RuntimeError("Failed to find C compiler"), None)

        return call

    monkeypatch.setattr(torch, "compile", fails)
    assert "Failed to find C compiler" in node_check.compile_kernel("cpu")
