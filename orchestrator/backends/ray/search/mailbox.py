"""Mailbox between the trials of a search and the runner that drives it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orchestrator.backends.protocol import PLACING_WORKERS
from orchestrator.backends.ray.attempt_log import LoggedProcess
from orchestrator.backends.ray.code_digest import current_digests
from orchestrator.backends.ray.gang.mailbox import GangMailbox, GangShape
from orchestrator.backends.ray.placement_groups import MAX_GAP_S
from orchestrator.core.contract import JobRequest, Progress
from orchestrator.core.job_kinds import JobKind

_STATES = ("uncompiled", "unsaved_s")
"""Names in ``Progress.counters`` of what holds only now, and is no sum."""


class TrialMailbox(GangMailbox):
    """The mailbox of a search: its workers are trials, each with its own progress, and a failed trial is a result."""

    def __init__(self, shape: GangShape) -> None:
        super().__init__(shape)
        self.num_ended = 0
        self.num_trials = 0
        self._progress_by_trial: dict[int, Progress] = {}
        self._counters: dict[int, Mapping[str, float]] = {}
        """Latest sums of each trial's newest attempt."""
        self._past = Counter[str]()
        """Sums of earlier attempts at trials."""
        self._silent_s: dict[int, float] = {}
        """Seconds without a report, by running trial; time counts only between polls."""
        self._not_reported: set[int] = set()
        """Running trials that have not reported yet."""
        self._polled_at_s: float | None = None

    def on_report(self, rank: int, news: Mapping[str, Any]) -> None:
        """Take a trial's report; ``rank`` is its number."""
        self.got_room()
        with self._lock:
            self._not_reported.discard(rank)
            if rank in self._silent_s:
                self._silent_s[rank] = 0.0
            if "progress" in news:
                done = news.get("activity", {}).get("done", 0)
                progress = Progress.from_json(news["progress"], done=done)
                self._progress_by_trial[rank] = progress
                self._count(rank, progress.counters)
                self.progress = self._total()
        super().on_report(rank, {name: news[name] for name in ("process", "machine", "place") if name in news})

    def admits(self, digest: str, own: str) -> bool:
        """Unlike ranks, trials may run different code: one that starts after an upgrade may be newer."""
        return digest == own or digest in current_digests(own)

    def expect(self, trial: int) -> None:
        """Tune is to run a trial, in a process of its own."""
        with self._lock:
            self._not_reported.add(trial)
            self._silent_s[trial] = 0.0
            # Not when it ends: a trial that is stopped still reports while it writes its checkpoint.
            self._past.update(self._counters.pop(trial, {}))
            if trial in self._progress_by_trial:
                self._progress_by_trial[trial] = replace(self._progress_by_trial[trial], images_per_s=0.0, counters={})

    def silent_trial(self, reservations: Mapping[str, bool] | None, now_s: float, limit_s: float) -> int | None:
        """Number of a trial that has not reported for ``limit_s`` seconds; None if there is no such trial.

        Time in which a trial waits for resources, or in which Ray does not answer, does not count.

        Args:
            reservations: the search's, by id, and whether each has its resources; None = Ray does not tell now.
            now_s: time of a monotonic clock.
            limit_s: seconds.
        """
        gap_s = 0.0 if self._polled_at_s is None else min(now_s - self._polled_at_s, MAX_GAP_S)
        self._polled_at_s = now_s
        if reservations is None:
            return None
        has_room = bool(reservations) and all(reservations.values())
        with self._lock:
            for trial in self._silent_s:
                if has_room or trial not in self._not_reported:
                    self._silent_s[trial] += gap_s
            return next((trial for trial, silent_s in sorted(self._silent_s.items()) if silent_s >= limit_s), None)

    def forget(self, trial: int) -> None:
        """The trial has ended, and its process may go."""
        with self._lock:
            self._not_reported.discard(trial)
            self._silent_s.pop(trial, None)
            self.progress = self._total()
        self._processes.pop(trial, None)

    @property
    def logged(self) -> list[LoggedProcess]:
        """The processes of the trials that run."""
        return super().logged

    def _count(self, trial: int, counters: Mapping[str, float]) -> None:
        """Take a trial's sums. The controller would take a total that falls for restarted, and count all of it."""
        before = self._counters.get(trial, {})
        counters = {name: value for name, value in counters.items() if name not in _STATES}
        self._past.update({name: before[name] for name, value in counters.items() if value < before.get(name, 0.0)})
        self._counters[trial] = {**before, **counters}

    def _total(self) -> Progress:
        """The sum over trials: it grows while any makes steps, or goes on without. The rate is of those that run, and
        of their states the highest is told.
        """
        reported, counters = self._progress_by_trial, Counter(self._past)
        for sums in self._counters.values():
            counters.update(sums)
        if not reported:
            return Progress(phase=PLACING_WORKERS)
        running = [one for trial, one in reported.items() if trial in self._silent_s]
        states = {name: max((one.counters.get(name, 0.0) for one in running), default=0.0) for name in _STATES}
        return Progress(
            phase=f"{self.num_ended} of {self.num_trials} trials ended",
            step=sum(one.step for one in reported.values()),
            done=sum(one.done for one in reported.values()),
            images_per_s=sum(one.images_per_s for one in running),
            counters={**counters, **{name: value for name, value in states.items() if value}},
        )


def mailbox_of(request: JobRequest, shape: GangShape | None) -> GangMailbox | None:
    """The mailbox of an attempt of many workers; None for one of a single worker."""
    if shape is None:
        return None
    return TrialMailbox(shape) if request.kind is JobKind.SEARCH else GangMailbox(shape)
