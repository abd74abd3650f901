"""Ranks as plain processes: forked from a server that has loaded torch and timm once, joined by gloo over loopback."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ANSWER_TIMEOUT_S = 90.0
COLLECTIVE_TIMEOUT_S = 20.0
PRELOADED = [
    "pytest",
    "tests.tiny_training",
    "workloads.jobs.cluster",
    "workloads.jobs.pretrain",
    "workloads.jobs.probe",
]
"""What tests with ranks import: loaded once by the server instead of by every rank."""


class Rank:
    """One process that calls functions, one after the other, until it is closed or killed."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._mine, theirs = context.Pipe()
        self.process: ForkServerProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, function: Callable[..., Any], *arguments: object) -> None:
        """Call a function of a module (not a lambda) there."""
        self._mine.send((function, arguments))

    def result(self) -> Any:
        """What the call gave; an exception of its is returned, and the process's death is an ``EOFError``."""
        if not self._mine.poll(ANSWER_TIMEOUT_S):
            raise TimeoutError(f"rank process {self.process.pid} gave no answer in {ANSWER_TIMEOUT_S:g} s")
        try:
            return self._mine.recv()
        except (EOFError, ConnectionResetError):
            return EOFError("the process died")

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self._mine.close()


class RankPool:
    """Rank processes for many short gangs."""

    def __init__(self, size: int) -> None:
        self.ranks = [Rank() for _ in range(size)]

    def run(self, folder: Path, world_size: int, function: Callable[..., Any], *arguments: object) -> list[Any]:
        """Results of ``function(rank, world_size, *arguments)`` by rank, in a gang of the first processes."""
        rendezvous = folder / f"gang-{os.urandom(8).hex()}"
        for number, rank in enumerate(self.ranks[:world_size]):
            rank.begin(in_gang, rendezvous, number, world_size, function, *arguments)
        return [rank.result() for rank in self.ranks[:world_size]]

    def close(self) -> None:
        """End all processes."""
        for rank in self.ranks:
            rank.close()


def in_gang(rendezvous: Path, rank: int, world_size: int, function: Callable[..., Any], *arguments: object) -> Any:
    """Call ``function(rank, world_size, *arguments)`` as one rank; alone without torch.distributed."""
    if world_size == 1:
        return function(rank, world_size, *arguments)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    try:
        dist.barrier()  # one that is refused at once must not close connections that others still make
        return function(rank, world_size, *arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def raise_errors(results: Sequence[Any]) -> Sequence[Any]:
    """The results, unless one of them is an exception: then that, with the traceback of where it was raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _serve(connection: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - the caller judges it
            error.add_note(traceback.format_exc())
            connection.send(error)
