"""The jobs of searches: who waits for whom, what they hold, and whose keys stay what they were."""

from __future__ import annotations

import pytest

from orchestrator.core.contract import Resources
from orchestrator.core.errors import UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.core.plugins import AUGMENTATIONS, OBJECTIVES
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.report.build import compute_report
from orchestrator.report.inputs import Committed
from orchestrator.scheduling.commands import FailJob
from orchestrator.search.search_plan import SearchPlan, combined
from orchestrator.state.nodes import Node
from orchestrator.sweepfile.load import load_sweep, parse_sweep
from orchestrator.sweepfile.parse.document import read_document
from orchestrator.sweepfile.plugin_uses import PluginSources
from orchestrator.sweepfile.sweep import resolve_sweep, validate_sweep
from orchestrator.tracking.attachments import best_backbone
from tests.builders import request_of
from tests.integration.search_jobs import SWEEP, search_request
from tests.scheduler_cases import after, decide
from tests.sweep_fields import plan_of as plan_of_all_fields

RANDOM = "{random: {}, space: {lr: {log: [0.01, 1.0]}}, trials: 9, concurrent: 8}"
OVER_LABELS = "{asha: {}, over: labels, concurrent: 2}"


def plan_of(tmp_path, search: str, *, recipe: str = "{epochs: 9, batch_size: 16}", more: str = "") -> Plan:
    text = SWEEP.replace("SEARCH", search).replace(
        "recipe: {epochs: 9, batch_size: 16}\n    search", f"recipe: {recipe}\n    search"
    )
    path = tmp_path / "sweep.yaml"
    path.write_text(text.replace("    labels: [levels/depth2]\n", "") + more)
    sweep, _ = load_sweep(str(path))
    return build_plan(sweep, store_uri="file:///store")


def test_search_over_a_recipe_stands_between_backbones_and_their_transfers(tmp_path):
    jobs = plan_of(tmp_path, RANDOM).by_name()
    search = jobs["search/tuned/levels/depth2"]
    assert search.resources == Resources(cpus=8.0)
    assert search.execution.num_workers == 8
    assert "pretrain/levels/depth2/seed0" in search.needs
    transfer = jobs["finetune/tuned/levels/depth2/seed0/seed0"]
    assert {"search/tuned/levels/depth2", "pretrain/levels/depth2/seed0"} <= set(transfer.needs)
    assert "lr" not in transfer.identity["parameters"]["recipe"]
    assert [job.name for job in jobs.values() if job.kind is JobKind.SEARCH] == [
        "search/tuned/levels/depth1",
        "search/tuned/levels/depth2",
    ]


def test_best_backbone_of_transfers_with_a_searched_recipe_is_the_one_that_transfers_best():
    """The search measures the first backbone, which was taken for that of all transfers."""
    text = SWEEP.replace("SEARCH", RANDOM).replace("lr: 0.05}\n", "lr: 0.05}\n  seeds: [0, 1]\n")
    plan = build_plan(parse_sweep(text, "sweep.yaml", {}), store_uri="file:///store")
    errors = (0.2, 0.1)
    found = {
        job.name: Committed(metrics={"val_error": errors[int(job.facets["pretrain_seed"])]})
        for job in plan.jobs
        if job.kind is JobKind.FINETUNE
    }
    best = best_backbone(plan, compute_report(plan, found))
    assert best is not None
    assert (best.job.name, best.error) == ("pretrain/levels/depth2/seed1", 0.1)
    seed = "Best seed (of 2, chosen by val_error)"
    assert best.reason == f"{seed} of the label space with the lowest mean val_error, 15.00 ± 7.07 %"


