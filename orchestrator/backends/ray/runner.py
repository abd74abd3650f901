"""The runner: a warm, detached, named actor that executes one attempt at a time.

It outlives controllers. It keeps the outcome of an ended attempt until the outcome is on record (``release``), so that
a controller that starts anew can still pull it. It obeys the highest epoch that it has heard of.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from orchestrator.backends.protocol import AttemptStatus
from orchestrator.backends.ray.attempt import AttemptRun, EntryPoint, RunnerPlace
from orchestrator.backends.ray.digest import code_digest
from orchestrator.backends.ray.gang_shape import GangShape
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.backends.ray.wire import Answer, RunnerDescription
from orchestrator.core.contract import JobRequest
from orchestrator.core.security import redaction
from orchestrator.metrics.machine import describe_machine, gpu_uuids
from orchestrator.storage.scratch import sweep_scratch

MAX_CONCURRENT_CALLS = 8
"""Threads for calls. A dead controller's ``report`` may hold one for as long as it waits, at most ``MAX_WAIT_S``."""
MAX_WAIT_S = 2.0
_IDLE_CHECK_EVERY_S = 1.0
_WARM_UP_AFTER_S = 0.3
UNHEARD_S = 40.0
"""Every controller calls a runner that it makes or finds. One that nobody calls is out of Ray's tables: it leaves."""
_LEAVE_WITHIN_S = 10.0


