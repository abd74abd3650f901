"""The actors of the controller and of the publisher. They only run the loops and export metrics."""

from __future__ import annotations

import importlib
import logging
import os
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit
from urllib.request import getproxies

from orchestrator.backends.ray.backend import RayBackend
from orchestrator.backends.ray.service import ACTIVE_PAUSE_S, BUSY_PAUSE_S, IDLE_PAUSE_S, LoopActor
from orchestrator.backends.ray.settings import KEEP_ALIVE_VARIABLE, RunnerSettings
from orchestrator.controller.attempt_tracker import AttemptLimits
from orchestrator.controller.controller import Controller
from orchestrator.controller.notifying import start_notifying
from orchestrator.core.errors import OUTAGES, OrchestratorError
from orchestrator.metrics import catalog
from orchestrator.metrics.exporter import Exporter, RayExporter, StoreErrors
from orchestrator.metrics.sweeps import SweepMetrics
from orchestrator.stack.description import database_behind
from orchestrator.stack.environment import STACK_VARIABLE
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.layout import journal_segment
from orchestrator.storage.open import check_tracking, open_store
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.request_pool import RequestPool
from orchestrator.sweeps.client import SweepLedger, list_sweeps
from orchestrator.sweeps.lease import LeaseLostError, new_holder
from orchestrator.sweeps.progress import PresenceBoard, PublishingTrouble

SHOW_EVERY_S: Final = 5.0
"""Ray passes values on every 10 s."""
_LOG = logging.getLogger(__name__)
KEEP_ALIVE_EVERY_S = 10.0
LOOK_AT_ENDED_EVERY_S: Final = 60.0
"""Between two looks of the publisher at a sweep that has ended and is published."""
_PORTS: Final = {"http": 80, "https": 443, "postgresql": 5432}
_CONNECT_TIMEOUT_S: Final = 2.0


class ControllerMetrics:
    """Use from the controller's thread. Metrics that cannot be exported never disturb it."""

    def __init__(self, namespace: str, exporter: Exporter | None = None) -> None:
        self._labels = {"namespace": namespace}
        self._exporter = exporter or RayExporter()
        self._sweeps = SweepMetrics(self._exporter)
        self._store_errors = StoreErrors(self._exporter)
        self._show_at_s = 0.0
        self._longest_s = 0.0
        self._has_failed = False
        self._is_shown = False

    def follow(self, controller: Controller, round_s: float) -> None:
        """Export metrics after a round that took ``round_s``."""
        self._longest_s = max(self._longest_s, round_s)
        try:
            self._sweeps.follow(controller.snapshots, time.time())
            if time.monotonic() >= self._show_at_s:
                self._show_at_s = time.monotonic() + SHOW_EVERY_S
                self._show(controller)
        except Exception:  # noqa: BLE001 - whatever it is, sweeps come first
            if not self._has_failed:
                _LOG.exception("metrics are not exported; sweeps run on all the same")
            self._has_failed = True

    def count_error(self, error: Exception) -> None:
        """Count a failed round."""
        try:
            self._exporter.add(catalog.ERRORS, 1, {**self._labels, "error": type(error).__name__})
        except Exception:  # noqa: BLE001 - the round's own error is raised
            _LOG.exception("a failed round is not counted")

    def _show(self, controller: Controller) -> None:
        self._sweeps.show(controller.observed(), time.time())
        if not self._is_shown:
            self._is_shown = True
            for error in OUTAGES:
                self._exporter.add(catalog.ERRORS, 0, {**self._labels, "error": error.__name__})
        total = controller.capacity
        self._exporter.set(catalog.EPOCH, controller.epoch, self._labels)
        self._exporter.set(catalog.ROUND, self._longest_s, self._labels)
        self._exporter.set(catalog.CAPACITY, total.cpus, {**self._labels, "resource": "cpu"})
        self._exporter.set(catalog.CAPACITY, total.gpus, {**self._labels, "resource": "gpu"})
        self._store_errors.show()
        controller.counters.export(self._exporter)
        self._longest_s = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Settings of a controller: one per cluster and namespace, with one store."""

    store_uri: str
    cluster: str
    namespace: str
    runners: Mapping[str, Any]
    """``RunnerSettings`` as JSON."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """``AttemptLimits`` as JSON; what is left out is at its default."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        return cls(**document)


