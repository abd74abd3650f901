"""Placement groups of gangs: which ones a runner has made, how long they stay unfilled, and how they are removed.

To start an actor, Ray asks a node for a process. If the head dies in between, the next head asks again, and may never
get an answer: the actor is then pending without end. Ray Train limits only the wait for resources, so the runner
limits the rest.

Ray ends a placement group with its creator's job, not with its creator. Ray Train's own cleaner finds a group only
when all workers run, and is a process on the head for each gang, which outlives a Ray Train controller that was
killed: gangs run without it (``gang.train``). So a runner gives back what its ended gang still holds. A process that
sees a gang's runner die asks Ray which groups dead runners and their Ray Train controllers have left; it needs no
report of the runner. On a shared cluster others use Ray Train, too: only groups of runners of its own namespace are
touched.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import ray
from ray._private.state import state as cluster_state
from ray._raylet import PlacementGroupID
from ray.core.generated.gcs_pb2 import ActorTableData, PlacementGroupTableData  # type: ignore[attr-defined]
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.backends.ray.capacity import HEAD_RESOURCE
from orchestrator.backends.ray.draining import leaving_nodes

_LOG = logging.getLogger(__name__)
SCANS_AFTER_S = (0.0, 2.0, 5.0, 10.0, 20.0, 40.0)
"""Scans after a death, in seconds: Ray takes a while to notice that what the dead process owned is dead, too."""
AGAIN_AFTER_S = 10.0
"""Between scans while an attempt waits for resources: after a restart of the head, Ray may take any time."""
EVERY_S = 60.0
"""Between scans at other times: Ray notices after more than a minute that a node without a network is gone."""
_RUNNER, _TRAIN_CONTROLLER = "Runner", "TrainController"
"""Actor classes that create them: a runner for a search's trials, and for gangs Ray Train's controller, which belongs
to a runner."""
IsRunner: TypeAlias = Callable[[str, str], bool]
"""Whether an actor's name and namespace are those of a runner."""
POLL_EVERY_S = 5.0
MAX_GAP_S = 2 * POLL_EVERY_S
"""Of the time between two polls, at most this counts."""


def remove_reservation(group_id: str) -> None:
    """Give the resources of a placement group back, and end what still runs in it; one that is gone is no error."""
    try:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))
    except (RayError, ValueError) as error:
        _LOG.warning("placement group %s was not removed: %s", group_id, error)


def off_the_head(excluded_ids: Collection[str] = ()) -> NodeAffinitySchedulingStrategy | None:
    """A preference for one of the largest nodes that are not the cluster's head; ``None`` if the head is all there is.

    Ray Train's controller sits beside a gang's runner. On the head, which survives everything, neither should compete
    with the cluster's own services. The loss of any other node should end few gangs: each draws its own. Nodes that
    leave or are excluded (Ray's ids) are used only if there are no others.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and HEAD_RESOURCE not in node["Resources"]]  # type: ignore[no-untyped-call]
    if not nodes:
        return None
    avoided = {*excluded_ids, *leaving_nodes()}
    nodes = [node for node in nodes if node["NodeID"] not in avoided] or nodes
    largest = max(map(_size, nodes))
    chosen = secrets.choice([node for node in nodes if _size(node) == largest])
    return NodeAffinitySchedulingStrategy(chosen["NodeID"], soft=True)


def _size(node: Mapping[str, Any]) -> tuple[float, float]:
    return node["Resources"].get("GPU", 0.0), node["Resources"].get("CPU", 0.0)


class OrphanedPlacementGroups:
    """Finds orphaned reservations after each ``scan_after_death``, and once a minute; sooner while an attempt waits.

    A scan costs one request to Ray's tables. ``is_runner`` tells the cluster's runners from other actors.
    """

    def __init__(self, is_runner: IsRunner) -> None:
        self._is_runner = is_runner
        self._scans_at_s: list[float] = []

    def scan_after_death(self) -> None:
        """Call it when a gang's runner may have died."""
        now_s = time.monotonic()
        self._scans_at_s = [now_s + after_s for after_s in SCANS_AFTER_S]

    def scan_again_later(self) -> None:
        """Call it when an attempt has waited long for resources, which an orphaned reservation may hold."""
        at_s = time.monotonic() + AGAIN_AFTER_S
        if not self._scans_at_s or self._scans_at_s[0] > at_s:
            self._scans_at_s.insert(0, at_s)

    def scan(self) -> None:
        """Give orphaned reservations back, if a scan is due."""
        now_s = time.monotonic()
        if not self._scans_at_s or now_s < self._scans_at_s[0]:
            return
        self._scans_at_s = [at_s for at_s in self._scans_at_s[1:] if at_s > now_s] or [now_s + EVERY_S]
        try:
            for group_id in orphaned_groups(self._is_runner):
                _LOG.info("placement group %s of a dead gang is given back", group_id)
                remove_reservation(group_id)
        except (RayError, RuntimeError, ValueError) as error:
            _LOG.warning("Ray does not list now which reservations dead gangs have left: %s", error)
            self.scan_again_later()


def orphaned_groups(is_runner: IsRunner) -> Iterator[str]:
    """Ids, hexadecimal, of placement groups that a runner, or its Ray Train controller, made which is dead.

    Such a group is unused: no other process refers to it.
    """
    for group in _live_groups():
        maker = None if group.is_detached else _actor(group.creator_actor_id)
        if maker is not None and maker.state == ActorTableData.DEAD and _is_ours(maker, is_runner):
            yield group.placement_group_id.hex()


