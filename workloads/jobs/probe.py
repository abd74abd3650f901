"""The job ``probe``: a linear head on the features of a frozen backbone, of images or of ``embed`` jobs.

Each batch of images goes through the backbone; where a sample has the same features in every epoch, they are computed
once. With ``features: cached`` they come from ``embed`` jobs; then ``solver: sgd`` trains as any probe does, and
``solver: lbfgs`` is in ``logistic_probe``.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult
from orchestrator.core.errors import BadDataError
from workloads.data.augment import Augment
from workloads.data.loader import Batch
from workloads.data.order import Order, rank_slice
from workloads.data.subset import SampleView
from workloads.features.artifact import FeatureTable
from workloads.jobs.logistic_probe import run_logistic_probe
from workloads.jobs.networks import ImageTask, new_head, pretrained_backbone, unseen_class_notes, zero_targets
from workloads.jobs.training import run_training
from workloads.models.batchnorm import batchnorm_layers
from workloads.models.build import FrozenForward
from workloads.runtime.precision import Arithmetic
from workloads.runtime.ranks import Ranks, share_of
from workloads.runtime.streams import Purpose, Stage, seed_device, torch_seed
from workloads.train.evaluate import EVAL_BATCH_SIZE, EvalInputs
from workloads.train.samples import LabelledSamples, LabelledSplit, eval_inputs
from workloads.train.task import JobContext, TrainInputs

_OF_FEATURES: Final = 1
"""Detail that tells the masks of a frozen backbone's dropout from those of an update."""
_MAX_REPLACEMENTS = 16
_NONE = -1


