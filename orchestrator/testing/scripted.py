"""A backend whose attempts do what a script says, and which detects what a controller must never do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from orchestrator.backends.protocol import ANYWHERE, AttemptReport, AttemptStatus, Capacity, Node, Placement
from orchestrator.core.contract import JobFailure, JobRequest, JobResult, Outcome, Progress, Resources, Timings
from orchestrator.core.errors import FailureKind
from orchestrator.planning.graph.plan import Plan
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.protocol import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Succeed:
    """Commit a tiny record and succeed at the observation after ``after_observes`` others."""

    after_observes: int = 1
    metrics: Mapping[str, float] | None = None
    commits: int = 1
    """0 = claim a success without any record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """Fail at the first observation."""

    kind: FailureKind = FailureKind.UNKNOWN
    message: str = "scripted failure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lose:
    """Be lost at the first observation; with ``commits=1`` the record is there all the same."""

    commits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Run until stopped, or with ``obeys=0`` until killed; report ``steps`` steps and then no more."""

    obeys: int = 1
    steps: int = 1_000_000


Script: TypeAlias = Succeed | Fail | Lose | Hang


@dataclass(slots=True, kw_only=True)
class _Attempt:
    request: JobRequest
    resources: Resources
    script: Script
    num_observes: int = 0
    report: AttemptReport | None = None
    """Set once ended."""


class ScriptedBackend:
    """See ``Backend``. The n-th attempt at a job follows the n-th script under its name, or the last, or ``Succeed()``.

    Survives its controller: give the same backend to the next one. ``launch`` raises ``AssertionError`` if a key would
    be live twice or the cluster overfull.
    """

    def __init__(
        self,
        store: ObjectStore,
        scripts: Mapping[str, Sequence[Script]] | None = None,
        *,
        total: Resources | None = None,
    ) -> None:
        self._store = store
        self._scripts = dict(scripts or {})
        self.total = total or Resources(cpus=4.0, gpus=0.0, memory_gib=16.0)
        self._attempts: dict[str, _Attempt] = {}
        self._num_tries: dict[str, int] = defaultdict(int)
        self.launched: list[JobRequest] = []
        self.placements: dict[str, Placement] = {}
        self.killed: list[str] = []
        self.stopped: list[str] = []
        self.released: list[str] = []
        self.epochs: list[int] = []

    def announce(self, epoch: int) -> None:
        """See ``Backend``."""
        self.epochs.append(epoch)

    def why_not(self, plan: Plan) -> str:
        """Never: what is run is scripted."""
        return ""

    def capacity(self) -> Capacity:
        """One node that is the whole cluster."""
        machine = Node(name="node-1", resources=self.total)
        return Capacity(total=self.total, nodes=(self.total,), machines=(machine,))

    @property
    def live(self) -> list[JobRequest]:
        """Requests of the attempts that have not ended."""
        return [attempt.request for attempt in self._attempts.values() if attempt.report is None]

    def launch(self, request: JobRequest, resources: Resources, placement: Placement = ANYWHERE) -> None:
        """See ``Backend``."""
        if request.attempt_id in {earlier.attempt_id for earlier in self.launched}:
            return
        twice = [other.attempt_id for other in self.live if other.key == request.key]
        assert not twice, f"{request.attempt_id} launched while {twice} is live"  # noqa: S101 - a fake that checks
        used_cpus = sum(a.resources.cpus for a in self._attempts.values() if a.report is None)
        assert used_cpus + resources.cpus <= self.total.cpus + 1e-6, "more launched than fits"  # noqa: S101
        scripts = self._scripts.get(request.job) or [Succeed()]
        script = scripts[min(self._num_tries[request.job], len(scripts) - 1)]
        self._num_tries[request.job] += 1
        self._attempts[request.attempt_id] = _Attempt(request=request, resources=resources, script=script)
        self.launched.append(request)
        self.placements[request.attempt_id] = placement

    def observe(self, attempt_ids: Collection[str], *, are_all: bool = True) -> list[AttemptReport]:
        """See ``Backend``; every call moves the scripts of the attempts asked for one step on."""
        return [self._observe(attempt_id) for attempt_id in attempt_ids]

    def stop(self, attempt_id: str) -> None:
        """See ``Backend``: the attempt ends as preempted."""
        self.stopped.append(attempt_id)
        attempt = self._attempts.get(attempt_id)
        if attempt is None or (isinstance(attempt.script, Hang) and not attempt.script.obeys):
            return
        attempt.report = attempt.report or _failed(attempt.request, FailureKind.PREEMPTED, "stopped")

    def kill(self, attempt_id: str, reason: str, kind: FailureKind = FailureKind.NODE_LOST) -> None:
        """See ``Backend``."""
        self.killed.append(attempt_id)
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and attempt.report is None:
            is_lost = kind is FailureKind.NODE_LOST
            attempt.report = _lost(attempt_id, reason) if is_lost else _failed(attempt.request, kind, reason)

    def release(self, attempt_id: str) -> None:
        """See ``Backend``: the end of the attempt is forgotten."""
        self.released.append(attempt_id)
        if attempt_id in self._attempts and self._attempts[attempt_id].report is not None:
            del self._attempts[attempt_id]

    def close(self) -> None:
        """See ``Backend``."""

    def kill_all(self) -> None:
        """All runners die: every live attempt is lost."""
        for attempt in self._attempts.values():
            attempt.report = attempt.report or _lost(attempt.request.attempt_id)

    def _observe(self, attempt_id: str) -> AttemptReport:
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            return _lost(attempt_id)
        if attempt.report is None:
            attempt.report = self._next_end(attempt)
            attempt.num_observes += 1
        return attempt.report or AttemptReport(
            attempt_id=attempt_id,
            status=AttemptStatus.RUNNING,
            progress=Progress(phase="train", step=_step(attempt), total_steps=10),
        )

    def _next_end(self, attempt: _Attempt) -> AttemptReport | None:
        match attempt.script:
            case Fail(kind=kind, message=message):
                return _failed(attempt.request, kind, message)
            case Lose(commits=commits):
                if commits:
                    _commit(self._store, attempt.request, {})
                return _lost(attempt.request.attempt_id)
            case Succeed() as script if attempt.num_observes >= script.after_observes:
                return self._succeed(attempt.request, script)
            case _:
                return None

    def _succeed(self, request: JobRequest, script: Succeed) -> AttemptReport:
        result = JobResult(
            attempt_id=request.attempt_id,
            key=request.key,
            outcome=_commit(self._store, request, script.metrics or {}) if script.commits else Outcome.COMMITTED,
            timings=Timings(work_s=1.0),
        )
        return AttemptReport(attempt_id=request.attempt_id, status=AttemptStatus.SUCCEEDED, result=result)


def _commit(store: ObjectStore, request: JobRequest, metrics: Mapping[str, float]) -> Outcome:
    writer = ArtifactWriter(store, request)
    writer.add("payload", request.attempt_id.encode())
    return writer.commit(now=0.0, metrics=metrics)


def _failed(request: JobRequest, kind: FailureKind, message: str) -> AttemptReport:
    failure = JobFailure(attempt_id=request.attempt_id, key=request.key, kind=kind, message=message)
    return AttemptReport(attempt_id=request.attempt_id, status=AttemptStatus.FAILED, failure=failure)


def _lost(attempt_id: str, reason: str = "scripted loss") -> AttemptReport:
    return AttemptReport(attempt_id=attempt_id, status=AttemptStatus.LOST, lost_reason=reason)


def _step(attempt: _Attempt) -> int:
    """How far a running attempt says it is."""
    most = attempt.script.steps if isinstance(attempt.script, Hang) else attempt.num_observes
    return min(attempt.num_observes, most)
