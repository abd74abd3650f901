"""``report`` and ``compare`` as commands, on a store without any cluster."""

import csv
import io
import json
from dataclasses import replace

import pytest

from orchestrator.cli.commands.compare import show_comparison
from orchestrator.cli.commands.report import ReportOptions, show_report
from orchestrator.cli.output import TableForm
from orchestrator.core.errors import NotFoundError, UserError
from orchestrator.core.ids import make_key
from orchestrator.planning.graph.plan import Job
from orchestrator.storage.local import LocalStore
from tests.report_sweeps import REPORT_FILES, accept, renamed
from tests.sample_sweep import commit, sample_plan

LOST = "finetune/superclass/levels/depth2/seed1/seed0"


@pytest.fixture(autouse=True)
def _project(tmp_path, monkeypatch):
    monkeypatch.setenv("ORCHESTRATOR_DIRECTORY", str(tmp_path / "project"))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A sweep that still runs: one transfer is missing. Shared, as writing it durably takes a second."""
    store = LocalStore(tmp_path_factory.mktemp("store"))
    plan = sample_plan(store.uri)
    accept(store, plan)
    for job in plan.jobs:
        if job.name != LOST:
            commit(store, job)
    return store


def test_report_command_of_a_running_sweep_shows_what_is_there(store, capsys):
    show_report("sample", ReportOptions(store=store.uri))
    printed = capsys.readouterr().out
    assert "2/3 runs" in printed
    assert "lowest mean: levels/depth3" in printed
    assert {name.rpartition("/")[2] for name in _saved(store)} == set(REPORT_FILES)


def test_report_command_writes_every_file_and_the_page_where_it_is_told(store, tmp_path, capsys):
    out = tmp_path / "answers" / "today"
    show_report("sample", ReportOptions(store=store.uri, directory=str(out), with_page=True))
    assert {path.name for path in out.iterdir()} == {*REPORT_FILES, "report.html"}
    assert (out / "report.html").read_bytes() == store.get("sweeps/sample/report/report.html")
    assert f"Interactive page: {out}/report.html" in capsys.readouterr().out.replace("\n", "")


def test_report_command_speaks_json_csv_and_markdown(store, capsys):
    show_report("sample", ReportOptions(store=store.uri, form=TableForm.JSON))
    document = json.loads(capsys.readouterr().out)
    assert document["absent"] == {LOST: "pending"}
    assert len(document["files"]) == len(REPORT_FILES)
    show_report("sample", ReportOptions(store=store.uri, form=TableForm.CSV))
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {line["label_space"] for line in lines if line["subset"] == "hard"} >= {"levels/depth1", "random/128"}
    show_report("sample", ReportOptions(store=store.uri, form=TableForm.MARKDOWN))
    assert capsys.readouterr().out.startswith("# Report of sweep sample")


def test_report_command_into_a_directory_that_is_a_file_says_that_nothing_is_lost(store, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match="the report is in the store all the same"):
        show_report("sample", ReportOptions(store=store.uri, directory=str(tmp_path / "taken")))
    assert _saved(store)


def recoded(job: Job) -> Job:
    """The same job by later code: another identity, and so another key."""
    identity = {**job.identity, "code_version": 2}
    return replace(job, identity=identity, key=make_key(job.kind.value, "sample", identity))


def test_compare_command_pairs_two_sweeps_in_every_form(store, capsys):
    other = sample_plan(store.uri, sweep="other", transfers=("superclass",))
    shorter = [recoded(job) if "transfer" in job.facets else job for job in other.jobs]
    plan = replace(other, jobs=tuple(shorter))
    accept(store, plan)
    for job in plan.jobs:
        if "transfer" in job.facets:
            commit(store, job, {"val_error": 0.1 + 0.01 * int(job.facets["pretrain_seed"])}, sweep="other")
    show_comparison(["sample", "other"], metric="", form=TableForm.TABLE, store_uri=store.uri)
    shown = capsys.readouterr()
    assert "other - sample" in shown.out
    assert "5 cells are in sample only" in " ".join(shown.err.split())
    show_comparison(["sample", "other"], metric="", form=TableForm.CSV, store_uri=store.uri)
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {(line["label_space"], line["sweep"]) for line in lines} >= {("levels/depth2", "other")}
    show_comparison(["sample", "other"], metric="", form=TableForm.JSON, store_uri=store.uri)
    assert json.loads(capsys.readouterr().out)["sweeps"] == ["sample", "other"]
    show_comparison(["sample", "other"], metric="", form=TableForm.MARKDOWN, store_uri=store.uri)
    assert "| pretrained on | G |" in capsys.readouterr().out


def test_compare_command_of_the_same_artifacts_calls_them_so(store, capsys):
    accept(store, renamed(sample_plan(store.uri), "again"))
    show_comparison(["sample", "again"], metric="val_error", form=TableForm.TABLE, store_uri=store.uri)
    assert "same runs" in capsys.readouterr().out


def test_compare_command_of_an_unknown_sweep_names_the_nearest(store):
    with pytest.raises(NotFoundError, match="did you mean 'sample'"):
        show_comparison(["sample", "sampel"], metric="", form=TableForm.TABLE, store_uri=store.uri)


def _saved(store):
    return [stat.name for stat in store.list_objects("sweeps/sample/report/")]
