"""What a sweep may use and how its jobs rank: the resolved form of ``policy:``. It changes no result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self


class PriorityClass(IntEnum):
    """Named priorities; numbers between and beyond them are fine too."""

    LOW = -10
    NORMAL = 0
    HIGH = 10
    URGENT = 100
    """Out of reach of whatever has waited for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """See the fields of ``policy:``; ``None`` = no bound."""

    priority: int = int(PriorityClass.NORMAL)
    weight: float = 1.0
    """Share of a busy cluster, relative to other sweeps of this priority."""
    max_gpus: float | None = None
    """GPUs that all live attempts hold together."""
    max_concurrent: int | None = None
    """Live attempts."""
    max_failures: int = 3
    """Failed attempts per job before the job fails; preemptions, lost nodes and failures of storage do not count."""
    max_preemptions: int = 3
    """Times that the scheduler may take a job's room for a sweep of higher priority."""
    breaker: int = 5
    """Jobs that fail in the same way, with none of their kind done, before the sweep stops; 0 = never."""
    gpu_hours: float | None = None
    cost: float | None = None
    gpu_hour_price: float = 0.0
    """Cost of one GPU-hour, in the currency of ``cost``."""
    deadline_s: float | None = None
    """Unix seconds from which on nothing is started."""
    time_limit_s: float | None = None
    """Seconds after submission from which on nothing is started."""
    users: tuple[str, ...] = ()
    """Who may give the sweep orders besides its owner."""

    @property
    def gpu_hour_budget(self) -> float | None:
        """GPU-hours that all attempts together may use: the smaller of both bounds."""
        bounds = [self.gpu_hours] if self.gpu_hours is not None else []
        bounds += [self.cost / self.gpu_hour_price] if self.cost is not None and self.gpu_hour_price else []
        return min(bounds, default=None)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``dataclasses.asdict``."""
        return cls(**{**document, "users": tuple(document.get("users", ()))})
