"""A gang whose workers do not come although there is room for them, or whose ranks wait for one that does not come.

Ray gets an actor its process by asking a node for one. If the head dies in between, the next head asks again, and that
question may stay unanswered: whoever waits for the actor then waits for ever. Ray Train bounds only the wait for room,
so the runner bounds the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ray
from ray._private.state import state as cluster_state
from ray.core.generated.gcs_pb2 import ActorTableData, PlacementGroupTableData  # type: ignore[attr-defined]
from ray.exceptions import RayError

from orchestrator.backends.ray.capacity import node_name
from orchestrator.backends.ray.hangs import Hang, HangWatch, judge_hang, tell_hang
from orchestrator.backends.ray.stacks import examine

if TYPE_CHECKING:
    from orchestrator.backends.ray.gang import Gang

LOOK_EVERY_S = 5.0
MAX_GAP_S = 2 * LOOK_EVERY_S
"""Of the time between two looks, no more than this counts."""
_ANSWER_WITHIN_S = 45.0
"""Ranks above 0 may speak every 10 s only, and a call may be tried again."""
_STACKS_WITHIN_S = 20.0
_LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Patience:
    """How long nothing has happened that a gang's workers could wait for. Time counts only while somebody looks."""

    counts_without_room: bool
    """Whether time without any reservation counts: Ray Train asks for one at once, a search when it has a trial."""
    waited_s: float = 0.0
    _rooms: Mapping[str, bool] = field(default_factory=dict)
    _seen_at_s: float | None = None

    def look(self, rooms: Mapping[str, bool] | None, now_s: float) -> float:
        """Take what is there now; returns the seconds waited since it changed.

        Args:
            rooms: the gang's reservations by id, and whether each holds something; None = nobody can tell now.
            now_s: on a clock that never goes back.
        """
        gap_s = 0.0 if self._seen_at_s is None else min(now_s - self._seen_at_s, MAX_GAP_S)
        self._seen_at_s = now_s
        if rooms is None:
            return self.waited_s
        waits_for_room = not all(rooms.values()) or not (rooms or self.counts_without_room)
        self.waited_s = 0.0 if waits_for_room or rooms != self._rooms else self.waited_s + gap_s
        self._rooms = dict(rooms)
        return self.waited_s


class OwnRooms:
    """Finds the reservations that a runner's gang has made: through Ray Train's controller, or the runner itself."""

    def __init__(self, worker_id: str, actor_id: str) -> None:
        self._worker_id, self._actor_id = worker_id, actor_id
        self._is_own: dict[str, bool] = {}
        self.node_ids: tuple[str, ...] = ()
        """Of those that held something at the latest look: Ray's ids of their nodes, one per bundle."""

    def find(self) -> dict[str, bool] | None:
        """By id, hexadecimal, whether each holds something yet; None while Ray does not tell."""
        try:
            groups = [group for group in _live_groups() if self._is_mine(group)]
            made = [group for group in groups if group.state == PlacementGroupTableData.CREATED]
            self.node_ids = tuple(bundle.node_id.hex() for group in made for bundle in group.bundles)
            return {group.placement_group_id.hex(): group in made for group in groups}
        except (RayError, RuntimeError, ValueError) as error:
            _LOG.warning("Ray does not tell now which reservations there are: %s", error)
            return None

    def _is_mine(self, group: PlacementGroupTableData) -> bool:
        group_id = group.placement_group_id.hex()
        if group_id not in self._is_own:  # who made a group never changes
            self._is_own[group_id] = self._has_made(group.creator_actor_id)
        return self._is_own[group_id]

    def _has_made(self, actor_id: bytes) -> bool:
        from ray import ActorID

        if not actor_id or ActorID(actor_id).is_nil():
            return False
        if actor_id.hex() == self._actor_id:
            return True
        content = cluster_state._connect_and_get_accessor().get_actor_info(ActorID(actor_id))  # noqa: SLF001
        return content is not None and ActorTableData.FromString(content).owner_address.worker_id.hex() == (
            self._worker_id
        )


def _live_groups() -> Iterable[PlacementGroupTableData]:
    accessor = cluster_state._connect_and_get_accessor()  # noqa: SLF001 - Ray's tables as it tells them leave creators out
    groups = (PlacementGroupTableData.FromString(content) for content in accessor.get_placement_group_table())
    return (group for group in groups if group.state != PlacementGroupTableData.REMOVED)


def watch(
    find: Callable[[], Mapping[str, bool] | None],
    patience: Patience,
    limit_s: float,
    is_over: Callable[[float], bool],
) -> Mapping[str, bool] | None:
    """Look until a gang has waited ``limit_s`` seconds; returns its reservations then, or None if it was over before.

    Args:
        find: its reservations, as ``Patience.look`` takes them.
        patience: what counts.
        limit_s: seconds.
        is_over: waits so many seconds; true once nothing has to be watched any more.
    """
    rooms: Mapping[str, bool] | None = None
    while patience.look(rooms := find(), time.monotonic()) < limit_s:
        if is_over(LOOK_EVERY_S):
            return None
    return rooms or {}


def wait_for_hang(
    gang: Gang, limits: HangWatch, store_uri: str, is_over: Callable[[float], bool]
) -> tuple[Hang, str] | None:
    """Look after a gang's ranks until they hang or it is over.

    Returns who is waited for, and the same as text; None if it was over before.

    Then all ranks that still speak have stored their flight records, and the stacks of all are in their logs.

    Args:
        gang: what its ranks say.
        limits: what counts.
        store_uri: where logs are.
        is_over: waits so many seconds; true once nothing has to be watched any more.
    """
    pause_s = min(LOOK_EVERY_S, limits.train_limit_s / 4, limits.setup_limit_s / 4)
    while not is_over(pause_s):
        if not limits.look(gang.ranks, time.monotonic()):
            continue
        asked_at_s, before = time.monotonic(), _entered(gang)
        _ask_for_records(gang, asked_at_s, is_over)
        if _entered(gang) != before:
            continue  # it was slow, and goes on
        stacks = [examine(process, store_uri) for process in gang.logged]
        hang, names = judge_hang(limits, gang.ranks, asked_at_s), _node_names()
        ray.wait(stacks, num_returns=len(stacks), timeout=_STACKS_WITHIN_S)
        return hang, tell_hang(hang, gang.flight_records, names)
    return None


def _entered(gang: Gang) -> dict[int, int]:
    return {rank: one.num_entered for rank, one in gang.ranks.items()}


def _ask_for_records(gang: Gang, asked_at_s: float, is_over: Callable[[float], bool]) -> None:
    """Until all ranks have answered, or had time to."""
    gang.wants_records = True
    try:
        while time.monotonic() - asked_at_s < _ANSWER_WITHIN_S and not is_over(0.2):
            answered, ranks = gang.flight_records, gang.ranks
            if all(one.has_ended or (rank in answered and one.heard_at_s > asked_at_s) for rank, one in ranks.items()):
                return
    finally:
        gang.wants_records = False


def _node_names() -> dict[str, str]:
    try:
        return {node["NodeID"]: node_name(node) for node in ray.nodes()}  # type: ignore[no-untyped-call]
    except RayError:
        return {}
