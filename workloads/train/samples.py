"""The samples of a training job: images from the index, targets from the label map, on the device."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from orchestrator.core.class_mixing import is_poor, repair_of
from orchestrator.core.errors import PreemptedError, UserError
from workloads.data.augment import Augment, AugmentSpec
from workloads.data.decode import DecoderName, Interpolation
from workloads.data.index import SampleIndex
from workloads.data.loader import Batch, EvalLoader, SampleSource, TrainLoader, uses_process
from workloads.data.loader_process import start_process
from workloads.data.order import DataGroups, Order, make_order
from workloads.data.pixels import PixelSpec
from workloads.data.split_targets import SplitTargets
from workloads.data.subset import SampleView, Subset, hold_out
from workloads.labels.label_map import LabelMap
from workloads.labels.taxonomy import read_parents
from workloads.runtime.ranks import Ranks
from workloads.runtime.streams import Stage
from workloads.train.evaluate import EVAL_BATCH_SIZE, EvalInputs, EvalLevel, eval_levels
from workloads.train.recipe import Recipe
from workloads.train.task import JobContext

_LOOKED_AT = 16
_ASK_EVERY_S = 5.0
"""A shorter evaluation is finished, although the run is to stop."""
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSplit:
    """A split under a label space: its images, their targets, and which of its samples count."""

    source: SampleSource
    labels: SplitTargets
    view: SampleView


class BadSampleLedger:
    """The bad samples of a run, by split: what this rank met, what other ranks told, and what earlier attempts met."""

    def __init__(self, splits: Mapping[str, LabelledSplit], ranks: Ranks) -> None:
        self._tallies = {name: split.source.bad_samples for name, split in splits.items()}
        self._ranks = ranks

    def summary(self) -> dict[str, Any]:
        """Samples that some rank could not decode, by split; empty without any. All ranks call this."""
        self.share()
        summaries = {name: tally.summary() for name, tally in self._tallies.items()}
        return {name: summary for name, summary in summaries.items() if summary}

    def to_json(self) -> dict[str, Any]:
        """What this rank knows of, by split."""
        return {name: found for name, tally in self._tallies.items() if (found := tally.to_json())}

    def recall(self, document: Mapping[str, Any]) -> None:
        """Inverse of `to_json`. Raises ``BadDataError``: the earlier attempt stopped above the budget."""
        for name, found in document.items():
            self._tallies[name].merge(found)
            self._tallies[name].check_budget()

    def share(self) -> None:
        """Let every rank know all bad samples, so that the budget is that of the run and all end at the same place.

        Raises ``BadDataError``: there are more than the budget allows.
        """
        if not self._ranks.is_solo:
            news = json.dumps({name: tally.take_news() for name, tally in self._tallies.items()})
            for rank, text in enumerate(self._ranks.gather_text(news)):
                if rank != self._ranks.rank:
                    for name, told in json.loads(text).items():
                        self._tallies[name].merge(told)
        for tally in self._tallies.values():
            tally.check_budget()


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSamples:
    """Both splits of a data set under one label space."""

    train: LabelledSplit
    val: LabelledSplit
    held_out: LabelledSplit | None
    """Training samples that are not trained on, to choose by."""
    levels: tuple[EvalLevel, ...]
    """Up which predictions are folded in evaluation."""
    bad: BadSampleLedger

    @classmethod
    def open(cls, job: JobContext) -> Self:
        """Open the inputs ``index`` and ``labels`` of a job. Raises ``UserError`` without validation samples."""
        request, context, recipe = job.request, job.context, job.recipe
        store, location = context.store, request.execution.data_location
        index = SampleIndex.open(store, request.inputs["index"], context.cache, location=location)
        label_map = LabelMap.open(store, request.inputs["labels"])
        pixels = PixelSpec(
            image_size=job.model.image_size,
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
            views = hold_out(train.source.split, train.view, recipe.select_holdout, job.seed)
            train, held_out = (replace(train, view=view) for view in views)
        if job.ranks.is_first and (complaint := poor_mixing(train, recipe, job.seed, job.stage)):
            _LOG.warning("%s: %s", request.job, complaint)
        return cls(
            train=train,
            val=val,
            held_out=held_out,
            levels=eval_levels(label_map, index.classes, read_parents(store, request.inputs["labels"])),
            bad=BadSampleLedger({"train": train, "val": val}, job.ranks),
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


def poor_mixing(train: LabelledSplit, recipe: Recipe, seed: int, stage: Stage) -> str:
    """A warning if batches hold few of the classes, because some shards hold no sample that is trained on.

    Such shards count in shuffle blocks as others do. Plans know how the classes of a whole split are spread over its
    shards, but not those of a label space. Some batches of an epoch are looked at, and a setting that repairs it is
    found in the same way.
    """
    split, view, size = train.source.split, train.view, recipe.batch_size
    leaves = split.leaves[view.ordinals()]
    if view.shard_sizes.all() or split.shares is not None or split.leaf_sets is not None or leaves.min() < 0:
        return ""
    shares_C = np.bincount(leaves) / len(leaves)
    wanted = float((1 - (1 - shares_C) ** size).sum())
    num_batches, groups = max(1, view.num_samples // size), DataGroups.of(recipe.data_groups, size)

    def classes_per_batch(chunk_samples: int | None) -> float:
        blocks = recipe.shuffle_block_shards
        order = make_order(view, None, seed, blocks, stage=stage, chunk_samples=chunk_samples, groups=groups)
        starts = [number * num_batches // _LOOKED_AT * size for number in range(_LOOKED_AT)]
        return float(np.mean([len(np.unique(split.leaves[order.ordinals(at, at + size)])) for at in starts]))

    found = classes_per_batch(recipe.shuffle_chunk_samples)
    if not is_poor(found, wanted):
        return ""
    num_shards = len(view.shard_sizes)
    remedy = repair_of(classes_per_batch, wanted, num_shards=num_shards, is_grouped=groups is not None)
    return (
        f"of its {num_shards} training shards {np.count_nonzero(view.shard_sizes)} hold samples to train "
        f"on, and these are sorted by class: a batch of {size} holds {found:.0f} of the {np.count_nonzero(shares_C)} "
        f"classes, fully shuffled {wanted:.0f}; {remedy}"
    )


class BatchLoaders:
    """Makes the loaders of a job: which share of which batch this rank takes follows from the job alone.

    ``unit`` consecutive samples of a batch stay on one rank, and in one data group; see ``rank_slice``.
    """

    def __init__(self, job: JobContext, samples: LabelledSamples) -> None:
        self._job, self._samples = job, samples
        self._newest: TrainLoader | None = None
        """Whose counters are told."""
        augment, num_workers = Augment(job.recipe.augment), job.request.execution.num_threads
        if uses_process(samples.train.source, augment, num_workers, job.device):
            start_process()

    def order(self, unit: int) -> Order:
        """Order of the training samples. Raises ``UserError``: there are more data groups than units of a batch."""
        job, train = self._job, self._samples.train
        return make_order(
            train.view,
            train.source.split.shares,
            job.seed,
            job.recipe.shuffle_block_shards,
            stage=job.stage,
            chunk_samples=job.recipe.shuffle_chunk_samples,
            groups=DataGroups.of(job.recipe.data_groups, job.recipe.batch_size, unit),
        )

    def batch_ordinals(self, batch: int, *, unit: int) -> NDArray[np.int64]:
        """Ordinals [B] of a global batch, before any bad sample is replaced."""
        size = self._job.recipe.batch_size
        return self.order(unit).ordinals(batch * size, (batch + 1) * size)

    def train_batches(self, first: int, stop: int, *, unit: int) -> Generator[Batch, None, None]:
        """Shares that this rank takes of the global batches ``first <= b < stop``."""
        job, recipe, train = self._job, self._job.recipe, self._samples.train
        augment = AugmentSpec(
            augment=Augment(recipe.augment),
            crop_scale=recipe.crop_scale,
            crop_ratio=recipe.crop_ratio,
            color_jitter=recipe.color_jitter,
            plugin=recipe.augment_plugin,
            arguments=recipe.augment_arguments,
        )
        self._newest = TrainLoader(
            train.source,
            self.order(unit),
            train.labels,
            batch_size=recipe.batch_size,
            start_step=first,
            total_steps=stop,
            seed=job.seed,
            stage=job.stage,
            augment=augment,
            rank=job.ranks.rank,
            world_size=job.ranks.world_size,
            group_size=unit,
            num_workers=job.request.execution.num_threads,
            device=job.device,
        )
        yield from self._newest

    def eval_batches(self, split: LabelledSplit) -> Iterator[Batch]:
        """Every sample of a split once on some rank, in ordinal order, without augmentation.

        At its end the ranks tell each other of bad samples, those of training included; so all of them get there. They
        read at their own pace: a node with an empty cache takes far longer than others. So whoever takes the batches
        must not begin a collective operation in between.

        Raises:
            PreemptedError: the split is that of validation, and some rank was asked to stop. All ranks leave together,
                and the training loop saves its state; nobody would save that of another evaluation.
        """
        job = self._job
        loader = EvalLoader(
            split.source,
            split.labels,
            batch_size=EVAL_BATCH_SIZE,
            ordinals=split.view.ordinals(),
            rank=job.ranks.rank,
            world_size=job.ranks.world_size,
            num_workers=job.request.execution.num_threads,
            device=job.device,
        )
        asked_s, is_saved = time.monotonic(), split is self._samples.val
        with job.ranks.at_own_pace() as pace:
            for batch in job.ranks.activity.each(loader):
                is_asked = is_saved and pace.is_stopping
                if is_saved and time.monotonic() - asked_s >= _ASK_EVERY_S:
                    is_asked, asked_s = is_asked or job.context.should_stop(), time.monotonic()
                if is_asked:
                    raise PreemptedError(f"{job.request.job} was asked to stop within an evaluation")
                yield batch
        self._samples.bad.share()

    def stats(self) -> dict[str, float]:
        """What the newest training loader did so far, for people; nothing before there is one."""
        return dict(self._newest.stats.snapshot()) if self._newest is not None else {}


def eval_inputs(batch: Batch, inputs: Tensor) -> EvalInputs:
    """A batch for ``evaluate`` with what the model gets instead of images."""
    targets = batch.targets.to(inputs.device, non_blocking=True)
    return EvalInputs(inputs=inputs, targets_B=targets, subsets_B=batch.subset_ids_B, ordinals_B=batch.ordinals_B)
