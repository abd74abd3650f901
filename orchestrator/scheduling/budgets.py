"""What a sweep may still use: GPU-hours, cost, time, GPUs and attempts at once. Pure; every refusal has its numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

from orchestrator.sweepfile.values import Policy

WARN_AT = 0.8
ANYBODY = "*"
"""The key of the limits of all users without their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """Limits of all live attempts of one sweep, or of one user; ``None`` = no limit."""

    max_gpus: float | None = None
    max_concurrent: int | None = None

    def refusal(self, owner: str, gpus: float, num_live: int, requested: float) -> str:
        """Why one more attempt may not start; empty if it may."""
        if self.max_concurrent is not None and num_live >= self.max_concurrent:
            attempts = "attempt" if num_live == 1 else "attempts"
            return f"{owner} runs {num_live} {attempts}, of max_concurrent={self.max_concurrent}"
        if requested and self.max_gpus is not None and gpus + requested > self.max_gpus + 1e-6:
            return f"{owner} holds {gpus:g} GPUs and {requested:g} more would exceed max_gpus={self.max_gpus:g}"
        return ""

    def num_more(self, gpus: float, num_live: int, requested: float) -> float:
        """How many more such attempts may start; infinite without a limit."""
        by_count = math.inf if self.max_concurrent is None else self.max_concurrent - num_live
        if not requested or self.max_gpus is None:
            return by_count
        return min(by_count, (self.max_gpus + 1e-6 - gpus) // requested)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadCap(Cap):
    """In place of limits that are not known: nothing starts and nothing grows until they are."""

    max_gpus: float | None = 0.0
    max_concurrent: int | None = 0

    def refusal(self, owner: str, gpus: float, num_live: int, requested: float) -> str:
        """See ``Cap.refusal``."""
        return (
            f"the quotas of the cluster cannot be read, so what {owner} may use is unknown; write them anew: "
            "orchestrator quota clear --all, then set them"
        )


@dataclass(slots=True, kw_only=True)
class UserCount:
    """Resources of one user's sweeps during one round of decisions."""

    cap: Cap
    gpus: float = 0.0
    num_live: int = 0


@dataclass(slots=True, kw_only=True)
class Budget:
    """GPU-hours of one sweep during one round of decisions."""

    policy: Policy
    used: float
    """GPU-hours so far, those of live attempts included."""
    promised: float
    """GPU-hours that the live attempts are still expected to take; of those that are ending, their jobs' next ones."""

    def allows(self, gpu_hours: float, *, instead_of: float = 0.0) -> bool:
        """Whether an attempt that takes so many GPU-hours may start, once a live one takes no more of its promised."""
        bound = self.policy.gpu_hour_budget
        return bound is None or not gpu_hours or self.used + self.promised - instead_of + gpu_hours <= bound + 1e-9

    def refusal(self, gpu_hours: float) -> str:
        """Why an attempt that takes so many GPU-hours may not start; empty if it may."""
        bound = self.policy.gpu_hour_budget
        if bound is None or self.allows(gpu_hours):
            return ""
        return (
            f"{self._name(bound)}: {self.used:.3g} GPU-hours are used, running attempts will take {self.promised:.3g} "
            f"more and the next job about {gpu_hours:.3g}"
        )

    def add(self, gpu_hours: float) -> None:
        """Count one more started attempt."""
        self.promised += gpu_hours

    def warning(self) -> str:
        """A warning before anything is refused; empty if there is none."""
        bound = self.policy.gpu_hour_budget
        if bound is None or self.used + self.promised < WARN_AT * bound:
            return ""
        part = (self.used + self.promised) / bound
        return f"{self._name(bound)}: {self.used:.3g} GPU-hours are used, with the running attempts {part:.0%} of it"

    def _name(self, bound: float) -> str:
        if self.policy.gpu_hours == bound:
            return f"the budget is {bound:g} GPU-hours (policy.budget.gpu_hours)"
        price = self.policy.gpu_hour_price
        return (
            f"the budget is {self.policy.cost:g} (policy.budget.cost), at {price:g} per GPU-hour {bound:.3g} GPU-hours"
        )


def overdue(policy: Policy, accepted_at_s: float, now: float) -> str:
    """Why no attempt may start any more; empty while time is left."""
    ends = _ends(policy, accepted_at_s)
    if not ends or now < min(ends)[0]:
        return ""
    at_s, which = min(ends)
    return f"{which} has passed: it was {datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def time_left_s(policy: Policy, accepted_at_s: float, now: float) -> float | None:
    """Seconds until no attempt may start any more."""
    return min((at_s - now for at_s, _ in _ends(policy, accepted_at_s)), default=None)


def _ends(policy: Policy, accepted_at_s: float) -> list[tuple[float, str]]:
    ends = [] if policy.deadline_s is None else [(policy.deadline_s, "policy.deadline")]
    if policy.time_limit_s is not None:
        hours = policy.time_limit_s / 3600.0
        ends.append((accepted_at_s + policy.time_limit_s, f"policy.deadline, {hours:g} h after submission,"))
    return ends
