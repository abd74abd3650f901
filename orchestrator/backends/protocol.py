"""What the controller asks of a backend. Every command is idempotent by attempt id."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from orchestrator.contract import JobFailure, JobRequest, JobResult, Progress, Resources


class AttemptStatus(StrEnum):
    """What a backend knows of an attempt that it was asked about."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    """Its runner is gone, or it was never there: nothing of it will ever take effect again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReport:
    """One answer of ``observe``; ``result`` belongs to SUCCEEDED, ``failure`` to FAILED."""

    attempt_id: str
    status: AttemptStatus
    progress: Progress | None = None
    result: JobResult | None = None
    failure: JobFailure | None = None
    lost_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the cluster has in all (not what is free: the scheduler subtracts what it has launched)."""

    total: Resources
    nodes: tuple[Resources, ...] = ()
    """The different shapes of its nodes: none has all of the cluster, and none need be the largest in everything."""


class Backend(Protocol):
    """Runs attempts. Calls return at once; nothing here blocks a tick for longer than a short, stated timeout."""

    def announce(self, epoch: int) -> None:
        """Make every runner refuse commands of controllers with a lower epoch, before any command is given."""

    def capacity(self) -> Capacity:
        """Resources of the whole cluster at this moment."""

    def launch(self, request: JobRequest, resources: Resources) -> None:
        """Start an attempt; a second call with the same attempt id changes nothing."""

    def observe(self, attempt_ids: Collection[str]) -> list[AttemptReport]:
        """One report for each attempt asked for; an ended one is reported until ``release``."""

    def stop(self, attempt_id: str) -> None:
        """Ask an attempt to write a checkpoint and end."""

    def release(self, attempt_id: str) -> None:
        """Say that the end of an attempt is on record: its runner may take the next one."""

    def close(self) -> None:
        """Let go of everything this backend holds in this process; runners go on."""