class ControllerActor(LoopActor):
    """Runs the ``Controller`` of one cluster. A newer one of the same cluster ends it."""

    final_errors = (LeaseLostError,)

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = ControllerSettings.from_json(settings)
        self._controller: Controller | None = None
        self._backend: RayBackend | None = None
        self._kept_alive_at_s = 0.0
        self._presence: PresenceBoard | None = None
        self._pool = RequestPool.of(self._settings.store_uri)
        self._is_notifying = False
        self._metrics = ControllerMetrics(self._settings.namespace)
        super().__init__()

    def ping(self) -> dict[str, Any]:
        """Its process, what it serves and the state of its loop."""
        controller = self._controller
        return {
            **super().ping(),
            "holder": controller.holder if controller else "",
            "epoch": controller.epoch if controller else 0,
            "is_idle": controller.is_idle if controller else False,
            "has_unfinished": controller.has_unfinished if controller else True,
            "settings": self._settings.to_json(),
        }

    def wake(self, sweep: str = "") -> None:
        """Read the inbox of a sweep (or of all sweeps) now."""
        if self._controller is not None:
            self._controller.wake(sweep)
        self._news.set()

    def turn(self) -> float:
        """One tick."""
        controller, backend = self._start() if self._controller is None else (self._controller, self._backend)
        started_s = time.monotonic()
        if controller.has_unfinished:  # also while the store does not answer
            self._keep_stack_alive()
        try:
            has_changed = controller.tick()
        except OrchestratorError as error:
            self._metrics.count_error(error)
            raise  # the store does not answer, or the lease is lost: what is in memory stays true
        except Exception as error:
            self._metrics.count_error(error)
            self._controller = None  # anything else leaves memory in doubt: fold the journals anew
            raise
        self._metrics.follow(controller, time.monotonic() - started_s)
        if backend is not None:
            backend.observe((), are_all=not controller.is_blind)
            self._show_nodes(controller, backend)
        if controller.is_idle:
            return IDLE_PAUSE_S
        if not has_changed and backend is not None:
            backend.wait(ACTIVE_PAUSE_S - BUSY_PAUSE_S)  # a short job's end is handled at once, not at the next poll
        return BUSY_PAUSE_S

    def _start(self) -> tuple[Controller, RayBackend]:
        settings = self._settings
        backend = RayBackend(settings.namespace, settings=RunnerSettings.from_json(settings.runners))
        store = open_store(settings.store_uri)
        limits = AttemptLimits.from_json(settings.limits)
        controller = Controller(store, backend, settings.cluster, new_holder(), on_alive=self.stamp, limits=limits)
        self._backend, self._controller = backend, controller
        self._presence = PresenceBoard(store, settings.cluster)
        if not self._is_notifying:
            self._is_notifying = True
            start_notifying(settings.store_uri, settings.cluster, self._snapshots)
        return controller, backend

    def _show_nodes(self, controller: Controller, backend: RayBackend) -> None:
        now = time.time()
        if self._presence is not None and self._presence.is_due(now):
            try:
                machines, runners = backend.capacity().machines, backend.idle_runners()
                self._pool.ask(controller.stay_alive, self._presence.show, machines, runners, now)
            except LeaseLostError:
                raise
            except OrchestratorError as error:
                _LOG.warning("the nodes of cluster %s are not shown: %s", self._settings.cluster, error)

    def _snapshots(self) -> list[Snapshot]:
        controller = self._controller
        return controller.snapshots if controller is not None else []

    def _keep_stack_alive(self) -> None:
        path = os.environ.get(KEEP_ALIVE_VARIABLE)
        if path and time.monotonic() >= self._kept_alive_at_s:
            self._kept_alive_at_s = time.monotonic() + KEEP_ALIVE_EVERY_S
            with open(path, "a", encoding="utf-8"):  # noqa: PTH123 - utime needs the file to exist
                os.utime(path)


