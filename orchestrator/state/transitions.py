"""The states of jobs and sweeps, and the one table of what moves them. An unlisted pair raises.

Waiting for other jobs, for room or for the end of a backoff are not states: they follow from the snapshot and the time.
"""

from __future__ import annotations

from enum import StrEnum

from orchestrator.errors import TransitionError
from orchestrator.state import events
from orchestrator.state.events import Event, SweepFinished, SweepStatus, event_type


class JobState(StrEnum):
    """Where a job stands."""

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
        """Whether the job's artifact is there for the jobs that need it."""
        return self in {JobState.SUCCEEDED, JobState.REUSED}

    @property
    def is_final(self) -> bool:
        """Whether nothing will happen to the job unless a client asks for it."""
        return self not in {JobState.PENDING, JobState.RUNNING}


class SweepState(StrEnum):
    """Where a sweep stands."""

    SUBMITTED = "submitted"
    """No plan has been accepted yet."""
    RUNNING = "running"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing will happen to the sweep unless a client asks for it."""
        return self in {SweepState.SUCCEEDED, SweepState.FAILED, SweepState.CANCELLED}


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
    (_J.RUNNING, events.AttemptSucceeded): _J.SUCCEEDED,
    # Whether the job is tried again is a later decision, counted from these events.
    (_J.RUNNING, events.AttemptFailed): _J.PENDING,
    (_J.RUNNING, events.AttemptLost): _J.PENDING,
    (_J.SUCCEEDED, events.ArtifactMissed): _J.PENDING,
    (_J.REUSED, events.ArtifactMissed): _J.PENDING,
    **_ALWAYS_REOPENED,
}

SWEEP_TRANSITIONS: dict[tuple[SweepState, type[Event]], SweepState] = {
    **{(state, events.SweepAdopted): state for state in SweepState},
    **{(state, events.MessageRefused): state for state in SweepState},
    **{(state, events.PlanAccepted): _S.RUNNING for state in SweepState},
    **{(state, events.SweepReopened): _S.RUNNING for state in SweepState if state is not _S.SUBMITTED},
    **{(state, events.CancelRequested): state for state in SweepState if state.is_final},
    (_S.SUBMITTED, events.CancelRequested): _S.CANCELLED,
    (_S.RUNNING, events.CancelRequested): _S.CANCELLING,
    (_S.CANCELLING, events.CancelRequested): _S.CANCELLING,
}

_ENDINGS: dict[tuple[SweepState, SweepStatus], SweepState] = {
    (_S.RUNNING, SweepStatus.SUCCEEDED): _S.SUCCEEDED,
    (_S.RUNNING, SweepStatus.FAILED): _S.FAILED,
    (_S.CANCELLING, SweepStatus.CANCELLED): _S.CANCELLED,
}


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
