"""Features of all training samples in memory, on every rank, each computed by one of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestrator.core.errors import BadDataError
from workloads.data.order import Order
from workloads.data.subset import SampleView
from workloads.runtime.ranks import Ranks

_MAX_REPLACEMENTS = 16
_NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Features:
    """``features_NF`` float32 on the device, and the row of each ordinal; -1 = it could not be decoded."""

    features_NF: Tensor
    rows: NDArray[np.int64]

    @classmethod
    def gather(
        cls,
        mine: Iterable[tuple[NDArray[np.int64], Tensor]],
        view: SampleView,
        num_features: int,
        ranks: Ranks,
        device: torch.device,
    ) -> Self:
        """Of the samples of a view, from this rank's pairs of ordinals (B,) and features (B, num_features)."""
        ordinals = view.ordinals()
        rows = np.full(int(ordinals.max(initial=_NONE)) + 1, _NONE, dtype=np.int64)
        rows[ordinals] = np.arange(len(ordinals))
        features_NF = torch.zeros(len(ordinals), num_features, device=device)
        is_there_N = torch.zeros(len(ordinals), device=device)
        for ordinals_B, features_BF in mine:
            rows_B = torch.from_numpy(rows[ordinals_B]).to(device)
            features_NF[rows_B] = features_BF.float()
            is_there_N[rows_B] = 1
        # Every row is zero on all ranks but one, so the sum is a copy.
        ranks.sum_(features_NF)
        rows[ordinals[~ranks.sum_(is_there_N).bool().cpu().numpy()]] = _NONE
        return cls(features_NF=features_NF, rows=rows)

    def take(self, ordinals_B: NDArray[np.int64]) -> Tensor:
        """Features (B, num_features) of samples that are there."""
        return self.features_NF[torch.from_numpy(self.rows[ordinals_B]).to(self.features_NF.device)]

    def present(self, order: Order, start: int, stop: int) -> NDArray[np.int64]:
        """Ordinals at the positions ``start <= p < stop``; what could not be decoded is replaced as in loading.

        Raises:
            BadDataError: the samples to replace it cannot be decoded either.
        """
        ordinals_B = order.ordinals(start, stop)
        for slot in np.flatnonzero(self.rows[ordinals_B] == _NONE):
            ordinals_B[slot] = self._replacement(order, start + int(slot))
        return ordinals_B

    def _replacement(self, order: Order, position: int) -> int:
        for attempt in range(_MAX_REPLACEMENTS):
            ordinal = int(order.replacement(position, attempt))
            if self.rows[ordinal] != _NONE:
                return ordinal
        message = (
            f"the sample at position {position} cannot be decoded, and none of {_MAX_REPLACEMENTS} others either; "
        )
        raise BadDataError(message + "look at the shards")
