"""Whole jobs in gangs of rank processes, through the one entry point of the data plane."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult
from orchestrator.storage.local import LocalStore
from tests.rank_processes import ANSWER_TIMEOUT_S, Rank, in_gang
from tests.tiny_training import TinyTraining
from workloads.data.loader import TrainLoader
from workloads.run import execute
from workloads.runtime import ranks
from workloads.train import samples

Seen = list[tuple[int, int, NDArray[np.int64]]]
"""Batch, first position and ordinals of every share that a rank was handed."""


class Gang:
    """One attempt at a job by a gang of fresh processes, in a store below ``folder``.

    ``asks_often``: validation has batches of 16 samples, and ranks ask before each whether to stop.
    """

    def __init__(
        self,
        folder: Path,
        request: JobRequest,
        world_size: int,
        *,
        stop_after: int | None = None,
        asks_often: bool = False,
    ) -> None:
        self.ranks = [Rank() for _ in range(world_size)]
        self._questions = [folder / f"questions-{rank}-{request.attempt_number}" for rank in range(world_size)]
        rendezvous = folder / f"gang-{request.attempt_number}"
        for path in self._questions:
            os.mkfifo(path)
        self._readers = [os.open(path, os.O_RDONLY | os.O_NONBLOCK) for path in self._questions]
        for number, rank in enumerate(self.ranks):
            # Only the last rank is asked to stop: the others must learn of it.
            mine = stop_after if number == world_size - 1 else None
            run = partial(run_rank, asks_often=asks_often)
            rank.begin(in_gang, rendezvous, number, world_size, run, folder, request, self._questions[number], mine)

    def kill(self, rank: int, after_questions: int) -> None:
        """SIGKILL a rank once it has asked so many times whether to stop, that is at the beginning of that step."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        num_read = 0
        os.set_blocking(self._readers[rank], True)
        while num_read < after_questions and time.monotonic() < deadline:
            num_read += len(os.read(self._readers[rank], after_questions - num_read))
        pid = self.ranks[rank].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def results(self) -> list[Any]:
        """What each rank ended with: result and samples seen, or an ``EOFError`` for a death."""
        try:
            return [rank.result() for rank in self.ranks]
        finally:
            for rank in self.ranks:
                rank.close()
            for reader in self._readers:
                os.close(reader)


def run_rank(
    rank: int,
    world_size: int,
    folder: Path,
    request: JobRequest,
    questions: Path,
    stop_after: int | None,
    *,
    asks_often: bool = False,
) -> tuple[JobResult, Seen] | tuple[Exception, Seen]:
    """One rank of an attempt; an error comes back with the samples seen before it."""
    asked, fifo = itertools.count(1), os.open(questions, os.O_WRONLY)

    def should_stop() -> bool:
        os.write(fifo, b".")
        return next(asked) == stop_after

    scratch = folder / "scratch" / f"{request.attempt_id}-{rank}"
    scratch.mkdir(parents=True)
    context = ExecutionContext(
        store=LocalStore(folder / "store"),
        scratch=scratch,
        cache=folder / "cache",
        rank=rank,
        world_size=world_size,
        should_stop=should_stop,
    )
    with _watched_batches() as seen, _asking_often() if asks_often else nullcontext():
        try:
            return execute(request, context), seen
        except Exception as error:  # noqa: BLE001 - the test judges it
            return error, seen
        finally:
            os.close(fifo)


def copied(prepared: Path, folder: Path) -> TinyTraining:
    """A store of its own with the data set of another folder."""
    shutil.copytree(prepared, folder)
    return TinyTraining(LocalStore(folder / "store"), folder)


def sequence(attempts: Sequence[tuple[int, int, Sequence[Seen]]]) -> list[int]:
    """Ordinals in the order of training, from ``(first step, end step, samples seen by each rank)`` per attempt."""
    ordinals: list[int] = []
    for first, end, seen_by_rank in attempts:
        shares = sorted(
            (start, share.tolist()) for seen in seen_by_rank for batch, start, share in seen if first <= batch < end
        )
        ordinals += [ordinal for _, share in shares for ordinal in share]
    return ordinals


@contextmanager
def _asking_often() -> Iterator[None]:
    with (
        mock.patch.multiple(samples, EVAL_BATCH_SIZE=16, _ASK_EVERY_S=0.0),
        mock.patch.object(ranks, "VOTE_EVERY_S", 0.05),
    ):
        yield


@contextmanager
def _watched_batches() -> Iterator[Seen]:
    seen: Seen = []
    iterate: Callable[[TrainLoader], Iterator[Any]] = TrainLoader.__iter__

    def watched(loader: TrainLoader) -> Iterator[Any]:
        for batch in iterate(loader):
            seen.append((batch.step, batch.positions[0], batch.ordinals_B))
            yield batch

    TrainLoader.__iter__ = watched  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        TrainLoader.__iter__ = iterate  # type: ignore[method-assign]
