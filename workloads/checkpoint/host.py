"""Host memory that has a path: training fills it, and a store reads it as a file, without a copy in between."""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from pathlib import Path

import torch

_LOG = logging.getLogger(__name__)


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
            return
        weakref.finalize(self.tensor, runtime.cudaHostUnregister, self.tensor.data_ptr())

    def close(self) -> None:
        """Give up the path."""
        self._close()
