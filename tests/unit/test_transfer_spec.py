"""The transfers of a sweep.yaml: what they become as jobs, and what is refused where."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.planning.graph.recipe_checks import (
    missing_trust_ratios,
    other_normalizations,
    repeated_levels,
    selections_on_seen_images,
    unguided_searches,
    unread_settings,
    unused_fractions,
    weights_not_loaded,
)
from orchestrator.sweepfile.load import parse_sweep, shipped_recipes
from orchestrator.sweepfile.transfer import cell_name
from orchestrator.sweepfile.values import ResolvedSweep
from orchestrator.sweeps.request_handling import check_plan

HEAD = """\
version: 1
name: small
datasets:
  tree: {builtin: synthetic-hierarchy, branching: [2, 4], num_train: 512, num_val: 256}
  digits: {builtin: digits}
labels:
  levels: {dataset: tree, hierarchy: [depth1, depth2]}
  digit: {dataset: digits, hierarchy: [digit]}
pretrain:
  model: {name: test_vit, image_size: 32}
  labels: [levels/depth2]
  recipe: {epochs: 4, batch_size: 64, lr: 1e-3}
  checkpoints: {keep: {epochs: [2]}}
  seeds: [0, 1]
transfer:
"""
TOP = "name: top, target: levels/depth1"
STEPS = "epochs: 2, batch_size: 64"
TWO_BLOCKS = """\
pretrain:
  small: &block
    model: {name: test_vit, image_size: 32}
    labels: [levels/depth2]
    recipe: {epochs: 4, batch_size: 64, lr: 1e-3}
  large: *block
