"""Live progress: one small object per sweep, overwritten, never truth."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.contract import Progress
from orchestrator.errors import NotFoundError
from orchestrator.storage.layout import progress_name
from orchestrator.storage.protocol import ObjectStore

WRITE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProgress:
    """Progress of one running attempt, as of ``at_s`` (when the object was written)."""

    at_s: float
    attempt_id: str
    progress: Progress


class ProgressBoard:
    """Collects the progress of one sweep's attempts and writes it at most once per ``WRITE_EVERY_S``."""

    def __init__(self, store: ObjectStore, sweep: str) -> None:
        self._store = store
        self._name = progress_name(sweep)
        self._current: dict[str, dict[str, Any]] = {}
        self._waits: Mapping[str, str] = {}
        self._written: dict[str, dict[str, Any]] = {}
        self._write_at_s = 0.0

    def show(self, job: str, attempt_id: str, progress: Progress) -> None:
        """Note where an attempt is."""
        self._current[job] = {"attempt_id": attempt_id, "progress": asdict(progress)}

    def remove(self, job: str) -> None:
        """Forget a job whose attempt has ended."""
        self._current.pop(job, None)

    def explain(self, waits: Mapping[str, str]) -> None:
        """Note why jobs wait, in place of what was told before; a running attempt's own progress goes first."""
        if waits != self._waits:
            for job in self._waits.keys() - waits.keys():
                if not self._current.get(job, {}).get("attempt_id"):
                    self.remove(job)
            self._waits = dict(waits)
        for job, reason in waits.items():
            if not self._current.get(job, {}).get("attempt_id"):
                self.show(job, "", Progress(phase=reason))

    def flush(self, now: float) -> None:
        """Write what has changed, when it is time."""
        if self._current == self._written or now < self._write_at_s:
            return
        self._store.put(self._name, json.dumps({"at_s": now, "jobs": self._current}).encode())
        self._written = dict(self._current)
        self._write_at_s = now + WRITE_EVERY_S


def read_progress(store: ObjectStore, sweep: str) -> Mapping[str, LiveProgress]:
    """Latest progress by job; empty if there is none."""
    try:
        document = json.loads(store.get(progress_name(sweep)))
    except NotFoundError:
        return {}
    return {
        job: LiveProgress(
            at_s=document["at_s"], attempt_id=line["attempt_id"], progress=Progress.from_json(line["progress"])
        )
        for job, line in document["jobs"].items()
    }
