"""Finds a gang that hangs because some ranks wait for others, and names these ranks, with torch's flight records.

NCCL's and gloo's own limits only say that a collective operation took too long, on the ranks that are healthy; the
controller's limit only says that the gang makes no step. So the runner watches all ranks: each reports what it does,
how many collective operations it has begun and how much other work it has done. The runner's limits are shorter than
both, so that there is time to ask each rank for its flight record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray.exceptions import RayError

from orchestrator.backends.ray.attempt_log import examine
from orchestrator.backends.ray.capacity import node_name
from orchestrator.backends.ray.gang.mailbox import GangMailbox, RankStatus
from orchestrator.backends.ray.placement_groups import POLL_EVERY_S
from orchestrator.backends.ray.settings import SETUP_HANG_S, TRAIN_HANG_S
from orchestrator.core.activity import Activity

RANK_SILENT_S: Final = 45.0
"""A rank silent for longer than this is not counted: ranks above 0 report every 10 s only, and a call may fail."""
_MAX_GAP_S = 10.0
"""Of the time between two polls, at most this counts."""
_MULTIPLE = 5.0
"""The limit is at least so many times the longest pause between operations or other work: steps may take minutes."""
_MULTIPLE_OF_SETUP = 2.0
"""The same for the longest pause of the setup, which includes the first update and waits that training has not."""
_EXCUSES = frozenset({Activity.DATA, Activity.STORE, Activity.CHECKPOINT, Activity.COMPILE})

_WAITS = frozenset({Activity.PEERS, Activity.ENDED})
_ANSWER_WITHIN_S = 45.0
"""Ranks above 0 may speak every 10 s only, and a call may be tried again."""
_STACKS_WITHIN_S = 20.0
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GangHang:
    """Which ranks keep a gang waiting, as far as the ranks report it."""

    waited_s: float
    limit_s: float
    silent: tuple[RankStatus, ...] = ()
    """Ranks that do not report any more: stopped, swapped out, or off the network."""
    behind: tuple[RankStatus, ...] = ()
    """Ranks that report and have not entered the operation in which others wait."""
    waiting: tuple[RankStatus, ...] = ()
    """Ranks that wait for others; if no rank is silent or behind, all ranks."""

    @property
    def blamed(self) -> tuple[RankStatus, ...]:
        """The ranks for which the others wait; empty = not known."""
        return self.silent or self.behind


@dataclass(slots=True, kw_only=True)
class HangWatch:
    """How long a gang has entered no further collective operation, and done no other work that ranks count, while no
    rank reports a reason to wait.

    Time counts only between calls of ``update``.
    """

    world_size: int
    setup_limit_s: float = SETUP_HANG_S
    train_limit_s: float = TRAIN_HANG_S
    waited_s: float = 0.0
    limit_s: float = SETUP_HANG_S
    _longest_s: float = 0.0
    """Longest pause between two operations, or other work, of a gang that trains."""
    _longest_of_setup_s: float = 0.0
    _pause_s: float = 0.0
    _marks: dict[int, tuple[int, int]] = field(default_factory=dict)
    _seen_at_s: float | None = None

    def update(self, ranks: Mapping[int, RankStatus], now_s: float) -> bool:
        """Take the ranks' latest reports, with the time of a monotonic clock; returns whether the gang hangs."""
        gap_s = 0.0 if self._seen_at_s is None else min(now_s - self._seen_at_s, _MAX_GAP_S)
        self._seen_at_s = now_s
        trains = len(ranks) == self.world_size and all(one.stage == "train" for one in ranks.values())
        marks = _marks(ranks)
        if marks != self._marks:
            if trains:
                self._longest_s = max(self._longest_s, self._pause_s)
            else:
                self._longest_s, self._longest_of_setup_s = 0.0, max(self._longest_of_setup_s, self._pause_s)
            self._marks, self.waited_s, self._pause_s = marks, 0.0, 0.0
            return False
        self._pause_s += gap_s
        reporting = [one for one in ranks.values() if now_s - one.reported_at_s <= RANK_SILENT_S or one.has_ended]
        waits = any(one.doing in _WAITS and one.stage for one in reporting)
        if not waits or any(one.doing in _EXCUSES for one in reporting):
            return False
        self.waited_s += gap_s
        slow_s = max(_MULTIPLE * self._longest_s, _MULTIPLE_OF_SETUP * self._longest_of_setup_s)
        self.limit_s = max(self.train_limit_s, slow_s) if trains else self.setup_limit_s
        return self.waited_s >= self.limit_s


def judge_hang(watch: HangWatch, ranks: Mapping[int, RankStatus], requested_at_s: float) -> GangHang:
    """The ranks for which a hanging gang waits; all ranks were asked at the given time, and had time to answer."""
    reporting = [one for one in ranks.values() if one.reported_at_s > requested_at_s or one.has_ended]
    answered_ranks = {one.rank for one in reporting}
    waiting = tuple(one for one in reporting if one.doing in _WAITS)
    last = max((one.num_entered for one in reporting), default=0)
    elsewhere = tuple(one for one in reporting if one.doing not in _WAITS)
    return GangHang(
        waited_s=watch.waited_s,
        limit_s=watch.limit_s,
        silent=tuple(
            ranks.get(rank) or _without_report(rank) for rank in range(watch.world_size) if rank not in answered_ranks
        ),
        behind=elsewhere or tuple(one for one in reporting if one.num_entered < last),
        waiting=waiting,
    )


