"""Runs every attempt inside this process, one after the other: for debugging, tests and ``orchestrator run``."""

from __future__ import annotations

import importlib
import math
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from orchestrator.backends.classify import failure_from
from orchestrator.backends.protocol import ANYWHERE, AttemptReport, AttemptStatus, Capacity, Node, Placement
from orchestrator.core.contract import ENTRY_POINT, ExecutionContext, JobRequest, JobResult, Progress, Resources
from orchestrator.core.errors import FailureKind
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Plan
from orchestrator.search.sequential import run_in_turn
from orchestrator.storage.protocol import ObjectStore

Execute: TypeAlias = Callable[[JobRequest, ExecutionContext], JobResult]
ProgressListener: TypeAlias = Callable[[JobRequest, Progress], None]

_UNBOUNDED = Resources(cpus=math.inf, gpus=math.inf, memory_gib=math.inf)
_HOST = Node(resources=_UNBOUNDED, is_spot=False)
"""Never on a spot node: a person debugs here, and the machine must not be taken away."""


def load_entry_point(entry_point: str = ENTRY_POINT) -> Execute:
    """Import ``"package.module:function"``: how the data plane enters a process of the control plane."""
    module, _, name = entry_point.partition(":")
    execute: Execute = getattr(importlib.import_module(module), name)
    return execute


def _no_listener(_request: JobRequest, _progress: Progress) -> None:
    return None


class InprocessBackend:
    """See ``Backend``; ``launch`` returns when the attempt has ended.

    It claims unbounded resources: run its controller with ``max_live_attempts=1``. ``directory`` holds the attempts'
    scratch directories, deleted after each, and the cache, which stays.
    """

    def __init__(
        self,
        store: ObjectStore,
        directory: Path,
        *,
        entry_point: str = ENTRY_POINT,
        on_progress: ProgressListener = _no_listener,
    ) -> None:
        self._store = store
        self._directory = directory
        self._entry_point = entry_point
        self._on_progress = on_progress
        self._reports: dict[str, AttemptReport] = {}
        self._stopping: set[str] = set()

    def announce(self, epoch: int) -> None:
        """Nothing to do: no runner outlives this process."""

    def why_not(self, plan: Plan) -> str:
        """Never: a submit from this machine has the files that its plan needs."""
        return ""

    def capacity(self) -> Capacity:
        """See ``Backend``."""
        # Without nodes, whose sort would have to be named: attempts run here whatever node they ask for.
        return Capacity(total=_UNBOUNDED, host=_HOST)

    def launch(self, request: JobRequest, resources: Resources, placement: Placement = ANYWHERE) -> None:
        """Run an attempt to its end."""
        if request.attempt_id in self._reports:
            return
        try:
            result = self.run(request)
        except Exception as error:  # noqa: BLE001 - whatever ends an attempt is a value; Ctrl-C passes
            failure = failure_from(error, request)
            report = AttemptReport(attempt_id=request.attempt_id, status=AttemptStatus.FAILED, failure=failure)
        else:
            report = AttemptReport(attempt_id=request.attempt_id, status=AttemptStatus.SUCCEEDED, result=result)
        self._reports[request.attempt_id] = report

    def run(self, request: JobRequest) -> JobResult:
        """Run an attempt in the foreground and let its exceptions out, for debuggers."""
        started_s = time.monotonic()
        execute = load_entry_point(self._entry_point)
        import_s = time.monotonic() - started_s
        scratch = self._directory / "scratch" / request.attempt_id
        try:
            context = self._context(request, scratch)
            if request.kind is JobKind.SEARCH:
                result = run_in_turn(request, context, execute, failure_from)
            else:
                result = execute(request, context)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return replace(result, timings=replace(result.timings, import_s=import_s + result.timings.import_s))

    def observe(self, attempt_ids: Collection[str], *, are_all: bool = True) -> list[AttemptReport]:
        """See ``Backend``."""
        return [self._reports.get(attempt_id) or _lost(attempt_id) for attempt_id in attempt_ids]

    def stop(self, attempt_id: str) -> None:
        """See ``Backend``; an attempt sees it only when this comes from another thread."""
        self._stopping.add(attempt_id)

    def kill(self, attempt_id: str, reason: str, kind: FailureKind = FailureKind.NODE_LOST) -> None:
        """Nothing to do: the attempt has ended before this can be called."""

    def release(self, attempt_id: str) -> None:
        """See ``Backend``."""
        self._reports.pop(attempt_id, None)
        self._stopping.discard(attempt_id)

    def close(self) -> None:
        """See ``Backend``."""

    def _context(self, request: JobRequest, scratch: Path) -> ExecutionContext:
        cache = self._directory / "cache"
        for folder in (scratch, cache):
            folder.mkdir(parents=True, exist_ok=True)
        return ExecutionContext(
            store=self._store,
            scratch=scratch,
            cache=cache,
            report=lambda progress: self._on_progress(request, progress),
            should_stop=lambda: request.attempt_id in self._stopping,
        )


def _lost(attempt_id: str) -> AttemptReport:
    reason = "the process that ran this attempt has ended"
    return AttemptReport(attempt_id=attempt_id, status=AttemptStatus.LOST, lost_reason=reason)