def run_online_probe(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit ``head.safetensors`` and ``model.json``; the backbone stays the pretraining's artifact.

    Raises:
        UserError, BadDataError, NumericsError, PreemptedError, StorageError: why there is no commit.
    """
    return run_training(request, context, Stage.PROBE, _probe_task)


def _probe_task(job: JobContext, samples: LabelledSamples) -> ProbeTask:
    backbone, num_features = pretrained_backbone(job, samples)
    return ProbeTask(job, samples, backbone, new_head(job, num_features, samples.num_classes))


class ProbeTask(ImageTask):
    """Only the head learns; the backbone is in evaluation mode. ``inputs`` of batches are features (B, num_features).

    With ``dropout`` the backbone drops activations while the head learns, as it did in pretraining, but its BatchNorm
    layers keep their running statistics; validation drops nothing.

    Where a sample has the same features in every epoch, they are computed once per job, by one rank each, and kept in
    memory.
    """

    is_backbone_trained = False

    def __init__(self, job: JobContext, samples: LabelledSamples, backbone: nn.Module, head: nn.Linear) -> None:
        super().__init__(job, samples, backbone.eval().requires_grad_(requires_grad=False), head)
        self.model = head
        self._arithmetic = Arithmetic.of(job.recipe, job.request.execution, job.device)
        self._forward = FrozenForward()

    def batches(self, first: int, stop: int, *, unit: int) -> Generator[TrainInputs, None, None]:
        """See ``Task``."""
        recipe = self._job.recipe
        is_plain = recipe.augment == Augment.NONE and not recipe.augment_plugin
        looks_the_same = is_plain and not recipe.color_jitter and not recipe.is_mixed
        if looks_the_same and not recipe.dropout:
            return self._cached_batches(first, stop, unit)
        return self._fresh_batches(super().batches(first, stop, unit=unit), first)

    def trial_batch(self, num_samples: int) -> TrainInputs:
        """See ``Task``."""
        batch = super().trial_batch(num_samples)
        return TrainInputs(inputs=self._features(batch.inputs), targets=batch.targets)

    def eval_batches(self) -> Iterable[EvalInputs]:
        """See ``Task``."""
        yield from self._val_features  # not before the first one is asked for: ``evaluate`` sets how they are computed

    def held_out_batches(self, split: LabelledSplit) -> Iterable[EvalInputs]:
        """See ``TrainedModel``."""
        for batch in self._loaders.eval_batches(split):
            yield eval_inputs(batch, self._features_of(batch))

    def _cached_batches(self, first: int, stop: int, unit: int) -> Generator[TrainInputs, None, None]:
        """The targets are those of the samples whose features they come with, also where a bad one is replaced."""
        features, ranks, order = self._train_features, self._job.ranks, self._loaders.order(unit)
        size = self._job.recipe.batch_size
        share = partial(rank_slice, rank=ranks.rank, world_size=ranks.world_size, group_size=unit)
        for batch in range(first, stop):
            start, end = share(batch * size, (batch + 1) * size)
            ordinals_B = features.present(order, start, end)
            targets = _copy_to(self._samples.train.labels.take(ordinals_B), self._job.device)
            yield TrainInputs(inputs=features.take(ordinals_B), targets=targets)

    def _fresh_batches(
        self, images: Generator[TrainInputs, None, None], first: int
    ) -> Generator[TrainInputs, None, None]:
        recipe, execution = self._job.recipe, self._job.request.execution
        with closing(images):
            for number, batch in enumerate(images, start=first):
                # Masks of dropout follow from the forward passes: without a setting there is one for the whole share.
                share = len(batch.inputs)
                whole = share if recipe.dropout else min(share, EVAL_BATCH_SIZE)
                size = max(1, min(execution.micro_batch or whole, share) >> execution.memory_retries)
                with self._dropping(number):
                    features_BF = torch.cat([self._features(some) for some in torch.split(batch.inputs, size)])
                yield TrainInputs(inputs=features_BF, targets=batch.targets)

    @contextmanager
    def _dropping(self, batch: int) -> Iterator[None]:
        """Run the body with the recipe's dropout; its masks follow from seed, batch and rank alone."""
        job = self._job
        if not job.recipe.dropout:
            yield
            return
        seed = torch_seed(job.seed, job.stage, Purpose.DROPOUT, _OF_FEATURES, batch, job.ranks.rank)
        self.backbone.train()
        for layer in batchnorm_layers(self.backbone):
            layer.eval()
        seed_device(job.device, seed)
        try:
            yield
        finally:
            self.backbone.eval()

    @cached_property
    def _val_features(self) -> list[EvalInputs]:
        return list(self.held_out_batches(self._samples.val))

    @cached_property
    def _train_features(self) -> Features:
        train, job = self._samples.train, self._job
        mine = ((batch.ordinals_B, self._features_of(batch)) for batch in self._loaders.eval_batches(train))
        return Features.gather(mine, train.view, self.head.in_features, job.ranks, job.device)

    def _features_of(self, batch: Batch) -> Tensor:
        """Of samples that always look the same. What does not fit into memory is halved, unlike the passes of steps."""
        return self._features(self._normalize(batch.images_BCHW), self._forward)

    def _features(self, images_BCHW: Tensor, forward: FrozenForward | None = None) -> Tensor:
        """Features (B, num_features), float32; in the recipe's arithmetic wherever it is called from."""
        # no_grad, not inference_mode: the head's backward pass saves the features, which inference tensors forbid.
        with torch.no_grad(), self._arithmetic.autocast():
            features_BF: Tensor = forward(self.backbone, images_BCHW) if forward else self.backbone(images_BCHW)
        return features_BF.float()


def run_cached_probe(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit ``head.safetensors`` and ``model.json``.

    Raises:
        UserError, BadDataError, NumericsError, PreemptedError, StorageError: why there is no commit.
    """
    return run_training(request, context, Stage.PROBE, _cached_task)


def _cached_task(job: JobContext, samples: LabelledSamples) -> CachedProbeTask:
    context, inputs, roles = job.context, job.request.inputs, ("train", "val")
    tick = context.activity.tick
    tables = {role: FeatureTable.open(context.store, inputs[role], context.cache, tick) for role in roles}
    job.notes.extend(unseen_class_notes(samples))
    return CachedProbeTask(job, samples, tables, new_head(job, tables["train"].dim, samples.num_classes))


class CachedProbeTask(ProbeTask):
    """Only the head is there. What has no features is replaced as in loading, and left out of evaluation."""

    def __init__(
        self, job: JobContext, samples: LabelledSamples, tables: dict[str, FeatureTable], head: nn.Linear
    ) -> None:
        super().__init__(job, samples, nn.Identity(), head)
        self._tables = tables

    def trial_batch(self, num_samples: int) -> TrainInputs:
        """See ``Task``."""
        device = self._job.device
        features_BF = torch.zeros(num_samples, self.head.in_features, device=device)
        targets = zero_targets(num_samples, device, is_multi_label=self.is_multi_label)
        return TrainInputs(inputs=features_BF, targets=targets)

    def held_out_batches(self, split: LabelledSplit) -> Iterable[EvalInputs]:
        """See ``TrainedModel``."""
        return self._batches_of(split, self._tables["train"])

    @cached_property
    def _val_features(self) -> list[EvalInputs]:
        return list(self._batches_of(self._samples.val, self._tables["val"]))

    @cached_property
    def _train_features(self) -> Features:
        view, table = self._samples.train.view, self._tables["train"]
        ordinals = np.setdiff1d(view.ordinals(), table.missing)
        rows = np.full(table.num_samples, -1, dtype=np.int64)
        rows[ordinals] = np.arange(len(ordinals))
        features_NF = torch.from_numpy(table.take(ordinals)).to(self._job.device).float()
        return Features(features_NF=features_NF, rows=rows)

    def _batches_of(self, split: LabelledSplit, table: FeatureTable) -> Iterator[EvalInputs]:
        """As images would be evaluated: the same batches on the same ranks, without what has no features."""
        ordinals, ranks = split.view.ordinals(), self._job.ranks
        for batch in share_of(math.ceil(len(ordinals) / EVAL_BATCH_SIZE), ranks.rank, ranks.world_size):
            start = batch * EVAL_BATCH_SIZE
            ordinals_B = np.setdiff1d(ordinals[start : start + EVAL_BATCH_SIZE], table.missing)
            targets_B = torch.from_numpy(split.labels.take(ordinals_B)).to(self._job.device)
            subsets_B = np.asarray(split.source.split.subset_ids[ordinals_B])
            inputs = self._on_device(table, ordinals_B)
            yield EvalInputs(inputs=inputs, targets_B=targets_B, subsets_B=subsets_B, ordinals_B=ordinals_B)

    def _on_device(self, table: FeatureTable, ordinals_B: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(table.take(ordinals_B)).to(self._job.device).float()


def run_probe(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit ``head.safetensors`` and ``model.json``; the backbone stays the pretraining's artifact.

    Raises:
        UserError, BadDataError, NumericsError, PreemptedError, StorageError: why there is no commit.
    """
    recipe = request.parameters["recipe"]
    if recipe.get("features") != "cached":
        return run_online_probe(request, context)
    return run_cached_probe(request, context) if recipe["solver"] == "sgd" else run_logistic_probe(request, context)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Features:
    """``features_NF`` float32 on the device, and the row of each ordinal; -1 = it could not be decoded."""

    features_NF: Tensor
    rows: NDArray[np.int64]

    @classmethod
    def gather(
        cls,
        mine: Iterable[tuple[NDArray[np.int64], Tensor]],
        view: SampleView,
        num_features: int,
        ranks: Ranks,
        device: torch.device,
    ) -> Self:
        """Of the samples of a view, from this rank's pairs of ordinals (B,) and features (B, num_features)."""
        ordinals = view.ordinals()
        rows = np.full(int(ordinals.max(initial=_NONE)) + 1, _NONE, dtype=np.int64)
        rows[ordinals] = np.arange(len(ordinals))
        features_NF = torch.zeros(len(ordinals), num_features, device=device)
        is_there_N = torch.zeros(len(ordinals), device=device)
        for ordinals_B, features_BF in mine:
            rows_B = torch.from_numpy(rows[ordinals_B]).to(device)
            features_NF[rows_B] = features_BF.float()
            is_there_N[rows_B] = 1
        # Every row is zero on all ranks but one, so the sum is a copy.
        ranks.sum_(features_NF)
        rows[ordinals[~ranks.sum_(is_there_N).bool().cpu().numpy()]] = _NONE
        return cls(features_NF=features_NF, rows=rows)

    def take(self, ordinals_B: NDArray[np.int64]) -> Tensor:
        """Features (B, num_features) of samples that are there."""
        return self.features_NF[_copy_to(self.rows[ordinals_B], self.features_NF.device)]

    def present(self, order: Order, start: int, stop: int) -> NDArray[np.int64]:
        """Ordinals at the positions ``start <= p < stop``; what could not be decoded is replaced as in loading.

        Raises:
            BadDataError: the samples to replace it cannot be decoded either.
        """
        ordinals_B = order.ordinals(start, stop)
        for slot in np.flatnonzero(self.rows[ordinals_B] == _NONE):
            ordinals_B[slot] = self._replacement(order, start + int(slot))
        return ordinals_B

    def _replacement(self, order: Order, position: int) -> int:
        for attempt in range(_MAX_REPLACEMENTS):
            ordinal = int(order.replacement(position, attempt))
            if self.rows[ordinal] != _NONE:
                return ordinal
        message = (
            f"the sample at position {position} cannot be decoded, and none of {_MAX_REPLACEMENTS} others either; "
        )
        raise BadDataError(message + "look at the shards")


def _copy_to(values: NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device, without waiting for what the device still does, as copies of pageable memory may."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
