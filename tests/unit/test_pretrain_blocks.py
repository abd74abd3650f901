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


def problems_of(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        plan_of(text)
    return str(caught.value)


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


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        (TEXT.replace("    labels: [levels/depth2]", "    lables: [levels/depth2]"), "15:5: pretrain.resnet", "labels"),
        (TEXT.replace("[levels/depth2]", "[levels/dept2]"), "15:14: pretrain.resnet.labels[0]", "'levels/dept2'"),
        (TEXT.replace("test_resnet", "test_resnett"), "14:13: pretrain.resnet.model.name", "test_resnet"),
        (TEXT.replace("  resnet:", "  model:"), "", ""),
        (TEXT.replace("  resnet:", "  res/net:"), "13:3: pretrain.res/net", "is not a name"),
        (with_init("{pretrain: vitt}"), "14:12: pretrain.resnet.init.pretrain", "did you mean 'vit'"),
        (with_init("{pretrain: vit}"), "pretrain.resnet.init.pretrain", "weights do not fit test_resnet"),
        (with_init("{pretrain: vit, timm: a1}"), "pretrain.resnet.init", "here: timm and pretrain"),
        (with_init("{timm: a1, seed: 1}"), "14:22: pretrain.resnet.init.seed", "remove seed"),
        (with_init("{pretrain: vit, seed: any}"), "pretrain.resnet.init.seed", "'any' is no seed"),
        (with_init("{pretrain: vit, seed: 7}"), "pretrain.resnet.init.seed", "its seeds are [0, 1]"),
        (with_init("{pretrain: vit, labels: levels/depth3}"), "resnet.init.labels", "did you mean 'levels/depth"),
        (with_init("{pretrain: resnet}", "vit"), "pretrain.vit.init.pretrain", "no backbone on 'levels/depth1'"),
    ],
)
def test_wrong_block_is_refused_at_its_place(text: str, place: str, said: str) -> None:
    problems = problems_of(text)
    assert place in problems
    assert said in problems


def test_single_block_with_a_typo_is_not_taken_for_several() -> None:
    problems = problems_of(single(VIT).replace("  recipe:", "  recip:", 1))
    assert "unknown key 'recip': did you mean 'recipe'" in problems


def test_initial_weights_that_wait_for_themselves_are_refused_with_the_chain() -> None:
    text = same_model(TEXT).replace("[levels/depth2]", '["levels/*"]')
    text = text.replace("  vit:\n", "  vit:\n    init: {pretrain: resnet}\n")
    problems = problems_of(text.replace("  resnet:\n", "  resnet:\n    init: {pretrain: vit}\n"))
    assert "sweep.yaml:9:12: pretrain.vit.init.pretrain: " in problems
    assert "pretrain/vit/levels/depth1 -> pretrain/resnet/levels/depth1 -> pretrain/vit/levels/depth1" in problems


def test_initial_weights_of_another_seed_are_no_circle_but_of_the_own_one() -> None:
    problems = problems_of(with_init("{pretrain: resnet, seed: 0}"))
    assert "(pretrain/resnet/levels/depth2 -> pretrain/resnet/levels/depth2)" in problems


def test_circle_through_clusters_and_initial_weights_is_refused() -> None:
    text = TEXT.replace("pretrain:\n", CLUSTERS.replace("{labels:", "{pretrain: vit, labels:") + "pretrain:\n", 1)
    text = same_model(text).replace("[levels/depth2]", "[found/2]")
    problems = problems_of(text.replace("  vit:\n", "  vit:\n    init: {pretrain: resnet, labels: found/2}\n"))
    assert "labels.found.clusters.embed.backbone.labels: these clusters need a backbone" in problems
    assert "pretrain.vit.init.pretrain: this backbone starts from one" in problems


def test_clusters_in_a_sweep_of_several_blocks_name_one() -> None:
    problems = problems_of(TEXT.replace("pretrain:\n", CLUSTERS + "pretrain:\n", 1))
    assert "'pretrain' is missing: which block's backbone is it? the blocks are vit, resnet" in problems
    other = CLUSTERS.replace("{labels:", "{pretrain: vitt, labels:")
    assert "'vitt' is not a block of pretrain: did you mean 'vit'" in problems_of(
        TEXT.replace("pretrain:\n", other + "pretrain:\n", 1)
    )
