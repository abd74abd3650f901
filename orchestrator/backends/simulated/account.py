"""Where the time of a simulated cluster went."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum


class Purpose(StrEnum):
    """What an attempt's resources were held for."""

    WORK = "work"
    """Work that was kept: it is in a checkpoint that counted, or in the committed result."""
    START = "start"
    CHECKPOINT = "checkpoint"
    """The loop stood still while one was taken, at a stop too."""
    LOST = "lost"
    """Work after the last checkpoint of an attempt that was interrupted."""
    IDLE = "idle"
    """Held without work: hung, or the rest of a gang until its death was noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One attempt on its nodes: what a Gantt chart draws."""

    sweep: str
    job: str
    attempt_id: str
    nodes: tuple[str, ...]
    gpus: tuple[float, ...]
    """On each of the nodes."""
    placed_at_s: float
    worked_from_s: float
    ended_at_s: float
    ending: str
    """``committed``, or what ended it: ``gpu``, ``spot``, ``rack``, ``preempted``, a kind of failure, ..."""


@dataclass(slots=True, kw_only=True)
class Account:
    """Resource-seconds by purpose. The resource is GPUs where the cluster has any, else CPUs."""

    seconds: dict[Purpose, float] = field(default_factory=lambda: dict.fromkeys(Purpose, 0.0))
    lost_by_cause: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Work lost, and time idle, by what ended the attempts."""
    num_ends: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Attempts by how they ended."""
    spans: list[Span] = field(default_factory=list)
    available_s: float = 0.0
    """Resource-seconds of nodes that were up, from the first moment to the latest measurement."""

    @property
    def allocated_s(self) -> float:
        """All that attempts held."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Effective training time by allocated time, start-up included, in [0, 1]; 1 if nothing was allocated."""
        return self.seconds[Purpose.WORK] / self.allocated_s if self.allocated_s else 1.0

    @property
    def utilisation(self) -> float:
        """Allocated by available time, in [0, 1]."""
        return self.allocated_s / self.available_s if self.available_s else 0.0

    def add(self, purpose: Purpose, amount_s: float, *, cause: str = "") -> None:
        """Book some resource-seconds."""
        self.seconds[purpose] += amount_s
        if amount_s > 0.0 and cause and purpose in {Purpose.LOST, Purpose.IDLE}:
            self.lost_by_cause[cause] += amount_s
