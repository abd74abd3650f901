"""``compare --samples`` on a real sweep: counts by hand from the records, the pictures."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from orchestrator.cli.commands.compare import SampleOptions, show_sample_comparison
from orchestrator.cli.output import TableForm
from orchestrator.core.contract import ExecutionContext
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.report.build import build_report
from orchestrator.report.render.columns import text_table
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.local import LocalStore
from orchestrator.storage.sample_outcomes import SampleOutcomes
from orchestrator.sweepfile.load import parse_sweep, shipped_recipes
from tests.builders import request_of
from tests.report_sweeps import accept
from workloads.data.index import SampleIndex
from workloads.run import execute

pytestmark = pytest.mark.slow

SWEEP = """\
version: 1
name: pictures
datasets:
  tree: {builtin: synthetic-hierarchy, branching: [2, 3], image_size: 16, patch_size: 4, num_train: 96, num_val: 70}
labels:
  levels: {dataset: tree, hierarchy: [depth1, depth2]}
pretrain:
  model: {name: test_vit, image_size: 16, kwargs: {patch_size: 4}}
  labels: [levels/*]
  recipe: {epochs: 1, batch_size: 32, lr: 0.05}
  seeds: [0, 1]
transfer:
  - {name: online, target: levels/depth1, protocol: probe, recipe: {epochs: 1, batch_size: 16, lr: 0.01}}
report: {baseline: levels/depth1}
"""
A, B = "levels/depth1", "levels/depth2"


class Ran:
    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, LocalStore(folder / "store")
        self.plan: Plan = build_plan(parse_sweep(SWEEP, "sweep.yaml", shipped_recipes()), store_uri=self.store.uri)
        accept(self.store, self.plan)
        for job in self.plan.jobs:
            self.run(job)

    def run(self, job: Job) -> None:
        request = request_of(job, self.store.uri, sweep=self.plan.sweep)
        scratch = self.folder / "scratch" / job.key
        scratch.mkdir(parents=True)
        execute(request, ExecutionContext(store=self.store, scratch=scratch, cache=self.folder / "cache"))

    def outcomes(self, space: str, seed: int) -> SampleOutcomes:
        job = self.plan.by_name()[f"probe/online/{space}/seed{seed}/seed0"]
        found = SampleOutcomes.read(self.store, read_record(self.store, job.key))
        assert found is not None
        return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_DIRECTORY", str(tmp_path / "project"))


def test_rows_are_compared_image_by_image_and_groups_add_up(
    ran: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = SampleOptions(first=A, second=B, out=str(tmp_path / "out"), form=TableForm.JSON, store=ran.store.uri)
    show_sample_comparison([], options)
    [document] = json.loads(capsys.readouterr().out)
    firsts, seconds = ([ran.outcomes(space, seed).right_N for seed in (0, 1)] for space in (A, B))
    fixed_N = np.sum([second & ~first for first, second in zip(firsts, seconds, strict=True)], axis=0)
    broken_N = np.sum([first & ~second for first, second in zip(firsts, seconds, strict=True)], axis=0)
    assert sum(test["num_fixed"] for test in document["tests"]) == fixed_N.sum()
    assert document["mean"] == pytest.approx((broken_N.sum() - fixed_N.sum()) / (2 * 70))
    split = SampleIndex.open(ran.store, ran.plan.by_name()["index/tree"].key, ran.folder / "cache").split("val")
    leaves = {
        str(group["name"]): (group["num_samples"], group["num_fixed"], group["num_broken"])
        for group in document["groups"]
        if group["kind"] == "depth2"
    }
    expected = [
        (
            int((split.leaves == leaf).sum()),
            int(fixed_N[split.leaves == leaf].sum()),
            int(broken_N[split.leaves == leaf].sum()),
        )
        for leaf in range(6)
    ]
    assert list(leaves.values()) == expected
    for kind in ("class", "subset"):
        some = [group for group in document["groups"] if group["kind"] == kind]
        assert sum(group["num_samples"] for group in some) == 70
        assert sum(group["num_broken"] for group in some) == broken_N.sum()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("samples.html", "groups.png", "images.png", "samples.csv"),
    }
    lines = list(csv.DictReader((tmp_path / "out" / "samples.csv").read_text().splitlines()))
    assert [line["kind"] for line in lines].count("networks") == 2
    sheet = Image.open(tmp_path / "out" / "images.png")
    assert len(sheet.getcolors(1 << 24) or ()) > 100  # there are images on it
    assert (tmp_path / "out" / "samples.html").read_bytes().count(b"data:image/png;base64") == 2


def test_two_jobs_are_one_pair_and_a_backbone_on_the_target_is_one_too(
    ran: Ran, capsys: pytest.CaptureFixture[str]
) -> None:
    options = SampleOptions(first=f"pretrain/{A}/seed0", second=f"probe/online/{B}/seed0/seed0", store=ran.store.uri)
    show_sample_comparison(["pictures"], options)
    told = capsys.readouterr().out
    assert "one pretraining seed: this interval is about these two networks" in " ".join(told.split())


def test_report_says_what_the_images_add_to_the_intervals(ran: Ran) -> None:
    [table] = build_report(ran.store, ran.plan).headlines
    assert table.num_val == 70
    best = table.ranked[0].summary
    assert best is not None
    error = 100 * np.sqrt(best.mean * (1 - best.mean) / 70)
    caption = text_table(table).caption
    assert "on the same 70 validation images" in caption
    assert caption.endswith(f"has a binomial standard error of {error:.2f} points")
