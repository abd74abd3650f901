"""Training of a whole network on images: ``pretrain``, ``finetune``, and the initial weights of transfers."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
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
from workloads.models.build import Classifier, PixelNormalizer, build_backbone, build_head, memory_format
from workloads.models.spec import ModelSpec
from workloads.models.weights import decode_tensors
from workloads.runtime.enums import HeadInit
from workloads.runtime.streams import Purpose, torch_seed
from workloads.train.evaluate import EvalInputs, EvalLevel
from workloads.train.freezing import freeze
from workloads.train.micro_batch import unit_of
from workloads.train.mixing import build_mixer
from workloads.train.samples import BatchLoaders, LabelledSamples, LabelledSplit, eval_inputs
from workloads.train.task import JobContext, TrainInputs


def new_backbone(job: JobContext) -> tuple[nn.Module, int]:
    """A freshly initialised backbone under the job's seed, on the device, and its number of features."""
    recipe, seed = job.recipe, torch_seed(job.seed, job.stage, Purpose.INIT_BACKBONE)
    backbone, num_features = build_backbone(job.model, seed, dropout=recipe.dropout, drop_path=recipe.drop_path)
    backbone.to(device=job.device, memory_format=memory_format(backbone))  # type: ignore[call-overload]
    return backbone, num_features


def new_head(job: JobContext, num_features: int, num_classes: int) -> nn.Linear:
    """A freshly initialised head under the job's seed, on the device."""
    recipe, seed = job.recipe, torch_seed(job.seed, job.stage, Purpose.INIT_HEAD)
    head = build_head(num_features, num_classes, seed, bias=recipe.head_bias, init=HeadInit(recipe.head_init))
    return head.to(job.device)


class ImageTask:
    """All weights learn, but for those that the recipe freezes. See ``Task`` and ``TrainedModel``."""

    is_backbone_trained = True

    def __init__(
        self,
        job: JobContext,
        samples: LabelledSamples,
        backbone: nn.Module,
        head: nn.Linear,
        *,
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        self.origin: Mapping[str, Any] = origin or {}
        self.backbone, self.head = backbone, head
        self.model: nn.Module = Classifier(backbone, head)
        freeze(self.model, job.recipe.freeze)
        self.num_train = samples.num_train
        self.num_classes, self.is_multi_label = samples.num_classes, samples.is_multi_label
        self.subset_names: Sequence[str] = samples.subset_names
        self.levels: Sequence[EvalLevel] = samples.levels
        self._job, self._samples, self._loaders = job, samples, BatchLoaders(job, samples)
        self._normalize = PixelNormalizer(job.recipe.mean, job.recipe.std, job.device, memory_format(backbone))
        self._mix = build_mixer(job.recipe, seed=job.seed, stage=job.stage)

    def batches(self, first: int, stop: int, *, unit: int) -> Generator[TrainInputs, None, None]:
        """See ``Task``."""
        with closing(self._loaders.train_batches(first, stop, unit=unit)) as batches:
            for batch in batches:
                images_BCHW = self._normalize(batch.images_BCHW)
                targets = batch.targets.to(images_BCHW.device, non_blocking=True)
                if self._mix is None:
                    yield TrainInputs(inputs=images_BCHW, targets=targets)
                else:
                    mixed_BCHW, mixed_targets = self._mix(images_BCHW, targets, batch.positions[0])
                    yield TrainInputs(inputs=mixed_BCHW, targets=mixed_targets)

    def trial_batch(self, num_samples: int) -> TrainInputs:
        """See ``Task``."""
        size = self._job.model.image_size
        images_BCHW = self._normalize(torch.zeros(num_samples, 3, size, size, dtype=torch.uint8))
        return TrainInputs(
            inputs=images_BCHW,
            targets=zero_targets(num_samples, images_BCHW.device, is_multi_label=self.is_multi_label),
        )

    def eval_batches(self) -> Iterable[EvalInputs]:
        """See ``Task``."""
        return self.held_out_batches(self._samples.val)

    def held_out_batches(self, split: LabelledSplit) -> Iterable[EvalInputs]:
        """See ``TrainedModel``."""
        for batch in self._loaders.eval_batches(split):
            yield eval_inputs(batch, self._normalize(batch.images_BCHW))

    def batch_ordinals(self, batch: int) -> NDArray[np.int64]:
        """See ``Task``."""
        return self._loaders.batch_ordinals(batch, unit=unit_of(self.model, self._job.recipe))

    def stats(self) -> Mapping[str, float]:
        """See ``Task``."""
        return self._loaders.stats()

    def sample_names(self, ordinals: Sequence[int]) -> list[str]:
        """See ``Task``."""
        return self._samples.train_names(ordinals)

    def bad_samples(self) -> dict[str, Any]:
        """See ``Task``."""
        self._samples.bad.share()
        return self._samples.bad.to_json()

    def recall_bad_samples(self, document: Mapping[str, Any]) -> None:
        """See ``Task``."""
        self._samples.bad.recall(document)


def zero_targets(num_samples: int, device: torch.device, *, is_multi_label: bool) -> Tensor:
    """Targets of the shape of real ones."""
    return torch.zeros((num_samples, 1) if is_multi_label else num_samples, dtype=torch.int64, device=device)


def pretrained_backbone(job: JobContext, samples: LabelledSamples) -> tuple[nn.Module, int]:
    """The backbone of the input ``backbone``, and its number of features.

    Raises:
        UserError: the transfer asks for another model or epoch than was pretrained, or no validation sample can be
            right after training on these samples.
        NotFoundError, CorruptObjectError: the artifact is not there or not what its record says.
    """
    store, key = job.context.store, job.request.inputs["backbone"]
    record = read_record(store, key)
    document: dict[str, Any] = json.loads(read_part(store, record, "model.json"))
    _check_same_model(job.model, ModelSpec.from_mapping(document), key)
    backbone, num_features = new_backbone(job)
    weights = read_backbone(store, record, job.request.parameters)
    backbone.load_state_dict(decode_tensors(weights))
    job.notes.extend(_normalization_notes(job, document))
    job.notes.extend(unseen_class_notes(samples))
    return backbone, num_features


def unseen_class_notes(samples: LabelledSamples) -> list[str]:
    """See ``unseen_notes``."""
    train, val = samples.train, samples.val
    return unseen_notes(train.labels, train.view.ordinals(), val.labels, val.view.ordinals())


def _normalization_notes(job: JobContext, pretrained: Mapping[str, Any]) -> list[str]:
    """What reports should say of a backbone that sees other pixels than it was trained on; ``model.json`` has those."""
    mean, std = list(job.recipe.mean), list(job.recipe.std)
    if mean == list(pretrained["mean"]) and std == list(pretrained["std"]):
        return []
    trained = f"mean {pretrained['mean']} and std {pretrained['std']}"
    return [f"images are normalised with mean {mean} and std {std}, those of the pretraining with {trained}"]


def _check_same_model(wanted: ModelSpec, pretrained: ModelSpec, key: str) -> None:
    if wanted.to_json() != pretrained.to_json():
        message = (
            f"the transfer asks for the model {wanted.to_json()}, but {key} is {pretrained.to_json()}: weights of "
        )
        raise UserError(message + "one do not fit the other; give the transfer the model of its pretraining")