class PublisherActor(LoopActor):
    """Publishes all sweeps of a store, again and again. An outage of a tracking server only delays it.

    ``tracking_uri`` is for sweeps whose plan names none.
    """

    # A call to a tracking server may block without end: one that answers a byte at a time, a file system that is gone.
    hangs_after_s = 1800.0

    def __init__(self, store_uri: str, tracking_uri: str, every_s: float = 2.0) -> None:
        self._publication = StorePublication(open_store(store_uri), tracking_uri)
        self._tracking_digest = tracking_digest(tracking_uri)
        self._every_s = every_s
        super().__init__()

    def ping(self) -> dict[str, Any]:
        """State of its loop, and the sweeps that it found ended and published: see ``StorePublication.ask``."""
        return {**super().ping(), "caught_up": self._publication.ask()}

    def tracking(self) -> str:
        """``tracking_digest`` of where it publishes to."""
        return self._tracking_digest

    def turn(self) -> float:
        """Publish what is new of every sweep."""
        self._publication.run(on_alive=self.stamp)
        return self._every_s

    def progress(self) -> object:
        """The newest stamp, and the number of runs that were written."""
        return super().progress(), self._publication.num_written

    def note_hang(self) -> None:
        """See ``StorePublication.note_hang``."""
        self._publication.note_hang(self.hangs_after_s)


def tracking_digest(uri: str) -> str:
    """Tells tracking servers apart; users and passwords make no difference, and none can be read from it."""
    return sha256(re.sub(r"//[^/@]*@", "//", uri).rstrip("/").encode()).hexdigest()


def _new_publisher(store: ObjectStore, tracking_uri: str) -> Any:  # noqa: ANN401 - imported by name
    # MLflow takes seconds and 200 MB to import: only this process pays for it.
    return importlib.import_module("orchestrator.tracking.publisher").Publisher(store, tracking_uri)


@dataclass(frozen=True, slots=True, kw_only=True)
class _JournalPosition:
    """How far a sweep's journal was read, and where the sweep is published."""

    tracking_uri: str
    """Of its plan."""
    next_sequence: int
    """Number of the first segment that was not there."""


