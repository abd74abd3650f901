"""The ranks of one gang: which one this process is, and what they do together.

Alone (``world_size`` 1) nothing communicates and torch.distributed is not touched, so that one-device jobs need no
process group. In a gang the launcher has initialised torch.distributed's default group; every method is then a
collective, to be called by all ranks in the same order.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.core.activity import Activity, RankActivity
from orchestrator.core.code import package_digest
from orchestrator.core.contract import ExecutionContext, JobRequest
from orchestrator.core.errors import FailureKind, OrchestratorError, PreemptedError, UserError, is_lost_peer

VOTE_EVERY_S = 5.0
"""Of ranks that work ``at_own_pace``: far below the limits of collective operations, and as long as a stop may take to
reach them all."""
_LOG = logging.getLogger(__name__)
Result = TypeVar("Result")


class PeerLostError(OrchestratorError):
    """Another rank of the gang died, left or did not answer in time; what it says itself is the cause."""

    failure_kind = FailureKind.NODE_LOST


def share_of(number: int, rank: int, world_size: int) -> range:
    """Which of ``number`` things in a row a rank takes: a run of them, as long as that of any other rank or one longer.

    Runs follow one another in the order of the ranks, so a node, whose ranks are consecutive, reads only the shards of
    its own part. Rank 0 has the first thing, if there is any.
    """
    return range(-(-rank * number // world_size), -(-(rank + 1) * number // world_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Rank ``rank`` of ``world_size``; all methods are collectives, and do nothing alone.

    All of them raise ``PeerLostError`` when another rank is gone, or does not come before the group's timeout. What is
    this rank's own fault (no memory, a broken device, a bug) they raise as it is.
    """

    rank: int = 0
    world_size: int = 1
    activity: RankActivity = field(default_factory=RankActivity, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UserError(f"rank {self.rank} of {self.world_size} does not exist; ranks count from 0")

    @classmethod
    def of(cls, context: ExecutionContext) -> Self:
        """The ranks that a launcher made.

        Raises:
            UserError: torch.distributed's default group is missing, or is another one than the context says.
        """
        context.activity.flight_record = flight_record
        ranks = cls(rank=context.rank, world_size=context.world_size, activity=context.activity)
        if not ranks.is_solo:
            joined = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
            if joined != (context.rank, context.world_size):
                wanted = f"rank {context.rank} of {context.world_size}"
                raise UserError(
                    f"this process must be {wanted}, but torch.distributed has {joined}: join the gang first"
                )
            if context.collective_timeout_s:
                dist.set_timeout(timedelta(seconds=context.collective_timeout_s))
        return ranks

    @property
    def is_solo(self) -> bool:
        """Whether there is no other rank."""
        return self.world_size == 1

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what is written once: checkpoints, metrics, progress, artifacts."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over the ranks, the same bits on all of them; returns it."""
        if not self.is_solo:
            self._together("sum", partial(dist.all_reduce, tensor))
        return tensor

    def sum_in_background(self, tensor: Tensor) -> Callable[[], object]:
        """Begin ``sum_``; the tensor holds the sum once the returned function was called."""
        if self.is_solo:
            return _done
        work = self._together("sum", partial(dist.all_reduce, tensor, async_op=True))
        return partial(self._together, "sum", work.wait)

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by that of rank 0; returns it."""
        if not self.is_solo:
            self._together("broadcast", partial(dist.broadcast, tensor, 0))
        return tensor

    def broadcast_text(self, text: str) -> str:
        """The text of rank 0."""
        if self.is_solo:
            return text
        content = torch.tensor(list(text.encode()), dtype=torch.uint8)
        length = int(self.broadcast_(torch.tensor([len(content)])))
        if not self.is_first:
            content = torch.empty(length, dtype=torch.uint8)
        return bytes(self.broadcast_(content).tolist()).decode() if length else ""

    def gather_text(self, text: str) -> list[str]:
        """The texts of all ranks, in their order."""
        if self.is_solo:
            return [text]
        content = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(content)
        lengths = self.sum_(sizes).tolist()
        texts = torch.zeros(self.world_size, max(lengths), dtype=torch.uint8)
        texts[self.rank, : len(content)] = content
        # Others add zeros to a rank's row.
        rows = self.sum_(texts) if max(lengths) else texts
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]

    def any_(self, flag: bool) -> bool:  # noqa: FBT001 - a vote
        """Whether any rank says so."""
        return flag if self.is_solo else bool(self.sum_(torch.tensor([int(flag)])))

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.any_(flag=False)

    @contextmanager
    def at_own_pace(self, while_waiting: Callable[[int], None] | None = None) -> Iterator[Pace]:
        """Context in which each rank works as long as it needs, without collectives; all ranks leave it together.

        Ranks that wait in one collective for one that works fail at the group's timeout. Here a thread of each rank
        votes again and again, while the work stays in the caller's thread, with its device, threads and precision.
        Votes do not count as operations: they go on beside a rank whose work stands still.

        Args:
            while_waiting: called every few seconds, in another thread, once this rank's work is done and that of
                another is not; given what all ranks together have done, see ``Pace.done``.

        Raises:
            PreemptedError: the work of some rank raised it; all ranks raise it together.
            PeerLostError: another rank was gone before all were through. This rank has done its own work.
        """
        pace = Pace(self, while_waiting)
        try:
            yield pace
        except PreemptedError:
            pace.leave_together(stops=True)
            raise
        except BaseException:
            pace.leave_alone()
            raise
        pace.leave_together()
        if pace.is_stopping:
            raise PreemptedError("another rank of the gang was asked to stop, so this one stops too")

    def abort(self) -> None:
        """Leave the gang at once, so that ranks which wait for this one fail now and not at their timeout."""
        if not self.is_solo and dist.is_initialized():
            _LOG.info("rank %d of %d leaves its gang", self.rank, self.world_size)
            # Destroying the group, the public way, waits on NCCL for collectives that will never end.
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001

    @contextmanager
    def aborted_on_error(self) -> Iterator[None]:
        """Leave the gang when the body fails, whatever the reason; but all ranks stop together when asked to.

        The reason is reported first: the others fail as soon as this rank has left, and a launcher then ends this
        process, which may still wait for a checkpoint in flight.
        """
        try:
            yield
        except PreemptedError:
            raise
        except BaseException as error:
            try:
                if self.activity.on_failure is not None:
                    self.activity.on_failure(error)
            finally:
                self.abort()
            raise

    def _together(self, what: str, collective: Callable[[], Result]) -> Result:
        with self.activity.during(Activity.PEERS):
            return self.counted(what, collective)

    def counted(self, what: str, collective: Callable[[], Result]) -> Result:
        """Run a collective operation and count it, from any thread while no other one of this rank is in one."""
        self.activity.num_entered += 1
        self.activity.operation = what
        return self.uncounted(what, collective)

    def uncounted(self, what: str, collective: Callable[[], Result]) -> Result:
        """The same without counting it."""
        try:
            return collective()
        except RuntimeError as error:
            if not _is_lost_peer(error):
                raise
            message = (
                f"rank {self.rank} of {self.world_size} lost another rank during a {what}; "
                "the attempt cannot go on without it, its checkpoints are safe: see the log of the other ranks"
            )
            raise PeerLostError(message) from error


class Pace:
    """The votes of one rank in ``Ranks.at_own_pace``: they end with the first one in which no rank works any more."""

    def __init__(self, ranks: Ranks, while_waiting: Callable[[int], None] | None = None) -> None:
        self.done = 0
        """How much this rank has done, in a unit that is the same on all."""
        self._ranks, self._while_waiting = ranks, while_waiting
        self._stops, self._is_through, self._has_left = threading.Event(), threading.Event(), False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._vote, name="ranks-at-own-pace", daemon=True)
        if not ranks.is_solo:
            self._thread.start()

    @property
    def is_stopping(self) -> bool:
        """Whether a rank was asked to stop: this one should raise ``PreemptedError``, too."""
        return self._stops.is_set()

    def leave_together(self, *, stops: bool = False) -> None:
        """Wait until all ranks are through. Raises ``PeerLostError``."""
        if stops:
            self._stops.set()
        self._is_through.set()
        if self._ranks.is_solo:
            return
        with self._ranks.activity.during(Activity.PEERS):
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def leave_alone(self) -> None:
        """Vote no more: this rank failed, and aborts the group next."""
        self._has_left = True
        self._is_through.set()
        if not self._ranks.is_solo:
            self._thread.join(2 * VOTE_EVERY_S)  # all ranks vote so often: it hangs only beside a rank that is gone

    def _vote(self) -> None:
        try:
            while True:
                works = not self._is_through.wait(VOTE_EVERY_S)
                if self._has_left:
                    return
                votes = torch.tensor([int(works), int(self.is_stopping), self.done])
                self._ranks.uncounted("vote", partial(dist.all_reduce, votes))
                working, stopping, done = votes.tolist()
                if stopping:
                    self._stops.set()
                if not working:
                    return
                if not works and self._while_waiting is not None:
                    self._while_waiting(done)
        except Exception as error:  # noqa: BLE001 - raised where the rank waits for the others
            self._failure = error


def _is_lost_peer(error: RuntimeError) -> bool:
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        return False
    return isinstance(error, dist.DistNetworkError | dist.DistStoreError) or is_lost_peer(str(error))


def _done() -> None:
    """Nothing to wait for."""


def flight_record() -> Mapping[str, Any]:
    """The collective operations that torch remembers of this process: of NCCL if it has any, else of gloo.

    ``_dump_fr_trace_json`` and ``_dump_nccl_trace_json`` of torch 2.15 (``TORCH_FR_BUFFER_SIZE`` entries, 2000 unless
    set). Empty where this torch has neither, or remembers nothing.
    """
    from torch._C import _distributed_c10d as recorder

    for dump in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        found = getattr(recorder, dump, None)
        record: dict[str, Any] = json.loads(found()) if found is not None else {}
        if record.get("entries"):
            return record
    return {}


def check_same_request(ranks: Ranks, request: JobRequest) -> None:
    """Refuse a gang whose ranks would train different things. Raises ``UserError``."""
    mine = f"{request.attempt_id} {request.key} with code {package_digest()}"
    firsts = ranks.broadcast_text(mine)
    if ranks.any_(mine != firsts):
        message = f"rank {ranks.rank} is to run {mine}, rank 0 {firsts}: all ranks of a gang need the same attempt and "
        raise UserError(message + "code; deploy one version on all nodes")
