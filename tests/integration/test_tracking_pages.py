"""MLflow's pages in a real browser: nested runs, and levels compared, also after its publisher was killed often."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Plan
from orchestrator.storage.local import LocalStore
from orchestrator.tracking.links import find_compare_link, find_run_links
from orchestrator.tracking.publisher import Publisher
from tests.browser import browser, browser_page
from tests.mlflow_servers import MlflowServer, new_database
from tests.sample_journal import SampleJournal, write_segment
from tests.sample_sweep import sample_plan
from tests.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

__all__ = ["browser", "browser_page"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NUM_KILLS = 20
ROOT = Path(__file__).parents[2]
_PATIENCE_MS = 60_000
_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    store: LocalStore
    plan: Plan
    uri: str
    server: MlflowServer

    @property
    def compare_link(self) -> str:
        return find_compare_link(self.store, self.plan.sweep, self.uri, self.server.url)


def _story(store: LocalStore, plan: Plan) -> Iterator[None]:
    """The sweep goes on, one job at a time."""
    journal = SampleJournal(store, plan)
    for job in plan.jobs:
        if job.kind is JobKind.PRETRAIN:
            write_segment(store, job.key, 1, 0, [3.0, 2.0, 1.5])
        journal.run(job)
        yield
    journal.finish()


def _num_runs(database: Path) -> int:
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=60) as connection:
        return int(connection.execute("SELECT count(*) FROM runs WHERE lifecycle_stage = 'active'").fetchone()[0])


def _has_more_runs(database: Path, before: int) -> bool:
    return _num_runs(database) > before


def _publish_with_kills(store: LocalStore, plan: Plan, database: Path) -> int:
    """Each time the sweep went on by some jobs, a publisher starts and is killed once it begins to write."""
    story, kills, root = _story(store, plan), 0, database.parent / "store"
    command = [sys.executable, "-m", "tests.publish_process", str(root), plan.sweep, f"sqlite:///{database}"]
    for number, _ in enumerate(story):
        if number % (len(plan.jobs) // NUM_KILLS) == 0 and kills < NUM_KILLS:
            before = _num_runs(database)
            child = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
            wait_until(partial(_has_more_runs, database, before), deadline_s=_DEADLINE_S, pause_s=0.02)
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            kills += 1
    return kills


@pytest.fixture(scope="module", params=["undisturbed", "killed"])
def study(request, tmp_path_factory) -> Iterator[Study]:
    folder = tmp_path_factory.mktemp(request.param)
    store, uri = LocalStore(folder / "store"), new_database(folder / "mlflow.db")
    plan = sample_plan(store.uri, sweep="study")
    if request.param == "killed":
        assert _publish_with_kills(store, plan, folder / "mlflow.db") == NUM_KILLS
    else:
        for _ in _story(store, plan):
            pass
    assert Publisher(store, uri).publish_once("study")
    assert _num_runs(folder / "mlflow.db") == len(plan.jobs) + 1
    with MlflowServer(folder, uri) as server:
        yield Study(store=store, plan=plan, uri=uri, server=server)


def test_pages_compare_link_shows_every_level(study: Study, browser_page: Page) -> None:
    browser_page.goto(study.compare_link)
    num_transfers = sum("transfer" in job.facets for job in study.plan.jobs)
    # With the sweep's own run, which has the curve.
    browser_page.get_by_text(re.compile(rf"^{num_transfers + 1}\s+matching runs")).wait_for(timeout=_PATIENCE_MS)
    curve = browser_page.locator("img[src*='images/curve'], img[src*='images%2Fcurve']").first
    curve.wait_for(timeout=_PATIENCE_MS)
    assert curve.evaluate("image => image.complete && image.naturalWidth") > 0
    parallel = browser_page.locator(".parcoords").first
    parallel.locator("text=granularity").first.wait_for(timeout=_PATIENCE_MS)
    shown = set(parallel.locator("text").all_inner_texts()) | set(parallel.locator("text").all_text_contents())
    spaces = {str(job.facets["label_space"]) for job in study.plan.jobs if "transfer" in job.facets}
    # Long names are abbreviated: random/128 reads ran...128.
    shortened = {f"{space[:3]}...{space[-3:]}" for space in spaces}
    assert {"label_space", "granularity", "transfer", "val_error", *shortened} <= shown
    assert browser_page.locator(".scatterlayer .point").count() >= num_transfers


def test_pages_sweep_has_its_jobs_nested_below_it(study: Study, browser_page: Page) -> None:
    link = study.compare_link.partition("?")[0]
    browser_page.goto(f"{link}?searchFilter=&orderByKey=attributes.start_time&orderByAsc=true&compareRunsMode=TABLE")
    row = browser_page.get_by_role("row").filter(has=browser_page.get_by_role("link", name="study", exact=True))
    row.first.wait_for(timeout=_PATIENCE_MS)
    assert browser_page.get_by_role("link", name="index/tree").count() == 0
    row.first.get_by_role("button").first.click()
    browser_page.get_by_role("link", name="index/tree").first.wait_for(timeout=_PATIENCE_MS)


def test_pages_run_of_a_backbone_shows_its_facts(study: Study, browser_page: Page) -> None:
    links = find_run_links(study.store, study.plan, study.uri, study.server.url)
    browser_page.goto(links["pretrain/levels/depth2/seed0"])
    for text in ("Finished", "granularity", "depth2", "label_space", "key"):
        browser_page.get_by_text(text, exact=True).first.wait_for(timeout=_PATIENCE_MS)
