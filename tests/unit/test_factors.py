"""Factors of pretrain blocks: their cells, names, facets and keys, and what a plan says of the design."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.errors import SpecError
from orchestrator.core.metrics import Better, better_of
from orchestrator.planning.estimate.estimates import Estimates, JobEstimate
from orchestrator.planning.graph.design import PlanDesign
from orchestrator.planning.graph.plan import Plan
from orchestrator.planning.graph.reuse import dispositions
from orchestrator.services.preview import summarize_design
from orchestrator.state.snapshot import JobView, Snapshot
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile.parse.document import Changes, read_document
from orchestrator.tracking.content import ContentReader, RecordCache
from orchestrator.tracking.facts import Timeline, job_facts
from orchestrator.tracking.links import shared_view
from tests.builders import make_job
from tests.sweep_fields import plan_of, portable_of

TEXT = """\
version: 1
name: study
datasets: {tree: {builtin: synthetic-hierarchy, branching: [2, 4], num_train: 512, num_val: 256}}
labels: {levels: {dataset: tree, hierarchy: [depth1, depth2]}}
pretrain:
  model: {name: test_vit, image_size: 32}
  labels: ["levels/*"]
  recipe: {epochs: 2, batch_size: 64, lr: 1e-3}
  seeds: [0, 1]
  factors:
    optimizer: {adamw: {}, lamb: {recipe: {optimizer: lamb, lr: 5.0e-3}}}
    mix: {none: {}, mixup: {recipe: {mixup: 0.2}}}
