"""The samples of a training job: images from the index, targets from the label map, on the device."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestrator.core.contract import ExecutionContext, JobRequest
from orchestrator.core.errors import UserError
from workloads.data.augment import AugmentSpec
from workloads.data.bad_samples import BadSampleTally
from workloads.data.decode import DecoderName, Interpolation
from workloads.data.index import SampleIndex
from workloads.data.loader import Batch, EvalLoader, SampleSource, TrainLoader
from workloads.data.order import Order, make_order
from workloads.data.pixels import PixelSpec
from workloads.data.split_targets import SplitTargets
from workloads.data.subset import SampleView, Subset, hold_out
from workloads.labels.label_map import LabelMap
from workloads.labels.taxonomy import read_parents
from workloads.runtime.ranks import Ranks
from workloads.runtime.streams import Stage
from workloads.train.evaluate import EvalInputs, EvalLevel, eval_levels
from workloads.train.recipe import Recipe

EVAL_BATCH_SIZE = 256
"""Fixed, because kernels may round differently for other batch sizes."""


class PixelNormalizer:
    """Pixels 0..255 to ``(pixel / 255 - mean) / std`` per channel, in float32 on the device."""

    def __init__(self, recipe: Recipe, device: torch.device, memory_format: torch.memory_format) -> None:
        self._device, self._memory_format = device, memory_format
        self._mean_C11 = torch.tensor(recipe.mean, device=device).view(3, 1, 1) * 255
        self._std_C11 = torch.tensor(recipe.std, device=device).view(3, 1, 1) * 255

    def __call__(self, images_BCHW: Tensor) -> Tensor:
        """Float32 images (B, 3, H, W) of uint8 ones."""
        # A quarter of the bytes cross to the device, from page-locked memory without the host waiting.
        on_device_BCHW = images_BCHW.to(self._device, non_blocking=True)
        pixels_BCHW = on_device_BCHW.to(torch.float32, memory_format=self._memory_format)
        return pixels_BCHW.sub_(self._mean_C11).div_(self._std_C11)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSplit:
    """A split under a label space: its images, their targets, and which of its samples count."""

    source: SampleSource
    labels: SplitTargets
    view: SampleView


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSamples:
    """Both splits of a data set under one label space, as one rank sees them."""

    train: LabelledSplit
    val: LabelledSplit
    held_out: LabelledSplit | None
    """Training samples that are not trained on, to choose by."""
    levels: tuple[EvalLevel, ...]
    """Up which predictions are folded in evaluation."""
    recipe: Recipe
    ranks: Ranks
    num_threads: int
    device: torch.device
    _loaders: list[TrainLoader] = field(default_factory=list)
    """The newest training loader, if there is one."""

    @classmethod
    def open(
        cls, request: JobRequest, context: ExecutionContext, recipe: Recipe, *, image_size: int, device: torch.device
    ) -> Self:
        """Open the inputs ``index`` and ``labels`` of a request. Raises ``UserError`` without validation samples."""
        store, execution = context.store, request.execution
        index = SampleIndex.open(store, request.inputs["index"], context.cache, location=execution.data_location)
        label_map = LabelMap.open(store, request.inputs["labels"])
        pixels = PixelSpec(
            image_size=image_size,
            resize=recipe.resize,
            interpolation=Interpolation(recipe.interpolation),
            decoder=DecoderName(recipe.decoder),
        )

        def split(name: str, subset: Subset | None) -> LabelledSplit:
            source = SampleSource(store, index, name, cache_dir=context.cache, pixels=pixels)
            labels = label_map.resolve_targets(source.split)
            return LabelledSplit(source=source, labels=labels, view=SampleView.of(source.split, labels, subset))

        val, train, held_out = split("val", None), split("train", Subset.of(request.parameters.get("subset"))), None
        if not val.view.num_samples:
            raise UserError(f"data set of {index.key} has no validation samples; val_error needs some (num_val >= 1)")
        if recipe.select_holdout:
            seed = int(request.parameters["seed"])
            views = hold_out(train.source.split, train.view, recipe.select_holdout, seed)
            train, held_out = (replace(train, view=view) for view in views)
        return cls(
            train=train,
            val=val,
            held_out=held_out,
            levels=eval_levels(label_map, index.classes, read_parents(store, request.inputs["labels"])),
            recipe=recipe,
            ranks=Ranks.of(context),
            num_threads=execution.num_threads,
            device=device,
        )

    @property
    def num_train(self) -> int:
        """Samples that are trained on in an epoch."""
        return self.train.view.num_samples

    @property
    def num_classes(self) -> int:
        """Classes of the label space."""
        return self.train.labels.num_classes

    @property
    def is_multi_label(self) -> bool:
        """Whether a sample may have several targets."""
        return self.train.labels.is_multi_label

    @property
    def subset_names(self) -> Sequence[str]:
        """Names of the subsets of the validation split; empty without subsets."""
        return self.val.source.split.subset_names

    def train_names(self, ordinals: Sequence[int]) -> list[str]:
        """``shard:key`` of training samples."""
        return [self.train.source.split.place(ordinal) for ordinal in ordinals]

    def order(self, *, seed: int, stage: Stage) -> Order:
        """Order of the training samples."""
        return make_order(
            self.train.view,
            self.train.source.split.shares,
            seed,
            self.recipe.shuffle_block_shards,
            stage=stage,
            chunk_samples=self.recipe.shuffle_chunk_samples,
        )

    def batch_ordinals(self, batch: int, *, seed: int, stage: Stage) -> NDArray[np.int64]:
        """Ordinals [B] of a global batch, before any bad sample is replaced."""
        size = self.recipe.batch_size
        return self.order(seed=seed, stage=stage).ordinals(batch * size, (batch + 1) * size)

    def train_batches(
        self, first: int, stop: int, *, seed: int, stage: Stage, unit: int
    ) -> Generator[Batch, None, None]:
        """Shares that this rank takes of the global batches ``first <= b < stop``; see ``rank_slice`` for ``unit``."""
        recipe, ranks = self.recipe, self.ranks
        augment = AugmentSpec(
            augment=recipe.augment,
            crop_scale=recipe.crop_scale,
            crop_ratio=recipe.crop_ratio,
            color_jitter=recipe.color_jitter,
        )
        loader = TrainLoader(
            self.train.source,
            self.order(seed=seed, stage=stage),
            self.train.labels,
            batch_size=recipe.batch_size,
            start_step=first,
            total_steps=stop,
            seed=seed,
            stage=stage,
            augment=augment,
            rank=ranks.rank,
            world_size=ranks.world_size,
            group_size=unit,
            num_workers=self.num_threads,
            device=self.device,
        )
        self._loaders[:] = [loader]
        yield from loader

    def stats(self) -> dict[str, float]:
        """What the training loader did so far, for people."""
        return {name: value for loader in self._loaders for name, value in loader.stats.snapshot().items()}

    def bad_samples(self) -> dict[str, Any]:
        """Samples that some rank could not decode, by split; empty without any. All ranks call this."""
        self._share_bad_samples()
        summaries = {name: tally.summary() for name, tally in self._tallies.items()}
        return {name: summary for name, summary in summaries.items() if summary}

    def to_json(self) -> dict[str, Any]:
        """See ``RunMemory``: the bad samples that this rank knows of, by split."""
        return {name: found for name, tally in self._tallies.items() if (found := tally.to_json())}

    def recall(self, document: Mapping[str, Any]) -> None:
        """See ``RunMemory``. Raises ``BadDataError``: the earlier attempt was above the budget when it was stopped."""
        for name, found in document.items():
            self._tallies[name].merge(found)
            self._tallies[name].check_budget()

    @property
    def _tallies(self) -> dict[str, BadSampleTally]:
        return {name: split.source.bad_samples for name, split in (("train", self.train), ("val", self.val))}

    def _share_bad_samples(self) -> None:
        """Let every rank know all bad samples, so that the budget is that of the run and all end at the same place.

        Raises ``BadDataError``: there are more than the budget allows.
        """
        if self.ranks.is_solo:
            return
        tallies = self._tallies
        news = json.dumps({name: tally.take_news() for name, tally in tallies.items()})
        for rank, text in enumerate(self.ranks.gather_text(news)):
            if rank != self.ranks.rank:
                for name, told in json.loads(text).items():
                    tallies[name].merge(told)
        for tally in tallies.values():
            tally.check_budget()

    def eval_batches(self, split: LabelledSplit) -> Iterator[Batch]:
        """Every sample of a split once on some rank, in ordinal order, without augmentation.

        At its end the ranks tell each other of bad samples, those of training included; so all of them get there.
        """
        yield from EvalLoader(
            split.source,
            split.labels,
            batch_size=EVAL_BATCH_SIZE,
            ordinals=split.view.ordinals(),
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            num_workers=self.num_threads,
            device=self.device,
        )
        self._share_bad_samples()


def eval_inputs(batch: Batch, inputs: Tensor) -> EvalInputs:
    """A batch for ``evaluate`` with what the model gets instead of images."""
    targets = batch.targets.to(inputs.device, non_blocking=True)
    return EvalInputs(inputs=inputs, targets_B=targets, subsets_B=batch.subset_ids_B, ordinals_B=batch.ordinals_B)
