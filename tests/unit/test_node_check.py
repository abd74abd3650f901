"""Devices that compute or remember wrongly are found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from orchestrator.backends.ray.node_checks import faults, timed_out
from orchestrator.storage.local import LocalStore
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
            return self._memory.ne(other)  # type: ignore[call-overload, no-any-return]

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


def test_disk_that_is_slow_and_a_store_that_alters_bytes_are_found(tmp_path: Path) -> None:
    assert node_check.write_disk(tmp_path, num_bytes=1024, least_per_s=0.0) > 0
    with pytest.raises(ArithmeticError, match=r"is written at .* MiB/s; at least"):
        node_check.write_disk(tmp_path, num_bytes=1024, least_per_s=1e15)
    assert list(tmp_path.iterdir()) == []

    class Altering(LocalStore):
        def get(self, name: str, *, max_bytes: int | None = None) -> bytes:
            return super().get(name)[:-1] + b"?"

    assert node_check.use_store(LocalStore(tmp_path / "store"), num_bytes=1024, least_per_s=0.0) > 0
    with pytest.raises(ArithmeticError, match="other bytes than were written"):
        node_check.use_store(Altering(tmp_path / "altering"), num_bytes=1024, least_per_s=0.0)
    assert list(LocalStore(tmp_path / "store").list_objects("probes/")) == []


def test_faults_are_those_of_the_hardware() -> None:
    well = {"device": "cuda:0", "errors": []}
    found = {"devices": [well], "compile": "no C compiler", "node": {"errors": []}}
    assert faults(found) == []
    assert faults({**found, "node": {"errors": ["all_reduce_s: rank 3 of 8"]}}) == ["all_reduce_s: rank 3 of 8"]
    assert faults({"error": "its check fails: code 1"}) == ["its check fails: code 1"]
    late = {"timed_out": "its check has not ended within 60 s"}
    assert (faults(late), timed_out(late)) == ([], late["timed_out"])
    assert timed_out({**found, "node": {"errors": [], "timed_out": "all_reduce_s: no answer"}})
    assert timed_out(found) == ""
