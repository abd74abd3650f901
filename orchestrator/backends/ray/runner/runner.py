"""The runner: a warm, detached, named actor that executes one attempt at a time; how it is created, named and called.

It outlives controllers.

Invariants:
- It obeys only the controller with the highest epoch that it has seen.
- It keeps the outcome of an ended attempt until the outcome is recorded (``release``), so that a new controller can
  still get it. Until then it accepts no other attempt.
- Every command is idempotent by attempt id.
"""

from __future__ import annotations

import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.backends.protocol import AttemptStatus
from orchestrator.backends.ray.attempt_process import EntryPoint
from orchestrator.backends.ray.code_digest import code_digest
from orchestrator.backends.ray.gang.mailbox import COORDINATOR, NODE_LABEL, GangShape
from orchestrator.backends.ray.placement_groups import off_the_head
from orchestrator.backends.ray.runner.attempt import AttemptRun, RunnerPlace
from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.core.contract import JobRequest, Resources, Spot
from orchestrator.core.security import redaction
from orchestrator.core.units import GIB
from orchestrator.metrics.machine import describe_machine, gpu_uuids
from orchestrator.state.nodes import ZONE_LABEL, Node
from orchestrator.storage.files import sweep_scratch

_NAME = re.compile(r"runner/cpus([0-9.e+-]+)-gpus([0-9.e+-]+)-memory_gib([0-9.e+-]+)/[0-9a-f]+")
_MARKET, _ACCELERATOR = "ray.io/market-type", "ray.io/accelerator-type"
_MARKETS = {Spot.REQUIRE: "spot", Spot.NEVER: "!spot"}
MAX_CONCURRENT_CALLS = 8
"""Threads for calls. A dead controller's ``report`` may hold one for as long as it waits, at most ``MAX_WAIT_S``."""
MAX_WAIT_S = 2.0
_IDLE_CHECK_EVERY_S = 1.0
_WARM_UP_AFTER_S = 0.3
UNCALLED_S = 40.0
"""Every controller calls a runner that it creates or finds. A runner without any call is missing in Ray's tables: it
leaves."""
_LEAVE_WITHIN_S = 10.0


def new_runner_name(resources: Resources) -> str:
    """A fresh name for a runner of this shape."""
    shape = f"cpus{resources.cpus:g}-gpus{resources.gpus:g}-memory_gib{resources.memory_gib:g}"
    return f"runner/{shape}/{secrets.token_hex(4)}"


def shape_of(name: str) -> Resources | None:
    """Resource shape of the runner with this name; ``None`` if the name is not a runner's."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    cpus, gpus, memory_gib = (float(number) for number in match.groups())
    return Resources(cpus=cpus, gpus=gpus, memory_gib=memory_gib)


class RunnerAnswer(StrEnum):
    """The result of a command to a runner."""

    ACCEPTED = "accepted"
    STALE_EPOCH = "stale_epoch"
    """A controller with a higher epoch has called before: this command has no effect."""
    BUSY = "busy"
    """The runner has another attempt, running or not yet released."""
    LEAVING = "leaving"
    """This runner takes no attempts any more."""
    OTHER_CODE = "other_code"
    """This runner's code is not the controller's."""
    RUNNING = "running"
    """The attempt to release has not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerDescription:
    """A runner's description of itself."""

    name: str
    pid: int
    node_id: str
    epoch: int
    digest: str
    """Digest of the code with which the runner started."""
    attempt_id: str = ""
    """Id of its attempt, running or waiting for its release; empty = idle."""
    has_ended: bool = False
    """Whether that attempt has ended."""
    jobs_done: int = 0
    is_warm: bool = False
    """Whether the data plane is loaded."""
    leaving: str = ""
    """Why it takes no attempts any more; empty = it takes them."""
    gang: dict[str, Any] | None = None
    """Shape of the gang that works on its attempt; none for an attempt of one worker."""
    placement_group: str = ""
    """Id of that gang's reservation, hexadecimal."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    """Hardware of its node; see ``metrics.machine``."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        return cls(**document)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSite:
    """Where a runner may run."""

    node: str = ""
    """Name of the one node for it; empty = any."""
    node_id: str = ""
    """Ray's id of that node."""
    excluded: tuple[str, ...] = ()
    """Names of nodes on which it must not run."""
    excluded_ids: tuple[str, ...] = ()
    selector: Mapping[str, str] = field(default_factory=dict)
    """Ray labels for a node that the autoscaler is still to add; for an existing node the scheduler checks them."""

    def suits(self, node: str) -> bool:
        """Whether a runner may be used, as far as its node is known."""
        if self.node:
            return node == self.node
        return not node or node not in self.excluded


ANY_SITE = RunnerSite()


def selector_of(requested: Resources, nodes: Iterable[Node]) -> dict[str, str]:
    """The conditions of an attempt as Ray's label selector: the autoscaler then adds nodes that meet them.

    ``nodes``: the kinds that may be added, then the nodes that are there. Ray compares texts exactly and ``Node.suits``
    does not, so names and values are written as suitable nodes have them.
    """
    suitable = [node for node in nodes if node.suits(requested)]
    selector = dict(requested.labels)
    if ZONE_LABEL in selector and suitable:
        selector[suitable[0].zone_label] = selector.pop(ZONE_LABEL)
    if requested.spot in _MARKETS:
        selector[_MARKET] = _MARKETS[requested.spot]
    if requested.accelerator:
        types = sorted({node.accelerator for node in suitable}) or [requested.accelerator]
        selector[_ACCELERATOR] = types[0] if len(types) == 1 else f"in({','.join(types)})"
    return selector


