"""Journals and metric segments of the sample sweep, written by hand as a controller and attempts would."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from orchestrator.core.errors import FailureKind
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.state import events
from orchestrator.storage import ObjectStore
from orchestrator.storage.layout import metrics_segment
from tests.builders import SweepJournal, done, failed, launched
from tests.sample_sweep import START_S, commit, sample_metrics


class SampleJournal:
    """Tells a sweep's story; every event is one second after the one before, starting at ``START_S``."""

    def __init__(self, store: ObjectStore, plan: Plan) -> None:
        self.store = store
        self.plan = plan
        self.now = START_S
        self._journal = SweepJournal(store, plan.sweep)
        self._numbers: dict[str, int] = {}
        self.accept(plan)

    def accept(self, plan: Plan) -> None:
        self.plan = plan
        self._journal.accept(plan, self._tick())

    def launch(self, job: Job) -> None:
        number = self._numbers.get(job.key, 0) + 1
        self._numbers[job.key] = number
        self._append(launched(job, at_s=self._tick(), number=number))

    def fail(self, job: Job, message: str = "boom", kind: FailureKind = FailureKind.UNKNOWN) -> None:
        self._append(failed(job, kind, message, at_s=self._tick(), number=self._numbers[job.key]))

    def give_up(self, job: Job) -> None:
        self._append(events.JobFailed(at_s=self._tick(), job=job.name, reason="no attempts left"))

    def skip(self, job: Job, because: Job) -> None:
        self._append(events.JobSkipped(at_s=self._tick(), job=job.name, because=because.name))

    def succeed(self, job: Job) -> None:
        commit(self.store, job, sweep=self.plan.sweep, at_s=self.now)
        self._append(done(job, self._tick(), self._numbers[job.key], sample_metrics(job)))

    def reuse(self, job: Job) -> None:
        self._append(events.JobReused(at_s=self._tick(), job=job.name, key=job.key))

    def run(self, job: Job) -> None:
        self.launch(job)
        self.succeed(job)

    def run_all(self) -> None:
        for job in self.plan.jobs:
            self.run(job)
        self.finish()

    def finish(self, status: events.SweepEnding = events.SweepEnding.SUCCEEDED) -> None:
        self._append(events.SweepFinished(at_s=self._tick(), status=status))

    def reopen(self) -> None:
        """As a submit of the same file does."""
        self._append(events.SweepReopened(at_s=self._tick(), message_id="again", sender="ada"))

    def _append(self, event: events.Event) -> None:
        self._journal.tell(event)

    def _tick(self) -> float:
        self.now += 1.0
        return self.now


def write_segment(
    store: ObjectStore, key: str, attempt: int, from_step: int, losses: Sequence[float], *, at_s: float = START_S
) -> None:
    """A segment with one line per step after ``from_step``."""
    to_step = from_step + len(losses)
    steps = range(from_step + 1, to_step + 1)
    lines = [_line(step, {"train_loss": loss}, at_s) for step, loss in zip(steps, losses, strict=True)]
    store.put(metrics_segment(key, attempt, from_step, to_step), "".join(lines).encode())


def _line(step: int, metrics: Mapping[str, float], at_s: float) -> str:
    return json.dumps({"step": step, "epoch": step / 10, "at_s": at_s + step, "metrics": dict(metrics)}) + "\n"
