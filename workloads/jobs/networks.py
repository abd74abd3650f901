"""Training of a whole network on images: what ``pretrain`` and ``finetune`` do, and what transfers start from."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from orchestrator.core.errors import UserError
from orchestrator.storage.artifacts import read_part, read_record
from workloads.checkpoint.retention import read_backbone
from workloads.data.split_targets import unseen_notes
from workloads.jobs.training import Setting
from workloads.models.build import Classifier, build_backbone, build_head, memory_format
from workloads.models.spec import ModelSpec
from workloads.models.weights import decode_tensors
from workloads.runtime.streams import Purpose, torch_seed
from workloads.train.evaluate import EvalInputs, EvalLevel
from workloads.train.freezing import freeze
from workloads.train.mixing import build_mixer
from workloads.train.samples import LabelledSplit, PixelNormalizer, eval_inputs
from workloads.train.task import TrainInputs


def new_backbone(setting: Setting) -> tuple[nn.Module, int]:
    """A freshly initialised backbone under the job's seed, on the device, and its number of features."""
    recipe = setting.parameters.recipe
    seed = torch_seed(setting.parameters.seed, setting.stage, Purpose.INIT_BACKBONE)
    backbone, num_features = build_backbone(
        setting.parameters.model, seed, dropout=recipe.dropout, drop_path=recipe.drop_path
    )
    backbone.to(device=setting.device, memory_format=memory_format(backbone))  # type: ignore[call-overload]
    return backbone, num_features


def new_head(setting: Setting, num_features: int) -> nn.Linear:
    """A freshly initialised head under the job's seed, on the device."""
    recipe = setting.parameters.recipe
    seed = torch_seed(setting.parameters.seed, setting.stage, Purpose.INIT_HEAD)
    head = build_head(num_features, setting.samples.num_classes, seed, bias=recipe.head_bias, init=recipe.head_init)
    return head.to(setting.device)


class ImageTask:
    """All weights learn, but for those that the recipe freezes. See ``workloads.jobs.training.TrainedModel``."""

    is_backbone_trained = True

    def __init__(
        self, setting: Setting, backbone: nn.Module, head: nn.Linear, *, origin: Mapping[str, Any] | None = None
    ) -> None:
        self.origin: Mapping[str, Any] = origin or {}
        recipe = setting.parameters.recipe
        self.backbone, self.head = backbone, head
        self.model = Classifier(backbone, head)
        freeze(self.model, recipe.freeze)
        self.num_classes, self.is_multi_label = setting.samples.num_classes, setting.samples.is_multi_label
        self.subset_names: Sequence[str] = setting.samples.subset_names
        self.levels: Sequence[EvalLevel] = setting.samples.levels
        self._setting = setting
        self.normalize = PixelNormalizer(recipe, setting.device, memory_format(backbone))
        """From uint8 images to what the backbone takes."""
        self._mix = build_mixer(recipe, seed=setting.parameters.seed, stage=setting.stage)

    def batches(self, first: int, stop: int, *, unit: int) -> Generator[TrainInputs, None, None]:
        """See ``Task``."""
        setting = self._setting
        batches = setting.samples.train_batches(
            first, stop, seed=setting.parameters.seed, stage=setting.stage, unit=unit
        )
        with closing(batches):
            for batch in batches:
                images_BCHW = self.normalize(batch.images_BCHW)
                targets = batch.targets.to(images_BCHW.device, non_blocking=True)
                if self._mix is None:
                    yield TrainInputs(inputs=images_BCHW, targets=targets)
                else:
                    mixed_BCHW, mixed_targets = self._mix(images_BCHW, targets, batch.positions[0])
                    yield TrainInputs(inputs=mixed_BCHW, targets=mixed_targets)

    def trial_batch(self, num_samples: int) -> TrainInputs:
        """See ``Task``."""
        size = self._setting.parameters.model.image_size
        images_BCHW = self.normalize(torch.zeros(num_samples, 3, size, size, dtype=torch.uint8))
        return TrainInputs(
            inputs=images_BCHW,
            targets=zero_targets(num_samples, images_BCHW.device, is_multi_label=self.is_multi_label),
        )

    def eval_batches(self) -> Iterator[EvalInputs]:
        """See ``Task``."""
        for batch in self._setting.samples.eval_batches(self._setting.samples.val):
            yield eval_inputs(batch, self.normalize(batch.images_BCHW))

    def held_out_batches(self, split: LabelledSplit) -> Iterator[EvalInputs]:
        """See ``TrainedModel``."""
        for batch in self._setting.samples.eval_batches(split):
            yield eval_inputs(batch, self.normalize(batch.images_BCHW))

    def batch_ordinals(self, batch: int) -> NDArray[np.int64]:
        """See ``Task``."""
        setting = self._setting
        return setting.samples.batch_ordinals(batch, seed=setting.parameters.seed, stage=setting.stage)

    def stats(self) -> Mapping[str, float]:
        """See ``Task``."""
        return self._setting.samples.stats()

    def sample_names(self, ordinals: Sequence[int]) -> list[str]:
        """See ``Task``."""
        return self._setting.samples.train_names(ordinals)


def zero_targets(num_samples: int, device: torch.device, *, is_multi_label: bool) -> Tensor:
    """Targets of the shape of real ones."""
    return torch.zeros((num_samples, 1) if is_multi_label else num_samples, dtype=torch.int64, device=device)


def pretrained_backbone(setting: Setting) -> tuple[nn.Module, int]:
    """The backbone of the input ``backbone``, and its number of features.

    Raises:
        UserError: the transfer asks for another model or epoch than was pretrained, or no validation sample can be
            right after training on these samples.
        NotFoundError, CorruptObjectError: the artifact is not there or not what its record says.
    """
    store, key = setting.context.store, setting.request.inputs["backbone"]
    record = read_record(store, key)
    document: dict[str, Any] = json.loads(read_part(store, record, "model.json"))
    _check_same_model(setting.parameters.model, ModelSpec.from_mapping(document), key)
    backbone, num_features = new_backbone(setting)
    weights = read_backbone(store, record, setting.request.parameters)
    backbone.load_state_dict(decode_tensors(weights))
    samples = setting.samples
    train, val = samples.train, samples.val
    setting.notes.extend(unseen_notes(train.labels, train.view.ordinals(), val.labels, val.view.ordinals()))
    return backbone, num_features


def _check_same_model(wanted: ModelSpec, pretrained: ModelSpec, key: str) -> None:
    if wanted.to_json() != pretrained.to_json():
        message = (
            f"the transfer asks for the model {wanted.to_json()}, but {key} is {pretrained.to_json()}: weights of "
        )
        raise UserError(message + "one do not fit the other; give the transfer the model of its pretraining")
