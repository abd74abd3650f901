"""Several blocks of ``pretrain:``, and backbones that start from other backbones of the sweep."""

from __future__ import annotations

import pytest

from orchestrator.core.errors import SpecError
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.sweepfile import parse_sweep

RECIPE = "{epochs: 2, batch_size: 64, lr: 1e-3}"
VIT = f"""\
    model: {{name: test_vit, image_size: 32}}
    labels: ["levels/*"]
    recipe: {RECIPE}
    seeds: [0, 1]
"""
RESNET = VIT.replace("test_vit", "test_resnet").replace('["levels/*"]', "[levels/depth2]")
TEXT = f"""\
version: 1
name: blocks
datasets:
  tree: {{builtin: synthetic-hierarchy, branching: [2, 4], num_train: 512, num_val: 256}}
labels:
  levels: {{dataset: tree, hierarchy: [depth1, depth2]}}
pretrain:
  vit:
{VIT}  resnet:
{RESNET}transfer:
  - {{name: top, target: levels/depth1, protocol: finetune, recipe: {RECIPE}}}
report: {{baseline: levels/depth1}}
"""
CLUSTERS = "  found: {dataset: tree, clusters: {k: [2], embed: {backbone: {labels: levels/depth2}}}}\n"


def plan_of(text: str = TEXT) -> Plan:
    return build_plan(parse_sweep(text, "sweep.yaml", {}), store_uri="file:///store")


def with_init(init: str, block: str = "resnet") -> str:
    return TEXT.replace(f"  {block}:\n", f"  {block}:\n    init: {init}\n")


def same_model(text: str) -> str:
    return text.replace("test_vit", "test_resnet")


def single(block: str) -> str:
    """The sweep with this one block, unnamed."""
    start, end = TEXT.index("pretrain:"), TEXT.index("transfer:")
    return TEXT[:start] + "pretrain:\n" + block.replace("\n    ", "\n  ").replace("    model", "  model") + TEXT[end:]


def test_plan_of_blocks_has_the_jobs_of_each_under_its_name() -> None:
    names = [job.name for job in plan_of().jobs if job.kind in {"pretrain", "finetune"}]
    backbones = [f"vit/levels/depth{depth}/seed{seed}" for depth in (1, 2) for seed in (0, 1)]
    backbones += [f"resnet/levels/depth2/seed{seed}" for seed in (0, 1)]
    assert names == [f"pretrain/{name}" for name in backbones] + [f"finetune/top/{name}/seed0" for name in backbones]


def test_facets_of_named_blocks_name_them() -> None:
    facets = {job.name: job.facets.get("pretrain") for job in plan_of().jobs}
    assert facets["pretrain/vit/levels/depth1/seed0"] == "vit"
    assert facets["finetune/top/resnet/levels/depth2/seed1/seed0"] == "resnet"
    assert facets["labels/levels/depth1"] is None


def test_keys_of_a_block_do_not_follow_its_name() -> None:
    named, unnamed = plan_of(), plan_of(single(VIT))
    of_vit = {job.key for job in named.jobs if job.facets.get("pretrain") == "vit"}
    assert of_vit == {job.key for job in unnamed.jobs if job.kind in {"pretrain", "finetune"}}
    renamed = plan_of(TEXT.replace("  vit:", "  transformer:"))
    assert [job.key for job in renamed.jobs] == [job.key for job in named.jobs]


def test_backbone_of_another_block_is_an_input_and_planned_first() -> None:
    plan = plan_of(same_model(with_init("{pretrain: resnet}", "vit").replace("[levels/depth2]", '["levels/*"]')))
    jobs = plan.by_name()
    started = jobs["pretrain/vit/levels/depth1/seed1"]
    origin = jobs["pretrain/resnet/levels/depth1/seed1"]
    assert started.identity["inputs"]["initial"] == origin.key
    assert "initial" not in started.identity["parameters"]
    names = list(jobs)
    assert names.index(origin.name) < names.index(started.name)
    assert len(names) == len(set(names)) == 4 + 8 + 8


CHAINED = 'model: {name: test_vit, image_size: 32}, labels: ["b/*"]'
CHAIN = f"""\
version: 1
name: chain
datasets:
  big: {{builtin: synthetic-hierarchy, branching: [2, 4], num_train: 4096, num_val: 256}}
  small: {{builtin: synthetic-hierarchy, branching: [2, 4], num_train: 256, num_val: 64}}
labels:
  b: {{dataset: big, hierarchy: [depth1, depth2]}}
  s: {{dataset: small, hierarchy: [depth1]}}
pretrain:
  first: {{{CHAINED}, recipe: {RECIPE}, seeds: [0, 1]}}
  second: {{{CHAINED}, init: {{pretrain: first}}, recipe: {RECIPE}, seeds: [0, 1]}}
  third: {{{CHAINED}, init: {{pretrain: second}}, recipe: {RECIPE}, seeds: [1]}}
transfer:
  - {{name: top, target: s/depth1, protocol: finetune, recipe: {RECIPE}, pretrain: [third], baselines: [retrain]}}
"""


def test_baseline_of_a_block_that_starts_from_others_is_theirs_too() -> None:
    """They were planned without a check of their recipes, and compared as if the file had listed them."""
    jobs = plan_of(CHAIN).by_name()
    blocks = ("first", "second", "third")
    baselines = {name for name, job in jobs.items() if job.facets.get("baseline") == "one_pass"}
    assert baselines == {f"pretrain/{block}/s/depth1/seed1" for block in blocks}
    assert {name for name in jobs if name.startswith("pretrain/")} == baselines | {
        f"pretrain/{block}/b/depth{depth}/seed{seed}"
        for block in blocks
        for depth in (1, 2)
        for seed in (0, 1)
        if (block, seed) != ("third", 0)
    }
    with pytest.raises(SpecError) as refused:
        plan_of(CHAIN.replace("batch_size: 64", "batch_size: 1024", 1))
    (problem,) = refused.value.problems
    assert "pretrain.first.recipe.batch_size: batch_size 1024 is more than the 256 training samples of" in problem
    named = plan_of(CHAIN.replace("{pretrain: first}", "{pretrain: first, labels: b/depth1}"))
    assert not [name for name in named.by_name() if name.startswith("pretrain/first/s/")]


def test_backbone_of_the_same_block_on_another_level_is_an_input() -> None:
    text = same_model(with_init("{pretrain: vit, labels: levels/depth2, seed: 1}"))
    jobs = plan_of(text).by_name()
    for seed in (0, 1):
        inputs = jobs[f"pretrain/resnet/levels/depth2/seed{seed}"].identity["inputs"]
        assert inputs["initial"] == jobs["pretrain/vit/levels/depth2/seed1"].key


def test_embedding_names_the_block_of_its_backbone() -> None:
    text = TEXT.replace("pretrain:\n", CLUSTERS.replace("{labels:", "{pretrain: resnet, labels:") + "pretrain:\n", 1)
    text = text.replace('["levels/*"]', '["levels/*", "found/*"]')
    jobs = plan_of(text).by_name()
    assert jobs["embed/found/train"].needs == ("index/tree", "pretrain/resnet/levels/depth2/seed0")
