"""Checks the arithmetic, memory and transfers of this node: answers ``orchestrator.core.data_plane.NODE``.

For each GPU (for the processor where there is none): a matrix product that is known beforehand, again and again; a
pattern written over most of the free memory and read back. If asked for: a kernel compiled by ``torch.compile``, which
needs a C compiler (compile); an all-reduce between the devices (reduce_s, its limit) and the disk of the cache (cache,
its folder); a store (store_uri), until a time of the monotonic clock (until_s). Fewer GPUs than there must be (gpus)
are a fault. Nothing else should run on the devices meanwhile: ``orchestrator.backends.ray.node_check_tasks``, which
asks for this on a node, sees to that.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from orchestrator.core.errors import OrchestratorError, StorageTimeoutError
from orchestrator.storage.open import open_store
from orchestrator.storage.protocol import ObjectStore

_SIDE: Final = {"cuda": 8192, "cpu": 512}
_OPERATIONS_PER_ENTRY: Final = 2
_MEMORY_SHARE: Final = 0.8
"""Of the memory that is free; the rest is for whoever comes in between."""
_CPU_BYTES: Final = 64 * 1024**2
_CHUNK_BYTES: Final = 1024**3
_DISK_BYTES: Final = 128 * 1024**2
_STORE_BYTES: Final = 16 * 1024**2
_LEAST_DISK_PER_S: Final = 20 * 2.0**20
_LEAST_STORE_PER_S: Final = 1 * 2.0**20
"""Below these a disk is broken, not merely shared, and a store says nothing of the node."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_PATTERNS: Final = (0x55, 0xAA, 0x00, 0xFF)
"""Each bit is set and cleared, beside neighbours of the same and of the other value."""


def main(request: Mapping[str, Any]) -> dict[str, Any]:
    """What was found. ``limit_s`` bounds the repetitions on devices, not a single step."""
    limit_s = float(request["limit_s"])
    names = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    share_s = limit_s / len(names)
    found: dict[str, Any] = {"devices": [check_device(torch.device(name), share_s) for name in names]}
    expected, usable = int(request.get("gpus", 0)), torch.cuda.device_count()
    if usable < expected:
        missing = f"torch can use {usable} of {expected} (nvidia-smi shows why; after a new driver, restart Ray here)"
        found["devices"].append({"device": "GPUs", "errors": [missing]})
    if request.get("compile"):
        found["compile"] = compile_kernel(names[0])
    if "cache" not in request:
        return found
    checks: dict[str, Callable[[], float]] = {
        "all_reduce_s": lambda: reduce_here(torch.cuda.device_count(), float(request["reduce_s"])),
        "disk_bytes_per_s": lambda: write_disk(Path(request["cache"])),
    }
    if request.get("store_uri"):
        left_s = float(request["until_s"]) - time.monotonic()
        checks["store_bytes_per_s"] = lambda: within(left_s, lambda: use_store(open_store(request["store_uri"])))
    return found | {"node": _told(checks)}


def _told(checks: Mapping[str, Callable[[], float]]) -> dict[str, Any]:
    """``errors`` of the node; in ``not_made`` what says nothing of it: a store that fails, a disk that is full."""
    told: dict[str, Any] = {"errors": [], "not_made": []}
    for name, check in checks.items():
        try:
            told[name] = check()
        except subprocess.TimeoutExpired:
            told["timed_out"] = f"{name}: no answer"
        except (ArithmeticError, OSError, OrchestratorError) as error:
            is_elsewhere = isinstance(error, OrchestratorError) or getattr(error, "errno", None) in _FULL
            kind = "not_made" if is_elsewhere else "errors"
            told[kind].append(f"{name}: {(str(error).strip() or type(error).__name__).splitlines()[0][:300]}")
    return told


def within(limit_s: float, check: Callable[[], float]) -> float:
    """What ``check`` returns or raises. Raises ``StorageTimeoutError`` after so many seconds, and leaves it behind."""
    ended: Future[float] = Future()

    def run() -> None:
        try:
            ended.set_result(check())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            ended.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return ended.result(timeout=max(0.0, limit_s))
    except TimeoutError:
        if ended.done():
            raise
        raise StorageTimeoutError(f"no answer within {max(0.0, limit_s):.0f} s") from None


