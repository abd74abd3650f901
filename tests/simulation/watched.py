"""The true store, the cluster and the log, each with an eye on what must never happen there."""

from __future__ import annotations

import logging
import traceback
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from orchestrator.backends.protocol import ANYWHERE, AttemptReport, Placement
from orchestrator.backends.simulated import SimulatedCluster
from orchestrator.backends.simulated.attempt import LiveAttempt, Phase
from orchestrator.controller.attempt_tracker import ATTEMPT_STOP_GRACE_S
from orchestrator.core.contract import JobRequest, Resources
from orchestrator.core.errors import FailureKind, OrchestratorError, TransitionError
from orchestrator.scheduling.occupancy import ROOM_KEPT_S
from orchestrator.storage.protocol import ObjectStat
from orchestrator.testing.memory_store import MemoryStore
from tests.simulation.audit import Audit, require

MAX_STOP_S = 400.0
"""The grace that stopped attempts have, and some rounds of the controller."""
ASKED_WITHIN_S = 60.0
"""After which a client's wish has reached the attempts that must end, where nothing goes wrong."""
ENDED_WITHIN_S = ATTEMPT_STOP_GRACE_S + 60.0
"""After which an attempt has ended that was asked to, where nothing goes wrong."""


class AuditedStore(MemoryStore):
    """The true store: tells the audit of every object that is new, and refuses to rewrite what is committed."""

    audit: Audit
    trace: Callable[[str], None]
    after_append: Callable[[], None]

    def put(self, name: str, content: bytes) -> ObjectStat:
        is_new = not self.exists(name)
        is_fixed = "/journal/" in name or name.endswith("/record.json")
        require(is_new or not is_fixed, f"{name} is rewritten")
        stat = super().put(name, content)
        if is_new and is_fixed:
            self.trace(f"+ {name}")
            self.audit.written(name, content)
            if "/journal/" in name:
                self.after_append()
        return stat

    def copy_to(self, other: AuditedStore) -> None:
        """Give another store all that this one holds."""
        other._objects, other._names = dict(self._objects), list(self._names)
        other._uri = self._uri


