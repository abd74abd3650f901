"""Data of the live view, read from the store in a separate thread; each refresh reads only new data."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from threading import Thread

from rich.console import RenderableType

from orchestrator.cli.commands.overview import Matrix, overview
from orchestrator.core.contract import Progress
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.units import format_duration, format_percent
from orchestrator.services.costs import read_prices
from orchestrator.services.eta import EtaTracker
from orchestrator.services.status import SweepStatus, load_status, revive_killed_stack, used_hours
from orchestrator.state.brief_reasons import brief
from orchestrator.state.snapshot import JobTable, JobView, Snapshot
from orchestrator.state.transitions import JobState
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import SweepLedger, list_sweeps
from orchestrator.sweeps.progress import NodePresence, read_presence

MAX_JOBS = 200
"""Rows of jobs; the most urgent ones of more."""
ENDED_EVERY_S = 15.0
"""Between two looks at a sweep that has ended: it may be opened again."""
_URGENCY = (
    JobState.RUNNING,
    JobState.FAILED,
    JobState.PENDING,
    JobState.CANCELLED,
    JobState.SKIPPED,
    JobState.SUCCEEDED,
    JobState.REUSED,
)
_MAX_EVENTS = 12
_NUM_KEPT = 50
_SHOWN_METRIC = "val_error"
POLL_S = 0.2
"""Between two signs of life while a read of the store lasts."""
_ANYWHERE = "(placed by Ray)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One sweep."""

    name: str
    state: str
    owner: str = ""
    priority: str = ""
    done: str = ""
    running: str = ""
    failed: str = ""
    images_per_s: str = ""
    gpu_hours: str = ""
    left: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job of the chosen sweep."""

    name: str
    state: str
    attempt: str = ""
    node: str = ""
    step: str = ""
    images_per_s: str = ""
    told: str = ""
    """Time left, why it waits, or why it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node of a cluster that is served, or on which something of any sweep runs, or that is avoided."""

    name: str
    jobs: str = ""
    gpus: str = ""
    """Used, and where that is known, of how many."""
    idle: str = ""
    """Runners that wait for their next attempt."""
    images_per_s: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One view."""

    sweeps: tuple[SweepRow, ...] = ()
    chosen: str = ""
    jobs: tuple[JobRow, ...] = ()
    num_jobs: int = 0
    """That the filter lets through, shown or not."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Jobs of the chosen sweep by state."""
    nodes: tuple[NodeRow, ...] = ()
    overview: RenderableType = ""
    """What the chosen sweep has done."""
    events: tuple[str, ...] = ()
    """What happened last to its jobs, newest first."""
    snapshot: Snapshot | None = None
    """Of the chosen sweep; none = it could not be read."""
    error: str = ""
    """Why some of it may be old."""
    settled: Mapping[str, str] = field(default_factory=dict)
    """Messages that a controller has followed, with the reason of those it refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a terminal has for the overview."""

    width: int = 120
    height: int = 20
    is_ascii: bool = False


_ROOM = Room()


