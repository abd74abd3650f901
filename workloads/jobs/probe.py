"""The job ``probe``: a linear head on the features of a frozen backbone, of images or of ``embed`` jobs.

With ``features: online`` each batch of images goes through the backbone or, without augmentation, its features are
computed once. With ``features: cached`` they come from ``embed`` jobs; then ``solver: sgd`` trains as any probe does,
and ``solver: lbfgs`` is in ``logistic_probe``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cached_property, partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult
from workloads.data.augment import Augment
from workloads.data.loader import Batch
from workloads.data.order import rank_slice
from workloads.data.split_targets import unseen_notes
from workloads.features.artifact import FeatureTable
from workloads.features.gathered import Features
from workloads.jobs.logistic_probe import run_logistic_probe
from workloads.jobs.networks import ImageTask, new_head, pretrained_backbone, zero_targets
from workloads.jobs.training import Setting, run_training
from workloads.models.batchnorm import batchnorm_layers
from workloads.runtime.precision import Arithmetic
from workloads.runtime.streams import Purpose, Stage, seed_device, torch_seed
from workloads.train.evaluate import EvalInputs
from workloads.train.samples import EVAL_BATCH_SIZE, LabelledSplit, eval_inputs
from workloads.train.task import TrainInputs

_OF_FEATURES: Final = 1
"""Detail that tells the masks of a frozen backbone's dropout from those of an update."""


