"""What status says about jobs that have no result."""

from __future__ import annotations

import pytest

from orchestrator.cli.commands.status import exit_code_for
from orchestrator.cli.exits import ExitCode
from orchestrator.services.status import failure_lines
from orchestrator.state.snapshot import JobTable, JobView, Snapshot
from orchestrator.state.transitions import JobState, SweepState


def snapshot(*views: JobView, state: SweepState = SweepState.FAILED) -> Snapshot:
    return Snapshot(sweep="s", state=state, jobs=JobTable(views))


def view(name: str, state: JobState, reason: str = "") -> JobView:
    return JobView(name=name, key=name, state=state, reason=reason)


def test_failure_lines_one_cause_is_one_line_with_the_number_of_jobs() -> None:
    lines = failure_lines(
        snapshot(
            view("pretrain/a", JobState.FAILED, "no such model"),
            view("pretrain/b", JobState.FAILED, "no such model"),
            view("finetune/a", JobState.SKIPPED, "pretrain/a"),
            view("pretrain/c", JobState.SUCCEEDED),
        )
    )
    assert lines == [
        "2 jobs (pretrain/a, ...) failed: no such model",
        "1 job (finetune/a) skipped: they need a job that failed or was cancelled",
    ]


def test_failure_lines_sound_sweep_has_none() -> None:
    assert failure_lines(snapshot(view("pretrain/a", JobState.SUCCEEDED), state=SweepState.SUCCEEDED)) == []


def test_exit_code_follows_the_state_of_the_sweep() -> None:
    codes = {state: int(exit_code_for(snapshot(state=state))) for state in SweepState}
    assert codes == {
        SweepState.SUBMITTED: 101,
        SweepState.RUNNING: 101,
        SweepState.PAUSED: 101,
        SweepState.STOPPING: 101,
        SweepState.CANCELLING: 101,
        SweepState.SUCCEEDED: 0,
        SweepState.FAILED: 100,
        SweepState.CANCELLED: 103,
    }


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ((JobState.SUCCEEDED, JobState.CANCELLED, JobState.SKIPPED), "succeeded (1 cancelled, 1 skipped)"),
        ((JobState.CANCELLED, JobState.SKIPPED), "cancelled"),
        ((JobState.SUCCEEDED, JobState.CANCELLED, JobState.FAILED), "failed"),
        ((JobState.SUCCEEDED, JobState.SKIPPED), "failed"),
    ],
)
def test_a_sweep_whose_jobs_were_cancelled_on_purpose_did_not_fail(states: tuple[JobState, ...], told: str) -> None:
    ended = snapshot(*(view(f"pretrain/{number}", state) for number, state in enumerate(states)))
    assert ended.outcome == told
    assert exit_code_for(ended) == ExitCode.SWEEP_FAILED
