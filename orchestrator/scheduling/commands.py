"""Commands of the scheduler; the controller journals and executes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from orchestrator.core.contract import Resources
from orchestrator.state.events import SweepEnding


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """Start an attempt."""

    sweep: str
    job: str
    resources: Resources | None = None
    """Its resources; ``None`` = those that its job requests."""
    num_workers: int = 0
    """Its number of ranks; 0 = as many as its job requests."""
    nodes: tuple[str, ...] = ()
    """Names of nodes, one per rank; empty = anywhere."""
    exclude: tuple[str, ...] = ()
    """Nodes that it must not use, if ``nodes`` is empty."""
    awaits_room: bool = False
    """Whether the autoscaler is to add nodes for it: it does not fit yet."""
    aging: int = 0
    """By how much waiting raised the priority of its sweep."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkReused:
    """The key of a ready job is committed already."""

    sweep: str
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailJob:
    """Mark a job as failed."""

    sweep: str
    job: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipJob:
    """A job that this one needs will never have an artifact."""

    sweep: str
    job: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelJob:
    """The sweep is being ended and the job has not started."""

    sweep: str
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAttempt:
    """Stop an attempt whose outcome is not needed any more: it writes a checkpoint and ends."""

    sweep: str
    attempt_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptAttempt:
    """Preempt an attempt, for its resources or to continue at another size: it writes a checkpoint and ends."""

    sweep: str
    attempt_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TripSweep:
    """Start no more jobs of a sweep: its jobs all fail in the same way, or its budget is spent."""

    sweep: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludeNode:
    """Exclude a node for some time; ``sweep`` is the one whose journal records it."""

    sweep: str
    node: str
    reason: str
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishSweep:
    """Every job has ended."""

    sweep: str
    status: SweepEnding


Command: TypeAlias = (
    LaunchJob
    | MarkReused
    | FailJob
    | SkipJob
    | CancelJob
    | StopAttempt
    | PreemptAttempt
    | TripSweep
    | ExcludeNode
    | FinishSweep
)
