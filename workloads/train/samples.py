"""The samples of a training job: images from the index, targets from the label map, on the device."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from orchestrator.contract import ExecutionContext, JobRequest
from orchestrator.errors import UserError
from workloads.data.index import SampleIndex
from workloads.data.loader import EvalLoader, SampleSource, TrainLoader
from workloads.data.order import SampleOrder, total_steps
from workloads.data.streams import Stage
from workloads.labels.label_map import LabelMap
from workloads.train.evaluate import EvalInputs
from workloads.train.recipe import Recipe
from workloads.train.task import TrainInputs

EVAL_BATCH_SIZE = 256
"""Fixed, because kernels may round differently for other batch sizes."""


class Normalizer:
    """Pixels 0..255 to ``(pixel / 255 - mean) / std`` per channel, in float32 on the device."""

    def __init__(self, recipe: Recipe, device: torch.device, memory_format: torch.memory_format) -> None:
        self._device, self._memory_format = device, memory_format
        self._mean_C11 = torch.tensor(recipe.mean, device=device).view(3, 1, 1) * 255
        self._std_C11 = torch.tensor(recipe.std, device=device).view(3, 1, 1) * 255

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        """Float32 images (B, 3, H, W) of uint8 ones."""
        pixels_BCHW = images_BCHW.to(self._device, torch.float32, memory_format=self._memory_format)
        return pixels_BCHW.sub_(self._mean_C11).div_(self._std_C11)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSamples:
    """Both splits of a data set under one label space."""

    train: SampleSource
    val: SampleSource
    label_map: LabelMap

    @classmethod
    def open(cls, request: JobRequest, context: ExecutionContext, *, image_size: int) -> Self:
        """Open the inputs ``index`` and ``labels`` of a request. Raises ``UserError`` without validation samples."""
        index = SampleIndex.open(context.store, request.inputs["index"], context.cache)
        if not index.split("val").num_samples:
            raise UserError(f"data set of {index.key} has no validation samples; val_error needs some (num_val >= 1)")
        train, val = (
            SampleSource(context.store, index, split, cache_dir=context.cache, image_size=image_size)
            for split in ("train", "val")
        )
        return cls(train=train, val=val, label_map=LabelMap.open(context.store, request.inputs["labels"]))

    @property
    def num_train(self) -> int:
        """Samples of the training split."""
        return self.train.split.num_samples

    @property
    def subset_names(self) -> Sequence[str]:
        """Names of the subsets of the validation split; empty without subsets."""
        return self.val.split.subset_names

    def train_names(self, ordinals: Sequence[int]) -> list[str]:
        """``shard:key`` of training samples."""
        return [self.train.split.place(ordinal) for ordinal in ordinals]

    def train_loader(self, recipe: Recipe, *, seed: int, stage: Stage, start_step: int) -> TrainLoader:
        """Loader of all global batches from ``start_step`` on."""
        return TrainLoader(
            self.train,
            self.order(recipe, seed=seed, stage=stage),
            self.label_map,
            batch_size=recipe.batch_size,
            start_step=start_step,
            total_steps=total_steps(recipe.epochs, self.num_train, recipe.batch_size),
            seed=seed,
            stage=stage,
            augment=recipe.augment,
        )

    def order(self, recipe: Recipe, *, seed: int, stage: Stage) -> SampleOrder:
        """Order of the training samples."""
        return SampleOrder(self.train.split.shard_sizes, seed, recipe.shuffle_block_shards, stage=stage)

    def train_batches(
        self, recipe: Recipe, normalize: Normalizer, *, seed: int, stage: Stage, start_step: int
    ) -> Generator[TrainInputs, None, None]:
        """Global batches on the device, from ``start_step`` on."""
        for batch in self.train_loader(recipe, seed=seed, stage=stage, start_step=start_step):
            images_BCHW = normalize(batch.images_BCHW)
            yield TrainInputs(
                inputs=images_BCHW,
                targets_B=batch.targets_B.to(images_BCHW.device),
                ordinals_B=batch.ordinals_B,
            )

    def eval_batches(self, source: SampleSource, normalize: Normalizer) -> Iterator[EvalInputs]:
        """Every sample of a split once, in ordinal order, without augmentation."""
        for batch in EvalLoader(source, self.label_map, batch_size=EVAL_BATCH_SIZE):
            images_BCHW = normalize(batch.images_BCHW)
            yield EvalInputs(
                inputs=images_BCHW,
                targets_B=batch.targets_B.to(images_BCHW.device),
                subsets_B=batch.subset_ids_B,
            )
