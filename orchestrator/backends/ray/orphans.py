"""Reservations that nobody will give back: those of a gang whose Ray Train died with the gang's runner.

Ray ends a placement group with its creator's job, not with its creator, and Ray Train's own cleaner learns of one only
when all workers are up. So whoever sees a gang's runner die asks Ray itself which groups dead Ray Train controllers
have left; nothing that the runner said, or had no time to say, is needed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from ray._private.state import state as cluster_state
from ray.core.generated.gcs_pb2 import ActorTableData, PlacementGroupTableData  # type: ignore[attr-defined]
from ray.exceptions import RayError

from orchestrator.backends.ray.reservations import remove_reservation

LOOKS_AFTER_S = (0.0, 2.0, 5.0, 10.0, 20.0, 40.0)
"""After a death: Ray takes a while to notice that what the dead process owned is dead, too."""
AGAIN_AFTER_S = 10.0
"""While something waits for room: after a head that was away, Ray may take longer than any fixed time."""
_MAKERS = frozenset({"TrainController", "Runner"})
"""Classes of actors: Ray Train's for gangs, and a runner itself, which makes those of a search's trials."""
_LOG = logging.getLogger(__name__)


class Orphanage:
    """Looks for orphaned reservations after each ``alert``, and for as long as something waits for room.

    A look costs one request to Ray's tables.
    """

    def __init__(self) -> None:
        self._looks_at_s: list[float] = []

    def alert(self) -> None:
        """A gang's runner may have died just now."""
        now_s = time.monotonic()
        self._looks_at_s = [now_s + after_s for after_s in LOOKS_AFTER_S]

    def suspect(self) -> None:
        """Something waits for room for long; what it waits for may be held by nobody."""
        if not self._looks_at_s:
            self._looks_at_s = [time.monotonic() + AGAIN_AFTER_S]

    def look(self) -> None:
        """Give back what is orphaned, if it is time to look."""
        if not self._looks_at_s or time.monotonic() < self._looks_at_s[0]:
            return
        self._looks_at_s = [at_s for at_s in self._looks_at_s[1:] if at_s > time.monotonic()]
        try:
            for group_id in orphaned_groups():
                _LOG.info("placement group %s of a dead gang is given back", group_id)
                remove_reservation(group_id)
        except (RayError, RuntimeError, ValueError) as error:
            _LOG.warning("nobody knows now which reservations dead gangs have left: %s", error)


def orphaned_groups() -> Iterator[str]:
    """Ids, hexadecimal, of placement groups that a Ray Train controller or a runner made which is dead, still there.

    Such a group is of no use to anybody: nothing else knows it, and Ray Train's own cleaner would remove it, too.
    """
    accessor = cluster_state._connect_and_get_accessor()  # noqa: SLF001 - Ray's tables as it tells them leave creators out
    for content in accessor.get_placement_group_table():
        group = PlacementGroupTableData.FromString(content)
        is_removed = group.state == PlacementGroupTableData.REMOVED
        if not is_removed and not group.is_detached and _is_dead_maker(accessor, group.creator_actor_id):
            yield group.placement_group_id.hex()


def _is_dead_maker(accessor: object, actor_id: bytes) -> bool:
    from ray import ActorID

    if not actor_id or ActorID(actor_id).is_nil():
        return False
    content = accessor.get_actor_info(ActorID(actor_id))  # type: ignore[attr-defined]
    if content is None:
        return False
    actor = ActorTableData.FromString(content)
    return actor.class_name in _MAKERS and actor.state == ActorTableData.DEAD