def _without_report(rank: int) -> RankStatus:
    """A rank that has never reported."""
    return RankStatus(rank=rank, node="", reported_at_s=0.0, doing=Activity.WORK, stage="", num_entered=0, operation="")


def behind_on_device(records: Mapping[int, Mapping[str, Any]]) -> tuple[int, ...] | None:
    """Ranks whose device has begun fewer collective operations than others', by their flight records; None = not known.

    NCCL's operations are begun by the device, long after the host has asked for them. Torch records the begin only with
    TORCH_NCCL_ENABLE_TIMING, and of gloo's never: -1.
    """
    begun: dict[int, int] = {}
    for rank, record in records.items():
        states: Mapping[str, Mapping[str, str]] = record.get("pg_status") or {}
        begun[rank] = sum(1 + int(one.get("last_started_collective", -1)) for one in states.values())
    most = max(begun.values(), default=0)
    return tuple(sorted(rank for rank, number in begun.items() if number < most)) if most else None


def _how_far(rank: RankStatus, last: RankStatus | None) -> str:
    if last is not None and rank.num_entered == last.num_entered:
        return "has not come to the next one"  # the others wait for it by votes, which are not counted
    operation = f" ({rank.operation})" if rank.operation else ""
    return f"did not enter it: it is at operation {rank.num_entered}{operation}"


def describe_hang(hang: GangHang, records: Mapping[int, Mapping[str, Any]], names: Mapping[str, str]) -> str:
    """The failure's message, one paragraph; ``names``: names of nodes by Ray's ids."""
    asleep = [f"rank {one.rank}{_on(one.node, names)} does not report any more" for one in hang.silent]
    last = max(hang.waiting, key=lambda one: one.num_entered, default=None)
    behind = [
        f"rank {one.rank}{_on(one.node, names)} {_how_far(one, last)}, doing: {one.doing}"
        for one in (() if hang.silent else hang.behind)
    ]
    where = f" in collective operation {last.num_entered} ({last.operation})" if last is not None else ""
    found = asleep or behind or _on_devices(records)
    records_note = (
        f"; flight records of ranks {', '.join(map(str, sorted(records)))} are beside their logs" if records else ""
    )
    return (
        f"the gang hangs: {len(hang.waiting)} rank(s) have waited {hang.waited_s:.0f} s ({hang.limit_s:.0f} s are "
        f"allowed) for others{where}; {'; '.join(found)}; "
        f"the stacks of its processes are at the end of their logs{records_note}"
    )


def _on_devices(records: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """What is known where all hosts have entered the operation."""
    late = behind_on_device(records)
    if late is None:
        message = "all of them have entered it: look at the network and the devices; which devices began it is not "
        return [message + "recorded (of NCCL it is with TORCH_NCCL_ENABLE_TIMING=1 in the environment of the nodes)"]
    if not late:
        return ["all of them have entered it, and no device is behind: look at the network between them"]
    return [f"the device of rank {rank} did not begin it" for rank in late]


def _on(node: str, names: Mapping[str, str]) -> str:
    return f" on node {names.get(node, node)}" if node else ""


def wait_for_hang(
    gang: GangMailbox, limits: HangWatch, store_uri: str, is_over: Callable[[float], bool]
) -> tuple[GangHang, str] | None:
    """Watch a gang's ranks until they hang or the attempt is over.

    Returns the ranks for which the others wait, and the same as text; None if the attempt ended first.

    When it returns a hang, all ranks that still report have stored their flight records, and the stacks of all are
    in their logs.

    Args:
        gang: mailbox with the reports of its ranks.
        limits: measures how long it waits.
        store_uri: where logs are.
        is_over: waits so many seconds; true once nothing has to be watched any more.
    """
    pause_s = min(POLL_EVERY_S, limits.train_limit_s / 4, limits.setup_limit_s / 4)
    while not is_over(pause_s):
        if not limits.update(gang.ranks, time.monotonic()):
            continue
        requested_at_s, before = time.monotonic(), _marks(gang.ranks)
        _ask_for_records(gang, requested_at_s, is_over)
        if _marks(gang.ranks) != before:
            continue  # it was slow, and has continued
        stacks = [examine(process, store_uri) for process in gang.logged]
        hang, names = judge_hang(limits, gang.ranks, requested_at_s), _node_names()
        ray.wait(stacks, num_returns=len(stacks), timeout=_STACKS_WITHIN_S)
        return hang, describe_hang(hang, gang.flight_records, names)
    return None


def _marks(ranks: Mapping[int, RankStatus]) -> dict[int, tuple[int, int]]:
    return {rank: one.mark for rank, one in ranks.items()}


def _ask_for_records(gang: GangMailbox, requested_at_s: float, is_over: Callable[[float], bool]) -> None:
    """Wait until all ranks have answered, or have had time to answer."""
    gang.wants_records = True
    try:
        while time.monotonic() - requested_at_s < _ANSWER_WITHIN_S and not is_over(0.2):
            answered, ranks = gang.flight_records, gang.ranks
            if all(
                one.has_ended or (rank in answered and one.reported_at_s > requested_at_s)
                for rank, one in ranks.items()
            ):
                return
    finally:
        gang.wants_records = False


def _node_names() -> dict[str, str]:
    try:
        return {node["NodeID"]: node_name(node) for node in ray.nodes()}  # type: ignore[no-untyped-call]
    except RayError:
        return {}
