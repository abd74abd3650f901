"""What newcomers meet in their first hours: the message that says what to do, at the first moment it can be said."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.errors import SpecError, UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.report.build import compute_report
from orchestrator.report.render.other_tables import sentences
from orchestrator.report.results import SearchReport
from orchestrator.state.snapshot import JobView
from orchestrator.state.transitions import JobState
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile.load import load_sweep, parse_sweep
from orchestrator.sweepfile.notify import parse_notify_file
from orchestrator.sweepfile.parse.document import read_document
from orchestrator.sweepfile.survey import ask_listing
from orchestrator.tracking.provenance import installed_packages
from tests.commands import run_command
from tests.integration.search_jobs import SWEEP, search_request
from tests.report_sweeps import StudyPlan, committed
from tests.unit.test_report_searches import FOUND, JOB, TRIALS
from tests.unit.test_search_plan import plan_of

SEARCH = "{random: {}, trials: 2, space: {lr: [0.1, 0.2]}}"
NAME = "search/tuned/levels/depth2"
TRANSFER = "finetune/tuned/levels/depth2/seed0/seed0"


@pytest.fixture
def sweep_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "sweep.yaml"
    path.write_text(SWEEP.replace("SEARCH", SEARCH))
    return str(path)


# ------------------------------------------------------------------------------------------------------- run, searches
@pytest.mark.parametrize("name", [NAME, TRANSFER])
def test_run_of_what_needs_a_search_is_refused_before_anything_runs(sweep_file, tmp_path, capsys, name):
    uri = (tmp_path / "store").as_uri()
    ended = run_command(capsys, "run", sweep_file, name, "--inprocess", "--commit", "--store", uri)
    assert ended.code == 1
    assert f"{NAME} needs Ray" in ended.message
    assert "once the search is committed" in ended.message
    assert "running" not in ended.err
    assert not (tmp_path / "store" / "attempts").exists()


def test_run_of_a_transfer_whose_search_is_committed_goes_on_to_its_jobs(sweep_file, tmp_path, capsys, monkeypatch):
    store = LocalStore(tmp_path / "store")
    ArtifactWriter(store, search_request(store, tmp_path, SEARCH)).commit(now=0.0)
    started: list[str] = []

    def execute(job: Job, *_: object) -> None:
        started.append(job.name)
        raise UserError("far enough")

    monkeypatch.setattr("orchestrator.cli.commands.run._execute", execute)
    ended = run_command(capsys, "run", sweep_file, TRANSFER, "--inprocess", "--store", store.uri)
    assert ended.code == 1
    assert started == ["dataset/tree"]


def _workers(plan: Plan) -> int:
    (job,) = [
        job for job in plan.jobs if job.kind is JobKind.SEARCH and job.facets.get("label_space") != "levels/depth1"
    ]
    return job.execution.num_workers


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        ("{random: {}, trials: 2, concurrent: 8, space: {lr: [0.1, 0.2]}}", 2),
        ("{random: {}, trials: 4, concurrent: 3, space: {lr: [0.1, 0.2, 0.3, 0.4]}}", 3),
        ("{asha: {}, over: labels, concurrent: 8}", 2),
    ],
)
def test_search_holds_no_more_than_its_trials_use(tmp_path, search, expected):
    recipe = "{epochs: 9, batch_size: 16}" if "space" in search else "{epochs: 9, batch_size: 16, lr: 0.1}"
    assert _workers(plan_of(tmp_path, search, recipe=recipe)) == expected


def test_report_of_trials_that_tie_says_so():
    found = {**FOUND, "trials": [{**TRIALS[0], "value": 0.1}, *TRIALS[1:]]}
    assert sentences(SearchReport.of(JOB, found))[0] == "2 trials tie for the best (0, 2); trial 2 was selected."
    assert "tie" not in " ".join(sentences(SearchReport.of(JOB, FOUND)))


# -------------------------------------------------------------------------------------------------------------- report
def test_failed_job_whose_artifact_is_there_is_not_noted():
    plan = StudyPlan().plan()
    lost = "finetune/main/levels/depth2/seed1/seed0"
    views = {lost: JobView(name=lost, key=plan.by_name()[lost].key, state=JobState.FAILED, reason="out of memory")}
    there = committed(plan, lambda _: {"val_error": 0.1})
    assert not [note for note in compute_report(plan, there, views).notes if "their cells lack" in note]
    index = replace(plan.jobs[0], name="index/tree", kind=JobKind.INDEX, needs=())
    early = {index.name: JobView(name=index.name, key=index.key, state=JobState.FAILED, reason="no disk")}
    indexed = replace(plan, jobs=(index, *plan.jobs))
    assert not [note for note in compute_report(indexed, there, early).notes if "their cells lack" in note]
    del there[lost]
    assert [note for note in compute_report(plan, there, views).notes if f"1 jobs failed (first: {lost}" in note]


# -------------------------------------------------------------------------------------------------------- the language
CONVERTED = """\
version: 1
name: photos
datasets:
  photos: {convert: {format: csv, source: "${env:PHOTOS}/list.csv", root: "${env:PHOTOS:-/data}"}}
