"""A pool of processes that never outlives its owner, also when the owner is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait

from orchestrator.core.errors import OrchestratorError


@contextmanager
def owned_pool(num_processes: int) -> Iterator[ProcessPoolExecutor]:
    """A pool whose pending work is dropped at the end of the block.

    Raises:
        OrchestratorError: a process died; usually the machine has too little memory for so many.
    """
    # spawn: a fork of a process with threads (torch, boto3) may deadlock.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_processes, mp_context=context, initializer=_follow_owner)
    try:
        yield pool
    except BrokenProcessPool as error:
        message = f"one of {num_processes} processes was killed, probably for lack of memory; use fewer and run again"
        raise OrchestratorError(message) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _follow_owner() -> None:
    """Ctrl-C is the owner's business; its death is ours: nothing else would wake a process that waits for work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = multiprocessing.parent_process()
    if owner is not None:
        threading.Thread(target=_end_with, args=(owner.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
