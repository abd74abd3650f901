"""The log of a search: immutable segments of JSON lines, each written by ``put_if_absent`` at the next number.

The number protects against two writers: if an older attempt at the search is still alive, one of the two finds a
segment that it did not write, and must end. The head of a log, which is written first, protects in the same way.

The log consists of events; the state of the trials follows from them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

from orchestrator.core.errors import FailureKind, NotFoundError, PreconditionFailedError, PreemptedError
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.bounds import SEGMENT_BYTES
from orchestrator.storage.layout import search_log_head, search_log_segment, segment_numbers
from orchestrator.storage.protocol import ObjectStore
from orchestrator.storage.seals import check_seal, seal
from orchestrator.storage.trials import TrialPoint, TrialState, encode_head, find_folder

LOG_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialAsked:
    """The sampler chose a trial; ``key`` is the key of its job."""

    name: ClassVar[str] = "asked"
    trial: int
    at_s: float
    key: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStarted:
    """An attempt at a trial begins, from its newest checkpoint if it has one."""

    name: ClassVar[str] = "started"
    trial: int
    at_s: float
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTold:
    """A trial reached a rung, or its last evaluation; ``spent_s`` counts from the start of its attempt."""

    name: ClassVar[str] = "told"
    trial: int
    at_s: float
    step: int
    epoch: float
    value: float
    metrics: Mapping[str, float]
    spent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStopped:
    """A trial fell behind, and ends."""

    name: ClassVar[str] = "stopped"
    trial: int
    at_s: float
    rung: float
    cutoff: float
    num_before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCompleted:
    """A trial ran to its end; its artifact is committed."""

    name: ClassVar[str] = "completed"
    trial: int
    at_s: float
    value: float
    metrics: Mapping[str, float]
    spent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFailed:
    """A trial ended without a result, and would again."""

    name: ClassVar[str] = "failed"
    trial: int
    at_s: float
    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLost:
    """An attempt at a trial was interrupted; another one continues."""

    name: ClassVar[str] = "lost"
    trial: int
    at_s: float
    reason: str


SearchEvent: TypeAlias = TrialAsked | TrialStarted | TrialTold | TrialStopped | TrialCompleted | TrialFailed | TrialLost
_EVENTS: Mapping[str, type[SearchEvent]] = {
    one.name: one for one in (TrialAsked, TrialStarted, TrialTold, TrialStopped, TrialCompleted, TrialFailed, TrialLost)
}


def encode_search_event(event: SearchEvent) -> dict[str, Any]:
    """Plain JSON form."""
    return {"event": event.name, **asdict(event)}


def decode_search_event(document: Mapping[str, Any]) -> SearchEvent:
    """Inverse of ``encode_search_event``. Raises ``KeyError`` on an event that this version does not know."""
    fields = {name: value for name, value in document.items() if name != "event"}
    if document["event"] == TrialFailed.name:
        fields["kind"] = FailureKind(fields["kind"])
    return _EVENTS[document["event"]](**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    """The state of a trial."""

    number: int
    key: str
    params: Mapping[str, Any]
    asked_at_s: float
    state: TrialState = TrialState.RUNNING
    points: tuple[TrialPoint, ...] = ()
    values: Mapping[float, float] = field(default_factory=dict)
    """Its reported values by epoch."""
    value: float | None = None
    """Its newest value."""
    attempts: tuple[int, ...] = ()
    num_lost: int = 0
    spent_s: float = 0.0
    """Seconds of all its attempts, as far as reported."""
    before_s: float = 0.0
    """Seconds of earlier attempts."""
    ended_at_s: float | None = None
    reason: str = ""
    failure: FailureKind | None = None

    @property
    def epoch(self) -> float:
        """The last reported epoch."""
        return max(self.values, default=0.0)


State: TypeAlias = Mapping[int, TrialView]


def apply_search_event(state: State, event: SearchEvent) -> State:
    """The state after an event. Raises ``KeyError`` for a trial that was never asked for."""
    if isinstance(event, TrialAsked):
        view = TrialView(number=event.trial, key=event.key, params=event.params, asked_at_s=event.at_s)
        return {**state, event.trial: view}
    return {**state, event.trial: _after(state[event.trial], event)}


def fold_search(events: Iterable[SearchEvent], state: State | None = None) -> State:
    """The state of a search, from its log, or from a state and what came after it."""
    state = state or {}
    for event in events:
        state = apply_search_event(state, event)
    return state


def _after(view: TrialView, event: SearchEvent) -> TrialView:
    match event:
        case TrialStarted():
            return replace(view, attempts=(*view.attempts, event.attempt), before_s=view.spent_s)
        case TrialLost():
            return replace(view, num_lost=view.num_lost + 1, reason=event.reason)
        case TrialTold():
            point = TrialPoint(step=event.step, at_s=event.at_s, metrics=event.metrics)
            values = {**view.values, event.epoch: event.value}
            spent_s = view.before_s + event.spent_s
            return replace(view, points=(*view.points, point), values=values, value=event.value, spent_s=spent_s)
        case TrialStopped():
            reason = f"at epoch {event.rung:g} {view.value:.4g} is worse than {event.cutoff:.4g}, the cutoff of "
            return _ended(view, event.at_s, TrialState.STOPPED, f"{reason}{event.num_before} trials")
        case TrialCompleted():
            spent_s = view.before_s + event.spent_s
            completed = _ended(view, event.at_s, TrialState.COMPLETED, "")
            return replace(completed, value=event.value, spent_s=max(spent_s, view.spent_s))
        case TrialFailed():
            return replace(_ended(view, event.at_s, TrialState.FAILED, event.message), failure=event.kind)
    raise TypeError(f"{event} asks for a trial, and is none of one")


def _ended(view: TrialView, at_s: float, state: TrialState, reason: str) -> TrialView:
    return replace(view, state=state, ended_at_s=at_s, reason=reason)


class SearchFencedError(PreemptedError):
    """Another attempt writes this search's log: this one no longer owns it."""


