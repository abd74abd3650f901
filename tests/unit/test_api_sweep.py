"""The Python API's own rules; what it shares with the command line is tested there."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.api import Sweep
from orchestrator.api.sweep import Where
from orchestrator.errors import SpecError
from orchestrator.state import events
from orchestrator.storage.journal import Journal
from orchestrator.storage.local import LocalStore
from tests.report_sweeps import StudyPlan, accept
from tests.unit.test_declared_datasets import ABSENT, Declared


def test_submit_of_a_declared_data_set_that_is_not_there_is_refused(tmp_path: Path) -> None:
    declared = Declared(tmp_path)
    declared.sweep({"from": declared.place, **ABSENT})
    sweep = Sweep.from_yaml(declared.path, store=(tmp_path / "store").as_uri())
    assert sweep.plan().plan.jobs
    with pytest.raises(SpecError, match="suffices to plan, but not to run"):
        sweep.submit(Where.INPROCESS)
    assert not (tmp_path / "store").exists()


def test_report_tells_failed_runs_of_what_was_submitted_and_of_nothing_else(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    plan = StudyPlan(pretrain_seeds=(0,)).plan(store.uri)
    accept(store, plan)
    failed = next(job.name for job in plan.jobs if "transfer" in job.facets)
    journal = Journal(store, plan.sweep, holder="test")
    list(journal.read_new())
    journal.append([events.encode_event(events.JobFailed(at_s=2.0, job=failed, reason="no attempts left"))])
    report = Sweep.submitted(plan.sweep, store=store.uri).report()
    assert report.absent[failed] == "failed"
    assert any("no attempts left" in note for note in report.notes)
