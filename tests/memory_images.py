"""Tiny networks and images in memory, as the training loop takes them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from numpy.typing import NDArray

from orchestrator.core.contract import Execution, ExecutionContext, JobRequest
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage import ObjectStore
from tests.tiny_training import RECIPE
from workloads.data.order import rank_slice
from workloads.models.build import Classifier
from workloads.models.spec import ModelSpec
from workloads.runtime.ranks import Ranks
from workloads.runtime.streams import Stage
from workloads.train.evaluate import EvalInputs, EvalLevel
from workloads.train.loop import TrainingLoop
from workloads.train.recipe import Recipe
from workloads.train.task import JobContext, TrainInputs

KEY = "pretrain-0123456789abcdef"
NUM_CLASSES = 3


def network(name: str, **kwargs: Any) -> Classifier:
    """A timm model without its own head, always with the same weights."""
    torch.manual_seed(0)
    backbone = timm.create_model(name, num_classes=0, **kwargs)
    return Classifier(backbone, torch.nn.Linear(int(backbone.num_features), NUM_CLASSES))  # type: ignore[arg-type]


def small_network() -> torch.nn.Sequential:
    """Two layers with BatchNorm between them, always with the same weights."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))


class MemoryImages:
    """Task over ``num_samples`` random images; batch b holds those at bB, bB + 1, ... modulo their number.

    ``poisoned`` batches hold a NaN in their sample number 3.
    """

    subset_names: Sequence[str] = ()
    levels: Sequence[EvalLevel] = ()
    num_classes = NUM_CLASSES
    is_multi_label = False
    is_backbone_trained = True

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        batch_size: int,
        num_samples: int,
        image_size: int = 16,
        ranks: Ranks | None = None,
        poisoned: Sequence[int] = (),
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.model = model
        self.images = torch.randn(num_samples, 3, image_size, image_size, generator=generator)
        self.targets = torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator)
        self.seen: list[int] = []
        self.num_train = num_samples
        self._batch_size, self._ranks, self._poisoned = batch_size, ranks or Ranks(), poisoned

    def batches(self, first: int, stop: int, *, unit: int) -> Generator[TrainInputs, None, None]:
        ranks = self._ranks
        for batch in range(first, stop):
            self.seen.append(batch)
            share = (0, self._batch_size)
            if not ranks.is_solo:
                share = rank_slice(*share, rank=ranks.rank, world_size=ranks.world_size, group_size=unit)
            ordinals = torch.from_numpy(self.batch_ordinals(batch)[slice(*share)])
            images = self.images[ordinals]
            if batch in self._poisoned and share[0] <= 3 < share[1]:
                images[3 - share[0]] = torch.nan
            yield TrainInputs(inputs=images, targets=self.targets[ordinals])

    def trial_batch(self, num_samples: int) -> TrainInputs:
        return TrainInputs(inputs=self.images[:num_samples], targets=self.targets[:num_samples])

    def eval_batches(self) -> Iterable[EvalInputs]:
        if self._ranks.is_first:
            subsets = np.full(len(self.images), -1, dtype=np.int16)
            yield EvalInputs(inputs=self.images, targets_B=self.targets, subsets_B=subsets)

    def batch_ordinals(self, batch: int) -> NDArray[np.int64]:
        start = batch * self._batch_size
        return np.arange(start, start + self._batch_size, dtype=np.int64) % len(self.images)

    def stats(self) -> Mapping[str, float]:
        return {}

    def sample_names(self, ordinals: Sequence[int]) -> list[str]:
        return [f"sample{ordinal}" for ordinal in ordinals]

    def bad_samples(self) -> dict[str, Any]:
        return {}

    def recall_bad_samples(self, document: Mapping[str, Any]) -> None:
        assert not document


def memory_loop(
    task: MemoryImages,
    store: ObjectStore,
    recipe: Mapping[str, Any],
    *,
    execution: Execution | None = None,
    ranks: Ranks | None = None,
    attempt: int = 1,
    **callbacks: Any,
) -> TrainingLoop:
    """The loop over a task as one rank; ``recipe`` changes single fields of ``RECIPE``."""
    parsed, mine = Recipe.from_mapping({**RECIPE, **recipe}), ranks or Ranks()
    request = JobRequest(
        attempt_id=f"{KEY}.{attempt}",
        attempt_number=attempt,
        sweep="s",
        job="pretrain/x",
        key=KEY,
        kind=JobKind.PRETRAIN,
        identity={"parameters": {}, "inputs": {}},
        store_uri=store.uri,
        execution=execution or Execution(),
    )
    folder = Path("/nonexistent")
    context = ExecutionContext(
        store=store, scratch=folder, cache=folder, rank=mine.rank, world_size=mine.world_size, **callbacks
    )
    job = JobContext(
        request=request,
        context=context,
        stage=Stage.PRETRAIN,
        model=ModelSpec(name="memory", image_size=1),
        recipe=parsed,
        seed=0,
        device=torch.device("cpu"),
        ranks=Ranks.of(context),
    )
    return TrainingLoop(task, job)