transfer: [{name: top, target: levels/depth1, protocol: probe, recipe: {epochs: 2, batch_size: 64, lr: 1e-3}}]
report: {baseline: {labels: levels/depth1, optimizer: lamb}, rows: [optimizer, labels]}
"""
PLAIN = "pretrain.factors=null"


def _backbones(plan: Plan) -> dict[str, str]:
    """Keys by name."""
    return {job.name: job.key for job in plan.jobs if job.kind.value == "pretrain"}


def _cells(plan: Plan) -> list[str]:
    return list(dict.fromkeys(str(job.facets["pretrain"]) for job in plan.jobs if "pretrain" in job.facets))


def _plan(*overrides: str) -> Plan:
    # The baseline names factors that a changed file may not have.
    return plan_of("report=null", *overrides, text=TEXT)


def test_full_design_has_a_block_for_each_combination_with_its_values_as_facets() -> None:
    plan = plan_of(text=TEXT)
    assert _cells(plan) == [
        "optimizer-adamw_mix-none",
        "optimizer-adamw_mix-mixup",
        "optimizer-lamb_mix-none",
        "optimizer-lamb_mix-mixup",
    ]
    job = plan.by_name()["probe/top/optimizer-lamb_mix-none/levels/depth2/seed1/seed0"]
    assert (job.facets["factor.optimizer"], job.facets["factor.mix"]) == ("lamb", "none")
    design = PlanDesign.of(plan)
    assert dict(design.factors) == {
        "optimizer": ("adamw", "lamb"),
        "mix": ("none", "mixup"),
        "labels": ("levels/depth1", "levels/depth2"),
    }
    assert (plan.rows, plan.baseline, plan.baseline_values) == (
        ("optimizer", "labels"),
        "levels/depth1",
        {"optimizer": "lamb"},
    )
    assert Plan.from_json(plan.to_json()) == plan


def test_first_values_that_change_nothing_share_the_keys_of_the_block_without_factors() -> None:
    plain, factors = _backbones(_plan(PLAIN)), _backbones(plan_of(text=TEXT))
    shared = {name: key for name, key in factors.items() if "optimizer-adamw_mix-none" in name}
    assert set(shared.values()) == set(plain.values())
    assert len(set(factors.values())) == 4 * len(plain)


def test_other_names_of_factors_and_values_change_no_key() -> None:
    renamed = TEXT.replace("optimizer: {adamw: {}, lamb: {", "solver: {a: {}, b: {").replace(
        "optimizer: lamb}, rows: [optimizer", "solver: b}, rows: [solver"
    )
    assert sorted(_backbones(plan_of(text=renamed)).values()) == sorted(_backbones(plan_of(text=TEXT)).values())


def test_cells_with_equal_identity_are_trained_once() -> None:
    plan = _plan("pretrain.factors.mix.again={recipe: {mixup: 0.2}}")
    assert len(_backbones(plan)) == 24
    assert len(set(_backbones(plan).values())) == 16
    found = dispositions(plan, (), ())
    estimates = Estimates(jobs={name: JobEstimate(seconds=3600.0, gpus=1.0) for name in _backbones(plan)})
    design = summarize_design(plan, found, estimates)
    assert design is not None
    assert (design.num_cells, design.num_shared) == (12, 4)
    # 12 of the 24 backbones have lamb, and 16 another mix than none.
    assert {cost.factor: cost.gpu_hours for cost in design.factors} == {"optimizer": 12.0, "mix": 16.0, "labels": 12.0}


def test_backbones_of_searches_are_cells_and_count_as_the_work_of_their_factors() -> None:
    plan = _plan("transfer.top.search={over: pretrain, random: {}, space: {batch_size: [32, 64]}}")
    assert not _backbones(plan)
    searches = [job.name for job in plan.jobs if job.kind.value == "search"]
    estimates = Estimates(jobs={name: JobEstimate(seconds=3600.0, gpus=1.0) for name in searches})
    design = summarize_design(plan, dispositions(plan, (), ()), estimates)
    assert design is not None
    assert (design.num_cells, design.num_shared) == (8, 0)
    assert {cost.factor: cost.gpu_hours for cost in design.factors} == {"optimizer": 8.0, "mix": 8.0, "labels": 8.0}
    assert _view(plan)[0] == ["factor.optimizer", "factor.mix", "label_space", "granularity"]


def test_block_that_every_transfer_searches_is_a_value_beside_one_that_is_pretrained() -> None:
    search = "{over: pretrain, random: {}, space: {batch_size: [32, 64]}}"
    more = f"{{name: found, target: levels/depth1, protocol: probe, pretrain: ['*lamb*'], search: {search}}}"
    first = TEXT[TEXT.index("transfer: [") : TEXT.index("report:")]
    text = TEXT.replace(first, first.replace("probe,", "probe, pretrain: ['*adamw*'],").replace("]\n", f", {more}]\n"))
    plan = plan_of("report=null", text=text)
    assert {name.split("_")[0] for name in _backbones(plan)} == {"pretrain/optimizer-adamw"}
    assert PlanDesign.of(plan).factors["optimizer"] == ("adamw", "lamb")


def test_one_at_a_time_and_listed_designs_run_what_they_say() -> None:
    assert _cells(_plan("pretrain.design=one_at_a_time")) == [
        "optimizer-adamw_mix-none",
        "optimizer-lamb_mix-none",
        "optimizer-adamw_mix-mixup",
    ]
    assert _cells(_plan("pretrain.design=[{mix: mixup}, {optimizer: lamb}]")) == [
        "optimizer-adamw_mix-mixup",
        "optimizer-lamb_mix-none",
    ]


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ("{recipe.lr: [0.1, 0.4]}", r"factors\.recipe\.lr: both 'optimizer' and 'lr' set recipe\.lr; make one factor"),
        (
            "{whole: {own: {}, other: {recipe: default-probe}}}",
            r"factors\.whole: both 'mix' and 'whole' set recipe\.mixup; make one factor of them",
        ),
    ],
)
def test_factors_of_which_two_set_one_field_are_refused_at_the_second(factors: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        _plan(f"pretrain.factors={factors}")


@pytest.mark.parametrize(
    ("overrides", "num_cells"),
    [
        (["pretrain.factors={rate: {low: {}, high: {recipe: {lr: 0.4}}}}", "pretrain.design=one_at_a_time"], 4),
        (["pretrain.factors={rate: {low: {}, high: {recipe: {lr: 5.0e-3}}}}"], 8),
        ([PLAIN, "pretrain.factors={whole: {own: {}, other: {recipe: default-probe}}, recipe.lr: [0.1, 0.4]}"], 4),
    ],
    ids=["no cell has both", "both set the same", "a named recipe is refined"],
)
def test_factors_that_overwrite_nothing_are_no_mistake(overrides: list[str], num_cells: int) -> None:
    assert len(_cells(_plan(*overrides))) == num_cells


def test_list_of_a_field_and_several_values_of_set_are_the_same_ordered_factor() -> None:
    listed = _plan(PLAIN, "pretrain.factors={recipe.lr: [0.1, 0.4]}")
    given = _plan(PLAIN, "pretrain.recipe.lr=0.1,0.4")
    assert listed.jobs == given.jobs
    design = PlanDesign.of(given)
    assert design.factors["lr"] == ("0.1", "0.4")
    assert design.is_ordered("lr")
    assert not design.is_ordered("labels")


def test_named_blocks_are_a_factor_without_those_that_continue_others() -> None:
    model = "{name: test_vit, image_size: 32}"
    block = f"{{model: {model}, labels: [levels/depth1], recipe: {{epochs: 2, batch_size: 64, lr: 1e-3}}"
    blocks = f"first: {block}}}, second: {block}}}, third: {block}, init: {{pretrain: first}}}}"
    text = TEXT[: TEXT.index("pretrain:")] + f"pretrain: {{{blocks}}}\n" + TEXT[TEXT.index("transfer:") :]
    plan = plan_of("report=null", text=text)
    assert PlanDesign.of(plan).factors == {"block": ("first", "second"), "labels": ("levels/depth1",)}
    assert not any(name.startswith("factor.") for job in plan.jobs for name in job.facets)


def test_block_of_several_means_all_of_its_cells_in_a_transfer() -> None:
    single = TEXT[TEXT.index("  model:") : TEXT.index("transfer:")]
    nested = "pretrain:\n  mine:\n" + "".join(f"  {line}\n" for line in single.splitlines())
    text = TEXT[: TEXT.index("pretrain:")] + nested + TEXT[TEXT.index("transfer:") :]
    plan = plan_of("report=null", "transfer.top.pretrain=[mine]", text=text)
    assert _cells(plan)[0] == "mine_optimizer-adamw_mix-none"
    assert PlanDesign.of(plan).factors["block"] == ("mine",)
    assert sum(job.kind.value == "probe" for job in plan.jobs) == 16


def _blocks(**factors: str) -> str:
    """The file with blocks of these names, each with its factors."""
    recipe = "{epochs: 2, batch_size: 64, lr: 1e-3}"
    rest = f"model: {{name: test_vit, image_size: 32}}, labels: [levels/depth1], recipe: {recipe}"
    blocks = ", ".join(f"{name}: {{{rest}, factors: {found}}}" for name, found in factors.items())
    return f"{TEXT[: TEXT.index('pretrain:')]}pretrain: {{{blocks}}}\n{TEXT[TEXT.index('transfer:') :]}"


_RATES = "recipe.lr: [0.1, 0.4]"


@pytest.mark.parametrize(
    ("small", "large", "factors"),
    [
        (f"{{size: small, {_RATES}}}", f"{{size: large, {_RATES}}}", {"lr": 2, "size": 2}),
        ("{size: small, lr: 0.1}", f"{{size: large, {_RATES}}}", {"lr": 2, "size": 2}),
        ("{lr: 0.2}", f"{{{_RATES}}}", {"lr": 3}),
        (f"{{{_RATES}}}", f"{{{_RATES}}}", {"lr": 2, "block": 2}),
        (f"{{study: one, {_RATES}}}", f"{{study: one, {_RATES}}}", {"lr": 2, "block": 2, "study": 1}),
    ],
    ids=["both have cells", "one has cells", "a value beside cells", "neither states a value", "both state the same"],
)
def test_blocks_that_state_different_values_are_told_apart_by_these_alone(
    small: str, large: str, factors: dict[str, int]
) -> None:
    plan = plan_of("report=null", text=_blocks(small=small, large=large))
    found = PlanDesign.of(plan).factors
    assert {name: len(values) for name, values in found.items() if name != "labels"} == factors


def test_cells_of_the_only_named_block_have_its_name_also_beside_a_value_that_it_states() -> None:
    plan = plan_of("report=null", text=_blocks(small=f"{{study: one, {_RATES}}}"))
    assert PlanDesign.of(plan).factors["block"] == ("small",)


def test_name_of_a_block_means_its_cells_also_where_it_is_no_value() -> None:
    text = _blocks(small=f"{{size: small, {_RATES}}}", large=f"{{size: large, {_RATES}}}")
    plan = plan_of("report=null", "transfer.top.pretrain=[large]", text=text)
    assert {job.facets["pretrain"] for job in plan.jobs if job.kind.value == "probe"} == {
        "large_lr-0.1",
        "large_lr-0.4",
    }


def test_name_of_a_block_means_the_blocks_that_several_values_of_set_make_of_it() -> None:
    text = _blocks(small="{size: small}", large="{size: large}")
    changes = ("report=null", "transfer.top.pretrain=[large, small]", "pretrain.large.recipe.norm_group=16,null")
    plan = plan_of(*changes, text=text)
    probed = {job.facets["pretrain"]: job.facets.get("factor.norm_group") for job in plan.jobs if job.kind == "probe"}
    assert probed == {"large_norm_group-16": "16", "large_norm_group-None": "null", "small": None}
    assert plan_of(text=portable_of(*changes, text=text).canonical).jobs == plan.jobs
    only = plan_of(*changes, "transfer.top.pretrain=[small]", text=text)
    assert {job.facets["pretrain"] for job in only.jobs if job.kind == "probe"} == {"small"}


def test_canonical_form_keeps_the_factors_and_plans_the_same() -> None:
    canonical = portable_of(text=TEXT).canonical
    assert "factors:" in canonical
    assert plan_of(text=canonical).jobs == plan_of(text=TEXT).jobs


def test_long_names_of_cells_end_in_a_hash_and_stay_apart() -> None:
    values = "{" + ", ".join(f"{'long' * 15}{n}: {{recipe: {{lr: 0.{n}}}}}" for n in (1, 2)) + "}"
    alone = ("pretrain.factors.optimizer=null", "pretrain.factors.mix=null")
    names = _cells(_plan(*alone, "pretrain.factors={rate: " + values + "}"))
    assert len(set(names)) == 2
    assert {len(name) for name in names} == {63}


def test_mistake_that_several_cells_share_is_told_once() -> None:
    with pytest.raises(SpecError) as error:
        plan_of("pretrain.recipe.lr=fast", "pretrain.factors.optimizer.lamb={}", text=TEXT)
    assert len(error.value.problems) == 1


def test_factors_of_a_stored_plan_have_the_order_of_the_file_though_its_facets_are_sorted() -> None:
    plan = _plan()
    stored = replace(plan, jobs=tuple(replace(job, facets=dict(sorted(job.facets.items()))) for job in plan.jobs))
    assert list(PlanDesign.of(stored).factors) == list(PlanDesign.of(plan).factors) == ["optimizer", "mix", "labels"]


def _view(plan: Plan) -> tuple[list[str], str]:
    """Axes of the parallel coordinates that MLflow's pages show of a sweep, and that of the scatter plot."""
    view = next(text for name, text in shared_view(plan).items() if "sharedViewState" in name)
    charts = {chart["type"]: chart for chart in json.loads(view)["compareRunCharts"]}
    return charts["PARALLEL"]["selectedParams"], charts["SCATTER"]["xaxis"]["key"]


