"""What the training loop trains: a model, its batches, and how it is evaluated."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from workloads.train.evaluate import EvalInputs, EvalLevel
from workloads.train.linear_form import Targets


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainInputs:
    """The share that this rank takes of a global batch, on the device: model inputs (B, ...) and targets."""

    inputs: Tensor
    targets: Targets


class Task(Protocol):
    """A model and its samples. ``model`` holds exactly what is trained and checkpointed."""

    @property
    def model(self) -> nn.Module:
        """Maps ``TrainInputs.inputs`` to logits."""

    @property
    def num_classes(self) -> int:
        """Logits per sample."""

    @property
    def is_multi_label(self) -> bool:
        """Whether a sample may have several targets."""

    def batches(self, first: int, stop: int, *, unit: int) -> Generator[TrainInputs, None, None]:
        """Shares that this rank takes of the global batches ``first <= b < stop``, a pure function of b.

        ``unit`` consecutive samples stay on one rank, see ``rank_slice``.
        """

    def trial_batch(self, num_samples: int) -> TrainInputs:
        """A batch that needs as much memory as a real one; what it holds is of no interest."""

    @property
    def levels(self) -> Sequence[EvalLevel]:
        """Levels of the hierarchy up which predictions are folded in evaluation."""

    def eval_batches(self) -> Iterable[EvalInputs]:
        """The validation split, every sample once on some rank."""

    @property
    def subset_names(self) -> Sequence[str]:
        """Names of the subset ids of the validation split."""

    def batch_ordinals(self, batch: int) -> NDArray[np.int64]:
        """Ordinals [B] of the samples of a global batch."""

    def stats(self) -> Mapping[str, float]:
        """What the loading of training batches did so far, for people."""

    def sample_names(self, ordinals: Sequence[int]) -> list[str]:
        """Keys of training samples, for messages."""


class RunMemory(Protocol):
    """What of the samples a run must know again when it resumes: those that are bad, or its record would lack those of
    earlier attempts, and each attempt would have a budget of its own.
    """

    def to_json(self) -> dict[str, Any]:
        """As plain JSON; of rank 0 it stands in the checkpoints."""

    def recall(self, document: Mapping[str, Any]) -> None:
        """Know what an earlier attempt knew; on every rank."""