@pytest.mark.parametrize(
    ("errors", "name"),
    [
        ((0.3, 0.4, 0.1, 0.2), "second/levels/depth2/seed0"),
        ((0.3, 0.2, 0.1), "first/levels/depth2/seed1"),
    ],
    ids=["of all", "of those with all seeds"],
)
def test_best_backbone_of_several_blocks_is_looked_for_in_the_tables_of_all(
    errors: tuple[float, ...], name: str
) -> None:
    """Every block has its own table, and the first one alone was looked at."""
    text = SWEEP.replace("16}\n    search: SEARCH", "16, lr: 0.1}").replace("0.05}", "0.05}\n  seeds: [0, 1]")
    one = text[text.index("  model:") : text.index("transfer:")].replace("\n  ", "\n    ").rstrip()
    text = text.replace(
        text[text.index("  model:") : text.index("transfer:")], f"  first:\n  {one}\n  second:\n  {one}\n"
    )
    plan = build_plan(parse_sweep(text, "sweep.yaml", {}), store_uri="file:///store")
    jobs = (job.name for job in plan.jobs if job.kind is JobKind.FINETUNE)
    found = {job: Committed(metrics={"val_error": error}) for job, error in zip(jobs, errors, strict=False)}
    best = best_backbone(plan, compute_report(plan, found))
    assert best is not None
    assert best.job.name == f"pretrain/{name}"


def test_search_over_labels_makes_the_backbones_itself(tmp_path):
    jobs = plan_of(tmp_path, OVER_LABELS, recipe="{epochs: 9, batch_size: 16, lr: 0.1}").by_name()
    assert not [name for name in jobs if name.startswith("pretrain/")]
    search = jobs["search/tuned/seed0"]
    assert search.identity["parameters"]["metric"] == "target_select_error"
    assert search.identity["parameters"]["space"] == {"label_space": {"values": ["levels/depth1", "levels/depth2"]}}
    best = jobs["finetune/tuned/best/seed0/seed0"]
    assert best.identity["inputs"]["search"] == search.key
    assert "backbone" not in best.identity["inputs"]


ALIKE = """
version: 1
name: alike
datasets:
  tree: {builtin: synthetic-hierarchy, branching: [2, 2], image_size: 16, patch_size: 4, num_train: 96, num_val: 48}
labels: {animals: {dataset: tree, modulo: 2}, plants: {dataset: tree, modulo: 3}}
pretrain:
  model: {name: test_vit, image_size: 16}
  labels: [animals, plants]
  recipe: {epochs: 9, batch_size: 16, lr: 0.05}
transfer:
  - name: animals
    target: animals
    protocol: probe
    recipe: &cached {features: cached}
    search: {over: labels, asha: {}}
  - {name: other, target: animals, protocol: probe, recipe: *cached}
"""


@pytest.mark.parametrize("search", ["{over: labels, asha: {}}", "{over: pretrain, asha: {}, space: {lr: [0.1, 0.2]}}"])
@pytest.mark.parametrize("intervals", [(1, 5), (5, 1)], ids=str)
def test_first_rung_of_each_block_is_its_own_first_validation(search: str, intervals: tuple[int, int]) -> None:
    """That of one block was taken for all: it lay before the validations of another one, or after its last epoch."""
    head, _, rest = ALIKE[: ALIKE.index("  - {name: other")].partition("pretrain:\n")
    block = (
        "{model: {name: test_vit, image_size: 16}, labels: [animals, plants], recipe: {epochs: 9, batch_size: 16, %s}}"
    )
    fields = "lr: 0.05, eval_every_epochs:"
    blocks = "".join(f"  every{every}: {block % f'{fields} {every}'}\n" for every in intervals)
    text = f"{head}pretrain:\n{blocks}{rest[rest.index('transfer:') :]}".replace("{over: labels, asha: {}}", search)
    plan = build_plan(parse_sweep(text, "sweep.yaml", {}), store_uri="file:///store")
    rungs = {
        (job.facets["pretrain"], job.identity["parameters"]["algorithm"]["asha"]["grace_epochs"])
        for job in plan.jobs
        if job.kind is JobKind.SEARCH
    }
    assert rungs == {("every1", 1), ("every5", 5)}


@pytest.mark.parametrize(("multi_label", "loss"), [("true", "sigmoid"), ("false", "softmax")])
def test_probe_that_judges_a_search_takes_as_many_classes_as_samples_have(multi_label: str, loss: str) -> None:
    """It took one of data whose samples have several, and every trial failed."""
    plan = plan_of_all_fields(
        f"datasets.counted.multi_label={multi_label}",
        f"pretrain.first.recipe.loss={loss}",
        "transfer.seek.target=plain/leaf",
        f"transfer.seek.recipe={{epochs: 2, batch_size: 64, lr: 0.1, loss: {loss}}}",
        "transfer.seek.search.over=pretrain",
        "resources.pretrain.gpus=1",
    )
    (search,) = [job for job in plan.jobs if job.kind is JobKind.SEARCH]
    assert search.identity["parameters"]["probe"]["recipe"]["loss"] == loss


