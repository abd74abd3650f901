"""The link that ``status`` and ``report`` end with, from the publisher's memory alone."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace

import pytest

from orchestrator.cli.commands.report import ReportOptions, show_report
from orchestrator.cli.commands.status import show_status
from orchestrator.cli.output import DocumentForm, print_document
from orchestrator.cli.pages import address_lines, compare_line, tracking_and_pages
from orchestrator.storage.local import LocalStore
from orchestrator.storage.probe import probe_store
from orchestrator.tracking.links import compare_url
from orchestrator.tracking.memory import Memory, MemoryFile
from tests.builders import make_job
from tests.described_stack import described_stack
from tests.sample_journal import SampleJournal
from tests.sample_sweep import sample_plan

SERVER = "http://mlflow.example.org:5000"


@pytest.fixture
def store(tmp_path):
    store = LocalStore(tmp_path / "store")
    probe_store(store)
    return store


@pytest.fixture
def plan(store):
    plan = sample_plan(store.uri, spaces=("levels/depth1",), seeds=(0,), transfers=("superclass",))
    SampleJournal(store, plan).run_all()
    return plan


def test_pages_of_a_server_are_at_its_own_address(plan, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", SERVER)
    assert tracking_and_pages(plan) == (SERVER, SERVER)


def test_pages_of_a_database_nobody_serves_are_nowhere(plan, monkeypatch, tmp_path):
    monkeypatch.setenv("ORCHESTRATOR_DIRECTORY", str(tmp_path / "project"))
    uri, pages = tracking_and_pages(plan)
    assert uri == f"sqlite:///{tmp_path}/project/mlflow.db"
    assert pages == ""
    assert compare_line(LocalStore(tmp_path / "store"), plan) == ""


def test_status_and_report_end_with_the_link_once_the_sweep_is_published(store, plan, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", SERVER)
    show_status(plan.sweep, store.uri, DocumentForm.TABLE)
    assert "MLflow" not in capsys.readouterr().out

    MemoryFile(store, plan.sweep, SERVER).save(Memory(experiment_id="7"))
    told = f"Compare the levels in MLflow: {compare_url(SERVER, '7', plan.sweep)}\n"
    show_status(plan.sweep, store.uri, DocumentForm.TABLE)
    assert capsys.readouterr().out.endswith(told)
    show_report(plan.sweep, ReportOptions(store=store.uri))
    assert capsys.readouterr().out.endswith(told)
    simulated = make_job("theory/gran/seeds0-9", facets={"simulation": "gran"})
    assert compare_line(store, replace(plan, jobs=(simulated,))) == ""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_token_of_the_stacks_pages_is_printed_on_a_terminal_alone(
    store, plan, tmp_path, monkeypatch, capsys, *, is_terminal
):
    monkeypatch.setenv("ORCHESTRATOR_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    (tmp_path / "mlflow_token").write_text("the-token")
    stack = described_stack(tmp_path, mlflow_url="http://127.0.0.1:5000")
    MemoryFile(store, plan.sweep, stack.tracking_uri).save(Memory(experiment_id="7"))
    told = [*address_lines(""), compare_line(store, plan)]
    assert len([line for line in told if "http://127.0.0.1:5000/?token=the-token" in line]) == 2 * is_terminal
    assert len([line for line in told if stack.mlflow_token_path in line]) == 2 * (not is_terminal)
    capsys.readouterr()
    show_status(plan.sweep, store.uri, DocumentForm.JSON)
    print_document(asdict(stack), DocumentForm.JSON)  # as `up -o json`
    assert "the-token" not in capsys.readouterr().out
