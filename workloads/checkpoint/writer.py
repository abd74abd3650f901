"""Checkpoints in the background: the loop waits for a copy in memory, a thread writes it to the store.

A thread, not a process: what it spends its time on (hashing, reading, sending, flushing) does not hold Python's lock,
and a process would cost the memory of a second interpreter and could write only to stores that have a URI.
``docs/checkpoints.md`` has the figures. How often to save follows from what a checkpoint costs and how often runs die.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, wait
from enum import StrEnum
from threading import Event, Thread
from typing import TypeVar

from orchestrator.core.clocks import young_interval_s
from orchestrator.core.errors import OUTAGES, StorageError
from workloads.checkpoint.snapshot import Checkpoint, Snapshot
from workloads.checkpoint.store import CheckpointFolder, Write

_LOG = logging.getLogger(__name__)
Result = TypeVar("Result")
_PATIENCE_S = 300.0
"""A longer outage is the controller's: it can wait without holding a device."""
_LOOK_EVERY_S = 1.0
_ALLOWANCE_S = 2.0
"""What saves that may be skipped wait in all, per attempt: below this, a skipped one would cost more than it saves."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_SLOWDOWN = 0.1
"""Share of its speed that training may lose while a checkpoint is written; measured, it is less."""


class WhenBusy(StrEnum):
    """What to do about a checkpoint that is due while an earlier one is being written."""

    SKIP = "skip"
    """Go on without it: the next one comes."""
    WAIT = "wait"
    """Wait for the earlier one: this one must be written."""


class CheckpointWriter:
    """Writes at most one checkpoint at a time, in the background. Close it.

    While the store is out of reach (throttled, timeouts), the checkpoint in flight is tried again without end, and
    training goes on until a save must wait: that one gives up once no object has been written for ``patience_s``. Any
    other error of the writing is raised by the next call.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        *,
        patience_s: float = _PATIENCE_S,
        allowance_s: float = _ALLOWANCE_S,
        first_pause_s: float = _FIRST_PAUSE_S,
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._snapshot = Snapshot()
        self._patience_s, self._allowance_s, self._first_pause_s = patience_s, allowance_s, first_pause_s
        self._on_written = on_written
        """Called while a caller waits, as objects are written."""
        self._flight: Future[float] | None = None
        self._is_closing = Event()
        self._num_written = 0
        self._is_failing = False
        """Whether the latest write found the store out of reach, and will be tried again."""
        self._saved_at_s = time.monotonic()
        """When the newest committed checkpoint was copied; before the first one, when this attempt began."""
        self._stall_s = self._write_s = 0.0
        self.stalled_s = 0.0
        """Seconds that callers have waited here, in all."""

    @property
    def cost_s(self) -> float:
        """Seconds of training that a checkpoint costs, by the newest one; 0 before the first."""
        return self._stall_s + _SLOWDOWN * self._write_s

    @property
    def unsaved_s(self) -> float:
        """Seconds of work that no checkpoint holds, while one cannot be written because the store is out of reach; 0
        otherwise.
        """
        return time.monotonic() - self._saved_at_s if self._is_failing else 0.0

    def has_room(self, when_busy: WhenBusy) -> bool:
        """Whether a save can begin at once; with ``WAIT``, always.

        Raises:
            StorageError: an earlier checkpoint could not be written, or was waited for in vain.
        """
        if when_busy is WhenBusy.WAIT:
            self.drain()
            return True
        started_s = time.monotonic()
        has_room = self._settle(self._allowance_s)
        self._allowance_s = max(0.0, self._allowance_s - (time.monotonic() - started_s))
        if not has_room:
            _LOG.info("a checkpoint is skipped: that of step %d is still being written", self._snapshot.step)
        return has_room

    def save(
        self,
        checkpoint: Checkpoint,
        *,
        before: Mapping[str, bytes] | None = None,
        protected: AbstractSet[int] = frozenset(),
    ) -> None:
        """Copy a checkpoint and return; its tensors may then change. Waits for an earlier one.

        ``before`` and ``protected``: see ``CheckpointFolder.commit``.

        Raises:
            StorageError: see ``has_room``.
        """
        self.drain()
        self._snapshot.fit(checkpoint)
        started_s = time.perf_counter()
        self._snapshot.take(checkpoint)
        self._flight = self._start_writing(before, protected)
        self._stall_s = time.perf_counter() - started_s
        self.stalled_s += self._stall_s

    def check(self) -> None:
        """Raise the error of the writing, if there is one; costs nothing."""
        self._settle(0.0)

    def drain(self) -> None:
        """Wait until the checkpoint in flight is committed.

        Raises:
            StorageError: see ``has_room``.
        """
        wrote_s, num_written = time.monotonic(), self._num_written
        while not self._settle(min(_LOOK_EVERY_S, self._patience_s)):
            if self._num_written > num_written:
                wrote_s, num_written = time.monotonic(), self._num_written
                self._on_written()
            elif time.monotonic() - wrote_s >= self._patience_s:
                message = (
                    f"the checkpoint of step {self._snapshot.step} is still not written after {self._patience_s:g} s "
                    "more: training must not go on without it; check that the store can be reached, the job resumes "
                    "from the checkpoint before"
                )
                raise StorageError(message)

    def close(self) -> None:
        """Let the write in flight end, without trying again, and free the memory. Raises nothing."""
        self._is_closing.set()
        if self._flight is not None:
            if not wait([self._flight], self._patience_s).done:
                # Its thread still reads the memory, which goes when it does.
                _LOG.warning("the store does not answer: the checkpoint of step %d is given up", self._snapshot.step)
                return
            if error := self._flight.exception():
                _LOG.warning("the checkpoint of step %d is not written: %s", self._snapshot.step, error)
            self._flight = None
        self._snapshot.close()

    def _settle(self, timeout_s: float) -> bool:
        """Whether nothing is in flight any more; an error of what was is raised once."""
        flight = self._flight
        if flight is None:
            return True
        if not flight.done() and not self._wait(flight, timeout_s):
            return False
        self._flight = None
        error = flight.exception()
        if isinstance(error, Exception) and not isinstance(error, StorageError):
            raise StorageError(f"writing the checkpoint of step {self._snapshot.step} failed: {error!r}") from error
        self._write_s = flight.result()
        return True

    def _wait(self, flight: Future[float], timeout_s: float) -> bool:
        started_s = time.perf_counter()
        is_done = bool(wait([flight], timeout_s).done)
        self.stalled_s += time.perf_counter() - started_s
        return is_done

    def _start_writing(self, before: Mapping[str, bytes] | None, protected: AbstractSet[int]) -> Future[float]:
        """A thread per checkpoint: none is left idle in a runner that stays warm."""
        flight: Future[float] = Future()
        copied_at_s = time.monotonic()

        def write() -> None:
            try:
                started_s = time.perf_counter()
                self._folder.commit(self._snapshot, before=before, protected=protected, persist=self._persist)
                self._saved_at_s = copied_at_s
                flight.set_result(time.perf_counter() - started_s)
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that trains
                flight.set_exception(error)

        Thread(target=write, name=f"checkpoint-{self._snapshot.step}", daemon=True).start()
        return flight

    def _persist(self, write: Write) -> None:
        """Write, again and again while the store is out of reach: the same bytes under the same name are harmless."""
        for pause_s in _pauses_s(self._first_pause_s):
            try:
                write()
                self._num_written += 1
                self._is_failing = False
                return
            except OUTAGES as error:
                if self._is_closing.is_set():
                    raise
                self._is_failing = True
                _LOG.warning(
                    "writing the checkpoint of step %d is tried again in %.1f s; training goes on without newer ones: "
                    "%s",
                    self._snapshot.step,
                    pause_s,
                    error,
                )
            self._is_closing.wait(pause_s)


