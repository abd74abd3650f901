"""Mailbox between the trials of a search and the runner that drives it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from orchestrator.backends.protocol import PLACING_WORKERS
from orchestrator.backends.ray.attempt_log import LoggedProcess
from orchestrator.backends.ray.digest import current_digests
from orchestrator.backends.ray.gang.mailbox import GangMailbox, GangShape
from orchestrator.backends.ray.placement_groups import MAX_GAP_S
from orchestrator.core.contract import JobRequest, Progress
from orchestrator.core.job_kinds import JobKind


class TrialMailbox(GangMailbox):
    """As a gang's, but that its workers are trials: each has its own progress, and their failures are answers."""

    def __init__(self, shape: GangShape) -> None:
        super().__init__(shape)
        self.num_ended = 0
        self.num_trials = 0
        self._heard: dict[int, Progress] = {}
        self._silent_s: dict[int, float] = {}
        """By trial that is to run: seconds for which it has said nothing, as far as somebody looked."""
        self._unheard: set[int] = set()
        """Those of them that have said nothing yet."""
        self._looked_at_s: float | None = None

    def on_report(self, rank: int, news: Mapping[str, Any]) -> None:
        """Take what a trial says; ``rank`` is its number."""
        self.got_room()
        with self._lock:
            self._unheard.discard(rank)
            if rank in self._silent_s:
                self._silent_s[rank] = 0.0
        if "progress" in news:
            self._heard[rank] = Progress.from_json(news["progress"])
            self.progress = self._total()
        super().on_report(rank, {name: news[name] for name in ("process", "machine", "place") if name in news})

    def admits(self, digest: str, own: str) -> bool:
        """As a gang's, but that trials train models of their own: one that starts after an upgrade may be newer."""
        return digest == own or digest in current_digests(own)

    def expect(self, trial: int) -> None:
        """Tune is to run a trial, in a process of its own."""
        with self._lock:
            self._unheard.add(trial)
            self._silent_s[trial] = 0.0

    def silent_trial(self, rooms: Mapping[str, bool] | None, now_s: float, limit_s: float) -> int | None:
        """Number of a trial that has said nothing for ``limit_s`` seconds; none if there is no such trial.

        Time in which a trial waits for room, or in which Ray does not answer, does not count.

        Args:
            rooms: the search's reservations by id, and whether each holds something; None = nobody can tell now.
            now_s: on a clock that never goes back.
            limit_s: seconds.
        """
        gap_s = 0.0 if self._looked_at_s is None else min(now_s - self._looked_at_s, MAX_GAP_S)
        self._looked_at_s = now_s
        if rooms is None:
            return None
        has_room = bool(rooms) and all(rooms.values())
        with self._lock:
            for trial in self._silent_s:
                if has_room or trial not in self._unheard:
                    self._silent_s[trial] += gap_s
            return next((trial for trial, silent_s in sorted(self._silent_s.items()) if silent_s >= limit_s), None)

    def forget(self, trial: int) -> None:
        """The trial has ended, and its process may go."""
        with self._lock:
            self._unheard.discard(trial)
            self._silent_s.pop(trial, None)
        self._processes.pop(trial, None)

    @property
    def logged(self) -> list[LoggedProcess]:
        """The processes of the trials that run."""
        return super().logged

    def _total(self) -> Progress:
        """The trials together: their steps add up, so that it moves while any of them does."""
        heard, counters = [*self._heard.values()], Counter[str]()
        for one in heard:
            counters.update(one.counters)
        if not heard:
            return Progress(phase=PLACING_WORKERS)
        return Progress(
            phase=f"{self.num_ended} of {self.num_trials} trials ended",
            step=sum(one.step for one in heard),
            images_per_s=sum(one.images_per_s for one in heard),
            counters=dict(counters),
        )


def mailbox_of(request: JobRequest, shape: GangShape | None) -> GangMailbox | None:
    """The mailbox of an attempt of many workers; None for one of a single worker."""
    if shape is None:
        return None
    return TrialMailbox(shape) if request.kind is JobKind.SEARCH else GangMailbox(shape)
