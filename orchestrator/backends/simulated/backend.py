"""One controller's connection to a simulated cluster: the ``Backend`` protocol, with faults of the connection."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from random import Random

from orchestrator.backends.protocol import ANYWHERE, AttemptReport, AttemptStatus, Capacity, Node, Placement
from orchestrator.backends.simulated.cluster import SimulatedCluster
from orchestrator.backends.simulated.hardware import NodeGroup, SimulatedNode
from orchestrator.core.contract import JobRequest, Resources
from orchestrator.core.errors import ClusterError, FailureKind
from orchestrator.planning.graph.plan import Plan

UNCLAIMED_S = 30.0
"""An attempt about which no controller asks for this long is ended, as on Ray."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turbulence:
    """Probabilities, per command or report, that it does not arrive as it should."""

    launch_refused: float = 0.0
    """``launch`` raises, and nothing starts."""
    launch_unheard: float = 0.0
    """The attempt starts, and ``launch`` raises all the same."""
    report_missing: float = 0.0
    report_twice: float = 0.0
    report_late: float = 0.0
    """One more report says RUNNING, although the attempt has ended."""
    flapping: float = 0.0
    """A runner cannot be reached for up to ``max_flap_s`` from then on."""
    max_flap_s: float = 100.0
    wrong_blame: float = 0.0
    """A failure names any node instead of the one at fault."""


CALM = Turbulence()


