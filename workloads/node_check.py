"""``python -m workloads.node_check REQUEST``: whether this node computes, remembers and moves data; prints JSON.

For each GPU (for the processor where there is none): a matrix product that is known beforehand, again and again; a
pattern written over most of the free memory and read back; one kernel compiled by ``torch.compile``, which needs a C
compiler. With the folder of the cache: an all-reduce between the devices, and that disk; with a store: it, too. Nothing
else should run on the devices meanwhile. ``REQUEST`` is JSON: limit_s, and if wanted cache and store_uri.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from orchestrator.errors import OrchestratorError
from orchestrator.storage.open import open_store
from orchestrator.storage.protocol import ObjectStore

_SIDE: Final = {"cuda": 8192, "cpu": 512}
_OPERATIONS_PER_ENTRY: Final = 2
_MEMORY_SHARE: Final = 0.8
"""Of the memory that is free; the rest is for whoever comes in between."""
_CPU_BYTES: Final = 64 * 1024**2
_CHUNK_BYTES: Final = 1024**3
_REDUCE_S: Final = 25.0
_DISK_BYTES: Final = 128 * 1024**2
_STORE_BYTES: Final = 16 * 1024**2
_LEAST_DISK_PER_S: Final = 20 * 2.0**20
_LEAST_STORE_PER_S: Final = 1 * 2.0**20
"""Below these a disk or a network card is broken, not merely shared."""
_PATTERNS: Final = (0x55, 0xAA, 0x00, 0xFF)
"""Each bit is set and cleared, beside neighbours of the same and of the other value."""


def main(request: Mapping[str, Any]) -> dict[str, Any]:
    """What was found. ``limit_s`` bounds the repetitions on devices, not a single step."""
    limit_s = float(request["limit_s"])
    names = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    share_s = limit_s / len(names)
    return {
        "devices": [check_device(torch.device(name), share_s) for name in names],
        "compile": compile_kernel(names[0]),
    }


def check_device(device: torch.device, limit_s: float) -> dict[str, Any]:
    """Results for one device; ``errors`` is empty for one that is well."""
    told: dict[str, Any] = {"device": str(device), "errors": []}
    for name, check in (("tflops", multiply), ("memory_gib", fill_memory)):
        try:
            told[name] = check(device, limit_s / 2)
        except (ArithmeticError, RuntimeError) as error:
            told["errors"].append(f"{name}: {str(error).strip().splitlines()[0][:300]}")
    return told


def multiply(device: torch.device, limit_s: float, product: Callable[[Tensor, Tensor], Tensor] = torch.mm) -> float:
    """10^12 operations/s of products whose every entry is known. Raises ``ArithmeticError`` for a wrong one.

    Rows of ones times a matrix of small integers: sums below 2^24 are exact in float32, whatever the order of adding.
    """
    side = _SIDE[device.type]
    left = torch.arange(side, device=device, dtype=torch.float32).remainder_(4).unsqueeze(1).expand(side, side)
    right = torch.arange(side, device=device, dtype=torch.float32).remainder_(8).unsqueeze(0).expand(side, side)
    left, right = left.contiguous(), right.contiguous()
    expected = left[:, :1] * right[:1, :] * side
    started_s, count = time.perf_counter(), 0
    while not count or time.perf_counter() - started_s < limit_s:
        found = product(left, right)
        wrong = int((found != expected).sum())  # waits for the device
        count += 1
        if wrong:
            raise ArithmeticError(f"{wrong} of {side * side} entries of a matrix product are wrong (try {count})")
    return _OPERATIONS_PER_ENTRY * count * side**3 / (time.perf_counter() - started_s) / 1e12


def fill_memory(device: torch.device, limit_s: float) -> float:
    """GiB that kept what was written to them. Raises ``ArithmeticError`` for memory that did not."""
    started_s = time.perf_counter()
    chunks = list(_memory(device))
    for pattern in _PATTERNS:
        for chunk in chunks:
            chunk.fill_(pattern)
        for number, chunk in enumerate(chunks):
            wrong = int((chunk != pattern).sum())
            if wrong:
                raise ArithmeticError(
                    f"{wrong} bytes of chunk {number} of memory did not keep the pattern {pattern:#04x}"
                )
        if time.perf_counter() - started_s > limit_s:
            break
    return sum(chunk.nbytes for chunk in chunks) / 2**30


def _memory(device: torch.device) -> Iterator[Tensor]:
    left = _CPU_BYTES if device.type == "cpu" else int(_MEMORY_SHARE * torch.cuda.mem_get_info(device)[0])
    while left > 0:
        yield torch.empty(min(left, _CHUNK_BYTES), dtype=torch.uint8, device=device)
        left -= _CHUNK_BYTES


def compile_kernel(device: str) -> str:
    """Compile and run one small function; the reason if it cannot be compiled, else empty."""
    from workloads.train.compiled import CompiledForward, CompileMode

    inputs = torch.linspace(0.0, 1.0, 1024, device=device)
    module = _Kernel()
    compiled = CompiledForward(module, CompileMode.DEFAULT)
    found = compiled(inputs)
    if compiled.note:
        return compiled.note
    return "" if torch.allclose(found, module(inputs)) else "the compiled kernel computes another result"


class _Kernel(torch.nn.Module):
    """Two operations that a compiler fuses."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(inputs - 0.5) * inputs


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
