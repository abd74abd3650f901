"""Shipped sweeps keep their jobs and keys: whoever has their results must find them again."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from orchestrator.report.render.curves import draw_curve, encode_svg
from tests.captures import CURVE, README, demo_report, demo_text, make
from tests.golden_plans import FOLDER, golden_text, shipped
from workloads.models.variants import main as variants

ROOT = Path(__file__).parents[2]
UPDATE = "if this is meant, run `python -m tests.golden_plans` and say in CHANGELOG.md what has to run again"
NEEDS_FAISS = {"clusters", "paper-in1k-resnet50", "paper-inat21-resnet34"}


@pytest.mark.parametrize("name", shipped())
def test_plan_of_shipped_sweep_is_the_golden_one(name: str) -> None:
    if name in NEEDS_FAISS and importlib.util.find_spec("faiss") is None:
        pytest.skip("without faiss, k-means is another library's, and so are the keys")
    golden = FOLDER / f"{name}.txt"
    assert golden.is_file(), f"{name} has no golden plan: {UPDATE}"
    found, expected = golden_text(name).splitlines(), golden.read_text(encoding="utf-8").splitlines()
    gone, come = [line for line in expected if line not in found], [line for line in found if line not in expected]
    assert found == expected, f"{len(gone)} lines went ({gone[:3]}), {len(come)} came ({come[:3]}): {UPDATE}"


def test_networks_of_shipped_sweeps_are_in_the_table_of_variants() -> None:
    file = ROOT / "orchestrator" / "planning" / "estimate" / "variants.json"
    assert variants([str(file), "--check"]) == 0, f"run `python -m workloads.models.variants {file.relative_to(ROOT)}`"
    assert all(len(row) == 4 for row in json.loads(file.read_text(encoding="utf-8")).values())


def test_capture_of_plan_shows_what_the_command_prints(tmp_path: Path) -> None:
    text = make("plan", tmp_path).read_text(encoding="utf-8")
    assert "orchestrator&#160;plan&#160;quickstart" in text
    assert "82&#160;jobs" in text
    assert "critical" in text


def test_readme_shows_the_report_of_the_kept_results() -> None:
    report = demo_report()
    assert not [row.label_space for row in report.headlines[0].rows if row.summary is None], "run `make demo` anew"
    remedy = "run `python -m tests.captures readme`, or after `make demo` `python -m tests.captures demo`"
    assert f"```\n{demo_text(report)}\n```" in README.read_text(encoding="utf-8"), remedy
    assert encode_svg(draw_curve(report)) == CURVE.read_bytes(), remedy