class SimulatedBackend:
    """See ``Backend``. Each controller gets its own one; runners obey the highest epoch that was announced."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        *,
        random: Random | None = None,
        turbulence: Turbulence = CALM,
        shows_progress: bool = False,
    ) -> None:
        self._cluster = cluster
        self._random = random or Random(0)  # noqa: S311 - a simulation
        self.turbulence = turbulence
        self._shows_progress = shows_progress
        self._epoch = 0
        self._unclaimed_since_s: dict[str, float] = {}
        self._silent_until_s: dict[str, float] = {}
        self._known: list[SimulatedNode] | None = None
        self._capacity = _capacity_of([])

    @property
    def is_stale(self) -> bool:
        """Whether a later controller has announced its epoch: then no command of this one has an effect."""
        return self._epoch < self._cluster.epoch

    def announce(self, epoch: int) -> None:
        """See ``Backend``."""
        self._epoch = epoch
        self._cluster.epoch = max(self._cluster.epoch, epoch)

    def why_not(self, plan: Plan) -> str:
        """Never: nothing is run."""
        return ""

    def capacity(self) -> Capacity:
        """See ``Backend``: of the nodes that are known to be up."""
        known = self._cluster.known_nodes()
        if known != self._known:
            self._known, self._capacity = known, _capacity_of(known)
            if self._cluster.spec.grows:
                self._capacity = replace(self._capacity, maximum=tuple(map(_kind_of, self._cluster.spec.groups)))
        return self._capacity

    def launch(self, request: JobRequest, resources: Resources, placement: Placement = ANYWHERE) -> None:
        """See ``Backend``."""
        if self.is_stale or request.attempt_id in self._cluster.attempts:
            return
        if self._strikes(self.turbulence.launch_refused):
            raise ClusterError(f"simulated: {request.attempt_id} did not reach a runner; it is tried again")
        self._cluster.start(request, resources, request.execution.num_workers, placement)
        if self._strikes(self.turbulence.launch_unheard):
            raise ClusterError(
                f"simulated: it is unknown whether {request.attempt_id} started; it is asked about later"
            )

    def observe(self, attempt_ids: Collection[str], *, are_all: bool = True) -> list[AttemptReport]:
        """See ``Backend``."""
        if are_all:
            self._end_unclaimed(attempt_ids)
        else:
            self._unclaimed_since_s.clear()
        reports: list[AttemptReport] = []
        for attempt_id in attempt_ids:
            if self._strikes(self.turbulence.report_missing):
                continue
            report = self._report(attempt_id)
            reports.append(report)
            if self._strikes(self.turbulence.report_twice):
                reports.append(report)
                self._random.shuffle(reports)
        return reports

    def stop(self, attempt_id: str) -> None:
        """See ``Backend``."""
        if not self.is_stale:
            self._cluster.stop(attempt_id)

    def kill(self, attempt_id: str, reason: str, kind: FailureKind = FailureKind.NODE_LOST) -> None:
        """See ``Backend``."""
        if not self.is_stale:
            self._cluster.kill(attempt_id, reason, kind)

    def release(self, attempt_id: str) -> None:
        """See ``Backend``."""
        if not self.is_stale:
            self._cluster.release(attempt_id)

    def close(self) -> None:
        """See ``Backend``."""

    def _strikes(self, probability: float) -> bool:
        return probability > 0.0 and self._random.random() < probability

    def _report(self, attempt_id: str) -> AttemptReport:
        attempt = self._cluster.attempts.get(attempt_id)
        if self.is_stale:
            return AttemptReport(attempt_id=attempt_id, status=AttemptStatus.OVERTAKEN)
        if attempt is None:
            return _lost(attempt_id, "its runner has ended: no runner of this cluster works on it")
        is_reachable = not self._flaps(attempt_id)
        if attempt.report is not None and is_reachable and not self._strikes(self.turbulence.report_late):
            if attempt.report.failure is not None and self._strikes(self.turbulence.wrong_blame):
                return replace(attempt.report, node=self._random.choice([*self._cluster.nodes]))
            return attempt.report
        progress = attempt.progress(self._cluster.clock()) if self._shows_progress else None
        node = attempt.places[0] if attempt.places else ""
        return AttemptReport(
            attempt_id=attempt_id,
            status=AttemptStatus.RUNNING,
            progress=progress,
            node=node,
            placed_for_s=self._cluster.clock() - attempt.placed_at_s if attempt.places else None,
        )

    def _flaps(self, attempt_id: str) -> bool:
        """Whether calls to a runner fail now; once they fail, they fail for a while."""
        now_s = self._cluster.clock()
        if now_s >= self._silent_until_s.get(attempt_id, 0.0) and self._strikes(self.turbulence.flapping):
            self._silent_until_s[attempt_id] = now_s + self._random.uniform(0.0, self.turbulence.max_flap_s)
        return now_s < self._silent_until_s.get(attempt_id, 0.0) and bool(self.turbulence.flapping)

    def _end_unclaimed(self, attempt_ids: Collection[str]) -> None:
        """End attempts that no journal knows: their controller died between two lines, or has released its sweep."""
        if self.is_stale:
            return
        now_s, requested = self._cluster.clock(), set(attempt_ids)
        unclaimed = [attempt_id for attempt_id in self._cluster.attempts if attempt_id not in requested]
        self._unclaimed_since_s = {a: self._unclaimed_since_s.get(a, now_s) for a in unclaimed}
        for attempt_id, since_s in self._unclaimed_since_s.items():
            if now_s - since_s >= UNCLAIMED_S:
                self._cluster.abandon(attempt_id)


def _kind_of(group: NodeGroup) -> Node:
    return Node(
        resources=group.shape,
        labels=dict(group.labels),
        accelerator=group.accelerator,
        is_spot=group.is_spot,
        max_count=group.count,
    )


def _capacity_of(nodes: Sequence[SimulatedNode]) -> Capacity:
    shapes = [node.group.shape for node in nodes]
    total = Resources(
        cpus=sum(shape.cpus for shape in shapes),
        gpus=sum(shape.gpus for shape in shapes),
        memory_gib=sum(shape.memory_gib for shape in shapes),
    )
    machines = tuple(
        Node(
            name=node.name,
            resources=node.group.shape,
            labels=dict(node.group.labels),
            accelerator=node.group.accelerator,
            is_spot=node.group.is_spot,
        )
        for node in nodes
    )
    return Capacity(total=total, nodes=tuple(dict.fromkeys(shapes)), machines=machines)


def _lost(attempt_id: str, reason: str) -> AttemptReport:
    return AttemptReport(attempt_id=attempt_id, status=AttemptStatus.LOST, lost_reason=reason, placed_for_s=None)
