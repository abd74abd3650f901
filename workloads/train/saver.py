"""The output of an attempt while it trains: checkpoints and metrics, written only by rank 0."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Final

from orchestrator.core.activity import Activity
from orchestrator.core.contract import ExecutionContext, JobRequest
from orchestrator.core.errors import CorruptObjectError, NotFoundError, StorageError
from orchestrator.core.units import MIB
from orchestrator.storage import ObjectStore
from orchestrator.storage.bulk import write_at
from orchestrator.storage.digests import Digests
from workloads.checkpoint.store import Checkpoint, CheckpointFolder
from workloads.checkpoint.writer import AutoInterval, CheckpointWriter, WhenBusy, retry_in_outage
from workloads.data.cache.folder import Pin, go_on
from workloads.data.cache.objects import ObjectCache, Wanted
from workloads.runtime.ranks import Ranks
from workloads.train.learner import AWAITS_EVALUATION, RunState
from workloads.train.step_metrics import MetricsLog

_COPY_BYTES: Final = 16 * MIB
_LOG = logging.getLogger(__name__)


class Saver:
    """The checkpoints and metrics of one attempt. Close it: a checkpoint that is being written is let through."""

    def __init__(self, request: JobRequest, context: ExecutionContext, ranks: Ranks) -> None:
        execution = request.execution
        # One rank reads straight into memory; several would read the same bytes as many times.
        tick = ranks.activity.tick
        self._copies = None if ranks.is_solo else NodeCopies(context.store, context.cache, tick)
        self.folder = CheckpointFolder(
            context.store,
            request.key,
            keep_last=execution.checkpoint_keep_last,
            attempt_number=request.attempt_number,
            copy=self._copies.copy if self._copies else None,
            arrived=tick,
        )
        self._request, self._store, self._ranks = request, context.store, ranks
        self._writer = CheckpointWriter(self.folder, on_written=tick)
        self._interval = AutoInterval(execution.checkpoint_mtbf_s)
        self._is_timed = execution.checkpoint_mtbf_s > 0 and not execution.checkpoint_every_steps
        self._saved = (0, False)
        """Step of the newest checkpoint, and whether its evaluation is still to be done."""
        self._log = MetricsLog(context.store, request, 0)

    @property
    def is_timed(self) -> bool:
        """Whether a clock, not the step, says when checkpoints are due."""
        return self._is_timed

    @property
    def stalled_s(self) -> float:
        """Seconds that training has stood still for checkpoints."""
        return self._writer.stalled_s

    @property
    def unsaved_s(self) -> float:
        """See ``CheckpointWriter.unsaved_s``."""
        return self._writer.unsaved_s

    def load(self) -> Checkpoint | None:
        """The checkpoint to resume from, the same on all ranks; the attempt's metrics begin there.

        Raises:
            StorageError: the ranks do not see the same checkpoint.
        """
        with self._reading():
            checkpoint = self.folder.load_newest() if self._ranks.is_first else None
        # The first rank chooses: what others see of the store may be older.
        name = self._ranks.broadcast_text(self.folder.newest_name() or "" if checkpoint else "")
        with self._reading():
            if name and not self._ranks.is_first:
                checkpoint = self.folder.load_named(name)
        checkpoint = self._agreed(checkpoint)
        self._saved = _saved(checkpoint) if checkpoint else (0, False)
        self._log = MetricsLog(self._store, self._request, _finished_step(checkpoint) if checkpoint else 0)
        return checkpoint

    def load_at_most(self, step: int) -> Checkpoint | None:
        """The newest checkpoint of this step or an earlier one, the same on all ranks. Raises as ``load``."""
        self.drain()
        self._ranks.barrier()
        with self._reading():
            if not self._ranks.is_first:
                self.folder.load_newest()  # learns what the first rank has written since
            checkpoint = self.folder.load_at_most(step)
        return self._agreed(checkpoint)

    def add_line(self, step: int, epoch: float, metrics: Mapping[str, float]) -> None:
        """Add a line of metrics."""
        self._log.add(step, epoch, metrics)

    def wants_save(self) -> bool:
        """Whether the clock says that it is time for a checkpoint; decided by rank 0."""
        if not (self._is_timed and self._ranks.is_first):
            return False
        return self._interval.is_due(cost_s=self._writer.cost_s, now_s=time.perf_counter())

    def has_room(self, state: RunState, when_busy: WhenBusy) -> bool:
        """Whether ``save`` of this state would write anything now; waits with ``WAIT``. Raises ``StorageError``."""
        is_new = (state.step, state.awaits_evaluation) != self._saved
        with self._ranks.activity.during(Activity.CHECKPOINT):
            return self._ranks.is_first and is_new and self._writer.has_room(when_busy)

    def save(self, checkpoint: Checkpoint, protected: AbstractSet[int]) -> None:
        """Copy a checkpoint; it is written in the background. Raises ``StorageError`` for an earlier one.

        ``protected``: steps of older ones that stay.
        """
        # The metrics up to this step are durable before the checkpoint is: a run that resumes from it never writes
        # them again.
        with self._ranks.activity.during(Activity.CHECKPOINT):
            self._writer.save(checkpoint, before=self._log.seal(_finished_step(checkpoint)), protected=protected)
        self._saved = _saved(checkpoint)
        self._interval.saved(time.perf_counter())

    def check(self) -> None:
        """Raise the error of the writing, if there is one; costs nothing."""
        self._writer.check()

    def drain(self) -> None:
        """Wait until everything is written. Raises ``StorageError``."""
        with self._ranks.activity.during(Activity.CHECKPOINT):
            self._writer.drain()

    def go_back(self, checkpoint: Checkpoint, protected: AbstractSet[int]) -> None:
        """Write what the run goes on from, then drop what was written about later steps.

        Raises:
            StorageError: the checkpoint cannot be written, or those of later steps cannot be deleted.
        """
        with self._ranks.at_own_pace():
            self.drain()
            self._log.forget_after(_finished_step(checkpoint))
            if self._ranks.is_first:
                # Deletion comes last: at every moment an intact checkpoint exists, and the newest knows of the rewind.
                self.save(checkpoint, protected)
                self.drain()
                with self._ranks.activity.during(Activity.STORE):
                    self.folder.delete_after(checkpoint.step)

    def finish(self, step: int) -> None:
        """Write what is left, at the end of training."""
        self.drain()
        if self._ranks.is_first:
            with self._ranks.activity.during(Activity.STORE):
                self._log.close_segment(step, retry_in_outage)

    def close(self) -> None:
        """Let the write in flight end. Raises nothing."""
        with self._ranks.activity.during(Activity.CHECKPOINT):
            self._writer.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Ranks wait for those that read: a large checkpoint takes a slow store longer than an operation may."""
        with self._ranks.at_own_pace(), self._ranks.activity.during(Activity.STORE):
            yield

    def _agreed(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        mine = _name(checkpoint)
        firsts = self._ranks.broadcast_text(mine)
        # Nobody goes on alone: a rank with another checkpoint would train another model.
        if self._ranks.any_(mine != firsts):
            message = (
                f"rank {self._ranks.rank} reads checkpoint {mine}, rank 0 reads {firsts}: something else writes or "
            )
            raise StorageError(
                message + f"damages the checkpoints of {self._request.key}; the next attempt reads again"
            )
        if self._copies is not None:
            self._copies.discard()  # every rank has it
        return checkpoint


class NodeCopies:
    """Objects of checkpoints that the ranks of a node read together: each travels once per node."""

    def __init__(self, store: ObjectStore, folder: Path, tick: Callable[[], None] = go_on) -> None:
        self._store, self._tick = store, tick
        self._cache = ObjectCache(store, folder)
        self._pins: list[Pin] = []

    def copy(self, name: str, size_bytes: int, digests: Digests, descriptor: int) -> bool:
        """See ``checkpoint.store.Copy``. Raises ``NotFoundError`` or ``CorruptObjectError``."""
        wanted = Wanted(store=self._store, name=name, size_bytes=size_bytes, digests=digests)
        try:
            pin = self._cache.pin(wanted, check=self._tick)
            if pin is None:
                return False
            self._pins.append(pin)
            for start in range(0, size_bytes, _COPY_BYTES):
                write_at(descriptor, pin.read(start, min(_COPY_BYTES, size_bytes - start)), start)
            # Disks and memory fail after a download, too, and a rank with other weights would not be noticed.
            if wanted.is_in(descriptor):
                return True
            _LOG.warning("the node's copy of checkpoint object %s is damaged: it is read from the store", name)
            self._cache.discard(pin)
        except (NotFoundError, CorruptObjectError):
            raise
        except (StorageError, OSError) as error:
            _LOG.warning("checkpoint object %s is read past the node's cache: %s", name, error)
        return False

    def discard(self) -> None:
        """Give the room back: a checkpoint is read once. Raises nothing."""
        pins, self._pins = self._pins, []
        for pin in pins:
            with suppress(StorageError, OSError):
                self._cache.discard(pin)


def _saved(checkpoint: Checkpoint) -> tuple[int, bool]:
    return checkpoint.step, bool(checkpoint.state.get(AWAITS_EVALUATION))


def _finished_step(checkpoint: Checkpoint) -> int:
    """The last step whose line of metrics is made: not one whose evaluation is still to be done."""
    step, awaits_evaluation = _saved(checkpoint)
    return step - awaits_evaluation


def _name(checkpoint: Checkpoint | None) -> str:
    """Tells checkpoints apart by their state, which holds what was measured up to their step."""
    if checkpoint is None:
        return "none"
    digest = sha256(json.dumps(checkpoint.state, sort_keys=True).encode()).hexdigest()
    return f"{checkpoint.step}-{digest[:16]}"