def test_mlflow_has_factors_as_parameters_tags_and_axes_of_the_view_that_compares(tmp_path: Path) -> None:
    plan = _plan()
    reader = ContentReader(LocalStore(tmp_path), plan, RecordCache(LocalStore(tmp_path)), {})
    job = plan.by_name()["probe/top/optimizer-lamb_mix-none/levels/depth2/seed1/seed0"]
    view = JobView(name=job.name, key=job.key, ended_at_s=1.0)
    said = reader.read(job, view, segments=(), run=None, is_told=False)
    facts = job_facts(Timeline(snapshot=Snapshot(sweep="s")), view, job)
    assert facts is not None
    for found in (said.params, facts.tags):
        assert (found["factor.optimizer"], found["factor.mix"]) == ("lamb", "none")
    assert _view(plan) == (["factor.optimizer", "factor.mix", "label_space", "granularity"], "granularity")
    numbers = _plan("pretrain.factors={recipe.epochs: [2, 4]}")
    assert _view(numbers) == (
        ["factor.optimizer", "factor.mix", "factor.epochs", "label_space", "granularity"],
        "factor.epochs",
    )
    assert _view(_plan(PLAIN)) == (["label_space", "granularity"], "granularity")


def test_blocks_are_an_axis_of_the_view_by_the_parameter_that_names_them() -> None:
    block = (
        "{model: {name: test_vit, image_size: 32}, labels: ['levels/*'], recipe: {epochs: 2, batch_size: 64, lr: %s}}"
    )
    plan = _plan("pretrain=null", f"pretrain={{low: {block % '1e-3'}, high: {block % '1e-2'}}}")
    assert _view(plan)[0] == ["pretrain", "label_space", "granularity"]