def test_features_of_a_searched_backbone_are_apart_from_those_of_a_label_space_of_its_name() -> None:
    jobs = build_plan(parse_sweep(ALIKE, "sweep.yaml", {}), store_uri="file:///store").jobs
    before: dict[str, str] = {}
    for job in jobs:
        assert job.name not in before
        assert set(job.needs) <= before.keys()
        assert set(job.identity["inputs"].values()) <= {before[need] for need in job.needs}, job.name
        before[job.name] = job.key
    assert {"embed/search/animals/seed0/tree/train", "embed/animals/seed0/tree/train"} <= before.keys()


@pytest.mark.parametrize(
    ("other", "trained"),
    [
        ("", set()),
        (
            "  - {name: other, target: animals, labels: [animals], protocol: probe, recipe: *cached}\n",
            {"pretrain/animals/seed0", "pretrain/stones/seed0"},
        ),
    ],
)
def test_label_spaces_that_no_search_trains_are_pretrained_as_usual_beside_a_transfer_without_one(
    other: str, trained: set[str]
) -> None:
    text = ALIKE[: ALIKE.index("  - {name: other")].replace(
        "plants: {dataset: tree, modulo: 3}", "plants: {dataset: tree, modulo: 3}, stones: {dataset: tree, modulo: 4}"
    )
    text = text.replace("[animals, plants]", "[animals, plants, stones]").replace(
        "{over: labels, asha: {}}", "{over: pretrain, asha: {}, space: {lr: [0.1, 0.2]}}\n    labels: [plants]"
    )
    jobs = build_plan(parse_sweep(text + other, "sweep.yaml", {}), store_uri="file:///store").by_name()
    assert {name for name in jobs if name.startswith("pretrain/")} == trained
    assert {name for name in jobs if name.startswith("search/")} == {"search/animals/plants/seed0"}


def test_two_different_jobs_of_one_name_are_refused() -> None:
    text = ALIKE.replace("animals", "best").replace("    search:", "    baselines: [retrain]\n    search:")
    with pytest.raises(
        UserError, match="two different jobs of sweep 'alike' have the name 'probe/best/best/seed0/seed0'"
    ):
        build_plan(parse_sweep(text, "sweep.yaml", {}), store_uri="file:///store")


def test_trials_over_labels_are_the_pretrainings_that_a_plan_without_a_search_has(tmp_path):
    """So either reuses what the other finished."""
    searched = plan_of(tmp_path, OVER_LABELS, recipe="{epochs: 9, batch_size: 16, lr: 0.1}")
    (search,) = [job for job in searched.jobs if job.kind is JobKind.SEARCH]
    plain = (
        "  - {name: plain, target: levels/depth1, protocol: finetune, recipe: {epochs: 9, batch_size: 16, lr: 0.1}}\n"
    )
    both = plan_of(tmp_path, OVER_LABELS, recipe="{epochs: 9, batch_size: 16, lr: 0.1}", more=plain).by_name()
    request = request_of(search, "")
    for space in ("levels/depth1", "levels/depth2"):
        assert SearchPlan.of(request).key_of({"label_space": space}) == both[f"pretrain/{space}/seed0"].key


def test_trial_over_a_recipe_is_the_transfer_that_names_the_same_values(tmp_path, store_at):
    request = search_request(store_at, tmp_path, "{random: {}, space: {lr: [0.1, 0.2], momentum: [0.5, 0.9]}}")
    recipe = "{epochs: 9, batch_size: 16, lr: 0.2, momentum: 0.5, select_holdout: 0.1}"
    text = SWEEP.replace("recipe: {epochs: 9, batch_size: 16}\n", f"recipe: {recipe}\n").replace(
        "    search: SEARCH\n", ""
    )
    (tmp_path / "plain.yaml").write_text(text)
    sweep, _ = load_sweep(str(tmp_path / "plain.yaml"))
    plain = build_plan(sweep, store_uri="file:///store").by_name()["finetune/tuned/levels/depth2/seed0/seed0"]
    assert SearchPlan.of(request).key_of({"lr": 0.2, "momentum": 0.5}) == plain.key


