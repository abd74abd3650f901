"""Label spaces of clusters in a sweep.yaml: jobs, keys, and what is refused with its place."""

from collections import Counter

import pytest

from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph import data_checks
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.data_checks import kmeans_operations, long_clusterings
from orchestrator.planning.graph.plan import Plan
from orchestrator.sweepfile import load_sweep, parse_sweep
from workloads.jobs.cluster import LADDER
from workloads.solvers.kmeans import Settings, operations

TEXT = """\
version: 1
name: small
datasets:
  tree: {builtin: synthetic-hierarchy, branching: [2, 4], num_train: 512, num_val: 256}
  other: {builtin: digits}
labels:
  levels: {dataset: tree, hierarchy: [depth1, depth2]}
  within:
    dataset: tree
    clusters: {k: [2, 8], within: levels/depth1, embed: {backbone: {labels: levels/depth2, seed: 1}}}
  whole: {dataset: tree, clusters: {k: [4], embed: {backbone: {labels: levels/depth2, seed: 1}}}}
  rebalanced:
    dataset: tree
    clusters: {rebalanced: {min_samples: 9}, within: levels/depth1, embed: {backbone: {labels: levels/depth2, seed: 1}}}
pretrain:
  model: {name: test_vit, image_size: 32}
  labels: ["within/*", "whole/*", rebalanced, levels/depth2]
  recipe: {epochs: 2, batch_size: 64, lr: 1e-3}
  seeds: [0, 1]
transfer:
  - {name: top, target: levels/depth1, protocol: probe, recipe: {epochs: 2, batch_size: 64, lr: 1e-3}}
"""
CLIP = "embed: {model: {name: vit_base_patch16_clip_224, image_size: 224}, init: {timm: openai}}"
SWEPT = "embed: {backbone: {labels: levels/depth2, seed: 1}}"


def plan_of(text: str = TEXT) -> Plan:
    return build_plan(parse_sweep(text, "sweep.yaml", {}), store_uri="file:///store")


def keys_changed_by(old: str, new: str) -> set[str]:
    assert old in TEXT
    before = {job.name: job.key for job in plan_of().jobs}
    after = {job.name: job.key for job in plan_of(TEXT.replace(old, new)).jobs}
    return {name for name in before if before[name] != after.get(name)}


def test_plan_of_clusters_has_every_job_once_in_order() -> None:
    plan = plan_of()
    kinds = Counter(job.kind.value for job in plan.jobs)
    wanted = {"dataset": 1, "index": 1, "labels": 6, "embed": 2, "cluster": 4, "pretrain": 10, "probe": 10}
    assert kinds == wanted  # three entries share one embedding
    seen: set[str] = set()
    for job in plan.jobs:
        assert seen.issuperset(job.needs)
        seen.add(job.name)
    assert len({job.key for job in plan.jobs}) == len(plan.jobs)


def test_plan_of_clusters_ties_each_job_to_what_it_reads() -> None:
    jobs = plan_of().by_name()
    assert jobs["embed/within/train"].needs == ("index/tree", "pretrain/levels/depth2/seed1")
    assert jobs["cluster/within/8"].needs == ("index/tree", "embed/within/train", "embed/within/val")
    assert jobs["labels/within/8"].needs == ("index/tree", "cluster/within/8")
    assert jobs["cluster/rebalanced"].needs == jobs["cluster/within/8"].needs
    assert "random" not in str(jobs["labels/within/8"].identity)


def test_plan_granularity_is_known_but_for_rebalanced_clusters() -> None:
    jobs = plan_of().by_name()
    assert jobs["labels/within/8"].facets["granularity"] == 16
    assert jobs["labels/whole/4"].facets["granularity"] == 4
    assert "granularity" not in jobs["labels/rebalanced"].facets
    assert "granularity" not in jobs["pretrain/rebalanced/seed0"].facets


