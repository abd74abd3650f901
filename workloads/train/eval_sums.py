"""Sums of an evaluation: exact, and the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workloads.train.outcomes import OutcomeTally
from workloads.train.ranks import Ranks

TOP = 5
"""A prediction among so many largest logits counts as right in ``val_top5_error``."""

_TOTALS = ("num_samples", "wrong", "top_wrong")


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

    def add(self, outcomes: Sequence[Outcome]) -> None:
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
        num_batches, self._num_classes, counted = ranks.sum_(torch.tensor([len(self._losses), *shape])).tolist()
        losses = torch.zeros(num_batches, dtype=torch.float64)
        # Every batch has its own place, so the ranks add zeros to it: no rounding depends on who evaluated it.
        losses[ranks.rank :: ranks.world_size] = torch.tensor(self._losses, dtype=torch.float64)
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
