"""The budget guard: may a plan start at all, given what its policy allows? Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from orchestrator.core.units import format_duration, format_money
from orchestrator.planning.estimate.estimates import Estimates
from orchestrator.planning.estimate.makespan import Makespan
from orchestrator.planning.graph.plan import Plan


def refusals(plan: Plan, estimates: Estimates, makespan: Makespan | None, *, now: float) -> list[str]:
    """Why the plan must not start, each with its arithmetic; empty if it may.

    ``now`` is in unix seconds; without a ``makespan`` (no cluster is known) the deadline is checked against nothing.
    """
    return [*_over_gpu_hours(plan, estimates), *_over_cost(plan, estimates), *_too_late(plan, makespan, now)]


def _over_gpu_hours(plan: Plan, estimates: Estimates) -> Iterator[str]:
    allowed = plan.policy.gpu_hours
    if allowed is not None and estimates.gpu_hours > allowed:
        over = estimates.gpu_hours - allowed
        yield (
            f"policy.budget.gpu_hours allows {allowed:,.1f} GPU-hours; {len(estimates.jobs)} jobs to run take about "
            f"{estimates.gpu_hours:,.1f}, {over:,.1f} too many; raise the budget or plan less"
        )


def _over_cost(plan: Plan, estimates: Estimates) -> Iterator[str]:
    allowed, price, prices = plan.policy.cost, plan.policy.gpu_hour_price, estimates.prices
    if allowed is None or not estimates.jobs:
        return
    arithmetic = f"{estimates.gpu_hours:,.1f} GPU-hours"
    cost = estimates.cost
    if prices is None and price:
        cost, arithmetic = estimates.gpu_hours * price, f"{arithmetic} at {price:g}"
    show = prices.show if prices else format_money
    if cost is None:
        lacking = f" (the table has no price of {', '.join(estimates.unpriced())})" if prices else ""
        yield f"policy.budget.cost allows {show(allowed)}, but the price is not known: give --prices FILE{lacking}"
    elif cost > allowed:
        yield (
            f"policy.budget.cost allows {show(allowed)}; the jobs to run cost about {show(cost)} ({arithmetic}), "
            f"{show(cost - allowed)} too much; raise it or plan less"
        )


def _too_late(plan: Plan, makespan: Makespan | None, now: float) -> Iterator[str]:
    policy = plan.policy
    ends_s = [policy.deadline_s] if policy.deadline_s is not None else []
    ends_s += [now + policy.time_limit_s] if policy.time_limit_s is not None else []
    if not ends_s or makespan is None:
        return
    deadline_s = min(ends_s)
    end_s = now + makespan.seconds
    if end_s > deadline_s:
        left, takes = format_duration(max(0.0, deadline_s - now)), format_duration(makespan.seconds)
        yield (
            f"policy's deadline is {_moment(deadline_s)}, in {left}; the jobs to run take about {takes} here, "
            f"until {_moment(end_s)}; ask for more GPUs (the critical path alone takes "
            f"{format_duration(makespan.critical_s)}), plan less, or move the deadline"
        )


def _moment(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, tz=UTC).strftime("%Y-%m-%d %H:%M UTC")