class WatchedCluster(SimulatedCluster):
    """Checks every command that has an effect against what is durable at that moment."""

    def __init__(self, name: str, audit: Audit, trace: Callable[[str], None], *rest: Any, **options: Any) -> None:
        self.name = name
        self.audit, self.trace = audit, trace
        self.others: list[WatchedCluster] = []
        """Clusters that must not work on a key at the same time as this one."""
        self.loses_track = True
        """Whether attempts may be unknown to every journal: controllers die, or requests fail."""
        self.drained_since_s: float | None = None
        self._asked_at_s: dict[str, float] = {}
        """When each attempt was first asked to end."""
        super().__init__(*rest, **options)

    def start(
        self, request: JobRequest, resources: Resources, num_workers: int, placement: Placement = ANYWHERE
    ) -> None:
        known = self.audit.launched.get(request.attempt_id)
        require(known is not None, f"{request.attempt_id} is launched, and no journal knows of it")
        require(known == (self.name, self.epoch), f"{request.attempt_id} of {known} is launched in epoch {self.epoch}")
        self._check_alone(request)
        self._check_room(resources)
        self._check_nodes(resources.share(num_workers), placement)
        failures = self.audit.sweeps[request.sweep].jobs[request.job].failures
        told, counted = request.execution.memory_retries, failures["out_of_memory"]
        require(told == counted, f"{request.attempt_id} is told of {told} failures of memory, not {counted}")
        rests_s = 0.0 if self.drained_since_s is None else self.clock() - self.drained_since_s
        require(rests_s < 300.0, f"{request.attempt_id} is launched {rests_s:.0f} s after {self.name} was drained")
        self.trace(f"{self.name}: launch {request.attempt_id} on {resources}")
        super().start(request, resources, num_workers, placement)

    def _check_alone(self, request: JobRequest) -> None:
        for cluster in (self, *self.others):
            twins = [attempt.attempt_id for attempt in cluster.working() if attempt.request.key == request.key]
            require(not twins, f"{request.attempt_id} is launched on {self.name} while {twins} run on {cluster.name}")

    def working(self) -> list[Any]:
        """Attempts that have not ended as far as anybody was told."""
        return [attempt for attempt in self.attempts.values() if attempt.report is None]

    def _check_room(self, resources: Resources) -> None:
        """What was asked for before a node went away stays; beyond what all nodes have, nothing may be asked for (of an
        autoscaler a quarter more, without any GPU a quarter of what it may add, or one attempt). Whoever waited long
        for nodes gave its room to others.
        """
        if not resources.gpus:
            return
        now = self.clock()
        asked = [
            attempt.resources.gpus
            for attempt in self.working()
            if not (attempt.phase is Phase.WAITING and now - attempt.launched_at_s > ROOM_KEPT_S)
        ]
        total = sum(node.group.shape.gpus for node in self.nodes.values())
        asked.append(resources.gpus)
        gpus = sum(asked)
        # The one that is more than a quarter may be another: beside it, what nodes have room for is started.
        base = total or sum(group.shape.gpus * group.count for group in self.spec.groups)
        limit = total + (max(base / 4.0, *asked) if self.spec.grows else 0.0)
        require(gpus <= limit + 1e-6, f"{gpus:g} GPUs are asked for in all, of {limit:g}")

    def _check_nodes(self, share: Resources, placement: Placement) -> None:
        """No node is named for more than it has."""
        gpus: dict[str, float] = defaultdict(float)
        for name in placement.nodes:
            gpus[name] += share.gpus
        asked = set(placement.nodes)
        for attempt in self.working() if asked else ():
            for name in asked.intersection(attempt.placement.nodes):
                gpus[name] += attempt.placement.nodes.count(name) * attempt.resources.gpus / attempt.num_workers
        for name in placement.nodes:
            has = self.nodes[name].group.shape.gpus
            require(gpus[name] <= has + 1e-6, f"{gpus[name]:g} of {has:g} GPUs of {name} are asked for")

    def stop(self, attempt_id: str) -> None:
        self._asked_at_s.setdefault(attempt_id, self.clock())
        super().stop(attempt_id)

    def kill(self, attempt_id: str, reason: str, kind: FailureKind) -> None:
        waited_s = self.clock() - self._asked_at_s.get(attempt_id, self.clock())
        require(self.loses_track or waited_s < MAX_STOP_S, f"{attempt_id} was asked to end {waited_s:.0f} s ago")
        super().kill(attempt_id, reason, kind)

    def _end(self, attempt: LiveAttempt, report: AttemptReport, **how: Any) -> None:
        fate = attempt.fate
        if fate.rank >= 0 and report.failure is not None and report.failure.message == fate.message:
            self.audit.broke(attempt.attempt_id, attempt.by_rank[fate.rank % len(attempt.by_rank)])
        super()._end(attempt, report, **how)

    def release(self, attempt_id: str) -> None:
        attempt = self.attempts.get(attempt_id)
        if attempt is not None:
            sweep = self.audit.sweeps[attempt.request.sweep]
            is_live = attempt_id in sweep.live or attempt_id in sweep.leaving
            require(not is_live or sweep.cluster != self.name, f"{attempt_id} is released, and it is live")
        super().release(attempt_id)

    def check_promptness(self) -> None:
        """What a client wants to end is asked to, and what was asked has ended, both soon."""
        now_s, working = self.clock(), {attempt.attempt_id for attempt in self.working()}
        for attempt_id in working:
            waits_s = now_s - self._asked_at_s.get(attempt_id, now_s)
            require(waits_s <= ENDED_WITHIN_S, f"{attempt_id} was asked to end {waits_s:.0f} s ago and works on")
        for sweep in self.audit.sweeps.values():
            waits_s = 0.0 if sweep.ends_since_s is None else now_s - sweep.ends_since_s
            if sweep.cluster != self.name or waits_s <= ASKED_WITHIN_S:
                continue
            for attempt_id in working.intersection(sweep.live):
                is_asked = attempt_id in self._asked_at_s
                require(
                    is_asked, f"{sweep.name} is {sweep.state} since {waits_s:.0f} s; nobody asks {attempt_id} to end"
                )

    def abandon(self, attempt_id: str) -> None:
        require(self.loses_track, f"nobody asks about {attempt_id} any more, and nothing was lost")
        self.trace(f"{self.name}: abandon {attempt_id}")
        self.kill(attempt_id, "no sweep knows it", FailureKind.NODE_LOST)
        super().release(attempt_id)


class BugCatcher(logging.Handler):
    """Finds faults of the program among those that the controller survives: its fleet logs them and reads the sweep
    again.
    """

    def __init__(self, trace: Callable[[str], None]) -> None:
        super().__init__()
        self._trace = trace
        self.bugs: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._trace(f"log: {record.getMessage()}")
        error = record.exc_info[1] if record.exc_info and record.name.endswith(".fleet") else None
        if error is not None and (not isinstance(error, OrchestratorError) or isinstance(error, TransitionError)):
            self.bugs.append("".join(traceback.format_exception(error)))