def reduce_here(num_gpus: int, limit_s: float) -> float:
    """Seconds of an all-reduce between all GPUs of this node, or two processes of one without several.

    Raises ``ArithmeticError`` if a rank fails, ``subprocess.TimeoutExpired`` if they do not come together.
    """
    world_size, backend = max(2, num_gpus), "nccl" if num_gpus > 1 else "gloo"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"world_size": world_size, "host": "127.0.0.1", "port": port, "backend": backend, "limit_s": limit_s}
    until_s = time.monotonic() + limit_s  # for all of them
    ranks = [_start_rank({**place, "rank": rank, "device": rank}) for rank in range(world_size)]
    try:
        answers = [rank.communicate(timeout=max(0.1, until_s - time.monotonic())) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, (rank, (_, said)) in enumerate(zip(ranks, answers, strict=True)):
        if rank.returncode:
            last = said.strip().splitlines()[-1:] or [f"it ended with code {rank.returncode}"]
            raise ArithmeticError(f"rank {number} of {world_size} of an all-reduce over {backend}: {last[0][:200]}")
    return max(float(json.loads(told.strip().splitlines()[-1])["took_s"]) for told, _ in answers)


def _start_rank(place: Mapping[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "workloads.all_reduce", json.dumps(place)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def write_disk(folder: Path, num_bytes: int = _DISK_BYTES, least_per_s: float = _LEAST_DISK_PER_S) -> float:
    """Bytes/s that reach a disk. Raises ``ArithmeticError`` where they come back altered, or slowly; ``OSError``."""
    folder.mkdir(parents=True, exist_ok=True)
    path, content = folder / f".node-check-{secrets.token_hex(8)}", secrets.token_bytes(num_bytes)
    started_s = time.perf_counter()
    try:
        with path.open("xb") as file:
            file.write(content)
            os.fsync(file.fileno())
        took_s = time.perf_counter() - started_s
        if path.read_bytes() != content:
            raise ArithmeticError(f"{folder} gives back other bytes than were written")
    finally:
        path.unlink(missing_ok=True)
    return _fast_enough(f"{folder} is written", num_bytes / took_s, least_per_s)


def use_store(store: ObjectStore, num_bytes: int = _STORE_BYTES, least_per_s: float = _LEAST_STORE_PER_S) -> float:
    """Bytes/s of an object there and back. Raises ``ArithmeticError`` if it is altered, ``StorageError`` if slow."""
    name, content = f"probes/node-{secrets.token_hex(8)}", secrets.token_bytes(num_bytes)
    started_s = time.perf_counter()
    store.put(name, content)
    try:
        found = store.get(name)
        took_s = time.perf_counter() - started_s
    finally:
        store.delete(name)
    if found != content:
        raise ArithmeticError(f"{store.uri} gives back other bytes than were written")
    try:
        return _fast_enough(f"{store.uri} is used", 2 * num_bytes / took_s, least_per_s)
    except ArithmeticError as error:  # of all nodes, most likely
        raise StorageTimeoutError(str(error)) from None


def _fast_enough(what: str, per_s: float, least_per_s: float) -> float:
    if per_s < least_per_s:
        raise ArithmeticError(f"{what} at {per_s / 2**20:.2g} MiB/s; at least {least_per_s / 2**20:g} are needed")
    return per_s


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
    from workloads.runtime.precision import CompiledForward, CompileMode

    inputs = torch.linspace(0.0, 1.0, 1024, device=device)
    module = _Kernel()
    compiled = CompiledForward(module, CompileMode.DEFAULT)
    found = compiled(inputs)
    if compiled.note:
        return compiled.note
    with compiled.paused():  # the module itself runs compiled, too
        expected = module(inputs)
    return "" if torch.allclose(found, expected) else "the compiled kernel computes another result"


class _Kernel(torch.nn.Module):
    """Two operations that a compiler fuses."""

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(inputs - 0.5) * inputs