def test_plan_whose_backbones_have_no_facets_has_a_view_too() -> None:
    jobs = (make_job("pretrain/one"), make_job("pretrain/two"))
    assert _view(Plan(sweep="study", revision=0, store_uri="", jobs=jobs, baseline=""))[0] == [
        "label_space",
        "granularity",
    ]


@pytest.mark.parametrize(
    ("metric", "better"),
    [
        ("val_error", Better.LOWER),
        ("val_error_hard", Better.LOWER),
        ("val_level_error_map", Better.LOWER),
        ("images_per_s", Better.HIGHER),
        ("gpu_hours", Better.LOWER),
        ("my_accuracy", Better.HIGHER),
        ("samples_per_s", Better.HIGHER),
        ("calibration", Better.LOWER),
    ],
)
def test_direction_of_a_metric_is_its_row_or_a_word_of_its_name(metric: str, better: Better) -> None:
    assert better_of(metric) is better


@pytest.mark.parametrize("metric", ["val_level_error_depth1", "val_k10_error", "peak_epoch", "num_trained_parameters"])
def test_whatever_the_records_of_all_runs_hold_can_be_reported(metric: str) -> None:
    assert _plan(f"report.metric={metric}").metric == metric


@pytest.mark.parametrize("metric", ["val_level_error", "val_kk_error", "val_k0_error"])
def test_metrics_that_no_level_and_no_number_of_neighbours_has_are_refused(metric: str) -> None:
    with pytest.raises(SpecError, match=r"report\.metric: "):
        _plan(f"report.metric={metric}")


