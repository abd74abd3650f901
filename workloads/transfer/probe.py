"""The job ``probe``: a linear head on the features of a frozen backbone."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from orchestrator.contract import ExecutionContext, JobRequest, JobResult
from workloads.data.augment import Augment
from workloads.data.loader import SampleSource
from workloads.data.order import total_steps
from workloads.data.streams import Stage
from workloads.models.build import memory_format
from workloads.train.evaluate import EvalInputs
from workloads.train.images import new_head
from workloads.train.job import Setting, run_training
from workloads.train.samples import Normalizer
from workloads.train.task import TrainInputs
from workloads.transfer.backbone import pretrained_backbone


def run_probe(request: JobRequest, context: ExecutionContext) -> JobResult:
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

    Without augmentation a sample has the same features in every epoch: they are computed once per job, and kept in
    memory.
    """

    is_backbone_trained = False

    def __init__(self, setting: Setting, backbone: nn.Module, head: nn.Linear) -> None:
        self.backbone, self.head = backbone.eval().requires_grad_(requires_grad=False), head
        self.model = head
        self.subset_names: Sequence[str] = setting.samples.subset_names
        self._setting = setting
        self._normalize = Normalizer(setting.parameters.recipe, setting.device, memory_format(backbone))

    def batches(self, start_step: int) -> Generator[TrainInputs, None, None]:
        """See ``Task``; ``inputs`` are features (B, num_features)."""
        if self._setting.parameters.recipe.augment is Augment.NONE:
            return self._cached_batches(start_step)
        return self._augmented_batches(start_step)

    def eval_batches(self) -> Iterator[EvalInputs]:
        """See ``Task``."""
        yield from self._val_features

    def sample_names(self, ordinals: Sequence[int]) -> list[str]:
        """See ``Task``."""
        return self._setting.samples.train_names(ordinals)

    def _cached_batches(self, start_step: int) -> Generator[TrainInputs, None, None]:
        setting, parameters = self._setting, self._setting.parameters
        batches = list(self._features_of(setting.samples.train))
        features_NF = torch.cat([batch.inputs for batch in batches])
        targets_N = torch.cat([batch.targets_B for batch in batches])
        order = setting.samples.order(parameters.recipe, seed=parameters.seed, stage=setting.stage)
        size = parameters.recipe.batch_size
        for step in range(start_step, total_steps(parameters.recipe.epochs, len(targets_N), size)):
            ordinals_B = order.ordinals(step * size, (step + 1) * size)
            rows_B = torch.from_numpy(ordinals_B).to(features_NF.device)
            yield TrainInputs(inputs=features_NF[rows_B], targets_B=targets_N[rows_B], ordinals_B=ordinals_B)

    def _augmented_batches(self, start_step: int) -> Generator[TrainInputs, None, None]:
        parameters, stage = self._setting.parameters, self._setting.stage
        batches = self._setting.samples.train_batches(
            parameters.recipe, self._normalize, seed=parameters.seed, stage=stage, start_step=start_step
        )
        for batch in batches:
            yield TrainInputs(
                inputs=self._features(batch.inputs), targets_B=batch.targets_B, ordinals_B=batch.ordinals_B
            )

    @cached_property
    def _val_features(self) -> list[EvalInputs]:
        return list(self._features_of(self._setting.samples.val))

    def _features_of(self, source: SampleSource) -> Iterator[EvalInputs]:
        for batch in self._setting.samples.eval_batches(source, self._normalize):
            features = self._features(batch.inputs)
            yield EvalInputs(inputs=features, targets_B=batch.targets_B, subsets_B=batch.subsets_B)

    def _features(self, images_BCHW: Tensor) -> Tensor:
        # no_grad, not inference_mode: the head's backward pass saves the features, which inference tensors forbid.
        with torch.no_grad():
            features_BF: Tensor = self.backbone(images_BCHW)
        return features_BF
