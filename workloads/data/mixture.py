"""Several data sets as one: mixed by weights, or one after the other in the shards of a joint order.

Ordinals of a mixture run through its components one after the other. Without weights a mixture is the union: a
`SampleOrder` over the shards of all components, in which every sample occurs once per epoch; the first k components of
a list are a cumulative prefix. With weights each component runs through its own epochs at its own pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from workloads.data.index import MixtureShares
from workloads.data.order import Order, SampleOrder
from workloads.data.streams import Purpose, Stage, permutation, seed_sequence
from workloads.data.subset import SampleView

WINDOW: Final = 10_000
"""Positions of which each component has its exact share, in random places; so weights count in ten-thousandths."""


class MixtureOrder:
    """The order of a weighted mixture: like `SampleOrder` a pure function of the position.

    Args:
        orders: of the components, which give ordinals of the mixture; each runs through its own epochs.
        num_shards: of each component.
        weights: share of each component, any positive unit.
        seed, stage: name the stream that interleaves the components.

    Raises:
        UserError: weights are missing, negative or too small.
    """

    def __init__(
        self,
        orders: Sequence[SampleOrder],
        num_shards: Sequence[int],
        weights: Sequence[float],
        *,
        seed: int,
        stage: Stage = Stage.PRETRAIN,
    ) -> None:
        self._orders, self._seed, self._stage = tuple(orders), seed, stage
        self._first_shards = (np.cumsum(num_shards) - np.asarray(num_shards)).tolist()
        self.quotas = quotas(weights, len(orders))
        self.num_samples = sum(order.num_samples for order in orders)
        """Positions that count as an epoch: as many as there are samples, though some occur more often than others."""
        self._window = lru_cache(maxsize=4)(self._interleaved)

    def ordinals(self, start: int, stop: int) -> NDArray[np.int64]:
        """Ordinals of the samples at positions ``start <= p < stop``."""
        found = np.empty(max(stop - start, 0), dtype=np.int64)
        for window in range(start // WINDOW, -(-stop // WINDOW)):
            first, last = max(start, window * WINDOW), min(stop, (window + 1) * WINDOW)
            components, ranks = (column[first % WINDOW :][: last - first] for column in self._window(window))
            part = found[first - start : last - start]
            for component, order in enumerate(self._orders):
                slots = np.flatnonzero(components == component)
                if slots.size:
                    begin = window * int(self.quotas[component]) + int(ranks[slots[0]])
                    part[slots] = order.ordinals(begin, begin + len(slots))  # its ranks ascend without gaps
        return found

    def replacement(self, position: int, attempt: int) -> int:
        """As `SampleOrder.replacement`, by a sample of the same component."""
        component, local = self._place(position)
        return self._orders[component].replacement(local, attempt)

    def shards_ahead(self, position: int, num_blocks: int = 2) -> NDArray[np.int64]:
        """As `SampleOrder.shards_ahead`; the components take turns."""
        window, slot = divmod(position, WINDOW)
        components, _ = self._window(window)
        ahead = []
        for component, order in enumerate(self._orders):
            before = int(np.count_nonzero(components[:slot] == component))
            local = window * int(self.quotas[component]) + before
            shards = order.shards_ahead(local, num_blocks) + self._first_shards[component]
            ahead.append(shards.tolist())
        turns = (shard for turn in zip_longest(*ahead) for shard in turn if shard is not None)
        return np.array(list(turns), dtype=np.int64)

    def _place(self, position: int) -> tuple[int, int]:
        """Component and position within it."""
        window, slot = divmod(position, WINDOW)
        components, ranks = self._window(window)
        component = int(components[slot])
        return component, window * int(self.quotas[component]) + int(ranks[slot])

    def _interleaved(self, window: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Component of each slot of a window, and how many slots of the same component come before it."""
        stream = seed_sequence(self._seed, self._stage, Purpose.MIXTURE, window)
        components = np.repeat(np.arange(len(self._orders)), self.quotas)[permutation(stream, WINDOW)]
        ranks = np.empty(WINDOW, dtype=np.int64)
        for component, quota in enumerate(self.quotas.tolist()):
            ranks[components == component] = np.arange(quota)
        return components, ranks


def make_order(
    view: SampleView,
    shares: MixtureShares | None,
    seed: int,
    block_shards: int,
    *,
    stage: Stage = Stage.PRETRAIN,
    chunk_samples: int | None = None,
) -> Order:
    """The order of a view of a split: by the weights of its components if it is a weighted mixture."""
    if shares is None:
        return SampleOrder.over(view, seed, block_shards, stage=stage, chunk_samples=chunk_samples)
    ends = np.cumsum(shares.num_shards).tolist()
    parts = [view.of_shards(end - number, end) for end, number in zip(ends, shares.num_shards, strict=True)]
    if empty := [number for number, part in enumerate(parts) if not part.num_samples]:
        message = f"component {empty[0]} of the mixture has no samples to train on in this label space; leave it out"
        raise UserError(message)
    orders = [SampleOrder.over(part, seed, block_shards, stage=stage, chunk_samples=chunk_samples) for part in parts]
    return MixtureOrder(orders, shares.num_shards, shares.weights, seed=seed, stage=stage)


def quotas(weights: Sequence[float], num_components: int) -> NDArray[np.int64]:
    """Positions of each component per window; the largest remainders are rounded up.

    Raises:
        UserError: not one weight per component, or one below a ten-thousandth of their sum.
    """
    if len(weights) != num_components:
        raise UserError(f"a mixture of {num_components} data sets has {len(weights)} weights; give one for each")
    total = sum(weights)
    if not all(weight > 0 and weight * WINDOW >= total for weight in weights):
        message = f"the weights {list(weights)} of a mixture are not valid; each must be above 0 and at least "
        raise UserError(message + f"1/{WINDOW} of their sum; leave a data set out instead")
    exact = np.array([weight / total * WINDOW for weight in weights])
    found: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    found[np.argsort(found - exact, kind="stable")[: WINDOW - int(found.sum())]] += 1
    return found
