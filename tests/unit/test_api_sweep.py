"""The Python API's own rules; what it shares with the command line is tested there."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import orchestrator
from orchestrator.api import Sweep
from orchestrator.api.sweep import Where, is_same_answer
from orchestrator.core.contract import Resources
from orchestrator.core.errors import ControllerError, NotFoundError, SpecError, StorageError
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job, Plan, PlannedSimulation, Published
from orchestrator.report.render.files import DOCUMENT
from orchestrator.state import events
from orchestrator.storage.artifacts import Record
from orchestrator.storage.journal import Journal
from orchestrator.storage.layout import record_name, report_name
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile.values import Expectation, Policy
from tests.report_sweeps import StudyPlan, accept
from tests.unit.test_declared_datasets import ABSENT, Declared


def test_files_of_settings_count_as_for_a_command_and_only_in_their_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submitted: LocalStore
) -> None:
    store = submitted.uri
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
    (one / "orchestrator.toml").write_text(f'store = "{store}"\ncluster = "lab"\n')
    (one / ".env").write_text("ORCHESTRATOR_NAMESPACE=ours\nOF_NO_SETTING=1\n")
    with patch.dict(os.environ):
        monkeypatch.chdir(one)
        assert Sweep.submitted("quickstart").store_uri == store
        assert Sweep.from_yaml("quickstart").store_uri == store
        assert os.environ["ORCHESTRATOR_CLUSTER"] == "lab"  # for S3 clients, Ray and child processes
        os.environ["ORCHESTRATOR_NAMESPACE"] = "mine"
        monkeypatch.chdir(other)
        assert Sweep.from_yaml("quickstart").store_uri == (other / ".orchestrator" / "store").as_uri()
        assert not {"ORCHESTRATOR_STORE", "ORCHESTRATOR_CLUSTER", "OF_NO_SETTING"} & os.environ.keys()
        assert os.environ["ORCHESTRATOR_NAMESPACE"] == "mine"


def test_store_may_be_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submitted: LocalStore) -> None:
    monkeypatch.chdir(tmp_path)
    assert Sweep.submitted("quickstart", store="store").store_uri == submitted.uri
    assert Sweep.from_yaml("quickstart", store=tmp_path / "store").store_uri == submitted.uri


def test_submit_of_a_declared_data_set_that_is_not_there_is_refused(tmp_path: Path) -> None:
    declared = Declared(tmp_path)
    declared.sweep({"from": declared.place, **ABSENT})
    sweep = Sweep.from_yaml(declared.path, store=(tmp_path / "store").as_uri())
    assert sweep.plan().plan.jobs
    with pytest.raises(SpecError, match="can be planned without the data, but not run"):
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


VARIANT = ("pretrain.seeds=[7]",)


@pytest.fixture
def submitted(tmp_path: Path) -> LocalStore:
    """A store where the quickstart was taken over, and nothing has run."""
    store = LocalStore(tmp_path / "store")
    accept(store, replace(Sweep.from_yaml("quickstart", store=store.uri).plan().plan, revision=1))
    return store


def test_report_of_a_variant_does_not_replace_that_of_what_was_submitted(submitted: LocalStore) -> None:
    name = report_name("quickstart", DOCUMENT)
    variants = [VARIANT, ("report.metric=best_val_error",), ("report.baseline=levels/depth3",)]
    for overrides in variants:
        report = Sweep.from_yaml("quickstart", store=submitted.uri, overrides=overrides).report()
        assert report.tables
        assert not submitted.exists(name), overrides
    Sweep.from_yaml("quickstart", store=submitted.uri).report()
    assert submitted.exists(name)


CLAIM = Expectation(rule="mean", low=0.9)
SIMULATION = PlannedSimulation(
    name="s", run="x", factors={"k": (2, 4)}, first_seed=0, num_seeds=2, metric="m", expectations=(CLAIM,)
)


@pytest.mark.parametrize(
    "changes",
    [
        {"simulations": (replace(SIMULATION, expectations=(replace(CLAIM, low=0.5),)),)},
        {"simulations": (replace(SIMULATION, metric="other"),)},
        {"rows": ("label_space",)},
        {"baseline_values": {"optimizer": "adamw"}},
        {"published": (Published(transfer="main", label_space="levels/depth1", value=0.1),)},
        {"jobs": tuple(replace(job, facets={**job.facets, "note": "b"}) for job in StudyPlan().plan().jobs)},
        {"jobs": StudyPlan(resources=Resources(cpus=2, gpus=8)).plan().jobs},
        {"jobs": StudyPlan().plan().jobs[::-1]},
    ],
)
def test_report_of_a_plan_with_the_same_keys_is_another_where_it_shows_or_judges_otherwise(
    changes: dict[str, Any],
) -> None:
    plan = replace(StudyPlan().plan(), simulations=(SIMULATION,))
    changed = replace(plan, **changes)
    assert {job.key for job in changed.jobs} == {job.key for job in plan.jobs}
    assert not is_same_answer(changed, plan)
    assert is_same_answer(replace(plan, revision=7, policy=Policy(priority=3)), Plan.from_json(plan.to_json()))


def test_report_of_what_was_never_submitted_leaves_no_sweep_behind(submitted: LocalStore) -> None:
    sweep = Sweep.from_yaml("digits", store=submitted.uri)
    assert sweep.report().missing
    assert submitted.list_children("sweeps/") == ["quickstart"]
    with pytest.raises(NotFoundError, match="no sweep 'digits'"):
        sweep.wait(timeout_s=0)


def test_status_and_wait_of_a_variant_say_that_another_plan_was_submitted(submitted: LocalStore) -> None:
    variant = Sweep.from_yaml("quickstart", store=submitted.uri, overrides=VARIANT)
    with pytest.warns(UserWarning, match=r"revision 1\) is not what this file.* added, .* removed"):
        variant.status()
    with pytest.raises(ControllerError, match=r"cannot wait.*submit\(\) first"):
        variant.wait(timeout_s=0)
    same = Sweep.from_yaml("quickstart", store=submitted.uri)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same.status()
    with pytest.raises(TimeoutError):
        same.wait(timeout_s=0)


def test_results_without_any_have_the_columns_that_questions_need(submitted: LocalStore) -> None:
    runs = Sweep.submitted("quickstart", store=submitted.uri).results()
    assert len(runs) == 0
    assert {"label_space", "level", "pretrain_seed", "transfer", "transfer_seed", "val_error", "key"} <= set(
        runs.columns
    )
    assert runs[runs.transfer == "superclass"].groupby("label_space").val_error.mean().empty


def test_results_with_a_damaged_or_altered_record_are_refused_as_a_submit_is(submitted: LocalStore) -> None:
    sweep = Sweep.from_yaml("quickstart", store=submitted.uri)
    good, bad = [job for job in sweep.plan().plan.jobs if job.kind is JobKind.PRETRAIN][:2]

    def record(job: Job, identity: Mapping[str, Any]) -> bytes:
        made = Record(
            key=job.key,
            identity=identity,
            attempt_id="a",
            job=job.name,
            sweep="quickstart",
            created_at_s=0.0,
            parts={},
            metrics={"val_error": 0.5},
        )
        return made.to_bytes()

    submitted.put(record_name(good.key), record(good, good.identity))
    assert list(sweep.results().key) == [good.key]
    for content, told in ((b"{", "cannot be read as a record"), (record(bad, good.identity), "another identity")):
        submitted.put(record_name(bad.key), content)
        with pytest.raises(StorageError, match=told):
            sweep.results()


def test_package_gives_what_scripts_catch_and_choose() -> None:
    from orchestrator.core import errors

    assert (orchestrator.SpecError, orchestrator.InfeasibleError) == (errors.SpecError, errors.InfeasibleError)
    assert orchestrator.Where is Where
    assert set(orchestrator.__all__) == {"Changed", "InfeasibleError", "SpecError", "Sweep", "Where"}


def test_repr_of_views_is_one_line(submitted: LocalStore) -> None:
    sweep = Sweep.from_yaml("quickstart", store=submitted.uri)
    view = sweep.plan()
    shown = {
        repr(view): "Plan of sweep quickstart: 82 jobs",
        repr(view.diff(view)): "82 unchanged",
        repr(sweep.report()): "Report of sweep quickstart: val_error",
        repr(sweep.status()): "Sweep quickstart: ",
    }
    for text, what in shown.items():
        assert what in text
        assert len(text) < 200
        assert "\n" not in text