@pytest.mark.parametrize(
    ("space", "values", "field"),
    [
        ("{weight_decay: [0.0, 0.1]}", {"weight_decay": 0.1}, "weight_decay_on"),
        ("{weight_decay: {uniform: [0.0, 0.1]}}", {"weight_decay": 0.1}, "weight_decay_on"),
        ("{optimizer: [sgd, adamw]}", {"optimizer": "adamw"}, "betas"),
        ("{schedule: [cosine, step]}", {"schedule": "step"}, "milestones"),
        ("{mixup: [0.0, 0.2], cutmix: [0.0, 1.0]}", {"mixup": 0.2, "cutmix": 1.0}, "cutmix_share"),
    ],
)
@pytest.mark.parametrize(("over", "is_inline"), [("recipe", False), ("recipe", True), ("pretrain", False)])
def test_trial_reads_what_its_recipe_says_though_other_values_of_the_space_do_not(
    tmp_path, space, values, field, over, is_inline
):
    """Fields that the first value of the space does not read were lost to all trials, or refused."""
    fields = {"weight_decay_on": "no_bias_norm", "betas": "[0.8, 0.95]", "milestones": "[2, 4]", "cutmix_share": "0.3"}
    written = ", ".join(f"{name}: {value}" for name, value in fields.items())
    more = f"recipes:\n  mine: {{epochs: 9, batch_size: 16, lr: 0.1, weight_decay: 0.0, {written}}}\n"
    own = f"{{base: mine, {field}: {fields[field]}}}" if is_inline else "mine"

    def planned(search: str, recipe: str) -> Plan:
        text = SWEEP.replace("    labels: [levels/depth2]\n", "")
        if over == "recipe":
            text = text.replace("recipe: {epochs: 9, batch_size: 16}\n", f"recipe: {recipe}\n")
        else:
            text = text.replace("recipe: {epochs: 9, batch_size: 16, lr: 0.05}\n", f"recipe: {recipe}\n")
            text = text.replace("recipe: {epochs: 9, batch_size: 16}\n", "recipe: {epochs: 9, batch_size: 16, lr: 1}\n")
        text = text.replace("    search: SEARCH\n", f"    search: {search}\n" if search else "")
        (tmp_path / "sweep.yaml").write_text(text + more)
        return build_plan(load_sweep(str(tmp_path / "sweep.yaml"))[0], store_uri="file:///store")

    searched = planned(f"{{over: {over}, random: {{}}, space: {space}}}", own)
    (search, *_) = [job for job in searched.jobs if job.kind is JobKind.SEARCH]
    fixed = {"select_holdout": 0.1} if over == "recipe" else {}
    written = ", ".join(f"{name}: {value}" for name, value in {**values, **fixed}.items())
    kind = "finetune/tuned" if over == "recipe" else "pretrain"
    (plain, *_) = [job for job in planned("", f"{{base: mine, {written}}}").jobs if job.name.startswith(kind)]
    assert field in plain.identity["parameters"]["recipe"]
    assert SearchPlan.of(request_of(search, "")).identity_of(values)["parameters"] == plain.identity["parameters"]


def test_trials_of_cached_features_see_images_as_the_transfer_that_names_the_same_values(tmp_path):
    """A recipe with an optimizer inherits no preprocessing from the pretraining, also while a search has its lr."""

    def planned(fields: str, search: str) -> Plan:
        head, _, _ = SWEEP.replace("lr: 0.05}", "lr: 0.05, interpolation: bicubic, mean: [0.4, 0.4, 0.4]}").partition(
            "    protocol:"
        )
        cached = f"{{features: cached, solver: sgd, epochs: 2, batch_size: 16, interpolation: bilinear{fields}}}"
        (tmp_path / "sweep.yaml").write_text(f"{head}    protocol: probe\n    recipe: {cached}\n{search}")
        return build_plan(load_sweep(str(tmp_path / "sweep.yaml"))[0], store_uri="file:///store")

    def features(plan: Plan) -> set[str]:
        return {job.key for job in plan.jobs if job.kind is JobKind.EMBED}

    searched = planned("", "    search: {random: {}, space: {lr: [0.1, 0.2]}}\n")
    plain = planned(", lr: 0.2, select_holdout: 0.1", "")
    assert features(searched) == features(plain) != set()
    searches = [job for job in searched.jobs if job.kind is JobKind.SEARCH]
    trials = {SearchPlan.of(request_of(search, "")).key_of({"lr": 0.2}) for search in searches}
    assert trials <= {job.key for job in plain.jobs}


