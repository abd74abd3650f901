"""Live progress: one small object per sweep, overwritten, never truth."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.core.contract import Progress
from orchestrator.core.errors import NotFoundError
from orchestrator.core.security.json_text import parse_json
from orchestrator.metrics.sweeps import SlowRank
from orchestrator.storage.bounds import PROGRESS_BYTES
from orchestrator.storage.layout import progress_name
from orchestrator.storage.protocol import ObjectStore

WRITE_EVERY_S = 1.0
SLOW_FROM = 1.5
"""A rank is slow whose own time per step is so many times that of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProgress:
    """Progress of one running attempt, as of ``at_s`` (when the object was written)."""

    at_s: float
    attempt_id: str
    progress: Progress
    num_behind: int = 0
    """Of a job that waits: how many more ready ones wait for the same, and have no line of their own."""


@dataclass(frozen=True, slots=True)
class _Line:
    """What is shown of one job; without an attempt, why it waits."""

    attempt_id: str
    progress: Progress
    num_behind: int = 0

    def to_json(self) -> dict[str, Any]:
        # ``asdict`` copies deeply, and takes ten times as long.
        told = {name: getattr(self.progress, name) for name in Progress.__slots__}
        behind = {"num_behind": self.num_behind} if self.num_behind else {}
        return {"attempt_id": self.attempt_id, "progress": told, **behind}


class ProgressBoard:
    """Collects the progress of one sweep's attempts and writes it at most once per ``WRITE_EVERY_S``."""

    def __init__(self, store: ObjectStore, sweep: str) -> None:
        self._store = store
        self._name = progress_name(sweep)
        self._current: dict[str, _Line] = {}
        self._waits: Mapping[str, str] = {}
        self._behind: Mapping[str, int] = {}
        self._warnings: tuple[str, ...] = ()
        self._quarantined: dict[str, tuple[str, ...]] = {}
        self._slowest: dict[str, SlowRank] = {}
        self._written: tuple[dict[str, _Line], tuple[str, ...]] = {}, ()
        self._write_at_s = 0.0

    def show(self, job: str, attempt_id: str, progress: Progress, worker_nodes: Sequence[str] = ()) -> None:
        """Note where an attempt is; of a gang, on which nodes its ranks are."""
        self._current[job] = _Line(attempt_id, progress)
        slowest = SlowRank.of(progress, worker_nodes)
        if slowest is not None:
            self._slowest[job] = slowest

    def remove(self, job: str) -> None:
        """Forget a job whose attempt has ended."""
        self._current.pop(job, None)
        self._slowest.pop(job, None)

    def explain(self, waits: Mapping[str, str], behind: Mapping[str, int]) -> None:
        """Note why jobs wait, and how many more behind each, in place of what was told before.

        A running attempt's own progress goes first.
        """
        if waits == self._waits and behind == self._behind:
            return
        for job in self._waits.keys() - waits.keys():
            if not self._runs(job):
                self.remove(job)
        self._waits, self._behind = dict(waits), dict(behind)
        for job, reason in waits.items():
            if not self._runs(job):
                self._current[job] = _Line("", Progress(phase=reason), behind.get(job, 0))

    @property
    def running(self) -> dict[str, Progress]:
        """Latest progress of the attempts that run, by job."""
        return {job: line.progress for job, line in self._current.items() if line.attempt_id}

    @property
    def slowest(self) -> dict[str, SlowRank]:
        """The slowest rank of each gang that runs, by job."""
        return dict(self._slowest)

    def warn(self, *warnings: str) -> None:
        """Note what people should know of the sweep as a whole, in place of what was told before."""
        found = [warning for warning in warnings if warning]
        for job, told in list(self._quarantined.items())[:1]:
            others = f" and {len(self._quarantined) - 1} more jobs" if len(self._quarantined) > 1 else ""
            found.append(f"{job}{others} did without samples that cannot be read: {'; '.join(told)}")
        slow = [f"{job}: {one}" for job, one in self._slowest.items() if one.slowdown >= SLOW_FROM]
        uncompiled = [job for job, one in self.running.items() if one.counters.get("uncompiled")]
        self._warnings = (*found, *_first(slow, ""), *_first(uncompiled, _UNCOMPILED))

    def quarantine(self, job: str, told: tuple[str, ...]) -> None:
        """Note that a job has done without some of its samples; that stays."""
        if told:
            self._quarantined[job] = told

    def flush(self, now: float) -> None:
        """Write what has changed, when it is time."""
        if now < self._write_at_s or self._written == (self._current, self._warnings):
            return
        # Only here: a controller sees a thousand attempts ten times a second and writes once.
        jobs = {job: line.to_json() for job, line in self._current.items()}
        self._store.put(self._name, json.dumps({"at_s": now, "jobs": jobs, "warnings": self._warnings}).encode())
        self._written = dict(self._current), self._warnings
        self._write_at_s = now + WRITE_EVERY_S

    def _runs(self, job: str) -> bool:
        line = self._current.get(job)
        return line is not None and bool(line.attempt_id)


_UNCOMPILED = " runs without torch.compile, although compute.compile asks for it: its log says why"


def _first(found: Sequence[str], told: str) -> list[str]:
    """One line for all of them."""
    others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return [f"{found[0]}{told}{others}"] if found else []


def read_warnings(store: ObjectStore, sweep: str) -> tuple[str, ...]:
    """What people should know of an unfinished sweep as a whole: bounds that it comes close to, and the like."""
    try:
        document = parse_json(store.get(progress_name(sweep), max_bytes=PROGRESS_BYTES))
    except NotFoundError:
        return ()
    return tuple(document.get("warnings", ()))


def read_progress(store: ObjectStore, sweep: str) -> Mapping[str, LiveProgress]:
    """Latest progress by job; empty if there is none."""
    try:
        document = parse_json(store.get(progress_name(sweep), max_bytes=PROGRESS_BYTES))
    except NotFoundError:
        return {}
    return {
        job: LiveProgress(
            at_s=document["at_s"],
            attempt_id=line["attempt_id"],
            progress=Progress.from_json(line["progress"]),
            num_behind=line.get("num_behind", 0),
        )
        for job, line in document["jobs"].items()
    }
