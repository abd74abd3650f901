"""Texts of failures that no UTF-8 and no database takes, in journals of earlier versions and of foreign exceptions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.backends.classify import failure_from
from orchestrator.backends.protocol import AttemptReport, AttemptStatus
from orchestrator.controller.attempt_outcomes import judge_report
from orchestrator.core.contract import JobFailure
from orchestrator.core.errors import FailureKind
from orchestrator.notifications.channels import mail_of, signed
from orchestrator.notifications.messages import notice_of_event
from orchestrator.report.build import build_report
from orchestrator.report.render.files import MARKDOWN, render_files
from orchestrator.state import events
from orchestrator.state.fold import fold
from orchestrator.state.snapshot import Attempt, Snapshot
from orchestrator.sweepfile.values import Email
from orchestrator.testing.memory_store import MemoryStore
from tests.builders import failed, launched, make_job, make_plan, request_of
from tests.report_sweeps import StudyPlan

RAW, SHOWN = "caf\udce9\0", "caf\\udce9\\x00"
PLAN = StudyPlan(transfer_seeds=(0,)).plan()
JOB = PLAN.jobs[-1]


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    journal = [
        events.SweepAdopted(at_s=1.0, cluster="c", epoch=1, holder="h"),
        events.PlanAccepted(at_s=1.0, message_id="m", revision=1),
        launched(JOB),
        failed(JOB, FailureKind.USER_ERROR, RAW),
        events.JobFailed(at_s=3.0, job=JOB.name, reason=RAW),
    ]
    return fold("study", journal, lambda _: PLAN)


def test_state_of_a_sweep_has_them_as_escapes(snapshot: Snapshot) -> None:
    view = snapshot.jobs[JOB.name]
    assert view.last_failure is not None
    assert (view.last_failure.message, view.reason) == (SHOWN, SHOWN)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "sweep_finished", "status": "failed", "at_s": 4.0},
        {"type": "sweep_tripped", "reason": f"too many fail: {RAW}", "at_s": 4.0},
    ],
    ids=["finished", "tripped"],
)
def test_notice_that_quotes_one_is_sent(snapshot: Snapshot, event: dict[str, Any]) -> None:
    notice = notice_of_event(event, 1, 1, snapshot)
    assert notice is not None
    assert SHOWN in json.loads(signed(notice, "", 5.0).body)["text"]
    email = Email(sender="a@lab.org", to=("b@lab.org",), server="lab.org")
    assert SHOWN in mail_of(notice, email).get_content()
    assert mail_of(notice, email).as_bytes()


def test_report_that_quotes_one_is_written(snapshot: Snapshot) -> None:
    report = build_report(MemoryStore(), PLAN, snapshot.jobs)
    assert SHOWN in render_files(report)[MARKDOWN].decode()


def test_attempt_tells_them_as_escapes() -> None:
    job = make_job("probe/a")
    failure = failure_from(RuntimeError(RAW), request_of(job, ""))
    assert failure.message == f"RuntimeError: {SHOWN}"
    assert SHOWN in failure.traceback
    assert RAW not in failure.traceback


def test_journal_gets_them_as_escapes() -> None:
    job, store = make_job("probe/a"), MemoryStore()
    snapshot = fold(
        "sweep",
        [
            events.SweepAdopted(at_s=1.0, cluster="c", epoch=1, holder="h"),
            events.PlanAccepted(at_s=1.0, message_id="m", revision=0),
            launched(job),
        ],
        lambda _: make_plan(job),
    )
    attempt = snapshot.jobs[job.name].attempt
    assert isinstance(attempt, Attempt)
    told = JobFailure(attempt_id=attempt.attempt_id, key=job.key, kind=FailureKind.UNKNOWN, message=RAW, traceback=RAW)
    event = judge_report(
        store, attempt, AttemptReport(attempt_id=attempt.attempt_id, status=AttemptStatus.FAILED, failure=told), 2.0
    )
    assert isinstance(event, events.AttemptFailed)
    assert (event.message, event.traceback) == (SHOWN, SHOWN)
    lost = AttemptReport(attempt_id=attempt.attempt_id, status=AttemptStatus.LOST, lost_reason=RAW)
    event = judge_report(store, attempt, lost, 2.0)
    assert isinstance(event, events.AttemptLost)
    assert event.reason == SHOWN
