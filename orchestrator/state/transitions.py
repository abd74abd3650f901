"""The states of jobs and sweeps, and the one table of their transitions. An unlisted pair raises.

Waiting for other jobs, for resources or for the end of a backoff are not states: they follow from the snapshot and the
time. Invariants:

- A final state is left only by an event that a client asked for.
- Only a running job has a live attempt; a job that is done has an artifact, unless ``ArtifactMissed`` says otherwise.
"""

from __future__ import annotations

from enum import StrEnum

from orchestrator.core.errors import TransitionError
from orchestrator.state import events
from orchestrator.state.events import Event, SweepEnding, SweepFinished, event_type


class JobState(StrEnum):
    """The state of a job."""

    PENDING = "pending"
    RUNNING = "running"
    """One attempt is live: its launch is in the journal, its end is not."""
    SUCCEEDED = "succeeded"
    REUSED = "reused"
    """Its key was committed before this sweep needed it."""
    FAILED = "failed"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"

    @property
    def is_done(self) -> bool:
        """Whether the job's artifact is available for the jobs that need it."""
        return self in {JobState.SUCCEEDED, JobState.REUSED}

    @property
    def is_final(self) -> bool:
        """Whether the state changes only at a client's request."""
        return self not in {JobState.PENDING, JobState.RUNNING}


class SweepState(StrEnum):
    """The state of a sweep."""

    SUBMITTED = "submitted"
    """No plan has been accepted yet."""
    RUNNING = "running"
    PAUSED = "paused"
    """A client has paused the sweep: no job starts."""
    STOPPING = "stopping"
    """No job starts any more, by a client's request or the circuit breaker; running attempts end by themselves."""
    CANCELLING = "cancelling"
    """Running attempts are stopped, too."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether the sweep's state changes only at a client's request."""
        return self in {SweepState.SUCCEEDED, SweepState.FAILED, SweepState.CANCELLED}

    @property
    def is_live(self) -> bool:
        """Whether the sweep has a plan that has not ended."""
        return self is not SweepState.SUBMITTED and not self.is_final


_J, _S = JobState, SweepState

_ALWAYS_REOPENED: dict[tuple[JobState, type[Event]], JobState] = {
    (state, trigger): _J.PENDING if state in {_J.FAILED, _J.SKIPPED, _J.CANCELLED} else state
    for state in JobState
    for trigger in (events.SweepReopened, events.PlanAccepted)
}

JOB_TRANSITIONS: dict[tuple[JobState, type[Event]], JobState] = {
    (_J.PENDING, events.AttemptLaunched): _J.RUNNING,
    (_J.PENDING, events.JobReused): _J.REUSED,
    (_J.PENDING, events.JobFailed): _J.FAILED,
    (_J.PENDING, events.JobSkipped): _J.SKIPPED,
    (_J.PENDING, events.JobCancelled): _J.CANCELLED,
    (_J.PENDING, events.JobsCancelled): _J.CANCELLED,
    # Its attempt is ending: its outcome is ignored, even a success.
    (_J.RUNNING, events.JobsCancelled): _J.CANCELLED,
    (_J.RUNNING, events.AttemptPlaced): _J.RUNNING,
    (_J.RUNNING, events.AttemptPreempting): _J.RUNNING,
    (_J.RUNNING, events.AttemptSucceeded): _J.SUCCEEDED,
    # Whether the job is retried is a later decision, based on these events.
    (_J.RUNNING, events.AttemptFailed): _J.PENDING,
    (_J.RUNNING, events.AttemptLost): _J.PENDING,
    (_J.SUCCEEDED, events.ArtifactMissed): _J.PENDING,
    (_J.REUSED, events.ArtifactMissed): _J.PENDING,
    **{(state, events.JobsRetried): _J.PENDING for state in (_J.FAILED, _J.SKIPPED, _J.CANCELLED)},
    **_ALWAYS_REOPENED,
}

