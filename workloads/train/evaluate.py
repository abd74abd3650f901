"""Error and loss on a split: whole, per subset, per class and per level of a hierarchy; and which samples were right.

Sums are exact, and the same bits on any number of ranks.

A batch of 256 samples has 128 million logits over 500,000 classes: 0.5 GB, and as much again for the loss,
where training, whose head runs over chunks of classes, needs 10 MB. Evaluation needs whole rows (the five
largest, the levels), so it takes fewer of them at once. Only sizes decide: no result depends on where a job runs.

Measured on one core, 256 samples of 256 features, softmax: 273 MiB and 2.1 s of CPU in place of 985 MiB and 1.7 s,
since the weights are read four times; with half as many rows at a time 143 MiB and 2.5 s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from hashlib import sha256
from operator import add
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from orchestrator.core.activity import Activity
from orchestrator.storage.sample_outcomes import SampleOutcomes
from workloads.data.index import SplitIndex
from workloads.labels.inputs import LabelInputs
from workloads.labels.label_map import ClassLabels, LabelMap
from workloads.labels.taxonomy import CoarserLevel, find_parents
from workloads.models.build import Classifier, FrozenForward
from workloads.runtime.ranks import Ranks
from workloads.train.linear_form import NO_LABEL
from workloads.train.objective import Objective, SoftmaxObjective, is_wrong

EVAL_BATCH_SIZE: Final = 256
"""Fixed, because kernels may round differently for other batch sizes."""

_FLUSH_BATCHES = 32
"""Batches whose outcomes stay on the device before the host waits for them."""
TOP = 5
"""A prediction among so many largest logits counts as right in ``val_top5_error``."""
_TOTALS = ("num_samples", "wrong", "top_wrong")
MOST_LOGITS: Final = 2**25
"""Logits that exist at a time, at most, unless one sample alone has more: 128 MiB in float32."""
_WRONG, _RIGHT = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalInputs:
    """A batch for evaluation: model inputs (B, ...), targets (B,) or (B, M) on the device, subset ids (B,)."""

    inputs: Tensor
    targets_B: Tensor
    subsets_B: NDArray[np.integer[Any]]
    ordinals_B: NDArray[np.int64] | None = None
    """Rows of the split's index; needed only where the outcome of each sample is kept."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvalLevel:
    """A coarser level of the hierarchy: class k of the label space lies in ``coarser_K[k]``, >= 0, int64."""

    name: str
    coarser_K: NDArray[np.int64]