def retry_in_outage(work: Callable[[], Result]) -> Result:
    """Result of what may be repeated; it is, for as long as a save that must wait, while the store is out of reach.

    Raises:
        StorageError: the store is still out of reach after that time. Any other error is raised at once.
    """
    started_s, pauses_s = time.monotonic(), _pauses_s(_FIRST_PAUSE_S)
    while True:
        try:
            return work()
        except OUTAGES as error:
            if time.monotonic() - started_s >= _PATIENCE_S:
                raise
            pause_s = next(pauses_s)
            _LOG.warning("the store is out of reach; it is tried again in %.1f s: %s", pause_s, error)
        time.sleep(pause_s)


def _pauses_s(first_s: float) -> Iterator[float]:
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class AutoInterval:
    """Says when the next checkpoint is due; the first one is due at once, because only it tells what one costs."""

    def __init__(self, mtbf_s: float) -> None:
        self._mtbf_s = mtbf_s
        self._saved_at_s = -math.inf

    def is_due(self, *, cost_s: float, now_s: float) -> bool:
        """Whether the interval is over; ``now_s`` by any clock that is always the same."""
        return now_s - self._saved_at_s >= young_interval_s(cost_s, self._mtbf_s)

    def saved(self, now_s: float) -> None:
        """A checkpoint was taken; the next interval begins."""
        self._saved_at_s = now_s