def test_metric_of_a_level_is_refused_only_where_all_levels_are_known() -> None:
    metric = "report.metric=val_level_error_phylum"
    with pytest.raises(SpecError, match=r"'phylum' is not a level of a data set of this sweep: known: depth1, depth2"):
        _plan(metric)
    shards = '{shards: {train: "file:///p/", val: "file:///v/"}, num_train: 512, num_classes: 4}'
    foreign = ("datasets.far=" + shards, "labels.far={dataset: far, hierarchy: [leaf]}")
    assert _plan(*foreign, metric).metric == "val_level_error_phylum"


def test_change_of_all_blocks_counts_if_it_changes_one_of_them() -> None:
    begin = TEXT.index("pretrain:")
    blocks = """\
pretrain:
  one: {model: {name: test_vit, image_size: 32}, labels: levels/depth1, recipe: {epochs: 9, batch_size: 8, lr: 0.1}}
  two:
    model: {name: test_vit, image_size: 32}
    labels: levels/depth1
    recipe: {batch_size: 8, lr: 0.1}
    factors: {recipe.epochs: [30, 90]}
tiny: {pretrain: {"*": {recipe: {epochs: 1}}}}
"""
    tree = read_document(TEXT[:begin] + blocks, "sweep.yaml", changes=Changes(scale="tiny")).tree
    assert sorted(block["recipe"]["epochs"] for block in tree.value["pretrain"].values()) == [1, 30, 90]


TINY = "tiny: {pretrain: {recipe: {epochs: 1}}}\n"


@pytest.mark.parametrize(
    ("factor", "more", "epochs"),
    [
        ("recipe.epochs: [1]", (), [1]),
        ("recipe.epochs: [30, 90]", ("pretrain.factors.recipe.epochs=[1]", "pretrain.recipe.lr=0.5"), [1]),
        ("length: {short: {}, long: {recipe: {epochs: 90}}}", (), [1, 90]),
        ("recipe.lr: [0.1, 0.2]", ("pretrain.recipe.epochs=3",), [3, 3]),
    ],
)
def test_scale_and_set_change_what_no_factor_decides(factor: str, more: tuple[str, ...], epochs: list[int]) -> None:
    """Whatever all values of a factor set is refused: see the golden refusals."""
    begin, end = TEXT.index("    optimizer: {adamw"), TEXT.index("transfer:")
    text = f"{TEXT[:begin]}    {factor}\n{TEXT[end : TEXT.index('report:')]}{TINY}"
    tree = read_document(text, "sweep.yaml", changes=Changes(scale="tiny", overrides=more)).tree
    assert [block["recipe"]["epochs"] for block in tree.value["pretrain"].values()] == epochs
