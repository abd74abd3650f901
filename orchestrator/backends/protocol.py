"""The interface of a backend for the controller. Every command is idempotent by attempt id."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from orchestrator.core.contract import JobFailure, JobRequest, JobResult, Progress, Resources
from orchestrator.core.errors import FailureKind
from orchestrator.planning.graph.plan import Plan
from orchestrator.state.nodes import Node

__all__ = ["ANYWHERE", "AttemptReport", "AttemptStatus", "Backend", "Capacity", "Node", "Placement"]

PLACING, PLACING_WORKERS, RECONNECTING = "placing", "placing workers", "reconnecting"
"""Phases of an attempt before its runner or its gang's workers have resources, and while its runner is looked up."""
WAITING_PHASES = frozenset({PLACING, PLACING_WORKERS, RECONNECTING, "queued"})
"""Phases in which an attempt waits for the cluster, which is no fault of its own."""


class AttemptStatus(StrEnum):
    """The status of an attempt, as the backend reports it."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    """Its runner is gone, or it never started: nothing that it does will have an effect."""
    OVERTAKEN = "overtaken"
    """Its runner obeys a later controller and does not report to this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReport:
    """One answer of ``observe``; ``result`` belongs to SUCCEEDED, ``failure`` to FAILED."""

    attempt_id: str
    status: AttemptStatus
    progress: Progress | None = None
    result: JobResult | None = None
    failure: JobFailure | None = None
    lost_reason: str = ""
    node: str = ""
    """Name of the node where it runs or ran, of a gang that of its runner; empty = not known, or it was lost and its
    node is not at fault."""
    worker_nodes: tuple[str, ...] = ()
    """For a gang: the nodes of its workers by rank, once all of them are known."""
    machines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Hardware of its nodes, by name, as far as its processes have reported it; see ``metrics.machine``."""
    placed_for_s: float | None = 0.0
    """Seconds since it got its resources; None = it waits for them, or it ended without having had any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The resources of the whole cluster (not what is free: the scheduler subtracts what it has launched)."""

    total: Resources
    nodes: tuple[Resources, ...] = ()
    """The different shapes of its nodes; no node needs to be the largest in every resource."""
    machines: tuple[Node, ...] = ()
    """The nodes themselves; empty where a backend knows none."""
    absent: tuple[Node, ...] = ()
    """Nodes that were lost a short while ago and may come back, as machines do after a restart; none is alive."""
    host: Node | None = None
    """The one machine on which every attempt runs, whatever its placement; None = several, or none is known."""
    maximum: tuple[Node, ...] | None = None
    """Kinds of nodes that an autoscaler would add; none = the cluster does not grow."""
    is_settled: bool = True
    """Whether no other nodes are expected than these: none has joined for some time, and none can have been lost that
    the backend does not know of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where an attempt should go."""

    nodes: tuple[str, ...] = ()
    """Names of nodes, one per worker of a gang, or one; empty = anywhere."""
    exclude: tuple[str, ...] = ()
    """Names of nodes on which it must not run."""


ANYWHERE = Placement()


class Backend(Protocol):
    """Runs attempts. Calls return at once; nothing here blocks a tick for longer than a short, stated timeout."""

    def announce(self, epoch: int) -> None:
        """Make every runner refuse commands of controllers with a lower epoch, before any command is given."""

    def why_not(self, plan: Plan) -> str:
        """Why a plan that is submitted could not be run here, in words for its sender; empty if it could."""

    def capacity(self) -> Capacity:
        """Resources of the whole cluster at this moment."""

    def launch(self, request: JobRequest, resources: Resources, placement: Placement = ANYWHERE) -> None:
        """Start an attempt; a second call with the same attempt id changes nothing.

        A node that is gone meanwhile is no error: the attempt goes elsewhere, or is reported as lost.
        """

    def observe(self, attempt_ids: Collection[str], *, are_all: bool = True) -> list[AttemptReport]:
        """One report for each attempt asked for; an ended one is reported until ``release``.

        ``are_all``: no journal knows any other attempt. One that is not asked for in a while is ended then.
        """

    def stop(self, attempt_id: str) -> None:
        """Ask an attempt to write a checkpoint and end."""

    def kill(self, attempt_id: str, reason: str, kind: FailureKind = FailureKind.NODE_LOST) -> None:
        """End an attempt at once; ``observe`` then reports it as lost, or as failed with the given kind.

        Of one that hangs (``HANG``) the stacks of its processes come into its log first, so it may end seconds later.
        An attempt that has ended already, or that no runner has, is left alone.
        """

    def release(self, attempt_id: str) -> None:
        """Confirm that the end of an attempt is recorded: its runner may take the next one."""

    def close(self) -> None:
        """Release everything that this backend holds in this process; runners continue."""
