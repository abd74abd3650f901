"""Reasons in one line: Ray's paragraphs in our words, tracebacks by their first line, nothing twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.cli.commands.live_rows import job_line
from orchestrator.core.contract import Resources
from orchestrator.core.errors import FailureKind
from orchestrator.state.brief_reasons import MAX_CHARACTERS, brief_message, brief_reason
from orchestrator.state.snapshot import Attempt, Failure, JobView
from orchestrator.state.transitions import JobState

RAYS = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: Runner\n\tactor_id: 0123\n\tpid: 4711\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The "
    "process is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called. (3) The "
    "worker is crashed unexpectedly due to SIGSEGV or other unexpected errors."
)


def failed(message: str) -> JobView:
    failure = Failure(attempt_id="k.0", kind=FailureKind.NODE_LOST, message=message, at_s=1.0)
    return JobView(name="pretrain/a", key="k", state=JobState.PENDING, num_attempts=1, last_failure=failure)


def test_rays_paragraph_about_a_dead_worker_becomes_one_line() -> None:
    told = job_line(failed(f"runner r-1 has died: {RAYS}"))
    assert "\n" not in told
    assert "the worker process died" in told
    assert "potential root causes" not in told


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ValueError: no such level\n  File x\n", "ValueError: no such level"),
        ("\n\n  its node is gone", "its node is gone"),
        ("", "no reason was given"),
    ],
)
def test_first_line_of_a_message_is_told(text: str, expected: str) -> None:
    assert brief_message(text) == expected


def test_endless_line_is_cut() -> None:
    assert len(brief_message("x" * 10_000)) == MAX_CHARACTERS


def test_reason_of_a_given_up_job_keeps_its_sums() -> None:
    assert brief_reason(f"node_lost: {RAYS} (5 of 5 losses)").endswith("crashed in native code (5 of 5 losses)")
    assert brief_reason("user_error: no such level\n  File x (1 of 1 failures)") == (
        "user_error: no such level (1 of 1 failures)"
    )
    assert brief_reason("the budget is spent") == "the budget is spent"


def test_failure_is_told_once_and_the_next_attempt_by_its_number() -> None:
    waiting = failed("its node is gone")
    attempt = Attempt(
        attempt_id="k.1",
        job="pretrain/a",
        key="k",
        number=2,
        epoch=1,
        launched_at_s=2.0,
        resources=Resources(cpus=1.0),
    )
    running = replace(waiting, state=JobState.RUNNING, attempt=attempt)
    assert job_line(waiting) == "pretrain/a will be tried again after node_lost: its node is gone"
    assert job_line(running) == "pretrain/a runs again (attempt 2)"
