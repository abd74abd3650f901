"""Learning curves on the page: read, thinned, and the page as text."""

import json
import re

import pytest

from orchestrator.report.build import compute_report
from orchestrator.report.inputs import Curve, Learning, read_learning, thin
from orchestrator.report.render.page import render_page
from orchestrator.storage.layout import metrics_segment
from orchestrator.storage.local import LocalStore
from tests.report_sweeps import StudyPlan, committed


def _segment(steps, error):
    lines = [
        {"step": step, "epoch": step / 2, "at_s": 1.0, "metrics": {"train_loss": 1 / step, "lr": 0.1}} for step in steps
    ]
    lines[-1]["metrics"] |= {"val_error": error}
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def test_learning_follows_the_attempts_that_count_and_leaves_out_settings(store):
    plan = StudyPlan(pretrain_seeds=(0,)).plan(store.uri)
    job = next(job for job in plan.jobs if job.kind == "pretrain")
    store.put(metrics_segment(job.key, 1, 0, 2), _segment((1, 2), 0.5))
    store.put(metrics_segment(job.key, 1, 2, 4), _segment((3, 4), 0.9))  # a later attempt resumed from step 2
    store.put(metrics_segment(job.key, 2, 2, 4), _segment((3, 4), 0.4))
    curves = read_learning(store, plan.jobs).curves
    assert list(curves) == [job.name]
    assert curves[job.name]["val_error"] == Curve(epochs=(1.0, 2.0), values=(0.5, 0.4))
    assert curves[job.name]["train_loss"].epochs == (0.5, 1.0, 1.5, 2.0)
    assert set(curves[job.name]) == {"train_loss", "val_error"}


def test_learning_that_cannot_be_read_costs_its_own_curve_only(store):
    plan = StudyPlan(pretrain_seeds=(0,)).plan(store.uri)
    first, second = [job for job in plan.jobs if job.kind == "pretrain"][:2]
    store.put(metrics_segment(first.key, 1, 0, 2), b"{ not json")
    store.put(metrics_segment(second.key, 1, 0, 2), _segment((1, 2), 0.5))
    learning = read_learning(store, plan.jobs)
    assert learning.unreadable == (first.name,)
    assert list(learning.curves) == [second.name]
    report = compute_report(plan, committed(plan, lambda job: {"val_error": 0.1}))
    assert "cannot be read" in render_page(report, plan, learning).decode()


@pytest.mark.parametrize("num_points", [2, 3, 8, 99, 100, 1000])
def test_thinned_curve_keeps_its_ends_and_only_own_points(num_points):
    curve = Curve(epochs=tuple(map(float, range(100))), values=tuple(float(value**2) for value in range(100)))
    found = thin(curve, num_points)
    assert len(found.epochs) == min(num_points, 100)
    assert (found.epochs[0], found.epochs[-1]) == (0.0, 99.0)
    assert all(value == epoch**2 for epoch, value in zip(found.epochs, found.values, strict=True))


def test_page_text_of_a_study_cannot_become_markup():
    evil = "</script><script>alert(1)</script>"
    plan = StudyPlan(sweep=evil, transfers=("@@PLOTLY@@",), pretrain_seeds=(0,)).plan()
    report = compute_report(plan, committed(plan, lambda job: {"val_error": 0.1}))
    page = render_page(report, plan, Learning(curves={})).decode()
    assert evil not in page
    assert page.count("plotly.js v") == 1  # no text of the sweep is taken for a mark of the template
    embedded = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.DOTALL)
    assert embedded is not None
    assert json.loads(embedded[1])["sweep"] == evil


def test_page_is_byte_stable_and_names_no_other_host():
    plan = StudyPlan().plan()
    report = compute_report(
        plan, committed(plan, lambda job: {"val_error": 0.1 + 0.01 * int(job.facets["pretrain_seed"])})
    )
    page = render_page(report, plan, Learning(curves={}))
    assert page == render_page(report, plan, Learning(curves={}))
    own = page.decode().partition("plotly.js v")[0] + page.decode().rpartition("</script>\n<script>")[2]
    assert not re.search(r'(src|href)\s*=\s*"https?:', own)