class SearchLog:
    """The log of one search job as one attempt sees it; use from one thread at a time.

    ``on_alive`` is called after each segment that was read.
    """

    def __init__(
        self, store: ObjectStore, key: str, *, attempt_id: str = "", on_alive: Callable[[], None] = lambda: None
    ) -> None:
        self._store, self._key, self._attempt_id, self._on_alive = store, key, attempt_id, on_alive
        self._next, self._folder = 0, ""

    @property
    def folder(self) -> str:
        """Nonce that distinguishes this log from others of the search; empty before the log begins."""
        return self._folder

    def read(self) -> list[SearchEvent]:
        """The events since the last call, at first all so far. A failed read loses none: the next call returns them.

        Raises:
            ValueError, KeyError, TypeError: the log is damaged, or of a newer version, or a segment is missing in it.
        """
        events: list[SearchEvent] = []
        self._folder = self._folder or find_folder(self._store, self._key)
        last, number = self._last_number(), self._next
        while self._folder and (content := self._find(number)) is not None:
            name = search_log_segment(self._key, self._folder, number)
            check_seal(name, content)
            header, *lines = (json.loads(line) for line in content.decode().splitlines())
            if header["version"] > LOG_VERSION:
                raise ValueError(f"{name} has version {header['version']}, this program reads {LOG_VERSION}: update it")
            events += [decode_search_event(line) for line in lines]
            number += 1
            self._on_alive()
        if last >= number:
            name = search_log_segment(self._key, self._folder, number)
            raise ValueError(f"{name} is missing, and later segments exist: restore it from a copy of the store")
        self._next = number
        return events

    def append(self, events: Sequence[SearchEvent]) -> None:
        """Durably append events as one segment: all of them or none.

        Raises:
            SearchFencedError: another attempt wrote this segment.
        """
        nonce = secrets.token_hex(8)
        header = {"version": LOG_VERSION, "sequence": self._next, "attempt": self._attempt_id, "nonce": nonce}
        lines = [json.dumps(line, allow_nan=False) for line in (header, *map(encode_search_event, events))]
        self._begin()
        name = search_log_segment(self._key, self._folder, self._next)
        self._put_first(
            name,
            seal(name, ("\n".join(lines) + "\n").encode()),
            f"the log of search {self._key} has a segment {self._next} of another attempt, which goes on",
        )
        self._next += 1

    def _begin(self) -> None:
        """Write the head of a log that has none. After a crash, the next attempt continues the empty log."""
        if not self._folder:
            folder = secrets.token_hex(8)
            message = f"the log of search {self._key} was begun by another attempt, which goes on"
            self._put_first(search_log_head(self._key), encode_head(self._key, folder), message)
            self._folder = folder

    def _put_first(self, name: str, content: bytes, otherwise: str) -> None:
        try:
            self._store.put_if_absent(name, content)
        except PreconditionFailedError as error:
            raise SearchFencedError(otherwise) from error

    def _last_number(self) -> int:
        """Of the segments that are there now; -1 if there are none."""
        if not self._folder:
            return -1
        folder = search_log_segment(self._key, self._folder, 0).rpartition("/")[0]
        return max(segment_numbers(self._store.list_children(f"{folder}/")), default=-1)

    def _find(self, sequence: int) -> bytes | None:
        try:
            return self._store.get(search_log_segment(self._key, self._folder, sequence), max_bytes=SEGMENT_BYTES)
        except NotFoundError:
            return None


class SearchReader:
    """The trials of a search job, of whose log every ``read`` opens only the segments that are new."""

    def __init__(self, store: ObjectStore, key: str, *, on_alive: Callable[[], None] = lambda: None) -> None:
        self._store, self._key, self._on_alive = store, key, on_alive
        self._log, self._trials = self._new_log(), fold_search([])

    def read(self) -> State:
        """The trials now; none if the search has not begun, or its log is in the trash.

        Raises:
            ValueError, KeyError, TypeError: see ``SearchLog.read``, or its events cannot follow; make a new reader.
        """
        if self._log.folder and find_folder(self._store, self._key) != self._log.folder:  # another log, or none
            self._log, self._trials = self._new_log(), fold_search([])
        self._trials = fold_search(self._log.read(), self._trials)
        return self._trials

    def _new_log(self) -> SearchLog:
        return SearchLog(self._store, self._key, on_alive=self._on_alive)


def kept_trials(store: ObjectStore, key: str, reader: SearchReader | None = None) -> set[str]:
    """Keys of trials that completed; of a search that is not over those that it stopped and those that run, too.

    ``reader`` is one of this search that was used before.

    Raises:
        ValueError, KeyError, TypeError: the log is damaged, or of a newer version.
    """
    trials = (reader or SearchReader(store, key)).read().values()
    is_over = is_committed(store, key)
    return {view.key for view in trials if view.key and (not is_over or view.state is TrialState.COMPLETED)}