_LIVE = tuple(state for state in SweepState if state.is_live)
_FINAL = tuple(state for state in SweepState if state.is_final)

SWEEP_TRANSITIONS: dict[tuple[SweepState, type[Event]], SweepState] = {
    **{(state, events.SweepAdopted): state for state in SweepState},
    **{(state, events.MessageRefused): state for state in SweepState},
    **{(state, events.PlanAccepted): _S.RUNNING for state in SweepState},
    **{(state, events.SweepReopened): _S.RUNNING for state in SweepState if state is not _S.SUBMITTED},
    **{(state, events.CancelRequested): _S.CANCELLING for state in _LIVE},
    **{(state, events.CancelRequested): state for state in _FINAL},
    (_S.SUBMITTED, events.CancelRequested): _S.CANCELLED,
    (_S.RUNNING, events.SweepPaused): _S.PAUSED,
    (_S.PAUSED, events.SweepPaused): _S.PAUSED,
    (_S.PAUSED, events.SweepResumed): _S.RUNNING,
    **{(state, events.SweepStopping): _S.STOPPING for state in (_S.RUNNING, _S.PAUSED, _S.STOPPING)},
    **{(state, events.SweepTripped): _S.STOPPING for state in (_S.RUNNING, _S.PAUSED)},
    # About a node, not about the sweep, which may end in the same moment.
    **{(state, events.NodeExcluded): state for state in (*_LIVE, *_FINAL)},
    **{(state, events.NodeDescribed): state for state in (*_LIVE, *_FINAL)},
    **{(state, events.PriorityChanged): state for state in _LIVE},
    **{(state, events.JobsCancelled): state for state in _LIVE},
    **{(state, events.JobsRetried): state for state in (_S.RUNNING, _S.PAUSED)},
    **{(state, events.JobsRetried): _S.RUNNING for state in _FINAL},
}

_ENDINGS: dict[tuple[SweepState, SweepEnding], SweepState] = {
    **{(state, SweepEnding.SUCCEEDED): _S.SUCCEEDED for state in (_S.RUNNING, _S.PAUSED, _S.STOPPING)},
    **{(state, SweepEnding.FAILED): _S.FAILED for state in (_S.RUNNING, _S.PAUSED, _S.STOPPING)},
    **{(state, SweepEnding.CANCELLED): _S.CANCELLED for state in (_S.STOPPING, _S.CANCELLING)},
}


def is_allowed(state: SweepState, trigger: type[Event]) -> bool:
    """Whether an event of this type may follow for a sweep in this state (of ``SweepFinished``, some status)."""
    if trigger is SweepFinished:
        return any(found is state for found, _ in _ENDINGS)
    return (state, trigger) in SWEEP_TRANSITIONS


def next_job_state(job: str, state: JobState, event: Event) -> JobState:
    """State of a job after an event. Raises ``TransitionError`` for a pair that the table does not list."""
    found = JOB_TRANSITIONS.get((state, type(event)))
    if found is None:
        raise TransitionError(_refusal(f"job {job}", state, event_type(event)))
    return found


def next_sweep_state(sweep: str, state: SweepState, event: Event) -> SweepState:
    """State of a sweep after an event. Raises ``TransitionError`` for a pair that the table does not list."""
    if isinstance(event, SweepFinished):
        found, trigger = _ENDINGS.get((state, event.status)), f"sweep_finished({event.status})"
    else:
        found, trigger = SWEEP_TRANSITIONS.get((state, type(event))), event_type(event)
    if found is None:
        raise TransitionError(_refusal(f"sweep {sweep}", state, trigger))
    return found


def _refusal(subject: str, state: StrEnum, trigger: str) -> str:
    return (
        f"{subject} is {state} and its journal goes on with {trigger}, which cannot follow: the journal was altered, "
        "or written by a program with other rules; nothing is done for this sweep until that is repaired"
    )
