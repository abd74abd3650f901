"""Inputs of the training loop: the job (the request, and where it runs) and its task (what is trained)."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from orchestrator.core.contract import ExecutionContext, JobRequest
from workloads.models.spec import ModelSpec
from workloads.runtime.device import pick_device
from workloads.runtime.ranks import Ranks
from workloads.runtime.streams import Stage
from workloads.train.evaluate import EvalInputs, EvalLevel
from workloads.train.linear_form import Targets
from workloads.train.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """A job that trains, as one rank of it sees it: its parameters, read once, and where it runs."""

    request: JobRequest
    context: ExecutionContext
    stage: Stage
    model: ModelSpec
    recipe: Recipe
    seed: int
    device: torch.device
    ranks: Ranks
    notes: list[str] = field(default_factory=list)
    """What whoever reads the result should know; stands in the record."""

    @classmethod
    def of(cls, request: JobRequest, context: ExecutionContext, stage: Stage) -> Self:
        """On this process's device. Raises ``UserError`` naming the parameter that is wrong."""
        parameters = request.parameters
        return cls(
            request=request,
            context=context,
            stage=stage,
            model=ModelSpec.from_mapping(parameters["model"]),
            recipe=Recipe.from_mapping(parameters["recipe"]),
            seed=int(parameters["seed"]),
            device=pick_device(context),
            ranks=Ranks.of(context),
        )


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
    def is_backbone_trained(self) -> bool:
        """Whether the backbone learns, so that its weights are part of the artifact."""

    @property
    def num_train(self) -> int:
        """Samples of an epoch."""

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

    def bad_samples(self) -> dict[str, Any]:
        """Bad samples that any rank has met so far, as plain JSON, for the checkpoints. All ranks call this.

        Without them the record would lack those of earlier attempts, and each attempt would have a budget of its own.

        Raises:
            BadDataError: there are more than the budget allows.
        """

    def recall_bad_samples(self, document: Mapping[str, Any]) -> None:
        """Know what an earlier attempt knew; on every rank."""
