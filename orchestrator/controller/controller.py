"""The loop that owns all sweeps of a cluster: observe -> append -> fold -> decide -> execute.

Everything it knows is in the store or comes from the backend, so it may die between any two lines: the next controller
replays the journals, asks the backend about the attempts that are live in them, and continues. Invariants:

- One controller per cluster acts: it renews its lease before every round, and checks it again before it declares an
  attempt lost.
- Events are durable before anything follows from them: launches, releases of runners, deletions of messages.
- An error in one sweep never stops the others; a sweep that cannot be read keeps its resources and its keys.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

from orchestrator.backends.protocol import AttemptReport, AttemptStatus, Backend
from orchestrator.controller.attempt_outcomes import judge_report
from orchestrator.controller.attempt_tracker import RESUMED_GRACE_S, AttemptLimits, AttemptTracker
from orchestrator.controller.execution import Executor
from orchestrator.controller.key_cache import KeyCache
from orchestrator.controller.node_health import NodeHealth
from orchestrator.controller.node_pricing import NodePricing
from orchestrator.controller.owned_sweeps import SWEEP_FAULTS, Identification, OwnedSweep, OwnedSweeps
from orchestrator.core.clocks import is_time
from orchestrator.core.contract import Resources
from orchestrator.core.errors import ControllerError, OrchestratorError
from orchestrator.metrics.attempts import CounterBook
from orchestrator.metrics.sweeps import Observed
from orchestrator.planning.estimate.estimates import estimate
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.scheduling.commands import Command
from orchestrator.scheduling.scheduler import ClusterView, Scheduler
from orchestrator.state.events import AttemptEvent, AttemptSucceeded, Event, Running
from orchestrator.state.snapshot import Attempt, JobTable, Snapshot
from orchestrator.state.transitions import SweepState
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.request_pool import RequestPool
from orchestrator.sweepfile.policy import POLICY_RANGES, policy_problem
from orchestrator.sweepfile.values import Policy
from orchestrator.sweeps.drain import Drain, note_drained, read_drain
from orchestrator.sweeps.lease import Lease, LeaseLostError, StaleLeaseError, read_lease
from orchestrator.sweeps.ledger import list_sweeps
from orchestrator.sweeps.quotas import UNREAD, Quotas, read_quotas
from orchestrator.sweeps.request_handling import handle_request
from orchestrator.sweeps.requests import Message, Retry, Submit, discard, discard_marker, list_inbox, read_markers

INBOX_EVERY_S = 1.0
LIST_EVERY_S = 60.0
"""Between two lists of the store's sweeps, for messages without a marker."""
REJOIN_S = 3600.0
"""For so long after a drain no job fails because the present nodes cannot hold it: they may have been switched off."""
LOOK_UP_S = 2.0
"""In one round, for asking the store which ready jobs it has: the others wait for the next round."""
_ENDS_OF_CONTACT = {AttemptStatus.LOST, AttemptStatus.OVERTAKEN}
_UNKNOWN: Mapping[str, float] = MappingProxyType({})
_Verdicts: TypeAlias = Mapping[str, Callable[[], AttemptEvent | None]]
_LOG = logging.getLogger(__name__)


