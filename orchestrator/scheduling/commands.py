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
    """What it gets; ``None`` = what its job asks for."""
    num_workers: int = 0
    """Ranks that it gets; 0 = as many as its job asks for."""
    nodes: tuple[str, ...] = ()
    """Names of nodes, one per rank; empty = anywhere."""
    exclude: tuple[str, ...] = ()
    """Nodes to keep away from where ``nodes`` names none."""
    awaits_room: bool = False
    """Whether the cluster is to grow for it: there is no room for it yet."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkReused:
    """The key of a ready job is committed already."""

    sweep: str
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailJob:
    """Give a job up."""

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
    """Nobody wants the attempt's outcome any more: let it write a checkpoint and end."""

    sweep: str
    attempt_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptAttempt:
    """The attempt's room is wanted, or it is to go on at another size: let it write a checkpoint and end."""

    sweep: str
    attempt_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TripSweep:
    """Start nothing more of a sweep: its jobs all fail alike, or what it may use is spent."""

    sweep: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludeNode:
    """Send no attempts to a node for a while; ``sweep`` is the one whose journal tells so."""

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
