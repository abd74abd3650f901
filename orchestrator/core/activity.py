"""The present activity of a rank of a gang: the data plane writes it, the gang's runner reads it to find a hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, TypeVar

Item = TypeVar("Item")


class Activity(StrEnum):
    """What a rank of a gang does at a moment."""

    WORK = "work"
    PEERS = "peers"
    """It waits for other ranks: in a collective operation, or for a device that runs one."""
    DATA = "data"
    STORE = "store"
    CHECKPOINT = "checkpoint"
    COMPILE = "compile"
    ENDED = "ended"
    """Its part is done, and it waits for the others to end."""


class RankActivity:
    """The present activity of one rank. One thread at a time writes it, any thread reads it.

    A gang is looked after once ``stage`` is set: ``setup``, and ``train`` after the first step.
    """

    def __init__(self) -> None:
        self.stage = ""
        self.num_entered = 0
        """Collective operations that this rank has begun or waited for; the same number is the same one on all."""
        self.operation = ""
        """The latest of them."""
        self.num_done = 0
        """Other work, in pieces of any kind: batches, passes over data, parts of a checkpoint. It grows while the rank
        goes on, also where it makes no step and begins no operation."""
        self.flight_record: Callable[[], Mapping[str, Any]] | None = None
        """What torch remembers of collective operations, as JSON; may block, so not to be called by the rank itself."""
        self.on_failure: Callable[[BaseException], None] | None = None
        """Reports why this rank ends; called before it leaves its gang, whose other ranks fail then."""
        self._now = (Activity.WORK, time.monotonic())

    def end(self) -> None:
        """Mark the rank as ended."""
        self._now = (Activity.ENDED, time.monotonic())

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Context in which the rank does this activity; afterwards it returns to the previous one."""
        before = self._now[0]
        self._now = (activity, time.monotonic())
        try:
            yield
        finally:
            self._now = (before, time.monotonic())

    def tick(self) -> None:
        """Count a piece of work."""
        self.num_done += 1

    def each(self, items: Iterable[Item], activity: Activity = Activity.DATA) -> Iterator[Item]:
        """Iterate over items and count them; while an item is produced, the rank does this activity."""
        iterator = iter(items)
        while True:
            with self.during(activity):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            self.tick()
            yield item

    def to_json(self) -> dict[str, Any]:
        """The report to the gang's runner; ``for_s`` in seconds."""
        activity, since_s = self._now
        return {
            "doing": activity.value,
            "for_s": time.monotonic() - since_s,
            "stage": self.stage,
            "entered": self.num_entered,
            "done": self.num_done,
            "operation": self.operation,
        }