class Controller:
    """Serves all sweeps of one cluster on one store. Call ``tick`` again and again, from one thread.

    ``holder`` names this very incarnation (host, pid, something random); ``now`` is the clock in unix seconds.
    ``max_live_attempts`` bounds how many attempts run at once, whatever fits. ``on_alive`` is called again and again
    within a tick that takes long because of many sweeps or a slow store. ``limits`` say what attempts are allowed.
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
        self._pool = RequestPool.of(store.uri)
        self._backend = backend
        self._now = now
        self._max_live_attempts = max_live_attempts
        self._lease = Lease(store, cluster, holder, now)
        self._cluster = cluster
        self._holder = holder
        self._on_alive = on_alive
        self._owned: OwnedSweeps | None = None
        self._ended: set[str] = set()
        """Attempts that run no more, by the latest reports."""
        limits = limits or AttemptLimits()
        self._health = NodeHealth(backend, store.uri)
        self._pricing = NodePricing()
        self._keys = KeyCache(store, cluster, self._pool, self.stay_alive)
        self._tracker = AttemptTracker(backend, limits, now())
        self._executor = Executor(
            store,
            backend,
            self._keys,
            self._tracker.stops,
            self._pricing,
            grace_s=limits.grace_s,
            on_alive=self.stay_alive,
        )
        self._scheduler = Scheduler()
        self._durations = _EstimatedDurations()
        self._unplanned: set[str] = set()
        """Shelved sweeps whose plan or priority may be what the scheduler failed on."""
        self._drain: Drain | None = None
        self._drained_s = 0.0
        """When a drain was last seen (unix seconds): nodes may be switched off meanwhile, and join afterwards."""
        self._quotas: Quotas = UNREAD
        self._inbox_at_s = self._list_at_s = 0.0
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
        """Whether every sweep that it owns has ended, or the cluster is drained and at rest (false at first)."""
        if self._owned is None:
            return False
        return not self._owned.active() or (self._drain is not None and self._drain.drained_at_s is not None)

    @property
    def has_unfinished(self) -> bool:
        """Whether a sweep that it owns has not ended, also if nothing of it may run now (true at first). Of sweeps that
        cannot be served those with live attempts.
        """
        return self._owned is None or self._owned.has_unfinished

    @property
    def is_blind(self) -> bool:
        """Whether attempts may run that it does not know: it has just started, and not all journals have answered."""
        return self._owned is not None and self._owned.is_blind

    @property
    def snapshots(self) -> list[Snapshot]:
        """All sweeps that it owns; of those that ended long ago the condensed ones."""
        return [] if self._owned is None else self._owned.snapshots()

    @property
    def capacity(self) -> Resources:
        """What the cluster has in all."""
        return self._backend.capacity().total

    @property
    def counters(self) -> CounterBook:
        """Sums that attempts report, for metrics."""
        return self._tracker.counters

    def observed(self) -> list[Observed]:
        """Those of them that metrics show, with what metrics say of them."""
        silent_s, indexes = self._tracker.heartbeats.silent_s, self._scheduler.indexes
        return [
            Observed(
                snapshot=owned_sweep.snapshot,
                index=indexes.get(owned_sweep.snapshot.sweep),
                progress=owned_sweep.board.running,
                slowest=owned_sweep.board.slowest,
                silent_s=silent_s,
            )
            for owned_sweep in (self._owned.all() if self._owned is not None else ())
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
        owned = self._start() if self._owned is None else self._owned
        self._lease.keep(self._on_alive)
        before = owned.num_appends
        owned.reload()
        self._release_ended(owned)
        self._read_inbox(owned)
        self._observe(owned)
        self._health.follow(owned, self._now())
        self._drain_sweeps(owned)
        self._act(owned)
        self._tracker.stops.retry_or_kill(self._now())
        # Also of sweeps that cannot be served now: another cluster would do again what their attempts do.
        snapshots = [*(one.snapshot for one in owned.active()), *owned.shelved()]
        self._keys.keep_claims(snapshots, self._now(), ended=self._ended)
        self._keys.shrink(snapshots)
        self._drop_fenced(owned)
        self._show_progress(owned)
        owned.let_rest()
        return owned.num_appends != before

    def _start(self) -> OwnedSweeps:
        above = 0
        while self._owned is None:
            try:
                self._owned = self._adopt_sweeps(self._pool.ask(self._on_alive, self._lease.acquire, above))
            except StaleLeaseError as error:
                found = self._pool.ask(self._on_alive, read_lease, self._store, self._cluster)
                is_anothers = found is not None and found.holder != self._holder
                if is_anothers or error.epoch <= above:
                    raise  # another controller has started meanwhile, and lives; or nothing is above what it says
                # Runners obey the highest epoch only: under a lower one this controller could command none of them.
                _LOG.warning("a higher epoch is taken: %s", error)
                above = error.epoch
        return self._owned

    def _adopt_sweeps(self, epoch: int) -> OwnedSweeps:
        # Runners refuse the former controller from here on; only then does this one read what that one wrote last.
        self._backend.announce(epoch)
        me = Identification(cluster=self._cluster, epoch=epoch, holder=self._holder)
        owned = OwnedSweeps(self._store, me, self._now, self.stay_alive, self._pool)
        owned.adopt_all()
        return owned

    def stay_alive(self) -> None:
        """Show life and keep the lease in what takes long: one that expires has it replaced. Raises as ``tick``."""
        self._on_alive()
        self._lease.keep(self._on_alive)

    def _release_ended(self, owned: OwnedSweeps) -> None:
        """An end may be in the journal and its runner not released: the writer died, or lost the acknowledgement."""
        for owned_sweep in owned.take_loaded():
            leaving = owned_sweep.snapshot.leaving
            for view in owned_sweep.snapshot.jobs.values():
                if view.attempt is None and view.last_attempt_id and view.last_attempt_id not in leaving:
                    self._backend.release(view.last_attempt_id)
                owned_sweep.board.quarantine(view.name, view.quarantined)
            for attempt in owned_sweep.snapshot.live_attempts:
                self._resume_stop(attempt)

    def _resume_stop(self, attempt: Attempt) -> None:
        """A former controller preempted it, and may have died before it told the runner."""
        if attempt.preempting_at_s is not None:
            left_s = attempt.preempting_at_s + attempt.grace_s - self._now()
            grace_s = max(left_s, min(attempt.grace_s, RESUMED_GRACE_S))
            self._tracker.stops.ask(attempt.attempt_id, "its room is needed", self._now(), grace_s)

    def _read_inbox(self, owned: OwnedSweeps) -> None:
        woken, self._woken = self._woken, set()
        for sweep in woken - {""}:
            owned.looks.want(sweep)
        owned.reload_early(woken)
        if not is_time(self._inbox_at_s, self._now(), INBOX_EVERY_S) and "" not in woken:
            self._settle_messages(owned, sorted(woken), set)
            return
        self._inbox_at_s = self._now() + INBOX_EVERY_S
        with self._pool.batch(self.stay_alive) as batch:
            find, drain = batch.start(self._find_messages, woken), batch.start(self._read_drain)
            quotas = batch.start(self._read_quotas)

            def finish() -> set[str]:
                """Take these answers; the sweeps that are due by them."""
                sweeps, markers = find()
                self._drain, self._quotas = drain(), quotas()
                if self._drain is not None:
                    self._drained_s = self._now()
                told = owned.looks.follow_markers(markers, self._now())
                owned.reload_early(told)
                if sweeps is not None:
                    self._list_at_s = self._now() + LIST_EVERY_S
                    new = owned.looks.follow_sweeps(sweeps)
                    told |= set(sweeps) if "" in woken else new
                return told

            self._settle_messages(owned, owned.looks.due(self._now()), finish)
        with self._pool.batch(self.stay_alive) as batch:
            for done in [batch.start(discard_marker, self._store, *marker) for marker in owned.looks.take_settled()]:
                done()

    def _settle_messages(self, owned: OwnedSweeps, due: Sequence[str], finish: Callable[[], set[str]]) -> None:
        """Look into the inboxes of these sweeps, and of those that turn out to be due meanwhile."""
        with self._pool.batch(self.stay_alive) as batch:  # all sweeps of the store, when a controller starts
            lists = {sweep: batch.start(list_inbox, self._store, sweep) for sweep in due}
            owned.check_fences(due)
            told = finish()
            # Anew where a marker has just come: its message may have come after the list above.
            lists |= {sweep: batch.start(list_inbox, self._store, sweep) for sweep in sorted(told)}
            owned.check_fences(told)
            for owned_sweep, message in owned.messages(lists):
                with owned.guard(owned_sweep.snapshot.sweep):
                    self._settle(owned, owned_sweep, message)

    def _find_messages(self, woken: Collection[str]) -> tuple[list[str] | None, list[tuple[str, str]]]:
        """The store's sweeps, when it is time to list them, and all markers."""
        lists = is_time(self._list_at_s, self._now(), LIST_EVERY_S) or "" in woken
        return list_sweeps(self._store) if lists else None, read_markers(self._store)

    def _read_drain(self) -> Drain | None:
        try:
            return read_drain(self._store, self._cluster)
        except ControllerError as error:
            _LOG.error("%s", error)
            return Drain(cluster=self._cluster, running=Running.FINISH, reason=str(error))

    def _read_quotas(self) -> Quotas:
        try:
            return read_quotas(self._store, self._cluster)
        except ControllerError as error:
            _LOG.error("%s", error)
            return self._quotas

    def _settle(self, owned: OwnedSweeps, owned_sweep: OwnedSweep, message: Message) -> None:
        if message.message_id not in owned_sweep.snapshot.handled:
            events = handle_request(
                self._store,
                owned_sweep.ledger,
                message,
                now=self._now(),
                pool=self._pool,
                on_alive=self.stay_alive,
                why_not=self._backend.why_not,
            )
            owned.append(owned_sweep, events)
        # Somebody may have deleted results since. Also if its events were appended before, with an outcome that this
        # controller did not know.
        if isinstance(message, Submit | Retry):
            self._keys.forget_all(owned_sweep.snapshot)
        # Only now: a message that is deleted before its event is durable would be lost by a crash in between.
        self._pool.ask(self.stay_alive, discard, self._store, owned_sweep.snapshot.sweep, message)
        owned.looks.forget_marker(owned_sweep.snapshot.sweep, message.message_id)

    def _observe(self, owned: OwnedSweeps) -> None:
        owned_sweeps = owned.active()
        asked = {attempt.attempt_id for owned_sweep in owned_sweeps for attempt in owned_sweep.snapshot.live_attempts}
        asked |= {attempt.attempt_id for snapshot in owned.shelved() for attempt in snapshot.live_attempts}
        asked |= self._tracker.orphans
        self._ended = set()
        if not asked:
            return
        observed = self._backend.observe(sorted(asked), are_all=not owned.is_blind)
        reports = {report.attempt_id: report for report in observed}
        self._pricing.look(self._backend.capacity())
        if any(report.status in _ENDS_OF_CONTACT for report in reports.values()):
            # A controller that slept past its lease finds runners that do not talk to it any more. Its journals may be
            # open to it still, and there must never stand that they are lost.
            self._lease.verify(self._on_alive)
        self._ended = {attempt_id for attempt_id, one in reports.items() if one.status is not AttemptStatus.RUNNING}
        self._record(owned, owned_sweeps, reports)
        self._tracker.release_orphans(reports)
        self._tracker.retain(asked)

    def _record(
        self, owned: OwnedSweeps, owned_sweeps: Sequence[OwnedSweep], reports: Mapping[str, AttemptReport]
    ) -> None:
        news: list[_News] = []
        with self._pool.batch(self.stay_alive) as batch:
            verdicts: _Verdicts = {
                attempt.attempt_id: batch.start(judge_report, self._store, attempt, report, self._now())
                for owned_sweep in owned_sweeps
                for attempt in owned_sweep.snapshot.live_attempts
                if (report := reports.get(attempt.attempt_id)) and report.status is not AttemptStatus.RUNNING
            }
            for owned_sweep in owned_sweeps:
                with owned.guard(owned_sweep.snapshot.sweep):
                    news.append(self._news_of(owned_sweep, reports, verdicts))
        durable = owned.append_each([(one.owned_sweep, one.events) for one in news if one.events])
        for one in news:
            if one.owned_sweep.snapshot.sweep in durable:
                with owned.guard(one.owned_sweep.snapshot.sweep):
                    # A runner keeps the outcome until here: a crash before lets the next controller ask again.
                    for event in one.ended:
                        if isinstance(event, AttemptSucceeded):
                            one.owned_sweep.board.quarantine(event.job, event.quarantined)
                        self._tracker.release(event.attempt_id)

    def _news_of(self, owned_sweep: OwnedSweep, reports: Mapping[str, AttemptReport], verdicts: _Verdicts) -> _News:
        ended: list[AttemptEvent] = []
        news = self._pricing.placement_events(owned_sweep.snapshot, reports, self._now())
        for attempt in owned_sweep.snapshot.live_attempts:
            report = reports.get(attempt.attempt_id)
            if report is not None and report.progress is not None:
                self._tracker.counters.see(owned_sweep.snapshot, attempt, report.progress)
            judge = verdicts.get(attempt.attempt_id)
            event = None if judge is None else judge()
            if event is not None:
                ended.append(event)
                owned_sweep.board.remove(attempt.job)
                forget = self._keys.settle if isinstance(event, AttemptSucceeded) else self._keys.forget
                forget(attempt.key)
            elif report is not None and report.progress is not None:
                owned_sweep.board.show(attempt.job, attempt.attempt_id, report.progress, report.worker_nodes)
                self._tracker.follow(attempt.attempt_id, report.node, report.progress, self._now())
        return _News(owned_sweep=owned_sweep, events=[*news, *ended], ended=ended)

    def _drain_sweeps(self, owned: OwnedSweeps) -> None:
        """Ask for checkpoints where a pause or a drain wants them, and note when a drained cluster rests."""
        drain, active = self._drain, owned.active()
        for owned_sweep in active:
            is_paused = owned_sweep.snapshot.pause is Running.CHECKPOINT
            if drain is not None:  # what waits for its resources would begin to run, also if the running ones finish
                reason = f"cluster {self._cluster} is drained" + (f": {drain.reason}" if drain.reason else "")
                some = drain.running is not Running.CHECKPOINT and not is_paused
                self._executor.preempt(owned, owned_sweep, reason, self._now(), unplaced_only=some)
            elif is_paused:
                self._executor.preempt(owned, owned_sweep, "the sweep is paused", self._now())
        snapshots = [*(owned_sweep.snapshot for owned_sweep in owned.active()), *owned.shelved()]
        is_at_rest = not any(snapshot.live_attempts for snapshot in snapshots) and not self._tracker.orphans
        is_at_rest = is_at_rest and not owned.is_blind  # an attempt may run that no journal has told of yet
        if drain is not None and drain.drained_at_s is None and is_at_rest:
            self._pool.ask(self.stay_alive, note_drained, self._store, self._cluster, self._now())

    def _act(self, owned: OwnedSweeps) -> None:
        self._keys.end_waits(self._now())
        self._follow_each(owned)
        look_until_s = self._now() + LOOK_UP_S
        while commands := self._decide(owned, look_until_s):
            self._executor.execute(owned, commands, self._now)

    def _decide(self, owned: OwnedSweeps, look_until_s: float) -> list[Command]:
        self._look_up(owned, look_until_s)
        if not owned.active():
            self._scheduler.forget()
            return []
        decided = self._decide_each(owned)
        served = {owned_sweep.snapshot.sweep for owned_sweep in owned.active()}
        commands = [command for command in decided if command.sweep in served]
        return self._executor.without_repeats(commands)

    def _follow_each(self, owned: OwnedSweeps) -> None:
        """Bring what the scheduler knows up to date, sweep by sweep: together they take long after a takeover."""
        snapshots = [owned_sweep.snapshot for owned_sweep in owned.active()]
        durations = self._durations.of([*snapshots, *owned.shelved()], self.stay_alive)
        for snapshot in snapshots:
            self.stay_alive()
            with owned.guard(snapshot.sweep):
                self._scheduler.follow(snapshot, durations.get(snapshot.sweep))

    def _decide_each(self, owned: OwnedSweeps) -> list[Command]:
        """Decide for all sweeps together; those that keep the scheduler from it are set aside."""
        for check in (self._check_alone, _check_numbers):
            view = self._view(owned)
            try:
                return self._scheduler.decide(view)
            except SWEEP_FAULTS as error:
                _LOG.warning("nothing can be decided (%r): the sweep that is the cause is looked for", error)
            for owned_sweep in owned.active():
                self.stay_alive()
                with owned.guard(owned_sweep.snapshot.sweep):
                    check(view, owned_sweep.snapshot)
            self._unplanned = {snapshot.sweep for snapshot in owned.shelved()}
        return self._scheduler.decide(self._view(owned))

    def _check_alone(self, view: ClusterView, snapshot: Snapshot) -> None:
        try:
            self._scheduler.check_alone(view, snapshot)
        except SWEEP_FAULTS:
            _check_numbers(view, snapshot)  # says in words what is wrong, if it is one of these
            raise

    def _view(self, owned: OwnedSweeps) -> ClusterView:
        served, shelved = [owned_sweep.snapshot for owned_sweep in owned.active()], owned.shelved()
        self._unplanned &= {snapshot.sweep for snapshot in shelved}
        # What runs for a sweep that must be read again has its room and keys; nothing is decided for it.
        held = [
            _without_plan(snapshot)
            if snapshot.sweep in self._unplanned
            else replace(snapshot, state=SweepState.PAUSED, pause=None)
            for snapshot in shelved
        ]
        capacity = self._backend.capacity()
        self._pricing.look(capacity)
        return ClusterView(
            snapshots=[*served, *held],
            held={snapshot.sweep for snapshot in held},
            total=capacity.total,
            nodes=(*(capacity.machines or capacity.nodes), *capacity.absent),
            maximum=capacity.maximum,
            is_settled=capacity.is_settled and self._now() - self._drained_s >= REJOIN_S,
            now=self._now(),
            committed=self._keys.committed,
            claimed=self._keys.unavailable,
            may_start=self._drain is None and not owned.is_blind,
            max_live_attempts=self._max_live_attempts,
            durations=self._durations.of([*served, *shelved], self.stay_alive),
            remaining_s=self._tracker.remaining_s,
            node_by_attempt=self._tracker.node_by_attempt,
            user_caps=self._quotas,
            former=[one for one in owned.snapshots() if one.state.is_final and one.excluded],
            steps=self._tracker.heartbeats.steps,
            stepping=self._tracker.stepping,
        )

    def _look_up(self, owned: OwnedSweeps, until_s: float) -> None:
        """Which ready jobs the store has already."""
        self._keys.unknown.clear()
        ready: list[tuple[str, Job]] = []
        for owned_sweep in owned.active():
            sweep = owned_sweep.snapshot.sweep
            with owned.guard(sweep):
                ready += [(sweep, job) for job in self._scheduler.unlaunched(owned_sweep.snapshot)]
        looks = self._keys.look_up(ready, self._now, until_s)
        for sweep, error in looks.errors.items():
            with owned.guard(sweep):
                raise error
        found = [(owned.get(sweep), events) for sweep, events in looks.refused.items() if sweep not in looks.errors]
        owned.append_each([(owned_sweep, events) for owned_sweep, events in found if owned_sweep is not None])

    def _drop_fenced(self, owned: OwnedSweeps) -> None:
        if not owned.is_contested:
            return
        # A newer controller of this very cluster goes on with our attempts; only another cluster's takeover ends them.
        self._lease.verify(self._on_alive)
        for owned_sweep in owned.fenced:
            for attempt in owned_sweep.snapshot.live_attempts:
                self._tracker.disown(attempt, self._now())
        owned.fenced.clear()

    def _show_progress(self, owned: OwnedSweeps) -> None:
        with self._pool.batch(self.stay_alive) as batch:
            writes: dict[str, Callable[[], None]] = {}
            for owned_sweep in owned.all():
                sweep, board = owned_sweep.snapshot.sweep, owned_sweep.board
                board.explain(self._scheduler.waits.get(sweep, {}), self._scheduler.behind.get(sweep, {}))
                board.warn(self._scheduler.warnings.get(sweep, ""))
                if board.is_due(self._now()):
                    writes[sweep] = batch.start(board.flush, self._now())
            for sweep, write in writes.items():
                try:
                    write()
                except LeaseLostError:
                    raise
                except OrchestratorError as error:
                    _LOG.warning("progress of sweep %s is not shown: %s", sweep, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _News:
    """What the reports of a sweep's attempts come to."""

    owned_sweep: OwnedSweep
    events: Sequence[Event]
    ended: Sequence[AttemptEvent]


def _check_numbers(_: ClusterView, snapshot: Snapshot) -> None:
    """Raise ``ControllerError`` for a policy or priority that no client can have set: earlier versions took any."""
    plan, priorities = snapshot.plan, POLICY_RANGES["priority"]
    problem = "" if plan is None else policy_problem(plan.policy)
    if not problem and snapshot.priority is not None and snapshot.priority not in priorities:
        problem = f"its priority is {snapshot.priority!r:.80}, which is not {priorities}"
    if problem:
        message = f"sweep {snapshot.sweep} has no place among the others: {problem}; set it anew, or submit it again"
        raise ControllerError(message)


def _without_plan(snapshot: Snapshot) -> Snapshot:
    """A sweep that only holds what runs for it: nothing else of its snapshot can keep the scheduler from working."""
    plan = snapshot.plan and replace(snapshot.plan, jobs=(), policy=Policy(), owner="")
    live = {attempt.attempt_id: attempt for attempt in snapshot.live_attempts}
    return replace(
        snapshot, state=SweepState.PAUSED, pause=None, plan=plan, jobs=JobTable(), leaving=live, priority=None
    )


class _EstimatedDurations:
    """Remembers the estimates of each sweep's current plan; the same mapping is given out until the plan changes."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Plan, Mapping[str, float]]] = {}

    def of(self, snapshots: Sequence[Snapshot], on_alive: Callable[[], None]) -> dict[str, Mapping[str, float]]:
        """Seconds by job name, by sweep; other sweeps are forgotten. ``on_alive`` is called before each estimate."""
        self._known = {
            snapshot.sweep: (snapshot.plan, self._estimated(snapshot.sweep, snapshot.plan, on_alive))
            for snapshot in snapshots
            if snapshot.plan is not None
        }
        return {sweep: durations for sweep, (_, durations) in self._known.items()}

    def _estimated(self, sweep: str, plan: Plan, on_alive: Callable[[], None]) -> Mapping[str, float]:
        known = self._known.get(sweep)
        if known is not None and known[0] is plan:
            return known[1]
        on_alive()
        try:
            return estimate(plan).durations_s()
        except SWEEP_FAULTS:
            # An estimate only orders jobs. A plan of another version, or of jobs that nobody can estimate, runs too.
            _LOG.warning("jobs of sweep %s cannot be estimated, so they run in plan order", sweep, exc_info=True)
            return _UNKNOWN
