"""The state of a run at one step, copied into host memory while training continues.

The memory is a file in safetensors' format (https://github.com/huggingface/safetensors#format), so that a store reads
it without a copy in between. The library writes the format from tensors that it is given at once, each time into new
memory; here the header is made once and a save copies bytes only.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
_LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 8
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Layout = list[tuple[str, torch.dtype, torch.Size]]
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """All state of a run after ``step`` updates; ``state`` is plain JSON."""

    step: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: Mapping[str, Any]


class Snapshot:
    """Memory for one checkpoint, used again for the next one: one copy of the state, however many are taken."""

    def __init__(self) -> None:
        self.step = 0
        self.document = b""
        """The part that is no file: ``state.json``."""
        self._images = {MODEL: SafetensorsImage(), OPTIMIZER: SafetensorsImage()}
        self._stream: torch.cuda.Stream | None = None
        self._arrived: torch.cuda.Event | None = None

    @property
    def files(self) -> dict[str, HostFile]:
        """The files by part, complete once ``wait`` has returned."""
        return {part: image.file for part, image in self._images.items()}

    def fit(self, checkpoint: Checkpoint) -> None:
        """Make the memory that ``take`` needs, unless it is there: page by page, so slower than any copying."""
        self._images[MODEL].fit(checkpoint.model)
        self._images[OPTIMIZER].fit(checkpoint.optimizer)

    def take(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint that fits; its tensors may change as soon as this returns."""
        self.step = checkpoint.step
        self.document = json.dumps({"step": checkpoint.step, **checkpoint.state}, allow_nan=False).encode()
        model = self._images[MODEL].places(checkpoint.model)
        self._copy(model + self._images[OPTIMIZER].places(checkpoint.optimizer))

    def wait(self) -> None:
        """Wait until copies from a device have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def close(self) -> None:
        """Free the memory."""
        for image in self._images.values():
            image.close()

    @torch.no_grad()
    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        device = next((source.device for _, source in pairs if source.is_cuda), None)
        if device is None:
            for place, source in pairs:
                place.copy_(source)
            return
        training = torch.cuda.current_stream(device)
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(training)
        with torch.cuda.stream(self._stream):
            for place, source in pairs:
                place.copy_(source, non_blocking=True)
            self._arrived = self._stream.record_event()
        # The device waits, the host does not: the next step overwrites weights and BatchNorm statistics in place.
        training.wait_event(self._arrived)


class SafetensorsImage:
    """The file of one set of tensors; made anew only when their names, types or shapes change."""

    def __init__(self) -> None:
        self._file: HostFile | None = None
        self._layout: Layout = []
        self._places: dict[str, Tensor] = {}

    @property
    def file(self) -> HostFile:
        """The file; what it holds is valid from ``fit`` and the copying that follows it on."""
        if self._file is None:
            raise RuntimeError("fit comes first")
        return self._file

    def fit(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the file, unless the one at hand has place for exactly such tensors.

        Raises:
            TypeError: a tensor has a type that safetensors files do not hold.
        """
        layout = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        if self._file is not None and layout == self._layout:
            return
        # The old file goes before the new one comes: never two copies of the state.
        self.close()
        header, offsets = _plan(layout)
        total = sum(dtype.itemsize * shape.numel() for _, dtype, shape in layout)
        self._file, self._layout = HostFile(len(header) + total), layout
        self._file.view[: len(header)] = header
        body = self._file.tensor[len(header) :]
        for name, dtype, shape in layout:
            start = offsets[name]
            self._places[name] = body[start : start + dtype.itemsize * shape.numel()].view(dtype).view(shape)
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._file.pin()

    def places(self, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Where each tensor goes: pairs of (place in the file, tensor)."""
        return [(self._places[name], tensor) for name, tensor in tensors.items()]

    def close(self) -> None:
        """Free the memory."""
        self._places.clear()
        if self._file is not None:
            self._file.close()
        self._file = None


def _plan(layout: Layout) -> tuple[bytes, dict[str, int]]:
    """The header with its length, and the offset of each tensor after it.

    Wide types come first, so that every tensor is aligned although the format allows no gaps.
    """
    entries, offsets, end = {}, {}, 0
    for name, dtype, shape in sorted(layout, key=lambda item: (-item[1].itemsize, item[0])):
        if dtype not in _TYPES:
            message = f"tensor {name} is of {dtype}, which safetensors cannot hold; keep it as another type"
            raise TypeError(message)
        start, end = end, end + dtype.itemsize * shape.numel()
        entries[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        offsets[name] = start
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT_BYTES)
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header, offsets


class HostFile:
    """An anonymous file of ``size_bytes`` in memory, all of it present from the start (Linux: ``memfd_create(2)``).

    The memory is freed once this object is closed, or gone, and nothing that was made of ``tensor`` is left.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._descriptor = os.memfd_create("checkpoint", os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        os.truncate(self._descriptor, size_bytes)
        # Populated now: a page fault per 4 KiB would make the first copy several times slower than the later ones.
        mapped = mmap.mmap(self._descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.tensor = torch.frombuffer(mapped, dtype=torch.uint8)
        """All bytes, shape (size_bytes,)."""

    @property
    def path(self) -> Path:
        """Opens the file, in this process and until it is closed."""
        return Path(f"/proc/self/fd/{self._descriptor}")

    @property
    def descriptor(self) -> int:
        """Of the open file, until it is closed."""
        return self._descriptor

    @property
    def view(self) -> memoryview:
        """All bytes, writable, without a copy."""
        view: memoryview = self.tensor.numpy().data
        return view

    def pin(self) -> None:
        """Let CUDA devices write here directly; without it their copies are slower and not asynchronous."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(self.tensor.data_ptr(), self.size_bytes, 0))
        if code:
            _LOG.warning("cudaHostRegister of %d bytes failed with %d: checkpoints stall longer", self.size_bytes, code)
            # CUDA keeps the error until somebody asks, as torch does after each launch: here, not in a training step.
            with suppress(RuntimeError):
                torch.ones(1, device="cuda")
            return
        weakref.finalize(self.tensor, runtime.cudaHostUnregister, self.tensor.data_ptr())

    def close(self) -> None:
        """Give up the path."""
        self._close()