class StorePublication:
    """All sweeps of a store, each to the tracking server that its plan names; follows their journals."""

    def __init__(
        self,
        store: ObjectStore,
        tracking_uri: str,
        new_publisher: Callable[[ObjectStore, str], Any] = _new_publisher,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._clock = store, clock
        self._tracking_uri = tracking_uri
        self._new_publisher = new_publisher
        self._publishers: dict[str, Any] = {}
        self._ledgers: dict[str, SweepLedger] = {}
        self._ended: dict[str, _JournalPosition] = {}
        """Of those caught up, in place of their ledgers, which hold all of their jobs: there may be thousands."""
        self._trouble = PublishingTrouble(store)
        self.caught_up: frozenset[str] = frozenset()
        """Sweeps that had ended before they were published the last time; replaced, never changed."""
        self._looked_at_s: dict[str, float] = {}
        """When these were last looked at."""
        self._passed_over: frozenset[str] = frozenset()
        """Those at which the last pass did not look."""
        self._unreachable: set[str] = set()
        """Tracking servers that accepted no connection in this pass."""
        self._is_asked = False
        self.current: tuple[str, str] | None = None
        """The sweep that is published now, and its tracking server."""

    @property
    def num_written(self) -> int:
        """Runs that all tracking servers took so far."""
        return sum(publisher.num_written for publisher in tuple(self._publishers.values()))

    def note_hang(self, limit_s: float) -> None:
        """Store as the current sweep's problem that it made no progress: later all sweeps of its server come last."""
        if self.current is not None:
            sweep, uri = self.current
            why = f"publication has made no progress for {limit_s / 60:.0f} min; tried again after other sweeps"
            self._trouble.report(sweep, why, server=tracking_digest(uri))

    def ask(self) -> list[str]:
        """Sweeps that the last pass looked at and found ended and published. The next pass looks at all sweeps: whoever
        waits for one that was opened again must not get an answer of before.
        """
        self._is_asked = True
        return sorted(self.caught_up - self._passed_over)

    def run(self, on_alive: Callable[[], None] = lambda: None) -> None:
        """Publish what is new of every sweep; one that fails does not keep the others. Those that failed the last time,
        and those of a server at which an earlier process hung, come last.

        Raises:
            Exception: that of the first sweep that failed, after all others were published.
        """
        failures: list[Exception] = []
        self.current = None
        sweeps = list_sweeps(self._store)
        self._ledgers = {sweep: ledger for sweep, ledger in self._ledgers.items() if sweep in sweeps}
        self._ended = {sweep: ended for sweep, ended in self._ended.items() if sweep in sweeps}
        self._passed_over = self._rest()
        self._unreachable.clear()
        looked_at = [sweep for sweep in sweeps if sweep not in self._passed_over]
        for sweep in looked_at:
            self._trouble.is_known(sweep)  # a new process asks the store about each
            on_alive()
        queue = deque[tuple[str, _JournalPosition | None]]((sweep, None) for sweep in looked_at)
        while queue:
            sweep, found = queue.popleft()
            try:
                if found is None:
                    found = self._look(sweep)
                    if self._trouble.is_known(sweep) or tracking_digest(self._uri_of(found)) in self._trouble.servers:
                        queue.append((sweep, found))
                        continue
                self.current = sweep, self._uri_of(found)
                self._publish(sweep, found)
            except Exception as error:  # noqa: BLE001 - a damaged sweep may fail in any way
                why = str(error) or repr(error)
                if self._trouble.report(sweep, why):  # an outage lasts many rounds and is logged once
                    _LOG.warning("sweep %s is not published now: %s; it is tried again", sweep, why)
                # It may have stopped between two segments that it read: read them all again.
                self._ledgers.pop(sweep, None)
                self.caught_up -= {sweep}
                failures.append(error)
            else:
                self._trouble.clear(sweep)
            on_alive()
        if failures:
            raise failures[0]

    def _rest(self) -> frozenset[str]:
        """Sweeps at which this pass does not look: it would cost some requests of each, for ever."""
        is_asked, self._is_asked = self._is_asked, False
        since_s = self._clock() - LOOK_AT_ENDED_EVERY_S
        return frozenset() if is_asked else frozenset(s for s in self.caught_up if self._looked_at_s[s] > since_s)

    def _uri_of(self, found: _JournalPosition) -> str:
        uri = found.tracking_uri or self._tracking_uri
        return database_behind(uri, Path(os.environ.get(STACK_VARIABLE, "/nonexistent")))

    def _publish(self, sweep: str, found: _JournalPosition) -> None:
        uri = self._uri_of(found)
        if uri != self._tracking_uri:
            check_tracking(uri)
        if uri in self._unreachable:
            raise OrchestratorError("its tracking server accepts no connection; it is published once it does")
        publisher = self._publisher(uri)
        # Read before publishing: events before this reading are published, later ones may be missed.
        has_ended = publisher.has_ended(sweep)
        try:
            is_caught_up = publisher.publish_once(sweep) and has_ended
        except Exception:
            # A server that is gone for good costs each pass one timeout, not one for each of its sweeps.
            if not _accepts_connections(uri):
                self._unreachable.add(uri)
            raise
        self._trouble.servers.discard(tracking_digest(uri))
        self.caught_up = self.caught_up | {sweep} if is_caught_up else self.caught_up - {sweep}
        if is_caught_up:
            self._ended[sweep] = found
            self._ledgers.pop(sweep, None)

    def _look(self, sweep: str) -> _JournalPosition:
        self._looked_at_s[sweep] = self._clock()
        ended = self._ended.pop(sweep, None)
        if ended is not None and not self._store.exists(journal_segment(sweep, ended.next_sequence)):
            return ended
        ledger = self._ledgers.setdefault(sweep, SweepLedger(self._store, sweep))
        plan = ledger.refresh().plan
        return _JournalPosition(tracking_uri=plan.tracking_uri if plan else "", next_sequence=ledger.next_sequence)

    def _publisher(self, tracking_uri: str) -> Any:  # noqa: ANN401 - imported by name
        if tracking_uri not in self._publishers:
            self._publishers[tracking_uri] = self._new_publisher(self._store, tracking_uri)
        return self._publishers[tracking_uri]


def _accepts_connections(uri: str) -> bool:
    """Whether a tracking server may be up: False only if its port, asked directly, does not answer."""
    parts = urlsplit(uri)
    port = parts.port or _PORTS.get(parts.scheme.partition("+")[0])
    if parts.hostname is None or port is None or getproxies():
        return True
    try:
        with socket.create_connection((parts.hostname, port), _CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False