def _is_ours(actor: ActorTableData, is_runner: IsRunner) -> bool:
    """Whether an actor is a runner, or a Ray Train controller that a runner has created: then both are of one job."""
    if actor.class_name != _TRAIN_CONTROLLER:
        return _is_runner(actor, is_runner)
    owner_id = actor.owner_address.worker_id
    return any(one.address.worker_id == owner_id for one in _actors_of(actor.job_id) if _is_runner(one, is_runner))


def _is_runner(actor: ActorTableData, is_runner: IsRunner) -> bool:
    return actor.class_name == _RUNNER and is_runner(actor.name, actor.ray_namespace)


def _actors_of(job_id: bytes) -> Iterator[ActorTableData]:
    """The rows of all actors of a job in Ray's tables, dead ones too."""
    from ray import JobID

    accessor = cluster_state._connect_and_get_accessor()  # noqa: SLF001 - see below
    return (ActorTableData.FromString(content) for content in accessor.get_actor_table(JobID(job_id), None))


def _actor(actor_id: bytes) -> ActorTableData | None:
    """The row of an actor in Ray's tables, which may be dead; None if there is none."""
    from ray import ActorID

    if not actor_id or ActorID(actor_id).is_nil():
        return None
    content = cluster_state._connect_and_get_accessor().get_actor_info(ActorID(actor_id))  # noqa: SLF001 - see below
    return None if content is None else ActorTableData.FromString(content)


@dataclass(slots=True, kw_only=True)
class StallTimer:
    """How long a gang's reservations have not changed. Time counts only between calls of ``update``."""

    counts_without_room: bool
    """Whether time without any reservation counts: Ray Train creates one at once, a search when it has a trial."""
    waited_s: float = 0.0
    _rooms: Mapping[str, bool] = field(default_factory=dict)
    _seen_at_s: float | None = None

    def update(self, rooms: Mapping[str, bool] | None, now_s: float) -> float:
        """Take the current reservations; returns the seconds waited since they changed.

        Args:
            rooms: the gang's reservations by id, and whether each has its resources; None = Ray does not tell now.
            now_s: time of a monotonic clock.
        """
        gap_s = 0.0 if self._seen_at_s is None else min(now_s - self._seen_at_s, MAX_GAP_S)
        self._seen_at_s = now_s
        if rooms is None:
            return self.waited_s
        waits_for_room = not all(rooms.values()) or not (rooms or self.counts_without_room)
        self.waited_s = 0.0 if waits_for_room or rooms != self._rooms else self.waited_s + gap_s
        self._rooms = dict(rooms)
        return self.waited_s


class PlacementGroupFinder:
    """Finds the reservations that a runner's gang has made: through Ray Train's controller, or the runner itself."""

    def __init__(self, worker_id: str, actor_id: str) -> None:
        self._worker_id, self._actor_id = worker_id, actor_id
        self._is_own: dict[str, bool] = {}
        self.node_ids: tuple[str, ...] = ()
        """For reservations that had their resources at the latest poll: Ray's ids of their nodes, one per bundle."""

    def find(self) -> dict[str, bool] | None:
        """Whether each reservation, by id (hexadecimal), has its resources; None while Ray does not tell."""
        try:
            groups = [group for group in _live_groups() if self._is_mine(group)]
            made = [group for group in groups if group.state == PlacementGroupTableData.CREATED]
            self.node_ids = tuple(bundle.node_id.hex() for group in made for bundle in group.bundles)
            return {group.placement_group_id.hex(): group in made for group in groups}
        except (RayError, RuntimeError, ValueError) as error:
            _LOG.warning("Ray does not tell now which reservations there are: %s", error)
            return None

    def give_back(self) -> None:
        """Remove all that a gang which has ended still holds: Ray Train's controller may have been killed."""
        for group_id in self.find() or ():
            _LOG.info("placement group %s of an ended gang is given back", group_id)
            remove_reservation(group_id)

    def _is_mine(self, group: PlacementGroupTableData) -> bool:
        group_id = group.placement_group_id.hex()
        if group_id not in self._is_own:  # the creator of a group never changes
            self._is_own[group_id] = self._has_made(group.creator_actor_id)
        return self._is_own[group_id]

    def _has_made(self, actor_id: bytes) -> bool:
        if actor_id.hex() == self._actor_id:
            return True
        actor = _actor(actor_id)
        return actor is not None and actor.owner_address.worker_id.hex() == self._worker_id


def _live_groups() -> Iterable[PlacementGroupTableData]:
    accessor = cluster_state._connect_and_get_accessor()  # noqa: SLF001 - Ray's tables as it tells them leave creators out
    groups = (PlacementGroupTableData.FromString(content) for content in accessor.get_placement_group_table())
    return (group for group in groups if group.state != PlacementGroupTableData.REMOVED)


def watch_placement(
    find: Callable[[], Mapping[str, bool] | None],
    timer: StallTimer,
    limit_s: float,
    is_over: Callable[[float], bool],
) -> Mapping[str, bool] | None:
    """Poll until a gang has waited ``limit_s`` seconds; returns its reservations then, or None if the wait ended first.

    Args:
        find: returns its reservations, as ``StallTimer.update`` takes them.
        timer: measures the wait.
        limit_s: seconds.
        is_over: waits so many seconds; true once nothing has to be watched any more.
    """
    rooms: Mapping[str, bool] | None = None
    while timer.update(rooms := find(), time.monotonic()) < limit_s:
        if is_over(POLL_EVERY_S):
            return None
    return rooms or {}
