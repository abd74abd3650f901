"""What a search writes down, and the state that follows from it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

from orchestrator.core.errors import FailureKind
from orchestrator.storage.trials import TrialPoint, TrialState


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The sampler chose a trial; ``key`` is the address of the job that it is."""

    name: ClassVar[str] = "asked"
    trial: int
    at_s: float
    key: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """An attempt at a trial begins, from its newest checkpoint if it has one."""

    name: ClassVar[str] = "started"
    trial: int
    at_s: float
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
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
class Stopped:
    """A trial fell behind, and ends."""

    name: ClassVar[str] = "stopped"
    trial: int
    at_s: float
    rung: float
    cutoff: float
    num_before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A trial ran to its end; its artifact is committed."""

    name: ClassVar[str] = "completed"
    trial: int
    at_s: float
    value: float
    metrics: Mapping[str, float]
    spent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A trial ended without a result, and would again."""

    name: ClassVar[str] = "failed"
    trial: int
    at_s: float
    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """An attempt at a trial was cut off; another one goes on."""

    name: ClassVar[str] = "lost"
    trial: int
    at_s: float
    reason: str


SearchEvent: TypeAlias = Asked | Started | Told | Stopped | Completed | Failed | Lost
_EVENTS: Mapping[str, type[SearchEvent]] = {
    one.name: one for one in (Asked, Started, Told, Stopped, Completed, Failed, Lost)
}


def encode_search_event(event: SearchEvent) -> dict[str, Any]:
    """Plain JSON form."""
    return {"event": event.name, **asdict(event)}


def decode_search_event(document: Mapping[str, Any]) -> SearchEvent:
    """Inverse of ``encode_search_event``. Raises ``KeyError`` on an event that this version does not know."""
    fields = {name: value for name, value in document.items() if name != "event"}
    if document["event"] == Failed.name:
        fields["kind"] = FailureKind(fields["kind"])
    return _EVENTS[document["event"]](**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialView:
    """Where a trial stands, by the log."""

    number: int
    key: str
    params: Mapping[str, Any]
    asked_at_s: float
    state: TrialState = TrialState.RUNNING
    points: tuple[TrialPoint, ...] = ()
    values: Mapping[float, float] = field(default_factory=dict)
    """What it told, by epoch."""
    value: float | None = None
    """Its newest value."""
    attempts: tuple[int, ...] = ()
    num_lost: int = 0
    spent_s: float = 0.0
    """Seconds of all its attempts, as far as they told."""
    before_s: float = 0.0
    """Those of earlier attempts."""
    ended_at_s: float | None = None
    reason: str = ""
    failure: FailureKind | None = None

    @property
    def epoch(self) -> float:
        """The last one that it told."""
        return max(self.values, default=0.0)


State: TypeAlias = Mapping[int, TrialView]


def apply_search_event(state: State, event: SearchEvent) -> State:
    """The state after an event. Raises ``KeyError`` for a trial that was never asked for."""
    if isinstance(event, Asked):
        asked = TrialView(number=event.trial, key=event.key, params=event.params, asked_at_s=event.at_s)
        return {**state, event.trial: asked}
    return {**state, event.trial: _after(state[event.trial], event)}


def fold_search(events: Iterable[SearchEvent]) -> State:
    """The state that a log tells of."""
    state: State = {}
    for event in events:
        state = apply_search_event(state, event)
    return state


def _after(view: TrialView, event: SearchEvent) -> TrialView:
    match event:
        case Started():
            return replace(view, attempts=(*view.attempts, event.attempt), before_s=view.spent_s)
        case Lost():
            return replace(view, num_lost=view.num_lost + 1, reason=event.reason)
        case Told():
            point = TrialPoint(step=event.step, at_s=event.at_s, metrics=event.metrics)
            values = {**view.values, event.epoch: event.value}
            spent_s = view.before_s + event.spent_s
            return replace(view, points=(*view.points, point), values=values, value=event.value, spent_s=spent_s)
        case Stopped():
            reason = f"at epoch {event.rung:g} {view.value:.4g} is worse than {event.cutoff:.4g}, the cutoff of "
            return _ended(view, event.at_s, TrialState.STOPPED, f"{reason}{event.num_before} trials")
        case Completed():
            spent_s = view.before_s + event.spent_s
            completed = _ended(view, event.at_s, TrialState.COMPLETED, "")
            return replace(completed, value=event.value, spent_s=max(spent_s, view.spent_s))
        case Failed():
            return replace(_ended(view, event.at_s, TrialState.FAILED, event.message), failure=event.kind)
    raise TypeError(f"{event} asks for a trial, and is none of one")


def _ended(view: TrialView, at_s: float, state: TrialState, reason: str) -> TrialView:
    return replace(view, state=state, ended_at_s=at_s, reason=reason)
