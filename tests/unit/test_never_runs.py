"""What a machine can never run is refused where nothing adds nodes, with what is short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.contract import Resources
from orchestrator.planning.estimate.eta import Fleet
from orchestrator.planning.graph.build import build_plan
from orchestrator.services.preview import make_preview, never_runs, preview_lines
from orchestrator.sweepfile.load import parse_sweep

SWEEP = """version: 1
name: small
datasets: {tree: {builtin: synthetic-hierarchy}}
labels: {levels: {dataset: tree, hierarchy: [depth1, depth2]}}
pretrain:
  model: {name: resnet18, image_size: 32}
  labels: ["levels/*"]
  recipe: {epochs: 1, batch_size: 64, lr: 0.1}
resources: {pretrain: {RESOURCES}}
report: {baseline: levels/depth1}
"""
NODE = Fleet(nodes=(Resources(cpus=2.0),), name="this machine: 2 CPUs", is_fixed=True)


@pytest.mark.parametrize(
    ("asked", "short", "option"),
    [
        ("cpus: 64", "for 64 CPUs, which this machine: 2 CPUs does not have", "--cpus N"),
        ("gpus: 1", "for 1 GPU, which this machine: 2 CPUs does not have", "--gpus N"),
    ],
)
def test_jobs_that_nothing_can_run_are_named_with_what_is_short(
    asked: str, short: str, option: str, tmp_path: Path
) -> None:
    sweep = parse_sweep(SWEEP.replace("RESOURCES", asked), "sweep.yaml", {})
    plan = build_plan(sweep, store_uri=tmp_path.as_uri())
    preview = make_preview(sweep, plan, fleet=NODE)
    (why,) = never_runs(preview)
    assert why.startswith("pretrain/levels/depth1/seed0 and 1 more job ask")
    assert short in why
    assert f"lower resources.pretrain.{option[2:6]}" in why
    assert any(f"state a cluster with {option}" in line for line in preview_lines(preview))
    growing = make_preview(sweep, plan, fleet=replace(NODE, is_fixed=False))
    assert list(never_runs(growing)) == []


def test_what_fits_is_not_named(tmp_path: Path) -> None:
    sweep = parse_sweep(SWEEP.replace("RESOURCES", "cpus: 2"), "sweep.yaml", {})
    plan = build_plan(sweep, store_uri=tmp_path.as_uri())
    assert list(never_runs(make_preview(sweep, plan, fleet=NODE))) == []
