"""The state of a run at one step, held still in host memory while training goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workloads.checkpoint.host import HostFile
from workloads.checkpoint.image import SafetensorsImage

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


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
