"""What a process that hangs was doing: its stacks, at the end of its log, before it is ended.

A process that hangs may hold Python's lock, so that none of its own threads can say anything. A signal makes
faulthandler write the stacks all the same, from C, into the file of the log; a task on the process's node then brings
the rest of that file into the store.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TextIO

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.storage.logs import append_log
from orchestrator.storage.open import open_store

STACKS_SIGNAL = signal.SIGUSR2
_WRITTEN_WITHIN_S = 3.0
_PY_SPY_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedProcess:
    """One process of an attempt, and its log."""

    pid: int
    node_id: str
    log_path: str
    """File on that node."""
    log_name: str
    """Object in the store."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        return cls(**document)


def logged_process(log_path: Path, log_name: str) -> LoggedProcess:
    """The calling process."""
    node_id = ray.get_runtime_context().get_node_id()
    return LoggedProcess(pid=os.getpid(), node_id=node_id, log_path=str(log_path), log_name=log_name)


def write_stacks_into(log: TextIO) -> None:
    """From now on, the signal writes the stacks of all threads of this process into this file, which must stay open."""
    faulthandler.register(STACKS_SIGNAL, file=log, all_threads=True)


def examine(process: LoggedProcess, store_uri: str) -> ray.ObjectRef[Any]:
    """Start to bring a process's stacks into its log; the answer comes when that is done. Does not wait."""
    strategy = NodeAffinitySchedulingStrategy(process.node_id, soft=False)
    task: Any = ray.remote(_examine).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    ref: ray.ObjectRef[Any] = task.remote(process.to_json(), store_uri)
    return ref


def _examine(document: Mapping[str, Any], store_uri: str) -> int:
    """On the process's node. Returns the number of bytes that the log has got."""
    process = LoggedProcess.from_json(document)
    path = Path(process.log_path)
    before = path.stat().st_size  # fails if the process has ended and taken its log along: then it needs no signal
    os.kill(process.pid, STACKS_SIGNAL)
    _wait_for_more(path, before)
    content = path.read_bytes() + _py_spy(process.pid)
    return append_log(open_store(store_uri), process.log_name, content)


def _wait_for_more(path: Path, before: int) -> None:
    """Until the file has grown and grows no more, or for a few seconds."""
    deadline_s, last = time.monotonic() + _WRITTEN_WITHIN_S, before
    while time.monotonic() < deadline_s:
        time.sleep(0.1)
        size = path.stat().st_size
        if size > before and size == last:
            return
        last = size


def _py_spy(pid: int) -> bytes:
    """Native stacks too, where py-spy is installed and may look into other processes."""
    program = shutil.which("py-spy")
    if program is None:
        return b""
    try:
        told = subprocess.run(
            [program, "dump", "--native", "--pid", str(pid)],
            capture_output=True,
            timeout=_PY_SPY_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return b"\n" + told.stdout if told.returncode == 0 else b""
