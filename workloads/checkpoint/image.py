"""A safetensors file as a fixed place in host memory, into which tensors are copied again and again.

The format: https://github.com/huggingface/safetensors#format. The library writes it from tensors that it is given at
once, each time into new memory; here the header is made once and a save copies bytes only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from workloads.checkpoint.host import HostFile

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
