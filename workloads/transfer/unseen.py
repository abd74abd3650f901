"""Classes of the validation split that no training sample shows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from workloads.labels.bound import NO_LABEL, BoundLabels

_ROWS_AT_ONCE = 1 << 18  # bounds the memory of a pass over all samples


def unseen_notes(
    train: BoundLabels, train_ordinals: NDArray[np.int64], val: BoundLabels, val_ordinals: NDArray[np.int64]
) -> list[str]:
    """What to tell of validation samples that can only be wrong; nothing if there are none.

    Raises:
        UserError: all of them can only be wrong.
    """
    is_seen_K = np.zeros(train.num_classes + 1, dtype=np.bool_)  # NO_LABEL is the last one, and never seen
    for targets in _targets(train, train_ordinals):
        is_seen_K[targets.ravel()] = True
    is_seen_K[NO_LABEL] = False
    wanted_K, num_lost, num_val = np.zeros_like(is_seen_K), 0, len(val_ordinals)
    for targets in _targets(val, val_ordinals):
        wanted_K[targets.ravel()] = True
        num_lost += int((~is_seen_K[targets].reshape(len(targets), -1).any(axis=1)).sum())
    wanted_K[NO_LABEL] = False
    num_unseen = int((wanted_K & ~is_seen_K).sum())
    if num_val and num_lost == num_val:
        message = f"none of the {num_unseen} classes of the {num_val} validation samples has a training sample"
        raise UserError(f"{message}: nothing can be predicted; transfer to another label space, or use a larger subset")
    if not num_unseen:
        return []
    found = f"{num_unseen} of {int(wanted_K.sum())} classes of the validation split have no training sample"
    return [f"{found}: {num_lost} of {num_val} validation samples ({num_lost / num_val:.1%}) can only be wrong"]


def _targets(labels: BoundLabels, ordinals: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(ordinals), _ROWS_AT_ONCE):
        yield labels.take(ordinals[start : start + _ROWS_AT_ONCE])
