"""What a machine can never run is refused where nothing adds nodes, with what is short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.contract import Resources
from orchestrator.planning.estimate.eta import Fleet
from orchestrator.planning.graph.build import build_plan
from orchestrator.services.fleets import StatedCluster, stated_fleet
from orchestrator.services.preview import Preview, make_preview, never_runs, preview_lines
from orchestrator.sweepfile.load import parse_sweep, shipped_recipes

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
NODE = Fleet(nodes=(Resources(cpus=2.0),), name="this machine (2 CPUs)", is_fixed=True)


@pytest.mark.parametrize(
    ("asked", "short", "option"),
    [
        ("cpus: 64", "for 64 CPUs, which this machine (2 CPUs) does not have", "--cpus N"),
        ("gpus: 1", "for 1 GPU, which this machine (2 CPUs) does not have", "--gpus N"),
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


@pytest.mark.parametrize(
    ("asked", "short"),
    [
        ("memory_gib: 500", "500 GiB of memory; lower resources.pretrain.memory_gib"),
        (
            "labels: {rack: '4'}",
            "a node of its kind (rack=4); change accelerator, spot or labels of resources.pretrain",
        ),
        (
            "spot: require",
            "a node of its kind (on spot nodes); change accelerator, spot or labels of resources.pretrain",
        ),
    ],
)
def test_plan_has_no_wall_clock_where_memory_labels_or_spot_are_never_there(
    asked: str, short: str, tmp_path: Path
) -> None:
    machine = replace(NODE, nodes=(Resources(cpus=2.0, memory_gib=8.0),))
    preview = _preview(asked, machine, tmp_path)
    shown = [line.strip() for line in preview_lines(preview)]
    at = next(place for place, line in enumerate(shown) if line.startswith("wall clock"))
    assert "2 jobs can never run on this machine (2 CPUs): pretrain/levels/depth1/seed0, " in shown[at]
    assert shown[at + 1] == f"pretrain/levels/depth1/seed0 and 1 more job ask for {short}"
    assert shown[at + 2] == "or state a cluster with --cpus N"
    assert preview.summary()["never"] == ["pretrain/levels/depth1/seed0", "pretrain/levels/depth2/seed0"]
    stated = _preview(asked, stated_fleet(StatedCluster(cpus=2)), tmp_path)
    assert not stated.summary()["never"], "nobody knows what else the nodes of an imagined cluster have"


def test_what_fits_is_not_named(tmp_path: Path) -> None:
    sweep = parse_sweep(SWEEP.replace("RESOURCES", "cpus: 2"), "sweep.yaml", {})
    plan = build_plan(sweep, store_uri=tmp_path.as_uri())
    assert list(never_runs(make_preview(sweep, plan, fleet=NODE))) == []


GPU = Resources(cpus=8.0, gpus=4.0, memory_gib=64.0, accelerator="A100", labels=(("rack", "3"),))
CLUSTER = Fleet(nodes=(GPU, GPU), name="Ray at head:6379: 2 nodes, 8 GPUs", is_fixed=True)


@pytest.mark.parametrize(
    ("asked", "short"),
    [
        ("gpus: 16, cpus: 16", "for 16 workers at once"),
        ("gpus: 1, cpus: 16", "for 16 CPUs"),
        ("memory_gib: 100", "for 100 GiB of memory"),
        ("gpus: 1, accelerator: H100", "for a node of its kind (of type H100)"),
        ("gpus: 1, labels: {rack: '4'}", "for a node of its kind (rack=4)"),
        ("gpus: 1, spot: require", "for a node of its kind (on spot nodes)"),
        ("gpus: 16, cpus: 16, min_gpus: 12", "for 16 workers at once"),
    ],
)
def test_a_cluster_that_nothing_extends_is_asked_for_what_it_has(asked: str, short: str, tmp_path: Path) -> None:
    (why,) = never_runs(_preview(asked, CLUSTER, tmp_path))
    assert short in why
    assert "Ray at head:6379: 2 nodes, 8 GPUs does not have, and nothing adds nodes; " in why


@pytest.mark.parametrize(
    "asked",
    [
        "gpus: 8, cpus: 8",
        "gpus: 16, cpus: 16, min_gpus: 8",
        "gpus: 4, accelerator: a100, memory_gib: 64, labels: {rack: '3'}",
        "cpus: 8",
    ],
)
def test_what_the_idle_cluster_can_hold_waits_for_its_turn(asked: str, tmp_path: Path) -> None:
    assert list(never_runs(_preview(asked, CLUSTER, tmp_path))) == []


def test_what_nobody_knows_of_a_node_holds_no_job_up(tmp_path: Path) -> None:
    unknown = Fleet(nodes=(Resources(cpus=8.0, gpus=1.0),), is_fixed=True)
    assert list(never_runs(_preview("gpus: 1, accelerator: H100, memory_gib: 500", unknown, tmp_path))) == []


@pytest.mark.parametrize(
    ("over", "asked", "remedy"),
    [
        ("recipe", "transfer: {cpus: 2}", "search.concurrent of transfer t"),
        ("pretrain", "pretrain: {gpus: 1}", "resources.pretrain.gpus"),
    ],
)
def test_remedy_for_a_search_that_never_runs_is_what_its_resources_follow_from(
    over: str, asked: str, remedy: str, tmp_path: Path
) -> None:
    search = f"search: {{over: {over}, random: {{}}, space: {{lr: [0.1, 0.2, 0.3, 0.4]}}, concurrent: 4}}"
    transfer = f"transfer: [{{name: t, target: levels/depth1, protocol: finetune, {search}}}]\nresources:"
    text = SWEEP.replace("resources:", transfer).replace("pretrain: {RESOURCES}", asked)
    sweep = parse_sweep(text, "sweep.yaml", shipped_recipes())
    preview = make_preview(sweep, build_plan(sweep, store_uri=tmp_path.as_uri()), fleet=NODE)
    (why,) = (why for why in never_runs(preview) if why.startswith("search/"))
    assert f"lower {remedy}, or submit" in why


def _preview(asked: str, fleet: Fleet, folder: Path) -> Preview:
    sweep = parse_sweep(SWEEP.replace("RESOURCES", asked).replace("size: 64", "size: 1024"), "sweep.yaml", {})
    return make_preview(sweep, build_plan(sweep, store_uri=folder.as_uri()), fleet=fleet)
