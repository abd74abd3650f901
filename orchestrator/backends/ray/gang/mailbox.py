"""A gang, one attempt on several workers: its shape, and the mailbox with the reports of the workers.

A failure is kept with the rank, node and GPUs at fault, as far as they are known. The first failure that blames a node
explains the gang's end, else the first with a known cause: the end of one rank makes others fail.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from orchestrator.backends.protocol import PLACING_WORKERS
from orchestrator.backends.ray.attempt_log import LoggedProcess
from orchestrator.backends.ray.code_digest import current_digests
from orchestrator.core.activity import Activity
from orchestrator.core.contract import JobFailure, JobRequest, Progress, Resources
from orchestrator.core.errors import FailureKind
from orchestrator.core.job_kinds import JobKind
from orchestrator.state.codec import decode_value
from orchestrator.state.failure_policy import signature_of

NODE_LABEL = "ray.io/node-id"
"""Ray's own label of every node."""
COORDINATOR = Resources(cpus=0.0)
"""A gang's runner only waits for the workers, which hold the resources."""
# Of several failures, one with a known cause explains the gang's end, then one with an unknown cause, and last
# the loss of another rank.
_DISTANCE = {FailureKind.UNKNOWN: 2, FailureKind.NODE_LOST: 3}
_SAME_ON_ALL_RANKS = frozenset({FailureKind.NODE_LOST, FailureKind.PREEMPTED, FailureKind.NUMERICS})
"""Failures that all ranks report in the same way, unless the text blames a node or names a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """The latest report of a rank about itself."""

    rank: int
    node: str
    """Ray's id of its node; empty = not known yet."""
    reported_at_s: float
    doing: str
    stage: str
    num_entered: int
    operation: str
    num_done: int = 0

    @property
    def mark(self) -> tuple[int, int]:
        """Changes while the rank goes on."""
        return self.num_entered, self.num_done

    @property
    def has_ended(self) -> bool:
        """Whether its part is done, so that it reports no more."""
        return self.doing == Activity.ENDED

    @classmethod
    def of(cls, rank: int, node: str, news: Mapping[str, Any], now_s: float) -> RankStatus:
        """From ``RankActivity.to_json``."""
        return cls(
            rank=rank,
            node=node,
            reported_at_s=now_s,
            doing=news["doing"],
            stage=news["stage"],
            num_entered=news["entered"],
            operation=news["operation"],
            num_done=news.get("done", 0),  # of a worker of an earlier version
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GangShape:
    """``num_workers`` processes of equal size; together they hold what the attempt was given."""

    num_workers: int
    total: Resources = field(default_factory=Resources)
    node_ids: tuple[str, ...] = ()
    """Ray's ids of the nodes for the workers, one each; empty = any nodes with free resources."""
    excluded_ids: tuple[str, ...] = ()
    """Ray's ids of nodes on which no worker may run."""
    selector: Mapping[str, str] = field(default_factory=dict)
    """Ray labels that all of their nodes must have, where the autoscaler is still to add them."""

    @classmethod
    def of(
        cls,
        request: JobRequest,
        total: Resources,
        node_ids: tuple[str, ...] = (),
        excluded_ids: tuple[str, ...] = (),
        selector: Mapping[str, str] | None = None,
    ) -> Self | None:
        """Shape of an attempt's gang, or of a search's trials; ``None`` for one of one worker, which needs no gang."""
        num_workers = request.execution.num_workers
        if num_workers == 1 and request.kind is not JobKind.SEARCH:
            return None
        return cls(
            num_workers=num_workers, total=total, node_ids=node_ids, excluded_ids=excluded_ids, selector=selector or {}
        )

    @property
    def worker(self) -> Resources:
        """What each of the workers holds."""
        return self.total.share(self.num_workers)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        return decode_value(cls, document)


class GangMailbox:
    """Mailbox between the workers of one attempt and its runner; use from any thread."""

    def __init__(self, shape: GangShape) -> None:
        self.shape = shape
        self.progress = Progress(phase=PLACING_WORKERS)
        self.placement_group = ""
        """Id of the gang's reservation, hexadecimal, once its first worker is up."""
        self.room_node_ids: tuple[str, ...] = ()
        """Ray's ids of the nodes of its reservation, one per worker, once it has its resources."""
        self._room_at_s: float | None = None
        self.digest = ""
        """Digest of the code that all workers run; empty = no worker has been admitted yet."""
        self._failures: list[JobFailure] = []
        self._places: dict[int, _Place] = {}
        self._processes: dict[int, LoggedProcess] = {}
        self._machines: dict[str, Mapping[str, Any]] = {}
        self._ranks: dict[int, RankStatus] = {}
        self._records: dict[int, Mapping[str, Any]] = {}
        self.wants_records = False
        """Whether each rank must store its flight record."""
        self._lock = threading.Lock()

    def on_report(self, rank: int, news: Mapping[str, Any]) -> None:
        """Take a worker's report: its progress, its place, and why it failed."""
        self.got_room()
        with self._lock:
            if rank == 0 and "progress" in news:
                self.progress = Progress.from_json(news["progress"], done=self.progress.done)
            self.placement_group = news.get("placement_group") or self.placement_group
            if "process" in news:
                self._processes[rank] = LoggedProcess.from_json(news["process"])
                self._machines[self._processes[rank].node_id] = news.get("machine", {})
            if "place" in news:
                self._places[rank] = _Place(node_id=news["place"]["node_id"], gpus=tuple(news["place"]["gpus"]))
            if "activity" in news:
                place = self._processes.get(rank)
                node_id = "" if place is None else place.node_id
                self._ranks[rank] = RankStatus.of(rank, node_id, news["activity"], time.monotonic())
                # While the first rank waits for others, only their work shows that the gang goes on.
                self.progress = replace(self.progress, done=sum(one.num_done for one in self._ranks.values()))
            if "flight_record" in news:
                self._records[rank] = news["flight_record"]
        if "failure" in news:
            self.fail(rank, JobFailure.from_json(news["failure"]))

    def fail(self, rank: int, failure: JobFailure) -> None:
        """Record why a worker ended, or must not begin."""
        with self._lock:
            self._failures.append(self._blamed(rank, failure))

    def admits(self, digest: str, own: str) -> bool:
        """Whether a worker's code is that of the others; ``own`` is the runner's. The first worker decides."""
        with self._lock:
            if not self.digest and (digest == own or digest in current_digests(own)):
                self.digest = digest
            return bool(self.digest) and digest == self.digest

    def got_room(self, node_ids: Sequence[str] = ()) -> None:
        """Its workers have their resources now; ``node_ids`` if they are known. A later call may add them."""
        if self._room_at_s is None:
            self._room_at_s = time.monotonic()
        self.room_node_ids = self.room_node_ids or tuple(node_ids)

    @property
    def placed_for_s(self) -> float | None:
        """Seconds since its workers got their resources; None = they have none yet."""
        return None if self._room_at_s is None else time.monotonic() - self._room_at_s

    @property
    def ranks(self) -> dict[int, RankStatus]:
        """The latest report of each rank."""
        with self._lock:
            return dict(self._ranks)

    @property
    def flight_records(self) -> dict[int, Mapping[str, Any]]:
        """Summaries of the flight records that ranks have stored."""
        with self._lock:
            return dict(self._records)

    @property
    def logged(self) -> list[LoggedProcess]:
        """The workers that are up, by rank."""
        with self._lock:
            return [process for _, process in sorted(self._processes.items())]

    @property
    def machines(self) -> dict[str, Mapping[str, Any]]:
        """What the workers' nodes are, by Ray's ids; those of workers that are gone included."""
        with self._lock:
            return dict(self._machines)

    def primary_failure(self) -> JobFailure | None:
        """The first failure that blames a node; else the first that names a cause; else the first one reported."""
        with self._lock:
            return min(self._failures, key=_distance_to_cause, default=None)

    def known_cause(self) -> JobFailure | None:
        """The failure that a worker reported, if it names more than the loss of another worker."""
        failure = self.primary_failure()
        return (
            None
            if failure is None or (failure.kind is FailureKind.NODE_LOST and not _blames_node(failure))
            else failure
        )

    def node_of(self, rank: int) -> str:
        """Ray's id of a worker's node, also once it is gone; empty for a worker that has not reported its place."""
        place = self._places.get(rank)
        return place.node_id if place else ""

    def located(self, failure: JobFailure, rank: int) -> JobFailure:
        """The failure with the place of the rank that is at fault."""
        place = self._places.get(rank, _Place())
        return replace(failure, rank=rank, node_id=place.node_id, gpus=place.gpus)

    def _blamed(self, reporting_rank: int, failure: JobFailure) -> JobFailure:
        if failure.rank is not None:
            return self.located(failure, failure.rank)
        if failure.kind in _SAME_ON_ALL_RANKS and not _blames_node(failure):
            return failure
        return self.located(failure, reporting_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a worker runs."""

    node_id: str = ""
    gpus: tuple[str, ...] = ()


def _blames_node(failure: JobFailure) -> bool:
    found = signature_of(failure.message)
    return found is not None and found.blames_node


def _distance_to_cause(failure: JobFailure) -> int:
    """How far a failure is from the cause of the gang's end."""
    return 0 if _blames_node(failure) else _DISTANCE.get(failure.kind, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GangHome:
    """Where a gang's workers find their runner, and a folder for what Ray Train wants to write."""

    runner: str
    namespace: str
    scratch: Path