def run_online_probe(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit ``head.safetensors`` and ``model.json``; the backbone stays the pretraining's artifact.

    Raises:
        UserError, BadDataError, NumericsError, PreemptedError, StorageError: why there is no commit.
    """
    return run_training(request, context, Stage.PROBE, _probe_task)


def _probe_task(setting: Setting) -> ProbeTask:
    backbone, num_features = pretrained_backbone(setting)
    return ProbeTask(setting, backbone, new_head(setting, num_features))


class ProbeTask:
    """Only the head learns; the backbone is in evaluation mode. See ``workloads.jobs.training.TrainedModel``.

    With ``dropout`` the backbone drops activations while the head learns, as it did in pretraining, but its BatchNorm
    layers keep their running statistics; validation drops nothing.

    Where a sample has the same features in every epoch, they are computed once per job, by one rank each, and kept in
    memory.
    """

    is_backbone_trained = False

    def __init__(self, setting: Setting, backbone: nn.Module, head: nn.Linear) -> None:
        self.backbone, self.head = backbone.eval().requires_grad_(requires_grad=False), head
        self.model = head
        self._images = ImageTask(setting, backbone, head)
        self.num_classes, self.is_multi_label = self._images.num_classes, self._images.is_multi_label
        self.subset_names: Sequence[str] = setting.samples.subset_names
        self.origin = self._images.origin
        self.levels = self._images.levels
        self._setting = setting
        self._arithmetic = Arithmetic.of(setting.parameters.recipe, setting.request.execution, setting.device)

    def batches(self, first: int, stop: int, *, unit: int) -> Generator[TrainInputs, None, None]:
        """See ``Task``; ``inputs`` are features (B, num_features)."""
        recipe = self._setting.parameters.recipe
        looks_the_same = recipe.augment is Augment.NONE and not recipe.color_jitter and not recipe.is_mixed
        if looks_the_same and not recipe.dropout:
            return self._cached_batches(first, stop, unit)
        return self._fresh_batches(first, stop, unit)

    def trial_batch(self, num_samples: int) -> TrainInputs:
        """See ``Task``."""
        batch = self._images.trial_batch(num_samples)
        return TrainInputs(inputs=self._features(batch.inputs), targets=batch.targets)

    def eval_batches(self) -> Iterator[EvalInputs]:
        """See ``Task``."""
        yield from self._val_features

    def held_out_batches(self, split: LabelledSplit) -> Iterator[EvalInputs]:
        """See ``TrainedModel``."""
        for batch in self._setting.samples.eval_batches(split):
            yield eval_inputs(batch, self._features_of(batch))

    def batch_ordinals(self, batch: int) -> NDArray[np.int64]:
        """See ``Task``."""
        return self._images.batch_ordinals(batch)

    def stats(self) -> Mapping[str, float]:
        """See ``Task``."""
        return self._images.stats()

    def sample_names(self, ordinals: Sequence[int]) -> list[str]:
        """See ``Task``."""
        return self._images.sample_names(ordinals)

    def _cached_batches(self, first: int, stop: int, unit: int) -> Generator[TrainInputs, None, None]:
        """The targets are those of the samples whose features they come with, also where a bad one is replaced."""
        setting, samples = self._setting, self._setting.samples
        features, ranks = self._train_features, samples.ranks
        order = samples.order(seed=setting.parameters.seed, stage=setting.stage)
        size = setting.parameters.recipe.batch_size
        share = partial(rank_slice, rank=ranks.rank, world_size=ranks.world_size, group_size=unit)
        for batch in range(first, stop):
            start, end = share(batch * size, (batch + 1) * size)
            ordinals_B = features.present(order, start, end)
            targets = torch.from_numpy(samples.train.labels.take(ordinals_B)).to(setting.device)
            yield TrainInputs(inputs=features.take(ordinals_B), targets=targets)

    def _fresh_batches(self, first: int, stop: int, unit: int) -> Generator[TrainInputs, None, None]:
        with closing(self._images.batches(first, stop, unit=unit)) as batches:
            for number, batch in enumerate(batches, start=first):
                with self._dropping(number):
                    features_BF = self._features(batch.inputs)
                yield TrainInputs(inputs=features_BF, targets=batch.targets)

    @contextmanager
    def _dropping(self, batch: int) -> Iterator[None]:
        """Run the body with the recipe's dropout; its masks follow from seed, batch and rank alone."""
        setting = self._setting
        if not setting.parameters.recipe.dropout:
            yield
            return
        rank = setting.samples.ranks.rank
        seed = torch_seed(setting.parameters.seed, setting.stage, Purpose.DROPOUT, _OF_FEATURES, batch, rank)
        self.backbone.train()
        for layer in batchnorm_layers(self.backbone):
            layer.eval()
        seed_device(setting.device, seed)
        try:
            yield
        finally:
            self.backbone.eval()

    @cached_property
    def _val_features(self) -> list[EvalInputs]:
        samples = self._setting.samples
        return [eval_inputs(batch, self._features_of(batch)) for batch in samples.eval_batches(samples.val)]

    @cached_property
    def _train_features(self) -> Features:
        samples = self._setting.samples
        mine = ((batch.ordinals_B, self._features_of(batch)) for batch in samples.eval_batches(samples.train))
        return Features.gather(mine, samples.train.view, self.head.in_features, samples.ranks, self._setting.device)

    def _features_of(self, batch: Batch) -> Tensor:
        return self._features(self._images.normalize(batch.images_BCHW))

    def _features(self, images_BCHW: Tensor) -> Tensor:
        """Features (B, num_features), float32; in the recipe's arithmetic wherever it is called from."""
        # no_grad, not inference_mode: the head's backward pass saves the features, which inference tensors forbid.
        with torch.no_grad(), self._arithmetic.autocast():
            features_BF: Tensor = self.backbone(images_BCHW)
        return features_BF.float()


def run_cached_probe(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit ``head.safetensors`` and ``model.json``.

    Raises:
        UserError, BadDataError, NumericsError, PreemptedError, StorageError: why there is no commit.
    """
    return run_training(request, context, Stage.PROBE, _cached_task)


def _cached_task(setting: Setting) -> CachedProbeTask:
    context, inputs, samples = setting.context, setting.request.inputs, setting.samples
    tables = {role: FeatureTable.open(context.store, inputs[role], context.cache) for role in ("train", "val")}
    train, val = samples.train, samples.val
    setting.notes.extend(unseen_notes(train.labels, train.view.ordinals(), val.labels, val.view.ordinals()))
    return CachedProbeTask(setting, tables, new_head(setting, tables["train"].dim))


class CachedProbeTask(ProbeTask):
    """Only the head is there. What has no features is replaced as in loading, and left out of evaluation."""

    def __init__(self, setting: Setting, tables: dict[str, FeatureTable], head: nn.Linear) -> None:
        super().__init__(setting, nn.Identity(), head)
        self._tables = tables

    def trial_batch(self, num_samples: int) -> TrainInputs:
        """See ``Task``."""
        device = self._setting.device
        features_BF = torch.zeros(num_samples, self.head.in_features, device=device)
        targets = zero_targets(num_samples, device, is_multi_label=self.is_multi_label)
        return TrainInputs(inputs=features_BF, targets=targets)

    def held_out_batches(self, split: LabelledSplit) -> Iterator[EvalInputs]:
        """See ``TrainedModel``."""
        return self._batches_of(split, self._tables["train"])

    @cached_property
    def _val_features(self) -> list[EvalInputs]:
        return list(self._batches_of(self._setting.samples.val, self._tables["val"]))

    @cached_property
    def _train_features(self) -> Features:
        view, table = self._setting.samples.train.view, self._tables["train"]
        ordinals = np.setdiff1d(view.ordinals(), table.missing)
        rows = np.full(table.num_samples, -1, dtype=np.int64)
        rows[ordinals] = np.arange(len(ordinals))
        features_NF = torch.from_numpy(table.take(ordinals)).to(self._setting.device).float()
        return Features(features_NF=features_NF, rows=rows)

    def _batches_of(self, split: LabelledSplit, table: FeatureTable) -> Iterator[EvalInputs]:
        """As images would be evaluated: the same batches on the same ranks, without what has no features."""
        ordinals, ranks = split.view.ordinals(), self._setting.samples.ranks
        for start in range(ranks.rank * EVAL_BATCH_SIZE, len(ordinals), ranks.world_size * EVAL_BATCH_SIZE):
            ordinals_B = np.setdiff1d(ordinals[start : start + EVAL_BATCH_SIZE], table.missing)
            targets_B = torch.from_numpy(split.labels.take(ordinals_B)).to(self._setting.device)
            subsets_B = np.asarray(split.source.split.subset_ids[ordinals_B])
            inputs = self._on_device(table, ordinals_B)
            yield EvalInputs(inputs=inputs, targets_B=targets_B, subsets_B=subsets_B, ordinals_B=ordinals_B)

    def _on_device(self, table: FeatureTable, ordinals_B: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(table.take(ordinals_B)).to(self._setting.device).float()


def run_probe(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit ``head.safetensors`` and ``model.json``; the backbone stays the pretraining's artifact.

    Raises:
        UserError, BadDataError, NumericsError, PreemptedError, StorageError: why there is no commit.
    """
    recipe = request.parameters["recipe"]
    if recipe.get("features") != "cached":
        return run_online_probe(request, context)
    return run_cached_probe(request, context) if recipe["solver"] == "sgd" else run_logistic_probe(request, context)