transfer:
"""


def sweep_of(*transfers: str, head: str = HEAD) -> ResolvedSweep:
    text = head + "".join(f"  - {{{transfer}}}\n" for transfer in transfers)
    return parse_sweep(text, "sweep.yaml", shipped_recipes())


def plan_of(*transfers: str, head: str = HEAD) -> Plan:
    return build_plan(sweep_of(*transfers, head=head), store_uri="file:///store")


def measuring(plan: Plan) -> list[Job]:
    return [job for job in plan.jobs if "transfer" in job.facets]


def test_transfer_without_new_fields_has_the_parameters_it_always_had() -> None:
    (job, *_) = measuring(plan_of(f"{TOP}, protocol: probe, recipe: {{{STEPS}, lr: 0.1}}"))
    assert job.name == "probe/top/levels/depth2/seed0/seed0"
    assert job.identity["parameters"].keys() == {"model", "recipe", "seed"}
    assert not job.identity["parameters"]["recipe"].keys() & {"features", "solver", "select_holdout"}
    assert not job.facets.keys() & {"checkpoint", "fraction", "cell", "baseline", "select_on"}


def test_probe_that_says_online_is_the_one_that_says_nothing() -> None:
    plain, said = (
        measuring(plan_of(f"{TOP}, protocol: probe, recipe: {{{STEPS}, lr: 0.1{more}}}"))[0].key
        for more in ("", ", features: online")
    )
    assert plain == said


def test_cached_probes_and_neighbours_share_the_features_of_a_backbone() -> None:
    plan = plan_of(
        "name: a, target: digit/digit, protocol: probe, recipe: cached-probe, fractions: [0.1, 0.5, 1], seeds: [0, 1]",
        "name: b, target: digit/digit, protocol: knn",
        "name: c, target: digit/digit, protocol: probe, recipe: {base: cached-probe, loss: sigmoid}",
    )
    counts = Counter(job.kind.value for job in plan.jobs)
    assert (counts["pretrain"], counts["embed"], counts["probe"], counts["knn"]) == (2, 4, 2 * (3 * 2 + 1), 2)
    assert [job.name for job in plan.jobs if job.kind.value == "embed"] == [
        f"embed/levels/depth2/seed{seed}/digits/{split}" for seed in (0, 1) for split in ("train", "val")
    ]
    assert {job.needs for job in measuring(plan) if job.facets["pretrain_seed"] == 1} == {
        ("index/digits", "labels/digit/digit", *(f"embed/levels/depth2/seed1/digits/{s}" for s in ("train", "val")))
    }


def test_cached_probe_looks_at_images_as_the_backbone_did_unless_told_otherwise() -> None:
    head = HEAD.replace("lr: 1e-3", "lr: 1e-3, resize: 40, mean: [0.4, 0.4, 0.4]")
    plan = plan_of(
        f"{TOP}, protocol: knn", "name: b, target: levels/depth1, protocol: knn, recipe: {resize: 32}", head=head
    )
    embeds = {job.name: job.identity["parameters"] for job in plan.jobs if job.kind.value == "embed"}
    usual = embeds["embed/levels/depth2/seed0/tree/train"]
    other = embeds["embed/levels/depth2/seed0/tree/train/resize=32"]
    assert (usual["resize"], usual["mean"]) == (40, [0.4] * 3)
    assert {**usual, "resize": 32} == other
    names = {job.facets["transfer"]: job for job in measuring(plan)}
    assert names["top"].identity["parameters"] == names["b"].identity["parameters"]
    assert names["top"].key != names["b"].key


def test_mirrored_view_is_another_job_of_the_training_split_alone() -> None:
    plan = plan_of(
        f"{TOP}, protocol: probe, recipe: {{features: cached, views: [center, mirrored]}}",
        head=HEAD.replace("seeds: [0, 1]", "seeds: [0]"),
    )
    assert [job.name.rpartition("tree/")[2] for job in plan.jobs if job.kind.value == "embed"] == [
        "train",
        "train/mirrored",
        "val",
    ]


def test_checkpoints_are_measured_by_epoch_and_the_last_is_the_final_result() -> None:
    plan = plan_of(
        f"{TOP}, protocol: finetune, from_checkpoints: [2, 4]", "name: end, target: levels/depth1, protocol: finetune"
    )
    jobs = [job for job in measuring(plan) if job.facets["pretrain_seed"] == 0]
    assert [job.facets.get("checkpoint") for job in jobs] == ["epoch2", "epoch4", None]
    assert [job.identity["parameters"].get("checkpoint") for job in jobs] == [2, None, None]
    assert jobs[1].key == jobs[2].key
    assert jobs[0].name == "finetune/top/levels/depth2/seed0/epoch2/seed0"


def test_cached_features_of_a_checkpoint_are_its_own() -> None:
    plan = plan_of(f"{TOP}, protocol: knn, from_checkpoints: [2, 4]")
    names = [job.name for job in plan.jobs if job.kind.value == "embed" and "seed0" in job.name]
    assert names == [
        f"embed/levels/depth2/seed0/{part}tree/{split}" for part in ("epoch2/", "") for split in ("train", "val")
    ]


def test_fractions_are_drawn_by_the_transfer_seed_unless_the_subset_names_one() -> None:
    own, fixed = (
        [
            job.identity["parameters"].get("subset")
            for job in measuring(plan_of(f"{TOP}, protocol: knn, fractions: [0.1, 1.0], seeds: [3, 4]{more}"))
            if job.facets["pretrain_seed"] == 0
        ]
        for more in ("", ", subset: {seed: 7, max_per_class: 20}")
    )
    assert own == [{"fraction": 0.1, "seed": 3}, {"fraction": 0.1, "seed": 4}, None, None]
    assert fixed == [{"max_per_class": 20, "fraction": 0.1, "seed": 7}] * 2 + [{"max_per_class": 20, "seed": 7}] * 2


def test_whole_fraction_is_the_transfer_without_fractions() -> None:
    whole, plain = (measuring(plan_of(f"{TOP}, protocol: knn{more}"))[0] for more in (", fractions: [1.0]", ""))
    assert (whole.key, whole.facets["fraction"]) == (plain.key, "1")


def test_grid_makes_every_combination_and_holds_samples_out() -> None:
    jobs = measuring(
        plan_of(f"{TOP}, protocol: finetune, recipe: {{{STEPS}}}, grid: {{lr: [0.1, 0.4], weight_decay: [0, 1e-4]}}")
    )
    cells = {job.facets["cell"]: job.identity["parameters"]["recipe"] for job in jobs}
    assert list(cells) == [f"lr={lr},weight_decay={decay}" for lr in ("0.1", "0.4") for decay in ("0", "0.0001")]
    assert {(recipe["lr"], recipe["weight_decay"]) for recipe in cells.values()} == {
        (lr, decay) for lr in (0.1, 0.4) for decay in (0.0, 1e-4)
    }
    assert {recipe["select_holdout"] for recipe in cells.values()} == {0.1}
    assert {job.facets["select_on"] for job in jobs} == {"train"}
    assert jobs[0].name == "finetune/top/levels/depth2/seed0/lr=0.1,weight_decay=0/seed0"


def test_grid_selected_on_validation_trains_on_everything_and_says_so() -> None:
    (job, *_) = measuring(
        plan_of(f"{TOP}, protocol: finetune, recipe: {{{STEPS}}}, grid: {{lr: [0.1, 0.4]}}, select_on: val")
    )
    assert "select_holdout" not in job.identity["parameters"]["recipe"]
    assert job.facets["select_on"] == "val"


def test_grid_over_a_shipped_recipe_by_name() -> None:
    jobs = measuring(plan_of(f"{TOP}, protocol: knn, grid: {{temperature: [0.07, 0.2], k: [[1, 5], [10]]}}"))
    assert [job.facets["cell"] for job in jobs][:4] == [
        "temperature=0.07,k=1_5",
        "temperature=0.07,k=10",
        "temperature=0.2,k=1_5",
        "temperature=0.2,k=10",
    ]


def test_cell_name_holds_nothing_that_paths_or_tables_trip_over() -> None:
    chosen = {"betas": [0.9, 0.99], "freeze": "back/bone;x, y", "nesterov": True, "lr": 1e-5}
    assert cell_name(chosen) == "betas=0.9_0.99,freeze=backbonex_y,nesterov=true,lr=1e-05"


def test_jobs_that_are_named_by_lists_can_be_submitted() -> None:
    """Their names had a sign that no object of a store may have, so that all but the last step took them."""
    mean = "mean: [0.485, 0.456, 0.406]"
    plan = plan_of(
        f"{TOP}, protocol: knn, grid: {{k: [[1, 5], [10, 20]]}}",
        f"name: tuned, target: levels/depth1, protocol: finetune, recipe: {{{STEPS}, lr: 0.1, optimizer: adamw}}, "
        "grid: {betas: [[0.9, 0.99], [0.9, 0.999]]}",
        f"name: near, target: levels/depth1, protocol: knn, recipe: {{{mean}}}",
        f"name: line, target: levels/depth1, protocol: probe, recipe: {{base: cached-probe, {mean}}}",
        head=HEAD.replace("lr: 1e-3", "lr: 1e-3, std: [0.2, 0.2, 0.2]"),
    )
    assert check_plan(plan, sweep="small", store_uri="file:///store") == ""
    assert "embed/levels/depth2/seed0/tree/train/mean=0.485_0.456_0.406" in plan.by_name()


def test_baselines_pretrain_on_the_target_and_measure_it_alike() -> None:
    plan = plan_of("name: top, target: digit/digit, protocol: finetune, baselines: [one_pass, retrain]")
    pretrained = {job.name: job.facets.get("baseline") for job in plan.jobs if job.kind.value == "pretrain"}
    assert pretrained == {f"pretrain/levels/depth2/seed{seed}": None for seed in (0, 1)} | {
        f"pretrain/digit/digit/seed{seed}": "one_pass" for seed in (0, 1)
    }
    rows = {job.name: job.facets.get("baseline") for job in measuring(plan)}
    assert rows == {f"finetune/top/levels/depth2/seed{seed}/seed0": None for seed in (0, 1)} | {
        f"finetune/top/digit/digit/seed{seed}/seed0": "retrain" for seed in (0, 1)
    }


def test_one_pass_alone_measures_nothing_more() -> None:
    plan = plan_of("name: top, target: digit/digit, protocol: finetune, baselines: [one_pass]")
    assert {job.facets["label_space"] for job in measuring(plan)} == {"levels/depth2"}
    assert "pretrain/digit/digit/seed0" in plan.by_name()


def test_baseline_that_is_a_row_already_adds_no_job() -> None:
    head = HEAD.replace("[levels/depth2]", '["levels/*"]')
    plain, asked = (plan_of(f"{TOP}, protocol: finetune{more}", head=head) for more in ("", ", baselines: [retrain]"))
    assert [job.key for job in plain.jobs] == [job.key for job in asked.jobs]
    marked = {job.facets["label_space"] for job in measuring(asked) if job.facets.get("baseline") == "retrain"}
    assert marked == {"levels/depth1"}


def test_transfer_measures_the_blocks_that_it_names() -> None:
    head = HEAD[: HEAD.index("pretrain:")] + TWO_BLOCKS
    jobs = measuring(
        plan_of(
            f"{TOP}, protocol: knn", "name: one, target: levels/depth1, protocol: knn, pretrain: ['sm*']", head=head
        )
    )
    assert [(job.facets["transfer"], job.facets["pretrain"]) for job in jobs] == [
        ("top", "small"),
        ("top", "large"),
        ("one", "small"),
    ]


def test_fine_tuning_is_checked_on_the_networks_that_it_measures_alone() -> None:
    small, large = TWO_BLOCKS.split("  large: *block\n")
    resnet = small.replace("pretrain:\n", "").replace("small: &block", "large:").replace("test_vit", "resnet18")
    head = HEAD[: HEAD.index("pretrain:")] + small + resnet + large
    # 100 samples are no whole number of groups of BatchNorm, which a vision transformer has none of.
    odd = f"{TOP}, protocol: finetune, recipe: {{epochs: 2, batch_size: 100, lr: 0.1}}"
    assert {job.facets["pretrain"] for job in measuring(plan_of(f"{odd}, pretrain: [small]", head=head))} == {"small"}


def test_published_number_may_belong_to_a_retraining_baseline() -> None:
    transfer = "name: top, target: digit/digit, protocol: finetune"
    published = "report: {published: [{transfer: top, label_space: digit/digit, value: 0.1}]}\n"
    head = HEAD.replace("pretrain:\n", f"{published}pretrain:\n")
    sweep = sweep_of(f"{transfer}, baselines: [retrain]", head=head)
    assert sweep.published[0]["label_space"] == "digit/digit"


IMAGENET = "mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]"


def test_transfer_that_normalises_images_in_another_way_than_the_pretraining_is_warned_of_with_the_remedy() -> None:
    head = HEAD.replace("lr: 1e-3", f"lr: 1e-3, {IMAGENET}, resize: 40")

    def warnings(*transfers: str) -> list[str]:
        return list(other_normalizations(sweep_of(*transfers, head=head)))

    online, tuned = f"{TOP}, protocol: probe", "name: tuned, target: levels/depth1, protocol: finetune"
    cached = "name: cached, target: levels/depth1, protocol: probe, recipe: cached-probe-sgd"
    (told,) = warnings(online, tuned, cached)
    assert told.startswith(
        "top, tuned, cached: images are prepared with `mean: [0.5, 0.5, 0.5]`, `std: [0.5, 0.5, 0.5]` and "
        "`resize: null`, those of the pretraining with `mean: [0.485, 0.456, 0.406]`, `std: [0.229, 0.224, 0.225]` and "
        "`resize: 40`; "
    )
    assert warnings(f"{TOP}, protocol: probe, recipe: {{base: default-probe, {IMAGENET}}}") == []
    inheriting = "name: near, target: levels/depth1, protocol: knn"
    assert warnings(f"{TOP}, protocol: probe, recipe: cached-probe", inheriting) == []


def test_model_whose_name_has_a_tag_of_weights_that_nothing_loads_is_warned_of() -> None:
    tuned = f"{TOP}, protocol: finetune"
    head = HEAD.replace("name: test_vit,", "name: test_vit.r160_in1k,")
    (told,) = weights_not_loaded(sweep_of(tuned, head=head))
    assert told.startswith("pretrain: the name of the model `test_vit.r160_in1k` loads no weights")
    assert told.endswith("write `name: test_vit` and `init: {timm: r160_in1k}`")
    initialised = head.replace("  labels: ", "  init: {timm: r160_in1k}\n  labels: ", 1)
    assert list(weights_not_loaded(sweep_of(tuned, head=initialised))) == []


def test_recipe_whose_optimiser_has_no_trust_ratio_without_weight_decay_is_warned_of() -> None:
    head = HEAD.replace("lr: 1e-3", "lr: 1e-3, optimizer: lamb")
    tuned = f"{TOP}, protocol: finetune, recipe: {{{STEPS}, lr: 0.1, optimizer: lars%s}}"
    lamb, lars = missing_trust_ratios(sweep_of(tuned % "", head=head))
    assert lamb.startswith("pretrain: `optimizer: lamb` with `weight_decay: 0` has no trust ratio and updates as `opti")
    assert lars.startswith("top: `optimizer: lars` ")
    assert "as `optimizer: sgd` does" in lars
    assert list(missing_trust_ratios(sweep_of(tuned % ", weight_decay: 1e-4"))) == []


def test_search_that_chooses_backbones_by_images_of_their_pretraining_is_warned_of() -> None:
    head = HEAD.replace("labels: [levels/depth2]", "labels: [levels/depth1, levels/depth2]")

    def warnings(search: str, target: str = "levels/depth1", head: str = head) -> list[str]:
        transfer = f"name: top, target: {target}, protocol: probe, search: {search}"
        return list(selections_on_seen_images(sweep_of(transfer, head=head)))

    by_labels, by_recipe = "{over: labels, asha: {}}", "{over: pretrain, random: {}, space: {weight_decay: [0, 0.1]}}"
    for search in (by_labels, by_recipe):
        (told,) = warnings(search)
        assert told.startswith(
            "top: its search chooses among backbones by a tenth of the training images of `tree`, on "
        )
        assert "write `select_on: val`" in told
        assert warnings(search, "digit/digit") == []
        assert warnings(f"{search}, select_on: val") == []
    # One recipe for each backbone compares no backbones.
    assert warnings(f"{{random: {{}}, space: {{lr: [0.1, 0.2]}}}}, recipe: {{{STEPS}}}") == []


def test_search_for_backbones_beside_fractions_is_warned_of_with_the_subset_to_write() -> None:
    search = "protocol: knn, search: {over: pretrain, random: {}, space: {weight_decay: [0, 0.1]}}"
    (told,) = unused_fractions(sweep_of(f"{TOP}, {search}, fractions: [0.1, 0.5]"))
    assert told.startswith("top: its search does not read `fractions`")
    assert "write `subset: {fraction: 0.1}` in place of `fractions`" in told
    assert list(unused_fractions(sweep_of(f"{TOP}, {search}, subset: {{fraction: 0.1}}"))) == []


@pytest.mark.parametrize(
    ("trials", "at_once", "fewer"),
    [(10, 1, ", or `startup_trials` to 9 or less"), (13, 4, ", or `startup_trials` to 9 or less"), (4, 4, "")],
)
def test_search_of_which_optuna_guides_no_trial_is_warned_of(trials: int, at_once: int, fewer: str) -> None:
    def warnings(trials: int) -> list[str]:
        search = f"{{optuna: {{}}, trials: {trials}, concurrent: {at_once}, space: {{lr: {{log: [0.01, 1]}}}}}}"
        return list(unguided_searches(sweep_of(f"{TOP}, protocol: finetune, recipe: {{{STEPS}}}, search: {search}")))

    (told,) = warnings(trials)
    assert told.startswith(f"top: its search draws all of its {trials} trials at random: Optuna proposes none before ")
    assert told.endswith(f"{at_once} run at a time; set `trials` to {10 + at_once} or more{fewer}")
    assert warnings(10 + at_once) == []


def test_levels_with_the_same_classes_are_warned_of() -> None:
    def warnings(levels: str, branching: str) -> list[str]:
        head = HEAD.replace("branching: [2, 4]", f"branching: {branching}").replace("[depth1, depth2]", levels)
        head = head.replace("labels: [levels/depth2]", 'labels: ["levels/*"]')
        return list(repeated_levels(sweep_of(f"{TOP}, protocol: finetune", head=head)))

    (leaves,) = warnings("[depth1, depth2, leaf]", "[2, 4]")
    assert leaves.startswith("pretrain: levels/depth2, levels/leaf have the same classes: ")
    (inner,) = warnings("[depth1, depth2, depth3]", "[2, 1, 4]")
    assert "levels/depth1, levels/depth2 have" in inner
    assert warnings("[depth1, depth2, depth3]", "[2, 2, 2]") == []


@pytest.mark.parametrize(("nodes", "is_told"), [("ppppqqqq", True), ("pqpqpqpq", False)])
def test_levels_of_a_class_table_are_compared_class_by_class(nodes: str, is_told: bool) -> None:
    sweep = sweep_of(f"{TOP}, protocol: finetune", head=HEAD.replace("labels: [levels/depth2]", 'labels: ["levels/*"]'))
    rows = tuple({"depth1": one, "depth2": other} for one, other in zip("aaaabbbb", nodes, strict=True))
    tree = replace(sweep.datasets["tree"], levels={"depth1": 2, "depth2": 2}, class_table=rows)
    assert bool([*repeated_levels(replace(sweep, datasets={**sweep.datasets, "tree": tree}))]) == is_told


def test_seeds_and_norm_groups_that_nothing_reads_are_warned_of() -> None:
    tuned, vit = f"{TOP}, protocol: finetune", HEAD.replace("recipe: {epochs", "subset: SUBSET\n  recipe: {epochs")

    def warnings(head: str, transfer: str = tuned) -> list[str]:
        return list(unread_settings(sweep_of(transfer, head=head)))

    (told,) = warnings(vit.replace("SUBSET", "{fraction: 1.0, seed: 7}"), f"{tuned}, subset: {{seed: 7}}")
    assert told.startswith("pretrain, top: `subset.seed` chooses no samples where `subset` limits nothing")
    thin = vit.replace("SUBSET", "{fraction: 0.5, seed: 7}")
    assert warnings(thin, f"{tuned}, fractions: [0.5], subset: {{seed: 7}}") == []
    two = HEAD.replace("labels: [levels/depth2]", "labels: [levels/depth1, levels/depth2]")
    (seed,) = warnings(two, f"{TOP}, protocol: knn, search: {{over: labels, asha: {{}}, seed: 5}}")
    assert seed.startswith("top: `search.seed` draws nothing")
    groups = HEAD.replace("  seeds: [0, 1]\n", "  factors: {recipe.norm_group: [32, 64]}\n")
    (told,) = warnings(groups)
    assert told.startswith("pretrain.norm_group-32, pretrain.norm_group-64: `norm_group` is not read by `test_vit`")
    assert warnings(groups.replace("test_vit", "test_resnet")) == []