class Runner:
    """Methods take and return plain JSON; each returns at once but ``report``, which may wait as it is told."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        redaction.install()
        self._name = name
        self._settings = RunnerSettings.from_json(settings)
        self._digest = code_digest()
        self._machine = describe_machine()
        self._entry_point = EntryPoint(self._settings.entry_point)
        self._lock = threading.Lock()
        self._epoch = 0
        self._run: AttemptRun | None = None
        self._jobs_done = 0
        self._leaving = ""
        self._is_heard = False
        self._idle_since_s = time.monotonic()
        self._queue: queue.SimpleQueue[AttemptRun] = queue.SimpleQueue()
        self._self = ray.get_runtime_context().current_actor
        context = ray.get_runtime_context()
        self._place = RunnerPlace(
            name=name,
            namespace=self._settings.namespace,
            worker_id=context.get_worker_id(),
            actor_id=context.get_actor_id() or "",
            node_id=context.get_node_id(),
            gpus=gpu_uuids(context.get_accelerator_ids().get("GPU", ())),
        )
        # What killed runners have left may be large, and no attempt may come to sweep it for long.
        threading.Thread(target=sweep_scratch, name="sweep", daemon=True).start()
        # One thread runs all attempts: torch keeps settings such as the number of threads per thread.
        threading.Thread(target=self._work, name="attempts", daemon=True).start()
        threading.Thread(target=self._leave_when_due, name="leaving", daemon=True).start()

    def announce(self, epoch: int) -> dict[str, Any]:
        """Refuse lower epochs from now on; the answer describes this runner as it is afterwards."""
        with self._lock:
            self._epoch, self._is_heard = max(self._epoch, epoch), True
        return self.describe()

    def describe(self) -> dict[str, Any]:
        """A ``RunnerDescription``."""
        with self._lock:
            run = self._run
            return RunnerDescription(
                name=self._name,
                pid=os.getpid(),
                node_id=ray.get_runtime_context().get_node_id(),
                epoch=self._epoch,
                digest=self._digest,
                attempt_id=run.request.attempt_id if run else "",
                has_ended=run is not None and run.has_ended,
                jobs_done=self._jobs_done,
                is_warm=self._entry_point.is_warm,
                leaving=self._leaving,
                gang=run.gang.shape.to_json() if run and run.gang else None,
                placement_group=run.gang.placement_group if run and run.gang else "",
                machine=self._machine,
            ).to_json()

    def start(
        self,
        request: Mapping[str, Any],
        epoch: int,
        releases: str = "",
        gang: Mapping[str, Any] | None = None,
        digests: Sequence[str] = (),
    ) -> str:
        """Accept an attempt; repeating it changes nothing.

        ``releases`` names an ended attempt to let go of first; ``gang`` is the shape of an attempt of many workers;
        ``digests`` are of the code that a runner may run, empty = any.
        """
        if digests and self._digest not in digests:
            return Answer.OTHER_CODE
        with self._lock:
            if epoch < self._epoch:
                return Answer.STALE_EPOCH
            self._epoch, self._is_heard = epoch, True
            if self._run is not None and self._run.request.attempt_id == request["attempt_id"]:
                return Answer.ACCEPTED
            self._drop(releases)
            if self._run is not None:
                return Answer.BUSY
            if self._leaving:
                return Answer.LEAVING
            shape = GangShape.from_json(gang) if gang is not None else None
            self._run = AttemptRun(JobRequest.from_json(request), shape)
            self._queue.put(self._run)
            return Answer.ACCEPTED

    def report(self, attempt_id: str, wait_s: float = 0.0) -> dict[str, Any]:
        """Status, progress and outcome of an attempt, after its end or ``wait_s``, whichever is first."""
        run = self._run
        if run is None or run.request.attempt_id != attempt_id:
            return {"status": AttemptStatus.LOST.value}
        run.wait(min(wait_s, MAX_WAIT_S))
        return run.report()

    def exchange(self, attempt_id: str, rank: int, news: Mapping[str, Any]) -> dict[str, Any]:
        """A gang's worker tells its news and learns whether to stop; of an attempt that is not here it must."""
        run = self._run
        if run is None or run.gang is None or run.has_ended or run.request.attempt_id != attempt_id:
            return {"stop": True}
        refusal = run.hear(rank, news, self._digest)
        stop = run.must_stop or bool(refusal)
        return {"stop": stop, "refusal": refusal, "flight_record": run.gang.wants_records}

    def stop(self, attempt_id: str, epoch: int) -> str:
        """Ask an attempt to write a checkpoint and end; an attempt that is not here has ended already."""
        with self._lock:
            if epoch < self._epoch:
                return Answer.STALE_EPOCH
            if self._run is not None and self._run.request.attempt_id == attempt_id:
                self._run.stop()
            return Answer.ACCEPTED

    def release(self, attempt_id: str, epoch: int) -> str:
        """Forget an ended attempt, whose end is on record now; one that is not here is forgotten already."""
        with self._lock:
            if epoch < self._epoch:
                return Answer.STALE_EPOCH
            self._drop(attempt_id)
            is_here = self._run is not None and self._run.request.attempt_id == attempt_id
            return Answer.RUNNING if is_here else Answer.ACCEPTED

    def leave(self) -> None:
        """End this actor as intended. The runner calls it itself; it never interrupts an attempt."""
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]

    def die(self) -> None:
        """End the process at once, whatever else it does."""
        os._exit(1)

    def _drop(self, attempt_id: str) -> None:
        run = self._run
        if run is None or run.request.attempt_id != attempt_id or not run.has_ended:
            return
        self._run = None
        self._jobs_done += 1
        self._idle_since_s = time.monotonic()
        if self._jobs_done >= self._settings.max_jobs:
            self._leaving = f"it has run max_jobs={self._settings.max_jobs} jobs"
        self._leaving = run.poison or self._leaving

    def _work(self) -> None:
        while True:
            run = self._next_run()
            if run is None:
                self._entry_point.warm_up()
            else:
                run.execute(self._entry_point, self._settings, self._place)

    def _next_run(self) -> AttemptRun | None:
        """The next attempt; ``None`` once if there is time to warm up. Jobs that need no torch need not wait for it."""
        try:
            return self._queue.get(timeout=None if self._entry_point.is_warm else _WARM_UP_AFTER_S)
        except queue.Empty:
            return None

    def _leave_when_due(self) -> None:
        while not self._is_due():
            time.sleep(_IDLE_CHECK_EVERY_S)
        # From here on ``start`` is refused. Only a method of the actor may end it as intended, so it calls itself.
        self._self.leave.remote()
        time.sleep(_LEAVE_WITHIN_S)  # an actor that Ray counts as dead cannot be called, not even by itself
        self.die()

    def _is_due(self) -> bool:
        with self._lock:
            if self._run is not None:
                return False
            idle_s = time.monotonic() - self._idle_since_s
            if not self._is_heard and idle_s >= UNHEARD_S:
                self._leaving = f"no controller has called it in {UNHEARD_S:g} s"
            if idle_s >= self._settings.idle_timeout_s:
                self._leaving = self._leaving or f"it was idle for idle_timeout_s={self._settings.idle_timeout_s:g}"
            return bool(self._leaving)