class Reader:
    """Everything that one view knows. Use from one thread.

    Args:
        store: where the sweeps are.
        only: the one sweep that is looked at; empty = all.
    """

    def __init__(self, store: ObjectStore, only: str = "") -> None:
        self._store, self._only = store, only
        self._watched: dict[str, Watching] = {}
        self._looked_at_s: dict[str, float] = {}
        self._errors: dict[str, str] = {}

    def look(
        self, chosen: str = "", states: frozenset[JobState] = frozenset(), search: str = "", room: Room = _ROOM
    ) -> Frame:
        """Read what is new.

        Args:
            chosen: sweep whose jobs are shown; one that is not there means the first.
            states: of these jobs; empty = all.
            search: part of their names.
            room: for the overview.
        """
        try:
            names = [self._only] if self._only else list_sweeps(self._store)
        except OrchestratorError as error:
            return Frame(error=str(error))
        for name in names:
            self._look_at(name, is_chosen=name == chosen)
        shown = chosen if chosen in names else next(iter(names), "")
        watching = self._watched.get(shown)
        rows = tuple(self._sweep_row(name) for name in names)
        told = next(iter(self._errors.values()), "")
        if watching is None:
            return Frame(sweeps=rows, chosen=shown, error=told)
        status = watching.status
        jobs = [view for view in _ordered(status) if (not states or view.state in states) and search in view.name]
        return Frame(
            sweeps=rows,
            chosen=shown,
            jobs=tuple(_job_row(view, status) for view in jobs[:MAX_JOBS]),
            num_jobs=len(jobs),
            counts={state.value: number for state, number in status.snapshot.counts.items()},
            nodes=tuple(_node_rows([one.status for one in self._watched.values()], self._present())),
            overview=overview(status, watching.matrix, height=room.height, width=room.width, is_ascii=room.is_ascii),
            events=tuple(watching.events[:_MAX_EVENTS]),
            snapshot=status.snapshot,
            error=told,
            settled={message: status.snapshot.refusals.get(message, "") for message in status.snapshot.handled},
        )

    def _look_at(self, name: str, *, is_chosen: bool) -> None:
        watching = self._watched.get(name)
        has_ended = watching is not None and watching.status.snapshot.state.is_final
        if has_ended and not is_chosen and time.monotonic() - self._looked_at_s[name] < ENDED_EVERY_S:
            return
        watching = watching or Watching(self._store, name)
        self._looked_at_s[name] = time.monotonic()
        try:
            self._look_and_revive(watching, is_chosen=is_chosen)
        except OrchestratorError as error:  # what is known stays; a damaged sweep does not hide the others
            self._errors[name] = f"{name}: {error}"
        else:
            self._errors.pop(name, None)
            self._watched[name] = watching

    def _look_and_revive(self, watching: Watching, *, is_chosen: bool) -> None:
        """A stack that was killed is started again for the chosen sweep, also while the store does not answer."""

        def revive() -> None:
            revive_killed_stack(watching.status.snapshot)

        if is_chosen:
            look_while(watching.look, revive)
            revive()
        else:
            watching.look()

    def _present(self) -> dict[str, NodePresence]:
        """The nodes of all clusters that have a controller, by name."""
        statuses = [watching.status for watching in self._watched.values()]
        clusters = {status.snapshot.cluster for status in statuses if status.is_served}
        return {node.name: node for cluster in sorted(clusters) for node in read_presence(self._store, cluster)}

    def _sweep_row(self, name: str) -> SweepRow:
        watching = self._watched.get(name)
        if watching is None:
            return SweepRow(name=name, state="unreadable")
        status = watching.status
        snapshot, plan = status.snapshot, status.snapshot.plan
        counts = snapshot.counts
        num_done = sum(number for state, number in counts.items() if state.is_done)
        priority = snapshot.priority if snapshot.priority is not None else plan.policy.priority if plan else 0
        rate = sum(progress.images_per_s for progress in status.running.values()) if status.is_served else 0.0
        gpu_hours, _ = used_hours(snapshot, status.now)
        return SweepRow(
            name=name,
            state=snapshot.outcome + ("" if status.is_served or snapshot.state.is_final else " (no controller)"),
            owner=plan.owner if plan else "",
            priority=str(priority),
            done=f"{num_done}/{len(snapshot.jobs)}",
            running=str(counts.get(JobState.RUNNING, 0)),
            failed=str(counts.get(JobState.FAILED, 0)),
            images_per_s=_rate(rate),
            gpu_hours=f"{gpu_hours:,.1f}" if gpu_hours else "",
            left=format_duration(status.left.seconds) if status.left is not None else "",
        )


def _ordered(status: SweepStatus) -> Iterator[JobView]:
    """All jobs, the most urgent first, else in plan order."""
    groups: dict[JobState, list[JobView]] = {state: [] for state in _URGENCY}
    for view in status.snapshot.jobs.values():
        groups[view.state].append(view)
    for state in _URGENCY:
        yield from groups[state]


def _job_row(view: JobView, status: SweepStatus) -> JobRow:
    if view.attempt is None:
        failure = view.last_failure
        waits = status.progress.get(view.name)
        is_waiting = view.state is JobState.PENDING and waits is not None and not waits.attempt_id
        told = waits.progress.phase if is_waiting and waits is not None else view.reason
        if not told and failure is not None and not view.state.is_done:
            told = f"{failure.kind.value}: {failure.message}"
        attempt = str(view.num_attempts) if view.num_attempts else ""
        return JobRow(name=view.name, state=view.state.value, attempt=attempt, told=told)
    progress = status.running.get(view.name) or Progress(phase="starting")
    return JobRow(
        name=view.name,
        state=view.state.value,
        attempt=str(view.attempt.number),
        node=", ".join(view.attempt.nodes),
        step=f"{progress.phase} {progress.step}/{progress.total_steps}" if progress.total_steps else progress.phase,
        images_per_s=_rate(progress.images_per_s),
        told=f"{format_duration(progress.eta_s)} left" if progress.eta_s else "",
    )