def test_plan_k_is_readable_in_keys() -> None:
    jobs = plan_of().by_name()
    assert jobs["labels/within/8"].key.startswith("labels-clusters8within-")
    assert jobs["pretrain/rebalanced/seed0"].key.startswith("pretrain-test-vit-rebalanced9within-seed0-")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("k: [4], embed", "k: [4], seed: 1, embed"),
        ("k: [4], embed", "k: [4], iterations: 9, embed"),
        ("k: [4], embed", "k: [4], num_init: 2, embed"),
        ("k: [4], embed", "k: [4], library: faiss, embed"),
    ],
)
def test_keys_of_clusters_follow_what_changes_them(old: str, new: str) -> None:
    changed = keys_changed_by(old, new)
    assert {"cluster/whole/4", "labels/whole/4", "pretrain/whole/4/seed0"} <= changed
    assert all("whole/4" in name for name in changed)


@pytest.mark.parametrize("field", ["view: mirrored", "resize: 40", "precision: bf16", "mean: [0.4, 0.4, 0.4]"])
def test_keys_of_features_follow_how_images_are_seen(field: str) -> None:
    jobs = {name: job.key for name, job in plan_of(TEXT.replace(SWEPT, f"{SWEPT[:-1]}, {field}}}")).by_name().items()}
    assert jobs["embed/within/train"] != plan_of().by_name()["embed/within/train"].key


def test_embedding_sees_images_as_the_pretraining_did() -> None:
    plan = plan_of(TEXT.replace("lr: 1e-3}\n  seeds", "lr: 1e-3, resize: 36, interpolation: bicubic}\n  seeds"))
    parameters = plan.by_name()["embed/within/train"].identity["parameters"]
    assert (parameters["resize"], parameters["interpolation"], parameters["decoder"]) == (36, "bicubic", "pillow")


def test_embedding_of_another_network_needs_no_backbone() -> None:
    job = plan_of(TEXT.replace(SWEPT, CLIP)).by_name()["embed/within/val"]
    assert job.needs == ("index/tree",)
    assert job.identity["parameters"]["initial"] == {"timm": "openai"}
    assert job.identity["parameters"]["mean"] is None  # that of the weights


def test_embedding_through_the_projection_is_identity_only_where_it_is_asked_for() -> None:
    usual, same, other = (
        plan_of(TEXT.replace(SWEPT, CLIP.replace("init:", f"{output}init:"))).by_name()["embed/within/val"]
        for output in ("", "output: features, ", "output: projection, ")
    )
    assert usual.key == same.key != other.key
    assert "output" not in usual.identity["parameters"]
    assert other.identity["parameters"]["output"] == "projection"


def test_embedding_of_a_file_keeps_its_place_out_of_the_key() -> None:
    file = "init: {uri: file:///a/w.safetensors, sha256: " + "0" * 64 + "}"
    texts = [
        TEXT.replace(SWEPT, CLIP.replace("init: {timm: openai}", uri)) for uri in (file, file.replace("/a/", "/b/"))
    ]
    first, other = (plan_of(text).by_name()["embed/within/train"] for text in texts)
    assert first.key == other.key
    assert (first.execution.initial_uri, other.execution.initial_uri) == (
        "file:///a/w.safetensors",
        "file:///b/w.safetensors",
    )


def test_plan_says_how_long_large_clusterings_take() -> None:
    big = (
        TEXT.replace("num_train: 512", "num_train: 12700000")
        .replace("k: [4], embed", "k: [21841], library: faiss, embed")
        .replace(SWEPT, CLIP)
    )
    sweep = parse_sweep(big, "sweep.yaml", {})
    space = sweep.labels["whole/21841"]
    assert space.clustering is not None
    expected = operations(12_700_000, 768, 21_841, Settings(seed=0))
    assert kmeans_operations(space, space.clustering, sweep) == expected
    assert any(line.startswith("cluster/whole/21841: ") and "1.1e+16" in line for line in long_clusterings(sweep))
    assert long_clusterings(parse_sweep(TEXT, "sweep.yaml", {})) == []


def test_ladder_of_both_planes_is_the_same() -> None:
    assert data_checks._LADDER == LADDER


def test_shipped_clusters_sweep_has_eight_kinds() -> None:
    sweep, _ = load_sweep("clusters")
    kinds = {job.kind for job in build_plan(sweep, store_uri="file:///store").jobs}
    early = {JobKind.DATASET, JobKind.INDEX, JobKind.LABELS, JobKind.PRETRAIN}
    assert kinds == early | {JobKind.EMBED, JobKind.CLUSTER, JobKind.FINETUNE, JobKind.PROBE}
