"""Costs: the table of prices, and past and expected costs of a sweep."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.core.errors import UsageError, UserError
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.services.settings import Settings
from orchestrator.state.snapshot import Snapshot
from orchestrator.state.spending import Bill, bill_of


def read_prices(path: str) -> PriceTable | None:
    """The table of a path, else that of the setting ``prices``; None without either. Raises ``UsageError``."""
    named = path or Settings().prices
    if not named:
        return None
    try:
        return PriceTable.parse(Path(named).read_text(encoding="utf-8"), named)
    except UserError as error:
        raise UsageError(str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        where = "--prices" if path else "the setting prices (ORCHESTRATOR_PRICES):"
        raise UsageError(f"{where} {named} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def hours_left(snapshot: Snapshot, left_s: Mapping[str, float]) -> tuple[float, float]:
    """GPU-hours, and core-hours of jobs without GPUs, that jobs with so many seconds left will hold.

    A running job holds what its attempt has, by which its time left is counted.
    """
    held = {job.name: job.resources for job in snapshot.plan.jobs} if snapshot.plan is not None else {}
    live = {view.name: view.attempt for view in snapshot.jobs.values() if view.attempt is not None}
    held |= {name: attempt.resources for name, attempt in live.items() if name in held}
    amounts = [(held[name], seconds / 3600.0) for name, seconds in left_s.items() if name in held]
    gpu_hours = sum(resources.gpus * hours for resources, hours in amounts)
    return gpu_hours, sum(resources.cpus * hours for resources, hours in amounts if not resources.gpus)


def cost_lines(bill: Bill, prices: PriceTable | None, expected: float | None) -> Iterator[str]:
    """Cost so far and expected total cost; empty without any price."""
    if not bill.is_known:
        if prices is not None:
            yield f"Cost so far unknown: {_unpriced(bill)} have no price{_why_unpriced(bill)}"
    elif bill.is_partial:
        least = show_money(bill.amount, prices)
        yield f"Cost so far at least {least}: {_unpriced(bill)} have no known price{_market(bill)}"
    elif bill.gpu_hours or bill.core_hours:
        in_all = "" if expected is None else f", about {show_money(expected, prices)} in all"
        yield f"Cost so far {show_money(bill.amount, prices)}{in_all}"


def cost_document(bill: Bill, prices: PriceTable | None, expected: float | None) -> dict[str, Any]:
    """The same for machines; unknown amounts are null."""
    return {
        "amount": bill.amount if bill.is_known else None,
        "is_partial": bill.is_partial,
        "expected": expected,
        "currency": prices.currency if prices is not None else "",
        "unpriced_gpu_hours": bill.unpriced_gpu_hours,
        "unpriced_core_hours": bill.unpriced_core_hours,
    }


def sweep_bill(snapshot: Snapshot, prices: PriceTable | None, now: float) -> Bill:
    """Cost of all attempts of a sweep until now."""
    return bill_of(snapshot.uses(now), prices)


def show_money(amount: float, prices: PriceTable | None) -> str:
    """``1,234.50 USD``; labels of nodes have no currency."""
    return (prices or PriceTable(prices={})).show(amount)


def _why_unpriced(bill: Bill) -> str:
    return _market(bill) or ", neither by a node's label nor by the table"


def _market(bill: Bill) -> str:
    """``: ...`` where hours would have a price, were it known which of two."""
    if not bill.unknown_market_hours:
        return ""
    is_all = math.isclose(bill.unknown_market_hours, bill.unpriced_gpu_hours + bill.unpriced_core_hours)
    return f": {'' if is_all else 'of some '}it is not known whether the machine was spot"


def _unpriced(bill: Bill) -> str:
    parts = [f"{_hours(bill.unpriced_gpu_hours)} GPU-hours"] if bill.unpriced_gpu_hours else []
    parts += [f"{_hours(bill.unpriced_core_hours)} core-hours"] if bill.unpriced_core_hours else []
    return " and ".join(parts)


def _hours(hours: float) -> str:
    return f"{hours:,.2f}" if hours >= 0.01 else "less than 0.01"
