"""Any sweep, any failures, any interruption: what holds for every journal that the scheduler can lead to."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.contract import Outcome, Resources
from orchestrator.core.errors import FailureKind
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.scheduling.commands import (
    CancelJob,
    Command,
    ExcludeNode,
    FailJob,
    FinishSweep,
    LaunchJob,
    MarkReused,
    PreemptAttempt,
    SkipJob,
    StopAttempt,
    TripSweep,
)
from orchestrator.scheduling.scheduler import ClusterView, Scheduler
from orchestrator.state import events
from orchestrator.state.events import Event, MessageEvent, decode_event, encode_event
from orchestrator.state.fold import apply, fold
from orchestrator.state.snapshot import Attempt, Snapshot, decode_snapshot, encode_snapshot
from orchestrator.state.spending import PricedAllocation, bill_of
from orchestrator.state.transitions import JobState, SweepState, is_allowed
from tests.scripted_sweep import make_job, make_plan

TOTAL = Resources(cpus=3.0, memory_gib=8.0)
MAX_ROUNDS = 400


@st.composite
def plans(draw: st.DrawFn, sweep: str) -> Plan:
    jobs: list[Job] = []
    for number in range(draw(st.integers(1, 6))):
        needs = draw(st.lists(st.sampled_from([job.name for job in jobs]), max_size=2, unique=True)) if jobs else []
        cpus = draw(st.sampled_from([0.5, 1.0, 2.0, 3.0, 4.0]))
        key = f"pretrain-{draw(st.integers(0, 7))}"  # sweeps, and even jobs of one sweep, share keys
        jobs.append(make_job(f"pretrain/{number}", *needs, cpus=cpus, key=key))
    return make_plan(*jobs, sweep=sweep)


@dataclass
class Simulation:
    """Carries commands out on a world of dice, checking every step."""

    plans: dict[str, Plan]
    roll: Callable[[int], int]
    now_s: float = 0.0
    committed: set[str] = field(default_factory=set)
    journals: dict[str, list[Event]] = field(default_factory=dict)
    snapshots: dict[str, Snapshot] = field(default_factory=dict)
    num_attempts: int = 0
    num_messages: int = 0

    def append(self, sweep: str, *more: Event) -> None:
        self.journals.setdefault(sweep, []).extend(more)
        before = self.snapshots.get(sweep) or Snapshot(sweep=sweep)
        self.snapshots[sweep] = apply(before, more, lambda _: self.plans[sweep])

    def live(self) -> list[tuple[str, Attempt]]:
        return [(name, attempt) for name, snapshot in self.snapshots.items() for attempt in snapshot.live_attempts]

    def run(self) -> None:
        for sweep in self.plans:
            self.append(sweep, events.PlanAccepted(at_s=0.0, message_id=f"m-{sweep}", revision=1))
        for _ in range(MAX_ROUNDS):
            if all(snapshot.state.is_final for snapshot in self.snapshots.values()):
                return
            commands = Scheduler().decide(
                ClusterView(
                    snapshots=list(self.snapshots.values()),
                    total=TOTAL,
                    nodes=(TOTAL,),
                    now=self.now_s,
                    committed=self.committed,
                )
            )
            for command in commands:
                self.carry_out(command)
            self.check_room()
            self.end_some()
            self.now_s += 1000.0 if not commands else 1.0
        raise AssertionError({name: snapshot.counts for name, snapshot in self.snapshots.items()})

    def carry_out(self, command: Command) -> None:
        now_s, sweep = self.now_s, command.sweep
        match command:
            case LaunchJob(job=name):
                self.launch(sweep, name)
            case MarkReused(job=name):
                key = self.snapshots[sweep].jobs[name].key
                assert key in self.committed
                self.append(sweep, events.JobReused(at_s=now_s, job=name, key=key))
            case FailJob(job=name, reason=reason):
                self.append(sweep, events.JobFailed(at_s=now_s, job=name, reason=reason))
            case SkipJob(job=name, because=because):
                self.append(sweep, events.JobSkipped(at_s=now_s, job=name, because=because))
            case CancelJob(job=name):
                self.append(sweep, events.JobCancelled(at_s=now_s, job=name))
            case FinishSweep(status=status):
                self.append(sweep, events.SweepFinished(at_s=now_s, status=status))
            case StopAttempt(attempt_id=attempt_id) | PreemptAttempt(attempt_id=attempt_id):
                self.end(sweep, attempt_id, FailureKind.PREEMPTED)
            case TripSweep(reason=reason):
                self.append(sweep, events.SweepTripped(at_s=now_s, reason=reason))
            case ExcludeNode(node=node, reason=reason, until_s=until_s):
                self.append(sweep, events.NodeExcluded(at_s=now_s, node=node, reason=reason, until_s=until_s))

    def launch(self, sweep: str, name: str) -> None:
        job = self.plans[sweep].by_name()[name]
        jobs = self.snapshots[sweep].jobs
        assert all(jobs[need].state.is_done for need in job.needs), "launched before its needs"
        assert job.key not in {attempt.key for _, attempt in self.live()}, "one key live twice"
        assert job.key not in self.committed, "launched although committed"
        self.num_attempts += 1
        attempt_id = f"{job.key}.{self.num_attempts}"
        intent = events.AttemptLaunched(
            at_s=self.now_s,
            job=name,
            key=job.key,
            attempt_id=attempt_id,
            number=self.num_attempts,
            epoch=1,
            lots=(PricedAllocation(hourly=3600.0),) if self.roll(1) else (),
        )
        self.append(sweep, intent)
        if not intent.lots and self.roll(1):
            lots = (PricedAllocation(is_spot=True, hourly=3600.0),)
            self.append(
                sweep,
                events.AttemptPlaced(at_s=self.now_s, job=name, attempt_id=attempt_id, nodes=("n",), lots=lots),
            )

    def check_room(self) -> None:
        assert sum(attempt.resources.cpus for _, attempt in self.live()) <= TOTAL.cpus

    def end_some(self) -> None:
        for sweep, attempt in self.live():
            outcome = self.roll(5)
            if outcome in {0, 1}:
                self.committed.add(attempt.key)
                self.append(
                    sweep,
                    events.AttemptSucceeded(
                        at_s=self.now_s, job=attempt.job, attempt_id=attempt.attempt_id, outcome=Outcome.COMMITTED
                    ),
                )
            elif outcome == 2:
                kinds = list(FailureKind)
                self.end(sweep, attempt.attempt_id, kinds[self.roll(len(kinds) - 1)])
            elif outcome == 3:
                self.append(
                    sweep,
                    events.AttemptLost(at_s=self.now_s, job=attempt.job, attempt_id=attempt.attempt_id, reason=""),
                )
        for sweep in sorted(self.plans):
            if self.snapshots[sweep].state is SweepState.PAUSED:
                self.ask(sweep, events.SweepResumed(at_s=self.now_s, message_id=self.next_message()))
            elif self.roll(12) == 0:
                self.ask(sweep, self.message(sweep))

    def next_message(self) -> str:
        self.num_messages += 1
        return f"message-{self.num_messages}"

    def message(self, sweep: str) -> MessageEvent:
        """Something that a client might want."""
        views = list(self.snapshots[sweep].jobs.values())
        plain: dict[str, Any] = {"at_s": self.now_s, "message_id": self.next_message()}
        match self.roll(6):
            case 0:
                return events.CancelRequested(**plain)
            case 1:
                return events.SweepStopping(**plain)
            case 2:
                return events.PriorityChanged(**plain, priority=self.roll(9))
            case 3:
                names = [view.name for view in views if not view.state.is_final]
                return events.JobsCancelled(**plain, jobs=tuple(names[: self.roll(2)]))
            case 4:
                names = [view.name for view in views if view.state.is_final and not view.state.is_done]
                return events.JobsRetried(**plain, jobs=tuple(names))
            case _:
                return events.SweepPaused(**plain)

    def ask(self, sweep: str, event: MessageEvent) -> None:
        if is_allowed(self.snapshots[sweep].state, type(event)):
            self.append(sweep, event)

    def end(self, sweep: str, attempt_id: str, kind: FailureKind) -> None:
        jobs = {attempt.attempt_id: attempt.job for attempt in self.snapshots[sweep].live_attempts}
        if attempt_id in jobs:  # two orders may come in one round: its sweep is cancelled, and another wants its room
            failed = events.AttemptFailed(
                at_s=self.now_s, job=jobs[attempt_id], attempt_id=attempt_id, kind=kind, message=""
            )
            self.append(sweep, failed)


@settings(max_examples=200)
@given(first=plans("first"), second=plans("second"), dice=st.randoms(use_true_random=False))
def test_simulated_sweeps_end_without_breaking_a_rule(first, second, dice) -> None:
    simulation = Simulation(plans={"first": first, "second": second}, roll=lambda top: dice.randint(0, top))
    simulation.run()
    for snapshot in simulation.snapshots.values():
        assert snapshot.live_attempts == []
        for view in snapshot.jobs.values():
            assert view.state.is_final
            assert not view.state.is_done or view.key in simulation.committed


@settings(max_examples=60)
@given(plan=plans("sweep"), dice=st.randoms(use_true_random=False), cut=st.floats(0.0, 1.0))
def test_snapshot_through_json_then_the_rest_equals_the_fold_of_all(plan, dice, cut) -> None:
    simulation = Simulation(plans={"sweep": plan}, roll=lambda top: dice.randint(0, top))
    simulation.run()
    journal = simulation.journals["sweep"]
    split = int(cut * len(journal))
    stored = json.loads(json.dumps(encode_snapshot(fold("sweep", journal[:split], lambda _: plan))))
    resumed = decode_snapshot(stored, plan if stored["revision"] else None)
    assert resumed == fold("sweep", journal[:split], lambda _: plan)
    assert apply(resumed, journal[split:], lambda _: plan) == simulation.snapshots["sweep"]


@settings(max_examples=100)
@given(plan=plans("sweep"), dice=st.randoms(use_true_random=False), cut=st.floats(0.0, 1.0))
def test_fold_of_any_prefix_then_the_rest_equals_the_fold_of_all(plan, dice, cut) -> None:
    simulation = Simulation(plans={"sweep": plan}, roll=lambda top: dice.randint(0, top))
    simulation.run()
    journal = [decode_event(encode_event(event)) for event in simulation.journals["sweep"]]
    whole = fold("sweep", journal, lambda _: plan)
    assert whole == simulation.snapshots["sweep"]
    split = int(cut * len(journal))
    prefix = fold("sweep", journal[:split], lambda _: plan)
    assert apply(prefix, journal[split:], lambda _: plan) == whole
    running = {view.name for view in prefix.jobs.values() if view.state is JobState.RUNNING}
    assert running == {a.job for a in prefix.live_attempts if a.attempt_id not in prefix.leaving}


@settings(max_examples=60)
@given(plan=plans("sweep"), dice=st.randoms(use_true_random=False))
def test_uses_of_simulated_sweeps_hold_every_second_of_every_attempt(plan, dice) -> None:
    simulation = Simulation(plans={"sweep": plan}, roll=lambda top: dice.randint(0, top))
    simulation.run()
    launched: dict[str, events.AttemptLaunched] = {}
    priced: set[str] = set()
    core_s, amount = 0.0, 0.0
    for event in simulation.journals["sweep"]:
        if isinstance(event, events.AttemptLaunched):
            launched[event.attempt_id] = event
        if isinstance(event, events.AttemptLaunched | events.AttemptPlaced) and event.lots:
            priced.add(event.attempt_id)
        if isinstance(event, events.AttemptSucceeded | events.AttemptFailed | events.AttemptLost):
            ran_s = event.at_s - launched[event.attempt_id].at_s
            core_s += ran_s * plan.by_name()[event.job].resources.cpus
            amount += ran_s if event.attempt_id in priced else 0.0
    snapshot = simulation.snapshots["sweep"]
    assert sum(use.cpu_s for use in snapshot.uses(simulation.now_s)) == pytest.approx(core_s)
    assert bill_of(snapshot.uses(simulation.now_s)).amount == pytest.approx(amount)