"""


def test_source_of_a_conversion_may_name_the_environment():
    found = read_document(CONVERTED, "s.yaml", environment={"PHOTOS": "/mnt"}).tree.value["datasets"]["photos"][
        "convert"
    ]
    assert (found["source"], found["root"]) == ("/mnt/list.csv", "/mnt")
    with pytest.raises(SpecError, match="is not allowed here"):
        read_document(CONVERTED.replace("root:", "separator:"), "s.yaml", environment={"PHOTOS": "/mnt"})


def test_converters_name_the_fields_of_the_sweep(tmp_path):
    (tmp_path / "photos.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"no train\.csv; name the tables: splits: \{train: list\.csv\}"):
        ask_listing({"format": "csv", "source": str(tmp_path)})
    with pytest.raises(UserError, match="name them with path_column, label_column and level_columns"):
        ask_listing({"format": "csv", "source": str(tmp_path / "photos.csv")})


HOOK = "https://hooks.slack.com/services/T00000000/B00000000/abcdefghijklmnop"  # a form, nobody's


@pytest.mark.parametrize("line", [f"slack: {HOOK}", "webhook: https://example.org, secret: hunter2222"])
def test_secret_below_notify_is_answered_with_references(line):
    with pytest.raises(SpecError) as caught:
        parse_sweep(f"version: 1\nname: s\nnotify:\n- {{{line}}}\n", "s.yaml", {})
    assert "${file:/run/secrets/NAME} or ${env:NAME}" in str(caught.value)
    assert "AWS_SECRET_ACCESS_KEY" not in str(caught.value)
    with pytest.raises(SpecError, match="AWS_SECRET_ACCESS_KEY"):
        parse_sweep("version: 1\nname: s\nstore: {password: hunter2222}\n", "s.yaml", {})


def test_notify_file_that_is_a_bare_list_is_refused_in_the_controller_too():
    with pytest.raises(SpecError, match="bare list"):
        parse_notify_file("- slack: x\n", "f.yaml")


# ------------------------------------------------------------------------------------------------------------ packages
def test_packages_that_a_package_brings_inside_itself_are_not_listed(tmp_path, monkeypatch):
    for folder in (tmp_path / "site", tmp_path / "site" / "carrier" / "thirdparty"):
        name = "inner" if folder.name == "thirdparty" else "outer"
        (folder / f"{name}_one-1.0.dist-info").mkdir(parents=True)
        (folder / f"{name}_one-1.0.dist-info" / "METADATA").write_text(f"Name: {name}-one\nVersion: 1.0\n")
        monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    (tmp_path / "site" / "carrier" / "__init__.py").write_text("")
    found = installed_packages()
    assert found["outer-one"] == "1.0"
    assert "inner-one" not in found


# ----------------------------------------------------------------------------------------------------------------- docs
def test_sweeps_of_the_page_on_searches_are_valid(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "search.md").read_text()
    blocks = [block.partition("```")[0] for block in page.split("```yaml\n")[1:]]
    assert len(blocks) >= 3
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.yaml"
        path.write_text(SWEEP.partition("transfer:")[0].replace("num_train: 96", "num_train: 960") + block)
        assert load_sweep(str(path))[0].transfer[0].search is not None