def evaluate(
    model: nn.Module,
    batches: Iterable[EvalInputs],
    subset_names: Sequence[str],
    *,
    objective: Objective | None = None,
    levels: Sequence[EvalLevel] = (),
    ranks: Ranks | None = None,
    tally: OutcomeTally | None = None,
) -> dict[str, float]:
    """Metrics of a split; errors are fractions of its samples in [0, 1].

    - ``val_error``, ``val_loss`` (of the objective without smoothing; default: softmax cross-entropy)
    - ``val_error_<subset>`` for each subset that has samples
    - ``val_top5_error`` with more than 5 classes: no target is among the five largest logits
    - ``val_class_error``: mean over the classes that have samples; not for sets of classes
    - ``val_level_error_<level>``: the predicted class lies elsewhere in the hierarchy than (all of) the targets

    In a gang, each rank passes a run of the batches, the runs in the order of the ranks. All ranks get the same bits,
    those that a single process would get: counts add up as integers, and losses batch by batch in the split's order.
    ``tally`` is told which of this rank's samples were wrong.
    Leaves every module in the mode (train or eval) in which it was.
    """
    forward = EvalForward(model)
    score = _Scorer((objective or SoftmaxObjective(0)).unsmoothed(), levels)
    sums = EvalSums(num_subsets=len(subset_names), num_levels=len(levels), tally=tally)
    pending: list[Outcome] = []
    ranks = ranks or Ranks()
    with _evaluation_mode(model), torch.inference_mode():
        for batch in ranks.activity.each(batches):
            pending.append(score(forward.logits_in_parts(batch.inputs), batch))
            if len(pending) == _FLUSH_BATCHES:
                sums.add(ranks.activity.each(pending, Activity.WORK))
                pending = []
    sums.add(ranks.activity.each(pending, Activity.WORK))
    sums.sum_over(ranks)
    return sums.metrics(subset_names, [level.name for level in levels])


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards each module's own mode, because frozen parts stay out of training mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class _Scorer:
    """Scores batches on the device that they are on."""

    def __init__(self, loss: Objective, levels: Sequence[EvalLevel]) -> None:
        self._loss, self._levels = loss, levels
        self._coarser: list[Tensor] = []

    def __call__(self, logits: Iterable[Tensor], batch: EvalInputs) -> Outcome:
        """What one batch gives, still on the device; ``logits`` (b, K) are those of consecutive samples of it."""
        parts: list[Outcome] = []
        first = 0
        for logits_bK in logits:
            here = slice(first, first + len(logits_bK))
            parts.append(self._part(logits_bK, batch.targets_B[here], batch.subsets_B[here]))
            first = here.stop
        return replace(joined(parts), ordinals_B=batch.ordinals_B)

    def _part(self, logits_BK: Tensor, targets: Tensor, subsets_B: NDArray[np.integer[Any]]) -> Outcome:
        num_classes, predicted_B = logits_BK.shape[1], logits_BK.argmax(1)
        return Outcome(
            losses_B=self._loss.losses(logits_BK, targets).double(),
            wrong_B=is_wrong(predicted_B, targets),
            top_wrong_B=_is_out_of_top(logits_BK, targets) if num_classes > TOP else None,
            level_wrong_LB=[_misses(predicted_B, targets, level_K) for level_K in self._folds(logits_BK)],
            targets_B=targets if targets.ndim == 1 else None,
            subsets_B=subsets_B,
            num_classes=num_classes,
        )

    def _folds(self, logits_BK: Tensor) -> list[Tensor]:
        """The levels' arrays on the device of the logits, moved once: moving waits for the device."""
        if not self._coarser:
            for level in self._levels:
                if len(level.coarser_K) != logits_BK.shape[1]:
                    sizes = f"{len(level.coarser_K)} classes, but the model predicts {logits_BK.shape[1]}"
                    raise ValueError(f"level {level.name!r} folds {sizes}; give one entry for each class")
            self._coarser = [torch.from_numpy(level.coarser_K).to(logits_BK.device) for level in self._levels]
        return self._coarser


def _is_out_of_top(logits_BK: Tensor, targets: Tensor) -> Tensor:
    """Whether no target (B,), or none of a set of targets (B, M), is among the largest logits; [B]."""
    top_BT1 = logits_BK.topk(TOP, dim=1).indices[:, :, None]
    sets_BM = targets if targets.ndim == 2 else targets[:, None]
    return (top_BT1 != sets_BM[:, None, :]).flatten(1).all(1)


def _misses(predicted_B: Tensor, targets: Tensor, coarser_K: Tensor) -> Tensor:
    """Whether the prediction lies in another class of a level than (all) targets; [B]."""
    coarse_targets = torch.where(targets == NO_LABEL, NO_LABEL, coarser_K[targets.clamp(min=0)])
    return is_wrong(coarser_K[predicted_B], coarse_targets)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What one batch of an evaluation gives; tensors may lie on a device. ``None`` = not applicable."""

    losses_B: Tensor
    wrong_B: Tensor
    top_wrong_B: Tensor | None
    level_wrong_LB: Sequence[Tensor]
    targets_B: Tensor | None
    subsets_B: NDArray[np.integer[Any]]
    num_classes: int
    ordinals_B: NDArray[np.int64] | None = None


def joined(parts: Sequence[Outcome]) -> Outcome:
    """The outcome of a batch from those of its parts, in their order."""
    if len(parts) == 1:
        return parts[0]
    levels = zip(*(part.level_wrong_LB for part in parts), strict=True)
    return Outcome(
        losses_B=torch.cat([part.losses_B for part in parts]),
        wrong_B=torch.cat([part.wrong_B for part in parts]),
        top_wrong_B=_joined([part.top_wrong_B for part in parts]),
        level_wrong_LB=[torch.cat(level) for level in levels],
        targets_B=_joined([part.targets_B for part in parts]),
        subsets_B=np.concatenate([part.subsets_B for part in parts]),
        num_classes=parts[0].num_classes,
    )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """What does not apply does so to no part."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


