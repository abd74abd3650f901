"""What the training loop trains: a model, its batches, and how it is evaluated."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from workloads.train.evaluate import EvalInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainInputs:
    """One global batch on the device: model inputs (B, ...), targets (B,), and which samples they are."""

    inputs: Tensor
    targets_B: Tensor
    ordinals_B: NDArray[np.int64]


class Task(Protocol):
    """A model and its samples. ``model`` holds exactly what is trained and checkpointed."""

    @property
    def model(self) -> nn.Module:
        """Maps ``TrainInputs.inputs`` to logits."""

    def batches(self, start_step: int) -> Generator[TrainInputs, None, None]:
        """The global batches of all updates from ``start_step`` on; a pure function of the step."""

    def eval_batches(self) -> Iterable[EvalInputs]:
        """The validation split, every sample once."""

    @property
    def subset_names(self) -> Sequence[str]:
        """Names of the subset ids of the validation split."""

    def sample_names(self, ordinals: Sequence[int]) -> list[str]:
        """Keys of training samples, for messages."""
