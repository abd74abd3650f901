"""Costs of attempts: the kinds of nodes on which they ran, for how long, and at which price. Pure.

The price is the label ``price`` of the node when the attempt was placed there (per node and hour); for a node without
it, that of a table of prices, by accelerator and market. Unrecorded prices stay unknown: a sum with unknown parts says
so, and is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from orchestrator.core.contract import Resources
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.state.nodes import Node

PRICE_LABEL = "price"
"""Of a node and an hour."""
_HOUR_S = 3600.0
_Sort: TypeAlias = tuple[str, bool | None, bool, bool]
"""Key of uses that can be added: accelerator, market, whether there are GPUs, and whether there is no label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedAllocation:
    """The workers of an attempt that are on nodes of one type and price."""

    num_workers: int = 1
    accelerator: str = ""
    """Type of the nodes' GPUs; empty = none, or not known."""
    is_spot: bool = False
    hourly: float | None = None
    """Cost of all these workers for an hour, by the labels of their nodes; None = they have no such label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceUse:
    """Resources that ended attempts held on nodes of one type, from their launch to their end."""

    accelerator: str = ""
    is_spot: bool | None = None
    """None = not recorded."""
    gpu_s: float = 0.0
    cpu_s: float = 0.0
    """Core-seconds. Where there are GPU-seconds, those of the cores beside the GPUs."""
    memory_gib_s: float = 0.0
    amount: float | None = None
    """Cost by the labels of the nodes; None = they had none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """A sum of money, and the hours that are not in it."""

    amount: float = 0.0
    gpu_hours: float = 0.0
    """GPU-hours that the amount includes."""
    core_hours: float = 0.0
    """The same, of attempts without GPUs."""
    unpriced_gpu_hours: float = 0.0
    unpriced_core_hours: float = 0.0
    """Of attempts without GPUs."""
    unknown_market_hours: float = 0.0
    """Unpriced hours that lack a price only because it is not recorded whether their nodes were spot."""
    gpu_amount: float = 0.0
    """The part of the amount for GPU-hours."""

    @property
    def is_partial(self) -> bool:
        """Whether some use has no known price: the amount is then a lower bound."""
        return self.unpriced_gpu_hours > 0 or self.unpriced_core_hours > 0

    @property
    def is_known(self) -> bool:
        """Whether any price is known, or nothing was used that has one."""
        return self.gpu_hours > 0 or self.core_hours > 0 or not self.is_partial

    def expected(self, gpu_hours: float, core_hours: float) -> float | None:
        """With so many more hours, at what those so far cost on average; None where none of a kind had a price."""
        if self.is_partial or (gpu_hours and not self.gpu_hours) or (core_hours and not self.core_hours):
            return None
        per_gpu = self.gpu_amount / self.gpu_hours if self.gpu_hours else 0.0
        per_core = (self.amount - self.gpu_amount) / self.core_hours if self.core_hours else 0.0
        return self.amount + gpu_hours * per_gpu + core_hours * per_core


def price_of(node: Node) -> float | None:
    """Its price for an hour, from its label; None without a label that is a number from 0 up."""
    return parse_price(node.labels.get(PRICE_LABEL, ""))


def parse_price(label: str) -> float | None:
    """A label's price; None for what is not a number from 0 up."""
    try:
        price = float(label)
    except ValueError:
        return None
    return price if 0 <= price < math.inf else None


def priced_allocations(
    names: Sequence[str], nodes: Mapping[str, Node], resources: Resources, num_workers: int
) -> tuple[PricedAllocation, ...]:
    """The allocations of an attempt; empty if one of its nodes is unknown.

    Args:
        names: of its nodes, one per worker, or one for all workers.
        nodes: by name.
        resources: what all workers hold together.
        num_workers: ranks.
    """
    every = list(names) * num_workers if len(names) == 1 else list(names)
    if len(every) != num_workers or any(name not in nodes for name in every):
        return ()
    counts: dict[PricedAllocation, int] = {}
    worker = resources.share(num_workers)
    for name in every:
        lot = _priced_worker(nodes[name], worker)
        counts[lot] = counts.get(lot, 0) + 1
    return tuple(
        replace(lot, num_workers=count, hourly=None if lot.hourly is None else lot.hourly * count)
        for lot, count in counts.items()
    )


def _priced_worker(node: Node, worker: Resources) -> PricedAllocation:
    price = price_of(node)
    return PricedAllocation(
        accelerator=node.accelerator,
        is_spot=node.is_spot,
        hourly=None if price is None else price * _share(worker, node.resources),
    )


