"""The transition tables, and what falls outside them."""

from dataclasses import replace

import pytest

from orchestrator.core.contract import Outcome
from orchestrator.core.errors import FailureKind, TransitionError
from orchestrator.state import events
from orchestrator.state.events import Event, SweepEnding
from orchestrator.state.fold import fold
from orchestrator.state.transitions import (
    JOB_TRANSITIONS,
    JobState,
    SweepState,
    next_job_state,
    next_sweep_state,
)
from tests.scripted_sweep import make_job, make_plan

PLANS = {1: make_plan(make_job("dataset/tree"))}
ACCEPTED = events.PlanAccepted(at_s=1.0, message_id="m1", revision=1)
LAUNCHED = events.AttemptLaunched(at_s=2.0, job="dataset/tree", attempt_id="k.1", key="k", number=1, epoch=1)
SUCCEEDED = events.AttemptSucceeded(at_s=3.0, job="dataset/tree", attempt_id="k.1", outcome=Outcome.COMMITTED)
LOST = events.AttemptLost(at_s=3.0, job="dataset/tree", attempt_id="k.1", reason="")
FAILED = events.AttemptFailed(at_s=3.0, job="dataset/tree", attempt_id="k.1", kind=FailureKind.HANG, message="")
JOB_EVENTS: list[Event] = [
    LAUNCHED,
    SUCCEEDED,
    LOST,
    FAILED,
    ACCEPTED,
    events.SweepReopened(at_s=1.0, message_id="m2"),
    events.JobReused(at_s=1.0, job="dataset/tree", key="k"),
    events.ArtifactMissed(at_s=1.0, job="dataset/tree", key="k"),
    events.JobFailed(at_s=1.0, job="dataset/tree", reason=""),
    events.JobSkipped(at_s=1.0, job="dataset/tree", because=""),
    events.JobCancelled(at_s=1.0, job="dataset/tree"),
]


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize("event", JOB_EVENTS, ids=lambda event: type(event).__name__)
def test_job_transition_is_listed_or_raises(state: JobState, event: Event) -> None:
    if (state, type(event)) in JOB_TRANSITIONS:
        assert next_job_state("j", state, event) is JOB_TRANSITIONS[state, type(event)]
    else:
        with pytest.raises(TransitionError, match=f"j is {state}"):
            next_job_state("j", state, event)


def test_job_that_is_still_tried_keeps_its_failures_when_the_sweep_is_resubmitted() -> None:
    reopened = events.SweepReopened(at_s=9.0, message_id="m2")
    given_up = events.JobFailed(at_s=4.0, job="dataset/tree", reason="")
    tried = fold("s", [ACCEPTED, LAUNCHED, FAILED, reopened], lambda event: PLANS[event.revision])
    opened = fold("s", [ACCEPTED, LAUNCHED, FAILED, given_up, reopened], lambda event: PLANS[event.revision])
    assert tried.jobs["dataset/tree"].failures == {FailureKind.HANG: 1}
    assert opened.jobs["dataset/tree"].failures == {}


def test_done_jobs_stay_done_when_a_sweep_is_reopened() -> None:
    reopened = events.SweepReopened(at_s=1.0, message_id="m")
    kept = {state for state in JobState if next_job_state("j", state, reopened) is state}
    assert kept == {JobState.PENDING, JobState.RUNNING, JobState.SUCCEEDED, JobState.REUSED}


@pytest.mark.parametrize(
    ("state", "status"),
    [
        (SweepState.RUNNING, SweepEnding.CANCELLED),
        (SweepState.CANCELLING, SweepEnding.SUCCEEDED),
        (SweepState.SUCCEEDED, SweepEnding.SUCCEEDED),
    ],
)
def test_sweep_ending_that_does_not_follow_raises(state: SweepState, status: SweepEnding) -> None:
    with pytest.raises(TransitionError, match=str(status)):
        next_sweep_state("s", state, events.SweepFinished(at_s=1.0, status=status))


@pytest.mark.parametrize(
    "journal",
    [
        [LAUNCHED],
        [ACCEPTED, SUCCEEDED],
        [ACCEPTED, LAUNCHED, LAUNCHED],
        [ACCEPTED, LAUNCHED, SUCCEEDED, LOST],
        [ACCEPTED, LAUNCHED, events.AttemptLost(at_s=3.0, job="dataset/tree", attempt_id="k.9", reason="")],
        [ACCEPTED, events.JobReused(at_s=1.0, job="dataset/nobody", key="k")],
        [events.SweepReopened(at_s=1.0, message_id="m")],
    ],
)
def test_journal_with_an_event_that_cannot_follow_raises(journal: list[Event]) -> None:
    with pytest.raises(TransitionError):
        fold("sweep", journal, lambda event: PLANS[event.revision])


def test_fold_keeps_times_of_queueing_launch_and_end() -> None:
    view = fold("sweep", [ACCEPTED, LAUNCHED, SUCCEEDED], lambda event: PLANS[event.revision]).jobs["dataset/tree"]
    assert (view.queued_s, view.launched_at_s, view.ended_at_s) == (1.0, 2.0, 3.0)
    assert view.attempt is None


def test_fold_durations_between_clocks_that_disagree_are_never_negative() -> None:
    launched, ended = replace(LAUNCHED, at_s=0.5), replace(SUCCEEDED, at_s=0.0)  # each controller has its own clock
    view = fold("sweep", [ACCEPTED, launched, ended], lambda event: PLANS[event.revision]).jobs["dataset/tree"]
    assert (view.queued_s, view.ran_s, view.overhead_s) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("since_s", "unpaused_s"), [(1.0, 10.0), (4.0, 8.0), (10.0, 4.0)])
def test_fold_time_without_pauses_counts_none_that_was_over_before(since_s: float, unpaused_s: float) -> None:
    pauses = [events.SweepPaused(at_s=3.0, message_id="p"), events.SweepResumed(at_s=6.0, message_id="r")]
    later = [events.SweepPaused(at_s=11.0, message_id="q"), events.SweepResumed(at_s=13.0, message_id="s")]
    snapshot = fold("sweep", [ACCEPTED, *pauses, *later], lambda event: PLANS[event.revision])
    assert snapshot.unpaused_s(since_s, 16.0) == unpaused_s


def test_live_attempt_of_a_kept_job_survives_a_new_revision() -> None:
    plans = {**PLANS, 2: make_plan(make_job("dataset/tree"), make_job("index/tree", "dataset/tree"))}
    second = events.PlanAccepted(at_s=4.0, message_id="m2", revision=2)
    snapshot = fold("sweep", [ACCEPTED, LAUNCHED, second], lambda event: plans[event.revision])
    assert snapshot.jobs["dataset/tree"].attempt is not None
    assert snapshot.leaving == {}


def test_job_with_a_new_key_starts_anew_while_its_old_attempt_leaves() -> None:
    plans = {**PLANS, 2: make_plan(make_job("dataset/tree", key="dataset-other"))}
    second = events.PlanAccepted(at_s=4.0, message_id="m2", revision=2)
    snapshot = fold("sweep", [ACCEPTED, LAUNCHED, second], lambda event: plans[event.revision])
    assert snapshot.jobs["dataset/tree"].state is JobState.PENDING
    assert list(snapshot.leaving) == ["k.1"]
    ended = fold("sweep", [ACCEPTED, LAUNCHED, second, SUCCEEDED], lambda event: plans[event.revision])
    assert ended.leaving == {}
    assert ended.jobs["dataset/tree"].state is JobState.PENDING
