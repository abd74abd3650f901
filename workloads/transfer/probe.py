"""The job ``probe`` on images: a linear head on the features of a frozen backbone."""

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
from workloads.data.streams import Purpose, Stage
from workloads.models.batchnorm import batchnorm_layers
from workloads.train.arithmetic import Arithmetic
from workloads.train.evaluate import EvalInputs
from workloads.train.images import ImageTask, new_head
from workloads.train.job import Setting, run_training
from workloads.train.samples import LabelledSplit, eval_inputs
from workloads.train.streams import seed_device, torch_seed
from workloads.train.task import TrainInputs
from workloads.transfer.backbone import pretrained_backbone
from workloads.transfer.features import Features

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
    """Only the head learns; the backbone is in evaluation mode. See ``workloads.train.job.TrainedModel``.

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
        looks_the_same = recipe.augment == Augment.NONE and not recipe.color_jitter and not recipe.is_mixed
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