def _share(worker: Resources, node: Resources) -> float:
    """Part of a node that a worker pays for: that of its GPUs or of its cores, whichever it holds more of.

    As Slurm bills with ``PriorityFlags=MAX_TRES`` (https://slurm.schedmd.com/tres.html): the rest of the node can run
    other attempts, and no more than that.
    """
    parts = [
        held / whole for held, whole in ((worker.gpus, node.gpus), (worker.cpus, node.cpus)) if held > 0 and whole > 0
    ]
    return min(1.0, max(parts, default=0.0))


def uses_of(
    lots: Sequence[PricedAllocation], resources: Resources, num_workers: int, ran_s: float
) -> tuple[ResourceUse, ...]:
    """The use of an attempt in so many seconds."""
    if not lots:
        return (
            ResourceUse(
                accelerator=resources.accelerator,
                gpu_s=ran_s * resources.gpus,
                cpu_s=ran_s * resources.cpus,
                memory_gib_s=ran_s * resources.memory_gib,
            ),
        )
    worker = resources.share(num_workers)
    return tuple(
        ResourceUse(
            accelerator=lot.accelerator or resources.accelerator,
            is_spot=lot.is_spot,
            gpu_s=ran_s * worker.gpus * lot.num_workers,
            cpu_s=ran_s * worker.cpus * lot.num_workers,
            memory_gib_s=ran_s * worker.memory_gib * lot.num_workers,
            amount=None if lot.hourly is None else ran_s / _HOUR_S * lot.hourly,
        )
        for lot in lots
    )


def added(uses: Sequence[ResourceUse], more: Iterable[ResourceUse]) -> tuple[ResourceUse, ...]:
    """The uses with some more, those of one sort as one."""
    new = tuple(use for use in more if use.gpu_s or use.cpu_s or use.memory_gib_s)
    if not uses and len(new) < 2:  # nearly every job: it ran once
        return new
    sums: dict[_Sort, list[float]] = {}
    for use in (*uses, *new):  # thousands, whenever a large sweep is read
        key = (use.accelerator, use.is_spot, use.gpu_s > 0, use.amount is None)
        total = sums.setdefault(key, [0.0, 0.0, 0.0, 0.0])
        total[0] += use.gpu_s
        total[1] += use.cpu_s
        total[2] += use.memory_gib_s
        total[3] += use.amount or 0.0
    return tuple(
        ResourceUse(
            accelerator=accelerator,
            is_spot=is_spot,
            gpu_s=gpu_s,
            cpu_s=cpu_s,
            memory_gib_s=memory_gib_s,
            amount=None if is_bare else amount,
        )
        for (accelerator, is_spot, _, is_bare), (gpu_s, cpu_s, memory_gib_s, amount) in sums.items()
    )


def bill_of(uses: Iterable[ResourceUse], prices: PriceTable | None = None) -> Bill:
    """Cost of uses. ``prices`` are used where nodes had no label."""
    bill = Bill()
    for use in uses:
        amount = use.amount if use.amount is not None else _by_table(use, prices)
        gpu_hours, core_hours = use.gpu_s / _HOUR_S, 0.0 if use.gpu_s else use.cpu_s / _HOUR_S
        if amount is None:
            bill = replace(
                bill,
                unpriced_gpu_hours=bill.unpriced_gpu_hours + gpu_hours,
                unpriced_core_hours=bill.unpriced_core_hours + core_hours,
                unknown_market_hours=bill.unknown_market_hours
                + (gpu_hours + core_hours if len(_table_amounts(use, prices)) > 1 else 0.0),
            )
        else:
            bill = replace(
                bill,
                amount=bill.amount + amount,
                gpu_amount=bill.gpu_amount + (amount if use.gpu_s else 0.0),
                gpu_hours=bill.gpu_hours + gpu_hours,
                core_hours=bill.core_hours + core_hours,
            )
    return bill


def _by_table(use: ResourceUse, prices: PriceTable | None) -> float | None:
    found = _table_amounts(use, prices)
    # Both markets have the same price, or the cost is unknown.
    return found.pop() if len(found) == 1 else None


def _table_amounts(use: ResourceUse, prices: PriceTable | None) -> set[float | None]:
    """The possible costs: two amounts if its market is unknown and each market has its own price."""
    if prices is None:
        return set()
    held = Resources(cpus=use.cpu_s, gpus=use.gpu_s)  # for one second each
    markets = (True, False) if use.is_spot is None else (use.is_spot,)
    return {prices.cost(1.0, held, use.accelerator, is_spot=is_spot) for is_spot in markets}
