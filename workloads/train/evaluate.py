"""Error and loss on a split, whole and per subset."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from workloads.train.metrics import Tally


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalInputs:
    """A batch for evaluation: model inputs (B, ...), targets (B,) on the device, subset ids (B,)."""

    inputs: Tensor
    targets_B: Tensor
    subsets_B: NDArray[np.int16]


def evaluate(model: nn.Module, batches: Iterable[EvalInputs], subset_names: Sequence[str]) -> dict[str, float]:
    """``val_error`` and ``val_loss`` (cross-entropy without smoothing), and ``val_error_<subset>`` for each subset.

    Leaves the model in the mode (train or eval) in which it was.
    """
    whole, parts = Tally(), [Tally() for _ in subset_names]
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for batch in batches:
            _add(batch, model(batch.inputs), whole, parts)
    model.train(was_training)
    return whole.means("val") | _subset_errors(parts, subset_names)


def _add(batch: EvalInputs, logits_BK: Tensor, whole: Tally, parts: list[Tally]) -> None:
    losses_B = functional.cross_entropy(logits_BK, batch.targets_B, reduction="none").double().cpu().numpy()
    wrong_B = (logits_BK.argmax(1) != batch.targets_B).cpu().numpy()
    whole.add(float(losses_B.sum()), int(wrong_B.sum()), len(wrong_B))
    for subset, tally in enumerate(parts):
        mine_B = batch.subsets_B == subset
        tally.add(float(losses_B[mine_B].sum()), int(wrong_B[mine_B].sum()), int(mine_B.sum()))


def _subset_errors(parts: list[Tally], names: Sequence[str]) -> dict[str, float]:
    return {
        f"val_error_{name}": tally.errors / tally.num_samples
        for name, tally in zip(names, parts, strict=True)
        if tally.num_samples
    }
