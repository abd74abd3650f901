"""The loop that owns all sweeps of a cluster: observe -> append -> fold -> decide -> execute.

Everything it knows is in the store or comes from the backend, so it may die between any two lines: the next controller
replays the journals, asks the backend about the attempts that these believe live, and goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby

from orchestrator.backends.protocol import AttemptReport, AttemptStatus, Backend
from orchestrator.controller.attempts import judge_report
from orchestrator.controller.durations import Durations
from orchestrator.controller.execution import Executor
from orchestrator.controller.fleet import Fleet, Holding, Identification
from orchestrator.controller.heartbeats import Heartbeats
from orchestrator.controller.node_health import NodeHealth
from orchestrator.controller.settlement import settle
from orchestrator.controller.stops import Stops
from orchestrator.core.contract import Resources
from orchestrator.core.errors import ControllerError, FailureKind, OrchestratorError
from orchestrator.metrics.attempts import CounterBook
from orchestrator.metrics.sweeps import Observed
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.state.commands import Command, LaunchJob
from orchestrator.state.events import AttemptEvent, AttemptSucceeded, Running
from orchestrator.state.snapshot import Attempt, Snapshot
from orchestrator.state.transitions import SweepState
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.drain import Drain, note_drained, read_drain
from orchestrator.sweeps.inbox import Message, Retry, Submit, discard
from orchestrator.sweeps.lease import Lease, StaleLeaseError, read_lease
from orchestrator.sweeps.limits import AttemptLimits, PreflightRule
from orchestrator.sweeps.quotas import Cap, read_quotas
from orchestrator.sweeps.terms import Terms

INBOX_EVERY_S = 1.0
QUIET_AFTER_S = 3600.0
QUIET_EVERY_S = 30.0
"""The inbox of a sweep that ended so long ago is looked into so seldom: a store keeps sweeps for years, and each look
is a request that somebody pays for.
"""
LOOK_UP_S = 2.0
"""In one round, for asking the store which ready jobs it has: the others wait for the next round."""
_ENDS_OF_CONTACT = {AttemptStatus.LOST, AttemptStatus.OVERTAKEN}
_LOG = logging.getLogger(__name__)


class Controller:
    """Serves all sweeps of one cluster on one store. Call ``tick`` again and again, from one thread.

    ``holder`` names this very incarnation (host, pid, something random); ``now`` is the clock in unix seconds.
    ``max_live_attempts`` bounds how many attempts run at once, whatever fits. ``on_alive`` is called again and again
    within a tick that takes long because it reads many sweeps. ``limits`` say what attempts are allowed.
    """

    def __init__(
        self,
        store: ObjectStore,
        backend: Backend,
        cluster: str,
        holder: str,
        now: Callable[[], float] = time.time,
        *,
        max_live_attempts: int | None = None,
        on_alive: Callable[[], None] = lambda: None,
        limits: AttemptLimits | None = None,
    ) -> None:
        self._store = store
        self._backend = backend
        self._now = now
        self._max_live_attempts = max_live_attempts
        self._lease = Lease(store, cluster, holder, now)
        self._cluster = cluster
        self._holder = holder
        self._on_alive = on_alive
        self._fleet: Fleet | None = None
        limits = limits or AttemptLimits()
        self._stops, self._health = Stops(backend), NodeHealth(backend, store.uri)
        self._terms = Terms()
        self._executor = Executor(
            store, backend, cluster, self._stops, self._terms, grace_s=limits.grace_s, on_alive=self._stay_alive
        )
        self._heartbeats = Heartbeats(limits.hangs)
        self._preflight = limits.preflight
        self.counters = CounterBook(now())
        """Sums that attempts report, for metrics."""
        self._scheduler = Scheduler()
        self._durations = Durations()
        self._remaining_s: dict[str, float] = {}
        """What live attempts say of the time to their end."""
        self._whereabouts: dict[str, str] = {}
        """Nodes of live attempts, of gangs the first one."""
        self._drain: Drain | None = None
        self._quotas: Mapping[str, Cap] = {}
        self._orphans: set[str] = set()
        self._inbox_at_s = self._quiet_at_s = 0.0
        self._woken: set[str] = set()

    @property
    def epoch(self) -> int:
        """Epoch of its lease; 0 until the first tick."""
        return self._lease.epoch

    @property
    def holder(self) -> str:
        """Name of this incarnation."""
        return self._holder

    @property
    def is_idle(self) -> bool:
        """Whether every sweep in its hands has ended, or rests because the cluster is drained (false at first)."""
        if self._fleet is None:
            return False
        return not self._fleet.active() or (self._drain is not None and self._drain.drained_at_s is not None)

    @property
    def snapshots(self) -> list[Snapshot]:
        """All sweeps in its hands, those that have ended included."""
        return [] if self._fleet is None else [holding.snapshot for holding in self._fleet.holdings()]

    @property
    def capacity(self) -> Resources:
        """What the cluster has in all."""
        return self._backend.capacity().total

    def observed(self) -> list[Observed]:
        """The same, with what metrics say of them."""
        silent_s, indexes = self._heartbeats.silent_s, self._scheduler.indexes
        return [
            Observed(
                snapshot=holding.snapshot,
                index=indexes.get(holding.snapshot.sweep),
                progress=holding.board.running,
                slowest=holding.board.slowest,
                silent_s=silent_s,
            )
            for holding in (self._fleet.holdings() if self._fleet is not None else ())
        ]

    def wake(self, sweep: str = "") -> None:
        """Make the next tick look into the inbox of a sweep (or of all); callable from any thread."""
        self._woken.add(sweep)

    def tick(self) -> bool:
        """One round; true if anything changed, so that another round may find more to do.

        Raises:
            LeaseLostError: a newer controller of this cluster has started; end this one.
            StorageError: the store does not answer; call again later. What is known in memory stays true.
        """
        fleet = self._start() if self._fleet is None else self._fleet
        self._lease.keep()
        before = fleet.num_appends
        fleet.reload()
        self._release_ended(fleet)
        self._read_inbox(fleet)
        self._observe(fleet)
        self._health.follow(fleet, self._now())
        self._bring_to_rest(fleet)
        self._act(fleet)
        self._stops.insist(self._now())
        self._executor.keep_claims(fleet, self._now())
        self._drop_fenced(fleet)
        self._show_progress(fleet)
        return fleet.num_appends != before

    def _start(self) -> Fleet:
        above = 0
        while self._fleet is None:
            try:
                self._fleet = self._new_fleet(self._lease.acquire(above))
            except StaleLeaseError as error:
                found = read_lease(self._store, self._cluster)
                is_anothers = found is not None and found.holder != self._holder
                if is_anothers or error.epoch <= above:
                    raise  # another controller has started meanwhile, and lives; or nothing is above what it says
                # Runners obey the highest epoch only: under a lower one this controller could command none of them.
                _LOG.warning("a higher epoch is taken: %s", error)
                above = error.epoch
        return self._fleet

    def _new_fleet(self, epoch: int) -> Fleet:
        # Runners refuse the former controller from here on; only then does this one read what that one wrote last.
        self._backend.announce(epoch)
        me = Identification(cluster=self._cluster, epoch=epoch, holder=self._holder)
        fleet = Fleet(self._store, me, self._now, self._stay_alive)
        fleet.adopt_all()
        return fleet

    def _stay_alive(self) -> None:
        """A round of many requests may outlast a lease; whoever sees an expired one would replace this controller."""
        self._on_alive()
        self._lease.keep()

    def _release_ended(self, fleet: Fleet) -> None:
        """An end may be in the journal and its runner not released: the writer died, or lost the acknowledgement."""
        for holding in fleet.take_loaded():
            leaving = holding.snapshot.leaving
            for view in holding.snapshot.jobs.values():
                if view.attempt is None and view.last_attempt_id and view.last_attempt_id not in leaving:
                    self._backend.release(view.last_attempt_id)
                holding.board.quarantine(view.name, view.quarantined)
            for attempt in holding.snapshot.live_attempts:
                self._resume_stop(attempt)

    def _resume_stop(self, attempt: Attempt) -> None:
        """A former controller preempted it, and may have died before it told the runner."""
        if attempt.preempting_at_s is not None:
            grace_s = max(0.0, attempt.preempting_at_s + attempt.grace_s - self._now())
            self._stops.ask(attempt.attempt_id, "its room is needed", self._now(), grace_s)

    def _read_inbox(self, fleet: Fleet) -> None:
        woken, self._woken = self._woken, set()
        if self._now() >= self._inbox_at_s or "" in woken:
            self._inbox_at_s = self._now() + INBOX_EVERY_S
            sweeps = self._sweeps_to_look_at(fleet, woken)
            fleet.check_fences()
            self._drain = self._wish_to_rest()
            self._read_quotas()
        else:
            sweeps = sorted(woken)
        for holding, message in fleet.messages(sweeps):
            with fleet.guard(holding.snapshot.sweep):
                self._settle(fleet, holding, message)

    def _sweeps_to_look_at(self, fleet: Fleet, woken: set[str]) -> list[str]:
        sweeps, now = self._store.list_children("sweeps/"), self._now()
        if now >= self._quiet_at_s or "" in woken:
            self._quiet_at_s = now + QUIET_EVERY_S
            return sweeps
        ends_s = {holding.snapshot.sweep: holding.snapshot.finished_at_s for holding in fleet.holdings()}
        quiet = {sweep for sweep, end_s in ends_s.items() if end_s is not None and end_s + QUIET_AFTER_S < now}
        return [sweep for sweep in sweeps if sweep not in quiet - woken]

    def _wish_to_rest(self) -> Drain | None:
        try:
            return read_drain(self._store, self._cluster)
        except ControllerError as error:
            _LOG.error("%s", error)
            return Drain(cluster=self._cluster, running=Running.FINISH, reason=str(error))

    def _read_quotas(self) -> None:
        try:
            self._quotas = read_quotas(self._store, self._cluster)
        except ControllerError as error:
            _LOG.error("%s", error)

    def _settle(self, fleet: Fleet, holding: Holding, message: Message) -> None:
        if message.message_id not in holding.snapshot.handled:
            events = settle(self._store, holding.ledger, message, now=self._now(), on_alive=self._stay_alive)
            fleet.append(holding, events)
            if isinstance(message, Submit | Retry):  # somebody may have deleted results since
                self._executor.forget_keys(holding.snapshot)
        # Only now: a message that is deleted before its event is durable would be lost by a crash in between.
        discard(self._store, holding.snapshot.sweep, message.message_id)

    def _observe(self, fleet: Fleet) -> None:
        holdings = fleet.active()
        asked = {attempt.attempt_id for holding in holdings for attempt in holding.snapshot.live_attempts}
        asked |= {attempt.attempt_id for snapshot in fleet.shelved() for attempt in snapshot.live_attempts}
        asked |= self._orphans
        if not asked:
            return
        reports = {report.attempt_id: report for report in self._backend.observe(sorted(asked))}
        self._terms.look(self._backend.capacity())
        if any(report.status in _ENDS_OF_CONTACT for report in reports.values()):
            # A controller that slept past its lease finds runners that do not talk to it any more. Its journals may be
            # open to it still, and there must never stand that they are lost.
            self._lease.verify()
        for holding in holdings:
            with fleet.guard(holding.snapshot.sweep):
                self._record(fleet, holding, reports)
        for attempt_id in sorted(self._orphans & reports.keys()):
            if reports[attempt_id].status is not AttemptStatus.RUNNING:
                self._orphans.discard(attempt_id)
                self._stops.forget(attempt_id)
                self._backend.release(attempt_id)
        self._heartbeats.retain(asked)
        self.counters.retain(asked)

    def _record(self, fleet: Fleet, holding: Holding, reports: Mapping[str, AttemptReport]) -> None:
        ended: list[AttemptEvent] = []
        news = self._terms.news(holding.snapshot, reports, self._now())
        for attempt in holding.snapshot.live_attempts:
            report = reports.get(attempt.attempt_id)
            if report is not None and report.progress is not None:
                self.counters.see(holding.snapshot, attempt, report.progress)
            event = judge_report(self._store, attempt, report, self._now()) if report else None
            if event is not None:
                ended.append(event)
                holding.board.remove(attempt.job)
                forget = self._executor.settle if isinstance(event, AttemptSucceeded) else self._executor.forget_key
                forget(attempt.key)
            elif report is not None and report.progress is not None:
                holding.board.show(attempt.job, attempt.attempt_id, report.progress, report.worker_nodes)
                self._whereabouts[attempt.attempt_id] = report.node
                if report.progress.eta_s:
                    self._remaining_s[attempt.attempt_id] = report.progress.eta_s
                # The end comes back as a report: an event before it could leave a live attempt under an ended one.
                if why := self._heartbeats.see(attempt.attempt_id, report.progress, self._now()):
                    self._backend.kill(attempt.attempt_id, why, FailureKind.HANG)
        if news or ended:
            fleet.append(holding, [*news, *ended])
        # A runner keeps the outcome until here: a crash before this line lets the next controller ask again.
        for event in ended:
            if isinstance(event, AttemptSucceeded):
                holding.board.quarantine(event.job, event.quarantined)
            self._stops.forget(event.attempt_id)
            self._remaining_s.pop(event.attempt_id, None)
            self._whereabouts.pop(event.attempt_id, None)
            self._backend.release(event.attempt_id)

    def _bring_to_rest(self, fleet: Fleet) -> None:
        """Ask for checkpoints where a pause or a drain wants them, and note when a drained cluster rests."""
        wish, active = self._drain, fleet.active()
        for holding in active:
            reason = ""
            if wish is not None and wish.running is Running.CHECKPOINT:
                reason = f"cluster {self._cluster} is drained" + (f": {wish.reason}" if wish.reason else "")
            elif holding.snapshot.pause is Running.CHECKPOINT:
                reason = "the sweep is paused"
            if reason:
                with fleet.guard(holding.snapshot.sweep):
                    self._executor.preempt(fleet, holding, reason, self._now())
        snapshots = [*(holding.snapshot for holding in fleet.active()), *fleet.shelved()]
        is_at_rest = not any(snapshot.live_attempts for snapshot in snapshots) and not self._orphans
        if wish is not None and wish.drained_at_s is None and is_at_rest:
            note_drained(self._store, self._cluster, self._now())

    def _act(self, fleet: Fleet) -> None:
        self._executor.end_waits(self._now())
        look_until_s = self._now() + LOOK_UP_S
        while commands := self._decide(fleet, look_until_s):
            for sweep, group in groupby(commands, key=lambda command: command.sweep):
                holding = fleet.get(sweep)
                if holding is not None:
                    with fleet.guard(sweep):
                        self._executor.execute(fleet, holding, list(group), self._now())

    def _decide(self, fleet: Fleet, look_until_s: float) -> list[Command]:
        self._executor.unknown.clear()
        for holding in fleet.active():
            with fleet.guard(holding.snapshot.sweep):
                ready = self._scheduler.unlaunched(holding.snapshot)
                self._executor.look_up(fleet, holding, ready, self._now, look_until_s)
        snapshots = [holding.snapshot for holding in fleet.active()]
        if not snapshots:
            return []
        served = {snapshot.sweep for snapshot in snapshots}
        # What runs for a sweep that must be read again has its room and keys; nothing is decided for it.
        snapshots += [replace(snapshot, state=SweepState.PAUSED, pause=None) for snapshot in fleet.shelved()]
        capacity = self._backend.capacity()
        self._terms.look(capacity)
        commands = self._scheduler.decide(
            snapshots,
            total=capacity.total,
            nodes=(*(capacity.machines or capacity.nodes), *capacity.absent),
            maximum=capacity.maximum,
            now=self._now(),
            committed=self._executor.committed,
            claimed=self._executor.claimed | self._executor.unknown,
            max_live_attempts=self._max_live_attempts,
            durations=self._durations.of(snapshots),
            remaining_s=self._remaining_s,
            whereabouts=self._whereabouts,
            user_caps=self._quotas,
            former=[one.snapshot for one in fleet.holdings() if one.snapshot.state.is_final and one.snapshot.excluded],
            steps=self._heartbeats.steps,
            stepping=None if self._preflight is PreflightRule.NEVER else self._heartbeats.stepping,
        )
        commands = [command for command in commands if command.sweep in served]
        if self._drain is not None or fleet.is_blind:
            commands = [command for command in commands if not isinstance(command, LaunchJob)]
        return self._executor.without_repeats(commands)

    def _drop_fenced(self, fleet: Fleet) -> None:
        if not fleet.is_contested:
            return
        # A newer controller of this very cluster goes on with our attempts; only another cluster's takeover ends them.
        self._lease.verify()
        for holding in fleet.fenced:
            for attempt in holding.snapshot.live_attempts:
                self._orphans.add(attempt.attempt_id)
                self._stops.ask(attempt.attempt_id, "another cluster has taken its sweep over", self._now())
        fleet.fenced.clear()

    def _show_progress(self, fleet: Fleet) -> None:
        for holding in fleet.holdings():
            sweep = holding.snapshot.sweep
            holding.board.explain(self._scheduler.waits.get(sweep, {}), self._scheduler.behind.get(sweep, {}))
            holding.board.warn(self._scheduler.warnings.get(holding.snapshot.sweep, ""))
            try:
                holding.board.flush(self._now())
            except OrchestratorError as error:
                _LOG.warning("progress of sweep %s is not shown: %s", holding.snapshot.sweep, error)
