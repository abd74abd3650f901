"""Training of a whole network on images: what ``pretrain`` and ``finetune`` do."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from torch import nn

from workloads.data.streams import Purpose
from workloads.models.build import Classifier, build_backbone, build_head, memory_format
from workloads.train.evaluate import EvalInputs
from workloads.train.job import Setting
from workloads.train.samples import Normalizer
from workloads.train.streams import torch_seed
from workloads.train.task import TrainInputs


def new_backbone(setting: Setting) -> tuple[nn.Module, int]:
    """A freshly initialised backbone under the job's seed, on the device, and its number of features."""
    seed = torch_seed(setting.parameters.seed, setting.stage, Purpose.INIT_BACKBONE)
    backbone, num_features = build_backbone(setting.parameters.model, seed)
    backbone.to(device=setting.device, memory_format=memory_format(backbone))  # type: ignore[call-overload]
    return backbone, num_features


def new_head(setting: Setting, num_features: int) -> nn.Linear:
    """A freshly initialised head under the job's seed, on the device."""
    seed = torch_seed(setting.parameters.seed, setting.stage, Purpose.INIT_HEAD)
    return build_head(num_features, setting.samples.label_map.num_classes, seed).to(setting.device)


class ImageTask:
    """All weights learn. See ``workloads.train.job.TrainedModel``."""

    is_backbone_trained = True

    def __init__(self, setting: Setting, backbone: nn.Module, head: nn.Linear) -> None:
        self.backbone, self.head = backbone, head
        self.model = Classifier(backbone, head)
        self.subset_names: Sequence[str] = setting.samples.subset_names
        self._setting = setting
        self._normalize = Normalizer(setting.parameters.recipe, setting.device, memory_format(backbone))

    def batches(self, start_step: int) -> Generator[TrainInputs, None, None]:
        """See ``Task``."""
        parameters, stage = self._setting.parameters, self._setting.stage
        return self._setting.samples.train_batches(
            parameters.recipe, self._normalize, seed=parameters.seed, stage=stage, start_step=start_step
        )

    def eval_batches(self) -> Iterator[EvalInputs]:
        """See ``Task``."""
        return self._setting.samples.eval_batches(self._setting.samples.val, self._normalize)

    def sample_names(self, ordinals: Sequence[int]) -> list[str]:
        """See ``Task``."""
        return self._setting.samples.train_names(ordinals)