def _node_rows(statuses: list[SweepStatus], present: Mapping[str, NodePresence]) -> Iterator[NodeRow]:
    jobs: Counter[str] = Counter()
    gpus: defaultdict[str, float] = defaultdict(float)
    rates: defaultdict[str, float] = defaultdict(float)
    notes: dict[str, str] = {}
    for status in statuses:
        running = status.running
        for attempt in status.snapshot.live_attempts:
            nodes = attempt.nodes or (_ANYWHERE,)
            progress = running.get(attempt.job)
            for node in nodes:
                jobs[node] += 1
                gpus[node] += attempt.resources.gpus / len(nodes)
                rates[node] += (progress.images_per_s if progress else 0.0) / len(nodes)
        for node, exclusion in status.snapshot.excluded.items():
            if exclusion.until_s > status.now:
                left = format_duration(exclusion.until_s - status.now)
                notes[node] = f"avoided for {left}: {exclusion.reason}"
    notes = {**{name: "about to go" for name, node in present.items() if node.is_leaving}, **notes}
    for node in sorted({*jobs, *notes, *present}):
        is_present = node in present
        yield NodeRow(
            name=node,
            jobs=str(jobs[node]),
            gpus=f"{gpus[node]:g}" + (f"/{present[node].gpus:g}" if is_present else ""),
            idle=str(present[node].idle_runners) if is_present else "",
            images_per_s=_rate(rates[node]),
            note=notes.get(node, ""),
        )


def _rate(images_per_s: float) -> str:
    return f"{images_per_s:,.0f}" if images_per_s > 0 else ""


# ------------------------------------------------------------------------------------------------ one sweep, read again
class Watching:
    """What one display knows of a sweep; each look reads only what is new."""

    def __init__(self, store: ObjectStore, sweep: str) -> None:
        self._store = store
        self._ledger = SweepLedger(store, sweep)
        self._jobs: JobTable | None = None
        self._events: deque[tuple[float, str]] = deque(maxlen=_NUM_KEPT)
        self.tracker = EtaTracker()
        self._prices = read_prices("")
        self.matrix = Matrix()
        self.status = SweepStatus(snapshot=self._ledger.snapshot)

    def look(self) -> SweepStatus:
        """Read what is new.

        Raises:
            StorageError: the store does not answer; what is known stays.
        """
        snapshot = self._ledger.refresh()
        self._note(snapshot)
        self.matrix.update(snapshot)
        self.status = load_status(self._store, snapshot, self.tracker, self._prices)
        return self.status

    @property
    def events(self) -> list[str]:
        """What happened last to jobs, newest first."""
        now = self.status.now
        return [f"{format_duration(max(0.0, now - at_s)):>7} ago  {line}" for at_s, line in self._events]

    def _note(self, snapshot: Snapshot) -> None:
        jobs, self._jobs = self._jobs, snapshot.jobs
        changed = snapshot.jobs.values() if jobs is None else snapshot.jobs.changed_since(jobs)
        news = sorted((_moment(view), job_line(view)) for view in changed if _is_news(view))
        self._events.extendleft(news[-_NUM_KEPT:])


def look_while(look: Callable[[], SweepStatus], meanwhile: Callable[[], None]) -> SweepStatus:
    """What a look at the store finds. While it lasts, ``meanwhile`` is called every fifth of a second.

    A store that does not answer is asked again for a minute before that is an error. It may be on the S3 server of the
    very stack that ``meanwhile`` starts again.
    """
    found: Future[SweepStatus] = Future()

    def run() -> None:
        try:
            found.set_result(look())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            found.set_exception(error)

    Thread(target=run, name="look at the store", daemon=True).start()  # daemon: Ctrl-C waits for no server
    while not wait([found], timeout=POLL_S).done:
        meanwhile()
    return found.result()


def _is_news(view_: JobView) -> bool:
    return view_.attempt is not None or view_.last_failure is not None or view_.state.is_final


def _moment(view_: JobView) -> float:
    """When a job changed last."""
    if view_.attempt is not None:
        return view_.attempt.launched_at_s
    return view_.ended_at_s or (view_.last_failure.at_s if view_.last_failure else 0.0)


def job_line(view: JobView, *, tells_reason: bool = True) -> str:
    """``pretrain/levels/depth2/seed0 succeeded in 5.3s, val_error 12.10 %``."""
    failure = view.last_failure
    if failure is not None and not view.state.is_final:
        # The reason is printed once, when the attempt ends; later lines only say that the job continues.
        if view.attempt is not None:
            return f"{view.name} runs again (attempt {view.attempt.number})"
        return f"{view.name} will be tried again after {brief(failure)}"
    parts = [f"{view.name} {view.state.value}"]
    if view.state.is_done and view.timings is not None:
        parts.append(f"in {format_duration(view.timings.work_s)}")
    if _SHOWN_METRIC in view.metrics:
        parts.append(f"{_SHOWN_METRIC} {format_percent(view.metrics[_SHOWN_METRIC])} %")
    if failure is not None and tells_reason and not view.state.is_done:
        parts.append(f"({brief(failure)})")
    return " ".join(parts)