def create_runner(
    name: str, namespace: str, resources: Resources, settings: RunnerSettings, site: RunnerSite
) -> ActorHandle[Any]:
    """Start a runner; does not wait until it is up."""
    options: dict[str, Any] = {"memory": int(resources.memory_gib * GIB)} if resources.memory_gib else {}
    actor_class: Any = ray.remote(Runner).options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        num_cpus=resources.cpus,
        num_gpus=resources.gpus,
        max_concurrency=MAX_CONCURRENT_CALLS,
        max_restarts=0,
        **options,
        **_constraints(resources, site),
    )
    handle: ActorHandle[Any] = actor_class.remote(name, settings.to_json())
    return handle


def _constraints(resources: Resources, site: RunnerSite) -> dict[str, Any]:
    is_coordinator = resources == COORDINATOR
    if site.node_id:
        if is_coordinator:
            # It belongs on its gang's first node. A soft affinity ignores a node that has just joined, a hard one
            # fails; a label waits. The backend notices a node that is gone.
            return {"label_selector": {NODE_LABEL: site.node_id}}
        # The scheduler has planned with this node; on another node the runner would take resources twice.
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(site.node_id, soft=False)}
    if is_coordinator and (strategy := off_the_head(site.excluded_ids)):
        return {"scheduling_strategy": strategy}
    avoided = {NODE_LABEL: f"!in({','.join(site.excluded_ids)})"} if site.excluded_ids else {}
    selector = avoided if is_coordinator else {**site.selector, **avoided}
    return {"label_selector": selector} if selector else {}


class Runner:
    """Methods take and return plain JSON; each returns at once except ``report``, which may wait for a given time."""

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
        self._was_called = False
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
        # Killed runners may have left large files, and the next attempt, which would delete them, may start late.
        threading.Thread(target=sweep_scratch, name="sweep", daemon=True).start()
        # One thread runs all attempts: torch keeps settings such as the number of threads per thread.
        threading.Thread(target=self._work, name="attempts", daemon=True).start()
        threading.Thread(target=self._leave_when_due, name="leaving", daemon=True).start()

    def announce(self, epoch: int) -> dict[str, Any]:
        """Refuse lower epochs from now on; returns this runner's ``RunnerDescription`` afterwards."""
        with self._lock:
            self._epoch, self._was_called = max(self._epoch, epoch), True
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

        ``releases`` names an ended attempt to release first; ``gang`` is the shape of an attempt of many workers;
        ``digests`` are of the code that a runner may run, empty = any.
        """
        if digests and self._digest not in digests:
            return RunnerAnswer.OTHER_CODE
        with self._lock:
            if epoch < self._epoch:
                return RunnerAnswer.STALE_EPOCH
            self._epoch, self._was_called = epoch, True
            if self._run is not None and self._run.request.attempt_id == request["attempt_id"]:
                return RunnerAnswer.ACCEPTED
            self._drop(releases)
            if self._run is not None:
                return RunnerAnswer.BUSY
            if self._leaving:
                return RunnerAnswer.LEAVING
            shape = GangShape.from_json(gang) if gang is not None else None
            self._run = AttemptRun(JobRequest.from_json(request), shape)
            self._queue.put(self._run)
            return RunnerAnswer.ACCEPTED

    def report(self, attempt_id: str, wait_s: float = 0.0) -> dict[str, Any]:
        """Status, progress and outcome of an attempt, after its end or ``wait_s``, whichever is first."""
        run = self._run
        if run is None or run.request.attempt_id != attempt_id:
            return {"status": AttemptStatus.LOST.value}
        run.wait(min(wait_s, MAX_WAIT_S))
        return run.report()

    def exchange(self, attempt_id: str, rank: int, news: Mapping[str, Any]) -> dict[str, Any]:
        """Take the report of a gang's worker; returns whether it must stop, as if its attempt is not here."""
        run = self._run
        if run is None or run.gang is None or run.has_ended or run.request.attempt_id != attempt_id:
            return {"stop": True}
        refusal = run.on_report(rank, news, self._digest)
        stop = run.must_stop or bool(refusal)
        return {"stop": stop, "refusal": refusal, "flight_record": run.gang.wants_records}

    def stop(self, attempt_id: str, epoch: int) -> str:
        """Ask an attempt to write a checkpoint and end; an attempt that is not here has ended already."""
        with self._lock:
            if epoch < self._epoch:
                return RunnerAnswer.STALE_EPOCH
            if self._run is not None and self._run.request.attempt_id == attempt_id:
                self._run.stop()
            return RunnerAnswer.ACCEPTED

    def release(self, attempt_id: str, epoch: int) -> str:
        """Forget an ended attempt, whose end is recorded now; nothing happens if it is not here."""
        with self._lock:
            if epoch < self._epoch:
                return RunnerAnswer.STALE_EPOCH
            self._drop(attempt_id)
            is_here = self._run is not None and self._run.request.attempt_id == attempt_id
            return RunnerAnswer.RUNNING if is_here else RunnerAnswer.ACCEPTED

    def leave(self) -> None:
        """End this actor as intended. The runner calls it itself; it never interrupts an attempt."""
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]

    def die(self) -> None:
        """End the process at once."""
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
        self._leaving = run.retire_reason or self._leaving

    def _work(self) -> None:
        while True:
            run = self._next_run()
            if run is None:
                self._entry_point.warm_up()
            else:
                run.execute(self._entry_point, self._settings, self._place)

    def _next_run(self) -> AttemptRun | None:
        """The next attempt; ``None`` once, if there is time to warm up. Jobs without torch do not wait for it."""
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
            if not self._was_called and idle_s >= UNCALLED_S:
                self._leaving = f"no controller has called it in {UNCALLED_S:g} s"
            if idle_s >= self._settings.idle_timeout_s:
                self._leaving = self._leaving or f"it was idle for idle_timeout_s={self._settings.idle_timeout_s:g}"
            return bool(self._leaving)
