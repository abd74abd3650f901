"""Settings of a runner, given when it is created. Execution only: nothing here changes a result."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from orchestrator.core.contract import ENTRY_POINT
from orchestrator.core.errors import StorageDeniedError

SETUP_HANG_S: Final = 300.0
TRAIN_HANG_S: Final = 100.0
"""Seconds without a further collective operation after which a gang is ended, during its setup and its training.
``gang.hangs`` is the rule."""


CACHE_VARIABLE = "ORCHESTRATOR_CACHE_DIR"
"""Environment variable of a node's workers: where its attempts share downloads."""
KEEP_ALIVE_VARIABLE = "ORCHESTRATOR_KEEP_ALIVE_FILE"
"""Environment variable of a local stack's workers: the file to touch while a sweep is live, so that the stack stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """How runners behave; the same for all runners of a backend."""

    entry_point: str = ENTRY_POINT
    namespace: str = ""
    """Ray namespace of the runner, in which a gang's workers look it up; set by the backend."""
    idle_timeout_s: float = 300.0
    """An idle runner leaves after so many seconds and gives its resources back."""
    max_jobs: int = 500
    """A runner leaves after so many jobs: slow leaks of native libraries end with it."""
    log_every_s: float = 3.0
    """Longest age of what the store has of a running attempt's log."""
    gang_start_s: float = 900.0
    """A gang is lost if its workers have not started so long after it got its resources. Cold file systems take
    minutes, and ranks that do not find each other 5 minutes, after which Ray Train's own error says more.
    """
    setup_hang_s: float = SETUP_HANG_S
    """A gang hangs if its ranks wait so long for one of them before the first step; see ``hangs``."""
    train_hang_s: float = TRAIN_HANG_S
    """The same during training; at least five of its longest pauses between collective operations."""
    room_s: float = 240.0
    """A gang with chosen nodes gives its reservation up if they have had no free resources for so long, and is
    scheduled again: another job may have taken them. A gang for which the autoscaler adds nodes waits without limit.
    """
    runner_s: float = 1200.0
    """The same for an attempt with one worker, whose process starts within this time, too."""
    collectives: str = ""
    """Backend of ``torch.distributed`` for a gang's ranks; empty = NCCL and gloo for workers with GPUs, gloo for
    others. Other backends are for accelerators without NCCL.
    """

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        return cls(**document)


def cache_directory() -> Path:
    """The directory that all attempts on this node share, from the environment of this process."""
    default = Path(tempfile.gettempdir(), f"orchestrator-cache-{os.getuid()}")
    return Path(os.environ.get(CACHE_VARIABLE) or default)


def make_cache() -> Path:
    """The same; creates it.

    Raises:
        StorageDeniedError: the default directory, whose name can be guessed, belongs to another user, who could
            change what attempts read from it.
    """
    cache = cache_directory()
    is_usual = CACHE_VARIABLE not in os.environ
    cache.mkdir(mode=0o700 if is_usual else 0o777, parents=True, exist_ok=True)
    if is_usual and (cache.is_symlink() or cache.stat().st_uid != os.getuid()):
        raise StorageDeniedError(
            f"{cache} belongs to another user; remove it, or set {CACHE_VARIABLE} to a folder of yours"
        )
    return cache
