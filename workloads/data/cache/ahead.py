"""Fetches shards ahead of their readers, in the order in which they will be needed.

The processes of a node declare much the same shards. Each takes the first one that nobody fetches, and comes back to
those that others were at: so the node fetches as many different ones at once as it may, with any number of processes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate

from orchestrator.core.errors import OrchestratorError
from workloads.data.cache.folder import NUM_FETCHERS, BusyError, Check, Pin

_LOG = logging.getLogger(__name__)

PATIENCE_BYTES = 2 * 1024**3
"""A reader waits for its shard if at most so much is to be fetched before it; else it reads its sample by a range."""
_COME_BACK_S = 0.005
"""Between two looks at a shard that another process fetches."""
_ASK_AGAIN_S = 5.0
_KEPT_UNDECLARED = 8
_CLOSE_TIMEOUT_S = 2.0

Obtain = Callable[[int, Check], Pin | None]


class _ClosedError(Exception):
    """The reader has left."""


class _Place(Enum):
    FETCHING = auto()
    ELSEWHERE = auto()
    """Another process fetches it, or as many are fetched as the node may."""
    HELD = auto()
    NO_ROOM = auto()
    FAILED = auto()


@dataclass(slots=True, kw_only=True)
class _Slot:
    place: _Place
    pin: Pin | None = None
    error: BaseException | None = None
    at_s: float = 0.0


class Ahead:
    """Pins of the shards that a reader needs now and soon; threads fetch them in order. Thread-safe.

    Args:
        sizes: bytes of each shard.
        obtain: fetches and pins a shard, or says by None that there is no room, or by `BusyError` that it is to be
            asked again; called on threads of this object.
        patience_bytes: see ``PATIENCE_BYTES``.
    """

    def __init__(self, sizes: Sequence[int], obtain: Obtain, *, patience_bytes: int = PATIENCE_BYTES) -> None:
        self._sizes, self._obtain, self._patience_bytes = sizes, obtain, patience_bytes
        self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._declared: tuple[int, ...] = ()
        self._former: dict[int, Pin] = {}
        self._turn_of: dict[int, int] = {}
        self._bytes_before: list[int] = []
        self._next = 0
        self._pause_until_s = 0.0
        self._urgent: deque[int] = deque()
        self._undeclared: deque[int] = deque()
        self._slots: dict[int, _Slot] = {}
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._pid = os.getpid()

    def declare(self, shard_ids: Sequence[int]) -> None:
        """The shards needed from now on, in order of first use.

        Pins of the declaration before stay until the next one, unless their room is needed: readers that work ahead
        declare the next block while samples of the last one are still to be read.
        """
        declared = tuple(shard_ids)
        if declared == self._declared and self._pid == os.getpid():
            return
        self._after_fork()
        with self._changed:
            self._declared, formerly = declared, self._former
            self._turn_of = {shard_id: turn for turn, shard_id in reversed(list(enumerate(declared)))}
            self._bytes_before = [0, *accumulate(self._sizes[shard_id] for shard_id in declared)]
            self._next = 0
            self._undeclared.clear()
            # A fetch under way goes on: somebody wanted it a moment ago, and others on the node may want it now.
            known = self._slots.items()
            self._former = {
                shard_id: slot.pin for shard_id, slot in known if slot.pin and shard_id not in self._turn_of
            }
            self._slots = {
                shard_id: slot
                for shard_id, slot in known
                if slot.place is _Place.FETCHING or (slot.place is _Place.HELD and shard_id in self._turn_of)
            }
            for shard_id in self._turn_of.keys() & formerly.keys():
                self._slots.setdefault(shard_id, _Slot(place=_Place.HELD, pin=formerly[shard_id]))
            self._start()
            self._changed.notify_all()

    def held(self, shard_id: int) -> Pin | None:
        """The pin of a shard that is here."""
        slot = self._slots.get(shard_id)  # one look-up: atomic
        return slot.pin if slot is not None and slot.pin is not None else self._former.get(shard_id)

    def keep(self, shard_id: int, pin: Pin) -> None:
        """Hold a pin that a reader got by itself."""
        self._after_fork()
        with self._changed:
            slot = self._slots.get(shard_id)
            if slot is None or slot.place is not _Place.FETCHING:
                self._hold(shard_id, pin)

    def wait(self, shard_id: int) -> Pin | None:
        """Wait for a shard that is not here, or say by None that its samples are to be read by ranges.

        Raises:
            OrchestratorError: why the shard could not be fetched while we waited; a later call tries again.
        """
        self._after_fork()
        with self._changed:
            started_s = time.monotonic()
            # Asked anew after every change: before this thread has its turn, another declaration may have dropped the
            # shard, moved it to the former ones, or forgotten how its fetch ended.
            while not self._is_closed:
                slot = self._slots.get(shard_id)
                if slot is not None and slot.error is not None:
                    if slot.at_s >= started_s:
                        raise slot.error
                    del self._slots[shard_id]
                pin = self.held(shard_id)
                if pin is not None or not self._ask(shard_id):
                    return pin
                self._changed.wait()
            return None

    def ask(self, shard_id: int) -> None:
        """Have a shard fetched, without waiting for it."""
        self._after_fork()
        with self._changed:
            self._ask(shard_id)

    def drop(self, shard_id: int) -> None:
        """Let go of a shard's pin: its file was found to be damaged."""
        with self._changed:
            self._former.pop(shard_id, None)
            slot = self._slots.get(shard_id)
            if slot is not None and slot.place is _Place.HELD:
                del self._slots[shard_id]

    def close(self) -> None:
        """Drop all pins and end the threads; one that waits for the store ends by itself, later."""
        with self._changed:
            self._is_closed = True
            self._slots.clear()
            self._former.clear()
            self._changed.notify_all()
        if self._pid == os.getpid():
            for thread in self._threads:
                if thread is not threading.current_thread():  # a garbage collection may close us from anywhere
                    thread.join(_CLOSE_TIMEOUT_S)

    def _ask(self, shard_id: int) -> bool:
        """Make sure that a shard is fetched; whether that is worth waiting for."""
        slot = self._slots.get(shard_id)
        if self._is_closed:
            return False
        if slot is not None and slot.place is _Place.NO_ROOM:
            # One at a time, and until its turn its samples are read by ranges: a queue of thousands would not end.
            if not self._urgent and time.monotonic() - slot.at_s > _ASK_AGAIN_S:
                self._urge(shard_id)
            return False
        if slot is not None or shard_id in self._urgent:
            return True
        turn = self._turn_of.get(shard_id)
        if turn is None and self._declared:
            return False  # a straggler of an earlier declaration: not worth a whole shard
        if turn is None or turn < self._next:
            self._urge(shard_id)
            return True
        return self._bytes_before[turn] - self._bytes_before[self._next] <= self._patience_bytes

    def _urge(self, shard_id: int) -> None:
        self._urgent.append(shard_id)
        self._start()
        self._changed.notify_all()

    def _hold(self, shard_id: int, pin: Pin) -> None:
        if self._is_closed:
            return
        self._slots[shard_id] = _Slot(place=_Place.HELD, pin=pin)
        if shard_id not in self._turn_of:
            # Nobody said when these are no longer needed: the newest few stay.
            self._undeclared.append(shard_id)
            if len(self._undeclared) > _KEPT_UNDECLARED:
                self._slots.pop(self._undeclared.popleft(), None)

    def _start(self) -> None:
        while len(self._threads) < NUM_FETCHERS and not self._is_closed:
            thread = threading.Thread(target=self._fetch_all, name="shard-fetch", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _after_fork(self) -> None:
        """Threads do not survive a fork, and a lock may have been taken in it: a child begins anew."""
        if self._pid != os.getpid():
            self._begin()

    def _fetch_all(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed:
                    comes_back = self._comes_back()  # first: a pause that ends now is over at the next question
                    if self._has_work():
                        break
                    self._changed.wait(_COME_BACK_S if comes_back else None)
                if self._is_closed:
                    return
                shard_id = self._take_work()
                self._slots[shard_id] = _Slot(place=_Place.FETCHING)
            slot = self._fetched(shard_id)
            with self._changed:
                self._slots.pop(shard_id, None)  # gone already if it was closed meanwhile
                if slot.pin is not None:
                    self._hold(shard_id, slot.pin)
                elif not self._is_closed:
                    self._slots[shard_id] = slot
                if slot.place is not _Place.ELSEWHERE:  # nobody waits to hear that somebody else is at it
                    self._changed.notify_all()
            del slot  # or the idle thread would keep the pin

    def _fetched(self, shard_id: int) -> _Slot:
        had_former = bool(self._former)  # before: the other thread may let them go while we learn that there is no room
        try:
            pin = self._obtain(shard_id, self._check)
            if pin is None and had_former:
                with self._changed:
                    self._former.clear()
                pin = self._obtain(shard_id, self._check)
        except _ClosedError:
            return _Slot(place=_Place.NO_ROOM)
        except BusyError as busy:
            if busy.is_node:
                with self._changed:
                    self._pause_until_s = time.monotonic() + _COME_BACK_S
            return _Slot(place=_Place.ELSEWHERE, at_s=time.monotonic())
        except OrchestratorError as error:
            _LOG.warning("a shard could not be fetched ahead of its use: %s", error)
            return _Slot(place=_Place.FAILED, error=error, at_s=time.monotonic())
        except Exception as error:  # noqa: BLE001 - the reader raises it, whatever it is
            return _Slot(place=_Place.FAILED, error=error, at_s=time.monotonic())
        if pin is None:
            return _Slot(place=_Place.NO_ROOM, at_s=time.monotonic())
        return _Slot(place=_Place.HELD, pin=pin)

    def _check(self) -> None:
        if self._is_closed:
            raise _ClosedError

    def _comes_back(self) -> bool:
        """Whether there may be work in a moment although nobody tells."""
        is_pausing = time.monotonic() < self._pause_until_s
        return is_pausing or any(slot.place is _Place.ELSEWHERE for slot in self._slots.values())

    def _to_come_back_to(self) -> int | None:
        """The first of the shards that others were at, if it is time to look again."""
        before_s = time.monotonic() - _COME_BACK_S
        due = [
            shard_id
            for shard_id, slot in self._slots.items()
            if slot.place is _Place.ELSEWHERE and slot.at_s <= before_s
        ]
        return min(due, key=lambda shard_id: self._turn_of.get(shard_id, -1), default=None)

    def _has_work(self) -> bool:
        if time.monotonic() < self._pause_until_s:
            return False
        if self._to_come_back_to() is not None:
            return True
        while self._next < len(self._declared) and self._declared[self._next] in self._slots:
            self._next += 1
        return bool(self._urgent) or self._next < len(self._declared)

    def _take_work(self) -> int:
        if self._urgent:
            return self._urgent.popleft()
        if (shard_id := self._to_come_back_to()) is not None:
            return shard_id
        self._next += 1
        return self._declared[self._next - 1]
