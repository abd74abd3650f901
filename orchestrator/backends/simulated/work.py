"""What an attempt does with its time: start, work, checkpoints, an end. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.core.errors import FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWork:
    """What one job needs on its planned resources."""

    work_s: float
    """Seconds of work proper, without start-up, checkpoints and interruptions."""
    checkpoint_every_s: float = 0.0
    """Seconds of work between two checkpoints; 0 = none, so that every interruption loses all."""
    checkpoint_stall_s: float = 0.0
    """For how long a checkpoint holds up the work."""
    cold_start_s: float = 0.0
    """From placement to the first step where a process, or a gang, must start first."""
    warm_start_s: float = 0.0
    """The same on a warm runner."""
    stop_s: float = 0.0
    """From a stop to the end of the attempt: the step that runs, and a checkpoint."""
    steps: int = 100
    """Training steps, evenly spread over the work: what progress is told in."""


class Ending(StrEnum):
    """How an attempt ends if nothing happens to its nodes and nobody stops it."""

    COMMIT = "commit"
    FAIL = "fail"
    """With a failure of ``Fate.kind``."""
    HANG = "hang"
    """It makes no step any more and does not end by itself."""
    DIE = "die"
    """Its runner is gone."""
    COMMIT_AND_DIE = "commit_and_die"
    """Its runner is gone after the commit and before the report."""
    PRETEND = "pretend"
    """It reports a success, and nothing is committed: its record was lost, or its code is wrong."""
    GHOST = "ghost"
    """It is reported lost, goes on all the same and commits: a node that the cluster has given up too early."""
    DEAF = "deaf"
    """It commits, and does not end when it is asked to."""
    NO_ROOM = "no_room"
    """It never gets its room, and is given up after ``NO_ROOM_S``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of one attempt."""

    ending: Ending = Ending.COMMIT
    kind: FailureKind = FailureKind.UNKNOWN
    at_fraction: float = 1.0
    """Where in the work that is left the end comes, in [0, 1]; COMMIT and its kin need all of it."""
    speed: float = 1.0
    """Of this attempt, relative to the job's: a slow node, or another number of GPUs."""
    message: str = ""
    rank: int = -1
    """Of a gang, the rank at fault, counted as often around as needed; -1 = none can be named."""
    step: int | None = None
    """Of a failure of numerics, where it is whatever ``at_fraction`` says; None = where the attempt has come."""


NO_ROOM_S = 240.0
"""As a gang of the Ray backend that was sent to nodes where others came first."""
COMMITTING = frozenset({Ending.COMMIT, Ending.COMMIT_AND_DIE, Ending.PRETEND, Ending.GHOST, Ending.DEAF})


@dataclass(frozen=True, slots=True, kw_only=True)
class Stint:
    """The working time of one attempt, from its first step on."""

    work: JobWork
    saved_s: float
    """Seconds of work that an earlier attempt's checkpoint holds."""
    start_s: float
    """When the first step begins."""
    speed: float = 1.0

    @property
    def end_s(self) -> float:
        """When all work is done; no checkpoint is written at the very end."""
        left_s = max(0.0, self.work.work_s - self.saved_s)
        return self.start_s + left_s / self.speed + self._num_checkpoints(left_s) * self.work.checkpoint_stall_s

    def time_at(self, fraction: float) -> float:
        """When a fraction of the work that is left is done."""
        return self.start_s + fraction * (self.end_s - self.start_s)

    def done_at(self, at_s: float) -> float:
        """Seconds of work done by then, those of earlier attempts included."""
        elapsed_s = min(max(0.0, at_s - self.start_s), self.end_s - self.start_s)
        every_s = self.work.checkpoint_every_s
        if not every_s:
            return min(self.work.work_s, self.saved_s + elapsed_s * self.speed)
        num_full, rest_s = divmod(elapsed_s, self._period_s)
        return min(self.work.work_s, self.saved_s + num_full * every_s + min(every_s, rest_s * self.speed))

    def saved_at(self, at_s: float) -> float:
        """Seconds of work in the newest checkpoint by then."""
        elapsed_s = min(max(0.0, at_s - self.start_s), self.end_s - self.start_s)
        if not self.work.checkpoint_every_s:
            return self.saved_s
        num_full = math.floor(elapsed_s / self._period_s + 1e-9)
        return min(self.work.work_s, self.saved_s + num_full * self.work.checkpoint_every_s)

    @property
    def _period_s(self) -> float:
        return self.work.checkpoint_every_s / self.speed + self.work.checkpoint_stall_s

    def _num_checkpoints(self, left_s: float) -> int:
        every_s = self.work.checkpoint_every_s
        return max(0, math.ceil(left_s / every_s - 1e-9) - 1) if every_s else 0


def young_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Seconds between checkpoints that lose the least time: ``sqrt(2 * stall * mtbf)`` (Young 1974, CACM 17(9))."""
    return math.sqrt(2.0 * stall_s * mtbf_s)
