"""Error and loss on a split: whole, per subset, per class and per level of a hierarchy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from workloads.train.eval_logits import EvalForward
from workloads.train.eval_sums import TOP, EvalSums, Outcome, joined
from workloads.train.linear_form import NO_LABEL
from workloads.train.objective import Objective, SoftmaxObjective, is_wrong
from workloads.train.outcomes import OutcomeTally
from workloads.train.ranks import Ranks

_FLUSH_BATCHES = 32
"""Batches whose outcomes stay on the device before the host waits for them."""


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

    In a gang, rank r passes the batches b with b % world_size == r, and all ranks get the same bits, those that a
    single process would get: counts add up as integers, and losses are summed batch by batch in the split's order.
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
                sums.add(pending)
                pending = []
    sums.add(pending)
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