def test_plugins_in_a_space_are_the_references_that_a_recipe_names(tmp_path):
    text = SWEEP.replace("SEARCH", "{random: {}, space: {loss: [softmax, focal], augment_plugin: [null, cut]}}")
    tree = read_document(
        text.replace("batch_size: 16}\n    search", "batch_size: 16, lr: 1}\n    search"), "s.yaml"
    ).tree
    installed = {OBJECTIVES: {"focal": "mine==1.0:focal"}, AUGMENTATIONS: {"cut": "mine==1.0:cut"}}
    sweep = resolve_sweep(validate_sweep(tree), tree, {}, plugins=PluginSources(installed=installed))
    (search, *_) = [job for job in build_plan(sweep, store_uri="file:///store").jobs if job.kind is JobKind.SEARCH]
    space = search.identity["parameters"]["space"]
    assert space == {
        "loss": {"values": ["softmax", "mine==1.0:focal"]},
        "augment_plugin": {"values": [None, "mine==1.0:cut"]},
    }
    trial = SearchPlan.of(request_of(search, "")).identity_of({"loss": "mine==1.0:focal", "augment_plugin": None})
    assert trial["parameters"]["recipe"]["loss"] == "mine==1.0:focal"


def test_retrained_baseline_beside_a_search_over_labels_is_not_the_searched_backbone(tmp_path):
    plan = plan_of(tmp_path, OVER_LABELS + "\n    baselines: [retrain]", recipe="{epochs: 9, batch_size: 16, lr: 0.1}")
    baselines = [job.name for job in plan.jobs if job.facets.get("baseline")]
    assert baselines == ["finetune/tuned/levels/depth1/seed0/seed0"]


@pytest.fixture
def store_at(tmp_path):
    from orchestrator.storage.local import LocalStore

    return LocalStore(tmp_path / "store")


def test_combined_recipe_of_a_resolved_one_is_itself(tmp_path):
    recipe = plan_of(tmp_path, RANDOM).by_name()["pretrain/levels/depth1/seed0"].identity["parameters"]["recipe"]
    assert combined(recipe, {}, "") == recipe
    assert combined(recipe, {"optimizer": "adamw"}, "")["optimizer"] == "adamw"


def test_number_of_trials_over_labels_may_be_written_and_changes_no_key(tmp_path):
    recipe = "{epochs: 9, batch_size: 16, lr: 0.1}"
    one, other = (
        plan_of(tmp_path, f"{{asha: {{}}, over: labels{trials}}}", recipe=recipe) for trials in ("", ", trials: 2")
    )
    assert [job.key for job in one.jobs] == [job.key for job in other.jobs]


def test_concurrency_changes_no_key(tmp_path):
    one, many = (plan_of(tmp_path, RANDOM.replace("8", number)) for number in "18")
    assert [job.key for job in one.jobs] == [job.key for job in many.jobs]


def test_search_larger_than_the_cluster_is_infeasible_and_names_the_knob(tmp_path):
    plan = plan_of(tmp_path, RANDOM)
    before = [
        job for job in plan.jobs if job.kind in {JobKind.DATASET, JobKind.INDEX, JobKind.LABELS, JobKind.PRETRAIN}
    ]
    snapshot = after(plan, *(reused(job) for job in before))
    commands = decide(snapshot, nodes=(Node(name="a", resources=Resources(cpus=4.0)),))
    failed = [one for one in commands if isinstance(one, FailJob) and one.job.startswith("search/")]
    assert len(failed) == 2
    assert "8 CPU for 8 workers (1 CPU each)" in failed[0].reason
    assert "lower search.concurrent" in failed[0].reason


def reused(job):
    from orchestrator.state import events

    return events.JobReused(at_s=1.0, job=job.name, key=job.key)