class EvalSums:
    """Counts samples and errors as integers, and keeps the sum of losses of each batch (float64) apart."""

    def __init__(self, *, num_subsets: int, num_levels: int, tally: OutcomeTally | None = None) -> None:
        self._tally = tally
        self._num_subsets, self._num_levels = num_subsets, num_levels
        self._losses: list[float] = []
        self._totals = np.zeros(len(_TOTALS) + num_levels + 2 * num_subsets, dtype=np.int64)
        self._per_class = np.zeros((2, 0), dtype=np.int64)
        self._num_classes = 0

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """Add batches, in the order in which they were evaluated."""
        for outcome in outcomes:
            self._num_classes = outcome.num_classes
            wrong_B = outcome.wrong_B.cpu().numpy()
            if self._tally is not None:
                self._tally.add(outcome.ordinals_B, wrong_B)
            self._losses.append(float(outcome.losses_B.cpu().numpy().sum()))
            top = 0 if outcome.top_wrong_B is None else int(outcome.top_wrong_B.sum())
            levels = [int(wrong.sum()) for wrong in outcome.level_wrong_LB]
            totals = [len(wrong_B), int(wrong_B.sum()), top, *levels]
            self._totals += np.concatenate([totals, self._in_subsets(outcome, wrong_B)])
            if outcome.targets_B is not None:
                self._add_classes(outcome.targets_B.cpu().numpy(), wrong_B)

    def sum_over(self, ranks: Ranks) -> None:
        """Add up the sums of all ranks, on every rank; collective."""
        if ranks.is_solo:
            return
        # Rank 0 has the first batch, if there is any; a rank without batches learns the shapes from it.
        shape = (self._num_classes, self._per_class.shape[1]) if ranks.is_first else (0, 0)
        lengths = [0] * ranks.world_size
        lengths[ranks.rank] = len(self._losses)
        *lengths, self._num_classes, counted = ranks.sum_(torch.tensor([*lengths, *shape])).tolist()
        losses = torch.zeros(sum(lengths), dtype=torch.float64)
        # Every batch has its own place, so the ranks add zeros to it: no rounding depends on who evaluated it.
        first = sum(lengths[: ranks.rank])
        losses[first : first + len(self._losses)] = torch.tensor(self._losses, dtype=torch.float64)
        self._losses = ranks.sum_(losses).tolist()
        self._totals = ranks.sum_(torch.from_numpy(self._totals)).numpy()
        per_class = self._per_class if self._per_class.size else np.zeros((2, counted), dtype=np.int64)
        self._per_class = ranks.sum_(torch.from_numpy(per_class)).numpy()

    def metrics(self, subset_names: Sequence[str], level_names: Sequence[str]) -> dict[str, float]:
        """See ``evaluate``; nothing if there are no samples."""
        num_samples, wrong, top_wrong = (int(count) for count in self._totals[: len(_TOTALS)])
        if not num_samples:
            return {}
        found = {"val_loss": reduce(add, self._losses, 0.0) / num_samples, "val_error": wrong / num_samples}
        if self._num_classes > TOP:
            found["val_top5_error"] = top_wrong / num_samples
        if self._per_class.any():
            counts_K, wrong_K = self._per_class
            found["val_class_error"] = float((wrong_K[counts_K > 0] / counts_K[counts_K > 0]).mean())
        return found | self._level_errors(level_names, num_samples) | self._subset_errors(subset_names)

    def _level_errors(self, names: Sequence[str], num_samples: int) -> dict[str, float]:
        counts = self._totals[len(_TOTALS) : len(_TOTALS) + self._num_levels]
        return {f"val_level_error_{name}": int(wrong) / num_samples for name, wrong in zip(names, counts, strict=True)}

    def _subset_errors(self, names: Sequence[str]) -> dict[str, float]:
        pairs = self._totals[len(_TOTALS) + self._num_levels :].reshape(-1, 2)
        return {
            f"val_error_{name}": int(wrong) / int(count)
            for name, (count, wrong) in zip(names, pairs, strict=True)
            if count
        }

    def _in_subsets(self, outcome: Outcome, wrong_B: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Samples and errors of each subset, one after the other."""
        pairs = np.zeros((self._num_subsets, 2), dtype=np.int64)
        if self._num_subsets:
            in_any_B = outcome.subsets_B >= 0
            np.add.at(pairs[:, 0], outcome.subsets_B[in_any_B], 1)
            np.add.at(pairs[:, 1], outcome.subsets_B[in_any_B & wrong_B], 1)
        return pairs.reshape(-1)

    def _add_classes(self, targets_B: NDArray[np.int64], wrong_B: NDArray[np.bool_]) -> None:
        if not self._per_class.size:
            self._per_class = np.zeros((2, self._num_classes), dtype=np.int64)
        np.add.at(self._per_class[0], targets_B, 1)
        np.add.at(self._per_class[1], targets_B[wrong_B], 1)


class EvalForward:
    """A model in evaluation mode. What it learns of the device's memory holds for its own life."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._forward = model, FrozenForward()

    def logits_in_parts(self, inputs: Tensor) -> Iterator[Tensor]:
        """Logits (b, K) of consecutive samples, which together are all of the batch (B, ...).

        Models other than a backbone with a linear head, or such a head, give all of them in one part.
        """
        model = self._model
        head = model.head if isinstance(model, Classifier) else model
        if not isinstance(head, nn.Linear) or len(inputs) * head.out_features <= MOST_LOGITS:
            yield self._forward(model, inputs)
            return
        features_BD = self._forward(model.backbone, inputs) if isinstance(model, Classifier) else inputs
        for part_bD in torch.split(features_BD, max(1, MOST_LOGITS // head.out_features)):
            yield head(part_bD)


class OutcomeTally:
    """The outcomes of one evaluation, as one rank sees them; pass it to ``evaluate``, once."""

    def __init__(self) -> None:
        self._batches: list[tuple[NDArray[np.int64] | None, NDArray[np.bool_]]] = []

    def add(self, ordinals_B: NDArray[np.int64] | None, wrong_B: NDArray[np.bool_]) -> None:
        """Add a batch; one that does not say which samples it holds makes ``of_split`` fail."""
        self._batches.append((ordinals_B, wrong_B))

    def of_split(self, split: SplitIndex, ranks: Ranks | None = None) -> SampleOutcomes:
        """The outcomes of all ranks by ordinal of the split, on every rank; collective.

        Raises:
            ValueError: a batch did not name its samples.
        """
        seen_N = np.zeros(split.num_samples, dtype=np.uint8)
        for ordinals_B, wrong_B in self._batches:
            if ordinals_B is None or len(ordinals_B) != len(wrong_B):
                raise ValueError(f"a batch of {len(wrong_B)} samples does not name each of them: give it ordinals_B")
            seen_N[ordinals_B] = np.where(wrong_B, _WRONG, _RIGHT)
        # A sample is on one rank only, and the others add zeros to it.
        seen_N = (ranks or Ranks()).sum_(torch.from_numpy(seen_N)).numpy()
        return SampleOutcomes(right_N=seen_N == _RIGHT, counted_N=seen_N > 0, order_sha256=order_digest(split))


def order_digest(split: SplitIndex) -> str:
    """Sha256 of the names and sizes of the split's shards and of its samples' keys, in the order of ordinals."""
    digest = sha256()
    for shard in split.shards:
        digest.update(f"{shard.name}\0{shard.num_samples}\n".encode(errors="surrogateescape"))
    digest.update(np.ascontiguousarray(np.diff(split.key_offsets.astype(np.int64))).tobytes())
    digest.update(np.ascontiguousarray(split.key_bytes).tobytes())
    return digest.hexdigest()


def eval_levels(
    label_map: LabelMap, classes: Sequence[Mapping[str, Any]], parents: Sequence[CoarserLevel] | None
) -> tuple[EvalLevel, ...]:
    """The levels up which the predictions of a label space can be folded: those in which every class has one parent.

    None for label spaces in which a leaf class has several targets.

    Args:
        label_map: the label space.
        classes: rows in the order of leaf classes.
        parents: what the artifact of the label map says; None if it is of a version that did not record parents: then
            levels are the columns of the class table.
    """
    if not isinstance(label_map, ClassLabels) or label_map.table_CM.shape[1] != 1:
        return ()
    if parents is None:
        parents = find_parents(label_map, {}, LabelInputs(classes=classes, num_train=0))
    return tuple(EvalLevel(name=level.name, coarser_K=level.parents_KP[:, 0]) for level in parents if level.is_tree)
