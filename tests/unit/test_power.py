"""Power: against the noncentral t distribution, against simulated sweeps, and the command on stores and plans."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from orchestrator.cli.commands.plan import PlanOptions, show_plan
from orchestrator.cli.commands.power import PowerOptions, _lines, show_power
from orchestrator.cli.output import DocumentForm
from orchestrator.core.errors import NotFoundError, UsageError, UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.estimate.estimates import estimate
from orchestrator.planning.estimate.power import (
    MOST_SEEDS,
    Comparisons,
    Design,
    Noise,
    chance_of,
    least_shift,
    power_of,
    seeds_needed,
    smallest_difference,
    weak_designs,
)
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.planning.graph.build import build_plan
from orchestrator.report.build import compute_report
from orchestrator.report.inputs import Committed
from orchestrator.report.render.curves import PowerPanel, draw_power, encode_png
from orchestrator.report.statistics.summaries import SeedPair, noise_of
from orchestrator.services.power import JobCost, PowerQuestion, _added, _of_table, _prices, _with_effects, answer_power
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile.load import parse_sweep
from orchestrator.sweeps.client import load_plan
from tests.power_simulation import Truth, effect_shares, found_share, runs_of
from tests.report_sweeps import StudyPlan, accept
from tests.sample_sweep import commit, sample_metrics, sample_plan
from tests.sweep_fields import plan_of

SWEEP = """\
version: 1
name: seeds
datasets:
  tree: {{builtin: synthetic-hierarchy, branching: [2, 3], image_size: 16, patch_size: 4, num_train: 96, num_val: 48}}
labels:
  levels: {{dataset: tree, hierarchy: [depth1, depth2]}}
pretrain:
  model: {{name: test_vit, image_size: 16, kwargs: {{patch_size: 4}}}}
  labels: [levels/*]
  recipe: {{epochs: 1, batch_size: 32, lr: 0.05}}
  seeds: {seeds}
transfer:
  - {{name: tuned, target: levels/depth1, protocol: finetune, recipe: {{epochs: 1, batch_size: 16, lr: 0.01}},
     seeds: {transfer_seeds}}}
  - {{name: frozen, target: levels/depth1, protocol: probe, recipe: {{epochs: 1, batch_size: 16, lr: 0.01,
     features: cached, solver: sgd}}}}
report: {{baseline: levels/depth1}}
"""


SLOW = pytest.mark.slow
FIVE_SPACES = Comparisons.of_spaces(5, has_baseline=True)


def known(std=1.0, transfer_std=None):
    return Noise(pretrain_std=std, transfer_std=transfer_std, num_pretrain_seeds=0, freedom=math.inf)


@pytest.mark.parametrize(
    ("num", "comparisons", "difference"),
    [(2, 1, 20.0), (3, 4, 8.0), (3, 300, 60.0), (5, 4, 4.0), (6, 4, 3.0), (10, 33, 2.5), (20, 33, 1.5), (3000, 4, 0.1)],
)
def test_power_is_that_of_the_noncentral_t_distribution(num, comparisons, difference):
    family = Comparisons.of_spaces(comparisons + 1, has_baseline=True)
    critical, shift = stats.t.ppf(1 - family.level / 2, num - 1), difference * math.sqrt(num)
    expected = 1 - stats.nct.cdf(critical, num - 1, shift)  # the other tail is below 1e-9, and nan in scipy
    found = power_of(Design(num_pretrain_seeds=num), known(), difference, family)
    assert found == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(
    ("truth", "num_pretrain", "num_transfers", "num_spaces"),
    [
        (Truth(effect=1.3), 3, 1, 3),
        pytest.param(Truth(effect=0.75, pretrain_std=0.3, transfer_std=0.3), 5, 3, 5, marks=SLOW),
    ],
)
def test_power_is_that_of_2000_simulated_sweeps_to_3_points(truth, num_pretrain, num_transfers, num_spaces):
    """By the report's own comparisons and corrections; over more designs in the benchmarks."""
    design = Design(num_pretrain_seeds=num_pretrain, num_transfer_seeds=num_transfers)
    predicted = power_of(design, truth.noise, truth.effect, Comparisons.of_spaces(num_spaces, has_baseline=True))
    assert 0.2 < predicted < 0.95
    assert found_share(truth, design, num_spaces, num_sweeps=2000, seed=1) == pytest.approx(predicted, abs=0.03)


@pytest.mark.parametrize(("num", "shift"), [(2, 30.0), (3, 6.0), (5, 4.0), (10, 3.5)])
def test_power_of_independent_samples_is_that_of_simulated_welch_tests(num, shift):
    random, level = np.random.default_rng(num), 0.01
    one, other = random.standard_normal((2, num, 20_000))
    p_values = stats.ttest_ind(one + shift * math.sqrt(2 / num), other, equal_var=False).pvalue
    assert chance_of(shift, num - 1, level, is_paired=False) == pytest.approx(np.mean(p_values < level), abs=0.012)
    least = least_shift(num - 1, level, is_paired=False)
    assert chance_of(least, num - 1, level, is_paired=False) == pytest.approx(0.8, abs=0.002)


FACTORS = """\
version: 1
name: study
datasets: {tree: {builtin: synthetic-hierarchy, branching: [2, 4], num_train: 512, num_val: 256}}
labels: {levels: {dataset: tree, hierarchy: [depth1, depth2]}}
pretrain:
  model: {name: test_vit, image_size: 32}
  labels: ["levels/*"]
  recipe: {epochs: 2, batch_size: 64, lr: 1e-3}
  seeds: [0, 1, 2]
  factors:
    optimizer: {adamw: {}, lamb: {recipe: {optimizer: lamb, lr: 5.0e-3}}}
    mix: {none: {}, mixup: {recipe: {mixup: 0.2}}, cutmix: {recipe: {cutmix: 0.5}}}
transfer: [{name: top, target: levels/depth1, protocol: probe, recipe: {epochs: 2, batch_size: 64, lr: 1e-3}}]
"""


def factor_power(*overrides, report=None, **question):
    """The effects that a sweep with factors can find, by name."""
    plan = plan_of(*overrides, text=FACTORS)
    asked = PowerQuestion(**{"difference": 0.01, "std": 0.005, **question})
    if report is None:
        answers = answer_power(plan, asked)
    else:
        stated = answer_power(plan, replace(asked, std=0.005))
        answers = list(_with_effects(plan, report, asked, list(zip(report.headlines, stated, strict=True))))
    assert [bool(answer.effects) for answer in answers] == [True] + [False] * (len(answers) - 1)
    return {effect.name: effect for effect in answers[0].effects}


def test_power_of_a_sweep_with_factors_tells_the_smallest_of_each_effect_in_their_family():
    found = factor_power()
    # Against the first values 1 + 2 + 1 main effects, one other pair of mix, and 2 + 1 + 2 interactions.
    family = Comparisons(num_with_baseline=4, num_others=6)
    assert len(found) == family.total
    expected = {
        "optimizer lamb - adamw": (6, 0.005 / math.sqrt(6), family.shares[0]),
        "mix cutmix - mixup": (4, 0.005 / math.sqrt(4), family.shares[1]),
        "optimizer lamb - adamw x mix mixup - none": (2, 0.005, family.shares[1]),
    }
    for name, (num_matched, std, share) in expected.items():
        effect = found[name]
        assert (effect.num_matched, effect.is_measured) == (num_matched, False)
        critical = stats.t.ppf(1 - 0.05 * share / 2, 2)
        power = 1 - stats.nct.cdf(critical, 2, effect.smallest / std * math.sqrt(3))
        assert power == pytest.approx(0.8, abs=0.002), name
    one_seed = factor_power("pretrain.seeds=[0]")
    assert {effect.smallest for effect in one_seed.values()} == {None}


def test_plan_of_a_sweep_with_factors_is_warned_of_by_its_rows_and_not_by_its_label_spaces():
    labels = "pretrain.labels=[levels/depth1]"
    (told,) = weak_designs(plan_of(labels, "pretrain.seeds=[0, 1]", text=FACTORS))
    assert told.startswith("top: 2 pretraining seeds find, in 15 comparisons (")
    assert not list(weak_designs(plan_of(labels, "pretrain.seeds=[0, 1, 2, 3, 4]", text=FACTORS)))


DATA = "pretrain.factors.data={all: {}, other: {model: {name: test_vit2, image_size: 32}, subset: {fraction: 0.5}}}"
"""Two values that share only the number of the seed."""


UNSHARED = (
    DATA,
    DATA[:-1] + ", third: {model: {name: test_vit3, image_size: 32}, subset: {fraction: 0.25}}}",
)
"""Two values, and three, of which no two share more than the number of the seed."""
ONE_FACTOR = ("pretrain.factors.optimizer=null", "pretrain.factors.mix=null", "pretrain.labels=[levels/depth1]")


def test_plan_whose_rows_share_nothing_is_warned_of_by_welchs_test():
    """It finds more than the test of pairs with as many seeds, which the report does not use here."""
    two, three = (plan_of(data, *ONE_FACTOR, "pretrain.seeds=[0, 1]", text=FACTORS) for data in UNSHARED)
    assert not list(weak_designs(two))
    (told,) = weak_designs(three)
    assert "find, in 3 comparisons (Welch's t tests over pretrain seeds, Bonferroni), only" in told


def test_rows_of_searched_backbones_are_independent_samples_whatever_else_pretrains_them():
    """They were pairs, also in the report, once another transfer measured the cells without a search."""
    search = "transfer.top.search={over: pretrain, random: {}, space: {batch_size: [32, 64]}}"
    transfer = FACTORS[FACTORS.index("{name: top") : FACTORS.rindex("]")]
    text = FACTORS.replace(transfer, f"{transfer}, {transfer.replace('top', 'plain')}")
    plan = plan_of(search, ONE_FACTOR[0], ONE_FACTOR[2], "pretrain.seeds=[0, 1]", text=text)
    told = dict(line.split(":", 1) for line in weak_designs(plan))
    assert {name: "Welch's" in line for name, line in told.items()} == {"top": True, "plain": False}
    found = {one.transfer: one for one in answer_power(plan, PowerQuestion(difference=0.02, std=0.005))}
    assert {name: (one.is_paired, one.unpaired) for name, one in found.items()} == {
        "top": (False, ("mixup", "cutmix")),
        "plain": (True, ()),
    }


def blocks_with(*seeds_of_blocks, overrides=()):
    """A sweep of blocks with other optimizers, and these seeds."""
    rest = "model: {name: test_vit, image_size: 32}, labels: [levels/depth1]"
    blocks = (
        f"{name}: {{{rest}, seeds: {seeds}, recipe: {{epochs: 2, batch_size: 64, lr: 1e-3, optimizer: {name}}}, "
        f"factors: {{optimizer: {name}}}}}"
        for name, seeds in zip(("adamw", "lamb", "sgd"), seeds_of_blocks, strict=False)
    )
    head, tail = FACTORS.partition("pretrain:")[0], FACTORS[FACTORS.index("transfer:") :]
    return plan_of(*overrides, text=f"{head}pretrain: {{{', '.join(blocks)}}}\n{tail}")


@pytest.mark.parametrize(
    ("seeds", "num_common", "words"),
    [
        ([0], 1, "top: one pretraining seed shows no noise between seeds, so the comparison cannot be tested; "),
        ([3, 4, 5], 0, "top: no two rows share a pretraining seed, so no comparison can be tested; "),
        ([2, 1, 0], 3, ""),
    ],
)
def test_planned_seeds_of_pairs_are_those_that_both_rows_have(seeds, num_common, words):
    plan = blocks_with([0, 1, 2], seeds)
    told = list(weak_designs(plan))
    assert len(told) == bool(words)
    assert not words or told[0].startswith(words)
    answer = answer_power(plan, PowerQuestion(difference=0.02, std=0.005))[0]
    assert answer.planned.num_pretrain_seeds == num_common
    assert (answer.planned_power > 0) == (num_common > 1)


def test_independent_samples_have_all_of_their_own_seeds_in_rows_and_in_effects():
    other = ("pretrain.lamb.model={name: test_vit2, image_size: 32}", "pretrain.lamb.subset={fraction: 0.5}")
    plan = blocks_with([0, 1, 2, 3, 4], [4, 5, 6], overrides=other)
    answer = answer_power(plan, PowerQuestion(difference=0.02, std=0.005))[0]
    (effect,) = answer.effects
    assert (answer.is_paired, effect.is_paired) == (False, False)
    assert (answer.planned.num_pretrain_seeds, effect.num_pretrain_seeds) == (3, 3)


def test_plan_is_not_warned_of_a_table_in_which_some_rows_share_enough_seeds():
    assert not list(weak_designs(blocks_with([0], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4])))


def measured_data(plan):
    """A report in which seeds vary by 3 points in each value of ``DATA``, and the other factors by 0.1 within it."""
    random, committed = np.random.default_rng(1), {}
    shared = random.normal(0, 0.03, (2, 3))
    for job in plan.jobs:
        if job.kind is JobKind.PROBE:
            of_data = shared[int(job.facets["factor.data"] == "other")]
            error = 0.3 + of_data[int(job.facets["pretrain_seed"])] + random.normal(0, 0.001)
            committed[job.name] = Committed(metrics={"val_error": error})
    return shared, compute_report(plan, committed)


def test_power_of_rows_that_are_independent_samples_is_that_of_the_reports_welch_test():
    plan = plan_of(DATA, "pretrain.factors.optimizer=null", "pretrain.factors.mix=null", text=FACTORS)
    answer = answer_power(plan, PowerQuestion(difference=0.02, std=0.005))[0]
    assert (answer.is_paired, answer.unpaired) == (False, ("other",))
    assert answer.planned_power == pytest.approx(chance_of(4 * math.sqrt(3), 2, 0.05, is_paired=False))
    assert answer.planned_power > power_of(answer.planned, answer.noise, 0.02, answer.comparisons)
    assert "tests: 1 comparison, Welch's t tests over pretrain seeds, Bonferroni" in _lines(answer, "val_error")


def test_power_of_rows_of_both_kinds_is_that_of_the_pairs_with_their_noise_and_names_the_others():
    plan = plan_of(DATA, "pretrain.factors.mix=null", text=FACTORS)
    _, report = measured_data(plan)
    noise = _of_table(plan, report.headlines[0])
    assert noise is not None
    assert noise.pretrain_std < 0.005  # the differences to the rows of the other data vary by 3 points or more
    answer = answer_power(plan, PowerQuestion(difference=0.02, std=0.005))[0]
    assert answer.is_paired
    (told,) = (line for line in _lines(answer, "val_error") if line.startswith("not for "))
    assert told.startswith("not for adamw + other, lamb + other: ")


def test_effects_that_the_sweep_measured_have_their_own_noise_and_independent_samples_no_other():
    shared, report = measured_data(plan_of(DATA, text=FACTORS))
    stated, measured = factor_power(DATA), factor_power(DATA, report=report, std=None)
    name = "data other - all"
    assert (stated[name].noise, stated[name].smallest, stated[name].is_paired) == (None, None, False)
    assert measured[name].noise.pretrain_std == pytest.approx(np.sqrt(shared.var(axis=1, ddof=1).sum()), rel=0.1)
    assert measured[name].power < 0.2 < stated["optimizer lamb - adamw"].power
    assert measured["optimizer lamb - adamw"].noise.pretrain_std < 0.001
    assert all(effect.is_measured for effect in measured.values())


@pytest.mark.slow
@pytest.mark.parametrize(("num_seeds", "num_transfers", "target"), [(3, 1, 0.8), (5, 2, 0.5), (10, 1, 0.8)])
def test_smallest_effects_are_found_in_as_many_simulated_sweeps_as_promised(num_seeds, num_transfers, target):
    """By the report's own effects of the planned design, to 3 points."""
    seeds = f"pretrain.seeds={list(range(num_seeds))}"
    transfers = f"transfer.top.seeds={list(range(num_transfers))}"
    found = factor_power(seeds, transfers, target_power=target)
    names = ("optimizer lamb - adamw", "mix mixup - none", "optimizer lamb - adamw x mix mixup - none")
    main, mix, both = (found[name].smallest for name in names)
    # With one interaction in a third of the mixes: what main effects are averaged over has a part of it.
    levels = {"optimizer": ("adamw", "lamb"), "mix": ("none", "mixup", "cutmix"), "labels": ("depth1", "depth2")}
    slopes = {"optimizer": main - both / 3, "mix": mix - both / 2, "both": both}
    shares = effect_shares(levels, slopes, num_seeds, num_transfers, std=0.005, num_sweeps=2000)
    assert shares == pytest.approx(dict.fromkeys(names, target), abs=0.03)


def test_power_command_prints_the_effects_once_and_in_its_document(store, tmp_path, capsys):
    (tmp_path / "sweep.yaml").write_text(FACTORS)
    show_power(str(tmp_path / "sweep.yaml"), PowerOptions(difference=1.0, std=0.5, store=store.uri))
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("top: what the planned seeds find of each effect") == 1
    assert re.search(r"mix: 2 contrasts with the baseline's value 4 3 \d\.\d\d \d+%", told)
    assert "tests: 10 contrasts, paired t tests" in told
    options = PowerOptions(difference=1.0, std=0.5, store=store.uri, form=DocumentForm.JSON)
    show_power(str(tmp_path / "sweep.yaml"), options)
    constants: list[str] = []  # Infinity and NaN, which JSON does not have
    document = json.loads(capsys.readouterr().out, parse_constant=constants.append)
    assert len(document[0]["effects"]) == 10
    assert (constants, document[0]["noise"]["freedom"]) == ([], None)


def test_noise_is_pooled_over_rows_and_split_into_its_components():
    random, truth = np.random.default_rng(0), Truth(pretrain_std=0.4, transfer_std=0.8)
    many = [
        noise_of(*runs_of(truth, Design(num_pretrain_seeds=4, num_transfer_seeds=3), 5, random)) for _ in range(300)
    ]
    assert all(noise is not None and noise.num_pretrain_seeds == 4 for noise in many)
    pretrain, transfer = (
        np.mean([getattr(noise, f"{name}_std") ** 2 for noise in many]) for name in ("pretrain", "transfer")
    )
    assert pretrain == pytest.approx(truth.noise.pretrain_std**2, rel=0.15)
    assert truth.noise.transfer_std is not None
    assert transfer == pytest.approx(truth.noise.transfer_std**2, rel=0.1)


def test_noise_of_one_transfer_each_has_no_components_and_of_one_seed_there_is_none():
    pairs = [SeedPair(pretrain=seed, transfer=0) for seed in range(3)]
    rows = [dict(zip(pairs, values, strict=True)) for values in ([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])]
    noise = noise_of(rows[:1], rows[1])
    assert noise is not None
    assert (noise.pretrain_std, noise.transfer_std, noise.freedom) == (1.0, None, 2.0)
    assert noise_of([{pairs[0]: 1.0}], rows[1]) is None
    assert noise_of([], rows[1]) is None
    same = [{pair: value + difference for pair, value in rows[0].items()} for difference in (0.0, 0.1)]
    assert noise_of(same[:1], same[1]) is None, "all differences are equal: how much they vary is unknown"


@pytest.mark.parametrize("num_seeds", [2, pytest.param(3, marks=SLOW), pytest.param(5, marks=SLOW)])
def test_range_of_the_noise_holds_the_truth_in_80_of_100_sweeps(num_seeds):
    """It is wide with two seeds and narrower with five; differences to one baseline are not independent."""
    random, truth = np.random.default_rng(2), Truth(pretrain_std=0.5)
    design = Design(num_pretrain_seeds=num_seeds)
    found = [noise_of(*runs_of(truth, design, 5, random)) for _ in range(1000)]
    ends = [noise.ends for noise in found if noise is not None]
    inside = np.mean([low.pretrain_std <= truth.noise.pretrain_std <= high.pretrain_std for low, high in ends])
    assert 0.75 < inside < 0.9  # the degrees of freedom are those of the mean and the variance alone


def test_seeds_needed_are_the_fewest_and_more_transfers_need_no_more():
    noise = known(0.5, transfer_std=1.0)
    needed = [seeds_needed(noise, 1.0, FIVE_SPACES, num_transfer_seeds=num) or 0 for num in (1, 2, 5)]
    assert needed == sorted(needed, reverse=True)
    for num, transfers in zip(needed, (1, 2, 5), strict=True):
        powers = [
            power_of(Design(num_pretrain_seeds=n, num_transfer_seeds=transfers), noise, 1.0, FIVE_SPACES)
            for n in (num - 1, num)
        ]
        assert powers[0] < 0.8 <= powers[1]
    assert seeds_needed(noise, 0.01, FIVE_SPACES, num_transfer_seeds=1) is None


@pytest.mark.parametrize(("num", "num_spaces"), [(2, 2), (2, 34), (3, 5), (10, 34)])
def test_smallest_difference_has_the_power_that_is_asked_for(num, num_spaces):
    comparisons = Comparisons.of_spaces(num_spaces, has_baseline=True)
    least = smallest_difference(num, comparisons)
    assert power_of(Design(num_pretrain_seeds=num), known(), least, comparisons) == pytest.approx(0.8, abs=0.002)


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ((0,), "main: one pretraining seed shows no noise between seeds, so none of the 3 comparisons can be tested; "),
        ((0, 1), "main: 2 pretraining seeds find, in 3 comparisons .*, only differences of 38 standard deviations"),
        ((0, 1, 2), ""),
    ],
)
def test_designs_that_find_nothing_plausible_are_told_with_what_would(seeds, words):
    told = list(weak_designs(StudyPlan(pretrain_seeds=seeds).plan()))
    assert len(told) == bool(words)
    if words:
        assert re.match(words, told[0])
        assert re.search(
            r"4 pretraining seeds find differences of 3\.\d standard deviations between seeds; "
            "`orchestrator power` says what they cost",
            told[0],
        )


def test_transfer_that_names_its_own_baseline_is_warned_of_with_the_baselines_share():
    """The row that is retrained is its baseline, as in its table."""
    spaces = {f"levels/depth{level}": 2**level for level in range(1, 6)}
    study = StudyPlan(spaces=spaces, pretrain_seeds=(0, 1), baseline="")
    (without,) = weak_designs(study.plan())
    (own,) = weak_designs(replace(study, facets={"baseline": "retrain"}).plan())
    (named,) = weak_designs(replace(study, baseline="levels/depth1").plan())
    assert own == named
    assert own != without


@pytest.mark.parametrize(
    "fields", ["", ", search: {random: {}, space: {momentum: [0.5, 0.9]}}", ", fractions: [0.1, 0.5, 1.0]"]
)
def test_added_seeds_cost_what_the_planner_says_of_the_larger_plan(tmp_path, fields):
    """The search for a transfer's recipe runs for the first seed alone, each transfer seed measures all fractions."""
    prices = PriceTable.parse("{currency: USD, cpu: {hour: 1.0}}", "prices.yaml")

    def plan(num_seeds, num_transfers):
        text = SWEEP.format(seeds=list(range(num_seeds)), transfer_seeds=list(range(num_transfers)))
        text = text.replace(f"seeds: {list(range(num_transfers))}}}", f"seeds: {list(range(num_transfers))}{fields}}}")
        return build_plan(parse_sweep(text, "sweep.yaml", {}), store_uri=(tmp_path / "none").as_uri())

    small = plan(2, 1)
    [answer] = answer_power(small, PowerQuestion(difference=0.02, std=0.01, transfer="tuned"), prices=prices)
    [option] = answer.options
    before = estimate(small, prices=prices)
    table = next(one for one in compute_report(small, {}).headlines if one.transfer == "tuned")
    costs, planned = _prices(small, table, before), Design(num_pretrain_seeds=2, num_transfer_seeds=1)
    for num_seeds, num_transfers in ((option.num_pretrain_seeds or 0, 1), (2, 3), (3, 2)):
        design = Design(num_pretrain_seeds=num_seeds, num_transfer_seeds=num_transfers)
        added = option.added if num_transfers == 1 else _added(planned, design, costs)
        assert added is not None
        after = estimate(plan(num_seeds, num_transfers), prices=prices).cost or 0.0
        assert added.cost == pytest.approx(after - (before.cost or 0.0), rel=1e-6)
        assert after > (before.cost or 0.0)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("ORCHESTRATOR_DIRECTORY", str(tmp_path / "project"))
    return LocalStore(tmp_path / "store")


def measured(store, *, sweep="sample", seeds=(0, 1, 2), target="", transfers=("superclass",)):
    plan = sample_plan(store.uri, sweep=sweep, seeds=seeds, transfers=transfers)
    if target:
        jobs = (replace(job, facets={**job.facets, "target": target}) for job in plan.jobs if "target" in job.facets)
        plan = replace(plan, jobs=(*[job for job in plan.jobs if "target" not in job.facets], *jobs))
    accept(store, plan)
    for job in plan.jobs:
        if job.kind is JobKind.PRETRAIN:
            continue  # no report needs them, and writing is what takes long here
        seed = int(job.facets.get("pretrain_seed", 0))
        metrics = sample_metrics(job)
        commit(store, job, {name: value + 0.003 * (seed % 2) for name, value in metrics.items()})
    return plan


def asked(store, sweep="sample", **changes):
    return sweep, PowerOptions(**{"difference": 1.0, "form": DocumentForm.JSON, "store": store.uri, **changes})


def test_power_command_of_a_measured_sweep_names_seeds_power_and_source(store, tmp_path, capsys):
    measured(store)
    show_power(*asked(store, png=str(tmp_path / "power.png"), difference=2.0))
    document = json.loads(capsys.readouterr().out)
    assert [answer["transfer"] for answer in document] == ["superclass"]
    for answer in document:
        assert answer["source"] == "measured in this sweep"
        assert answer["comparisons"] == {"num_with_baseline": 4, "num_others": 6}
        assert answer["cheapest"]["power"] >= 0.8
        assert answer["cheapest"]["least"] <= answer["cheapest"]["num_pretrain_seeds"] <= answer["cheapest"]["most"]
    assert (tmp_path / "power.png").read_bytes().startswith(b"\x89PNG")
    show_power(*asked(store, form=DocumentForm.TABLE, difference=2.0))
    told = " ".join(capsys.readouterr().out.split())
    assert "to see a difference of 2.00 points to levels/depth1" in told
    assert "with one transfer per backbone, the effect of more transfer seeds cannot be estimated" in told


@pytest.mark.parametrize(
    ("num_pretrain", "num_transfers", "words"),
    [(3, 1, "1 more pretraining seed"), (4, 1, "2 more pretraining seeds"), (2, 2, "1 more transfer seed")],
)
def test_power_command_counts_in_the_singular(tmp_path, num_pretrain, num_transfers, words):
    text = SWEEP.format(seeds=[0, 1], transfer_seeds=[0])
    plan = build_plan(parse_sweep(text, "sweep.yaml", {}), store_uri=(tmp_path / "none").as_uri())
    [answer] = answer_power(plan, PowerQuestion(difference=0.1, std=0.01, transfer="tuned"))
    added = {
        "num_pretrain_seeds": num_pretrain,
        "num_transfer_seeds": num_transfers,
        "added": JobCost(cpu_hours=1.0),
    }
    lines = list(_lines(replace(answer, options=(replace(answer.options[0], **added),)), "val_error"))
    assert f"cheapest: {words}" in lines
    assert any(line.startswith("tests: 1 comparison, ") for line in lines)


def test_power_command_with_two_seeds_gives_a_range(store, capsys):
    measured(store, seeds=(0, 1))
    show_power(*asked(store, form=DocumentForm.TABLE, difference=3.0))
    told = capsys.readouterr().out
    assert "so a range is given" in told
    assert "cheapest" not in told
    assert re.search(r"\n +1 +\d+ to >?\d+ ", told)


def test_power_command_of_a_new_sweep_takes_the_noise_of_an_earlier_one(store, capsys):
    measured(store, sweep="earlier")
    plan = sample_plan(store.uri, sweep="next", seeds=(5, 6), transfers=("superclass",))
    accept(store, plan)
    show_power(*asked(store, "next"))
    assert {answer["source"] for answer in json.loads(capsys.readouterr().out)} == {"measured in earlier"}
    show_power(*asked(store, "next", std=0.5))
    assert {answer["source"] for answer in json.loads(capsys.readouterr().out)} == {"stated by --std"}
    show_power(*asked(store, "next", like="earlier"))
    assert {answer["source"] for answer in json.loads(capsys.readouterr().out)} == {"measured in earlier"}


def test_power_command_reads_each_other_sweep_once_for_all_tables(store, capsys, monkeypatch):
    transfers = ("superclass", "superclass-probe")
    measured(store, sweep="earlier", transfers=transfers)
    accept(store, sample_plan(store.uri, sweep="next", seeds=(5, 6), transfers=transfers))
    read = []

    def counted(store, sweep):
        read.append(sweep)
        return load_plan(store, sweep)

    monkeypatch.setattr("orchestrator.services.power.load_plan", counted)
    show_power(*asked(store, "next"))
    assert [answer["transfer"] for answer in json.loads(capsys.readouterr().out)] == list(transfers)
    assert read == ["earlier"]


def test_power_command_takes_the_noise_of_the_same_target_before_that_of_more_seeds(store, capsys):
    measured(store, sweep="alike")
    measured(store, sweep="other", seeds=range(5), target="levels/depth3")
    accept(store, sample_plan(store.uri, sweep="next", seeds=(5, 6), transfers=("superclass",)))
    show_power(*asked(store, "next"))
    assert {answer["source"] for answer in json.loads(capsys.readouterr().out)} == {"measured in alike"}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"difference": -1.0}, UsageError, "--difference -1 must be a number above 0"),
        ({"difference": float("nan")}, UsageError, "--difference nan must be"),
        ({"power": 80.0}, UsageError, "--power 80 is a probability: give a number between 0 and 1"),
        ({"std": 0.0}, UsageError, "--std 0 must be"),
        ({"transfer": "x"}, NotFoundError, "no transfer 'x' to compare; its transfers are: superclass"),
        ({"like": "x"}, NotFoundError, "no sweep 'x' to take the noise from"),
        ({"like": "sample"}, UserError, "no finetune with val_error of two pretrain seeds"),
        ({}, UserError, "state the standard deviation with --std"),
    ],
)
def test_power_command_that_cannot_answer_says_why(store, changes, error, words):
    accept(store, sample_plan(store.uri))
    with pytest.raises(error, match=words):
        show_power(*asked(store, **changes))


def test_plan_command_warns_of_a_design_that_finds_nothing(store, tmp_path, capsys):
    for seeds, is_weak in (([0, 1], True), ([0, 1, 2], False)):
        (tmp_path / "sweep.yaml").write_text(SWEEP.format(seeds=seeds, transfer_seeds=[0]))
        show_plan(str(tmp_path / "sweep.yaml"), PlanOptions(store=store.uri, output=DocumentForm.JSON))
        told = capsys.readouterr()
        warnings = json.loads(told.out)["summary"]["warnings"]
        assert any("tuned, frozen: 2 pretraining seeds find" in warning for warning in warnings) is is_weak
        assert ("which no plausible difference reaches" in " ".join(told.err.split())) is is_weak


def test_figure_has_a_panel_for_each_transfer_and_a_line_for_each_number_of_transfer_seeds():
    panel = PowerPanel(
        title="x",
        noise=known(0.01, transfer_std=0.01),
        difference=0.02,
        comparisons=FIVE_SPACES,
        planned=Design(num_pretrain_seeds=2),
        target_power=0.8,
        transfer_seeds=(1, 2, 5),
        has_line=True,
        wanted=MOST_SEEDS,
    )
    figure = draw_power([panel, panel])
    assert len(figure.axes) == 2
    legend = figure.axes[0].get_legend()
    assert legend is not None
    lines = ["1 transfer seed", "2 transfer seeds", "5 transfer seeds", "planned"]
    assert [text.get_text() for text in legend.get_texts()] == lines
    encode_png(figure)
    upper, lower = (axis.get_tightbbox() for axis in figure.axes)
    assert upper is not None
    assert lower is not None
    assert upper.y0 > lower.y1  # titles and axes have room
    assert upper.x1 < figure.bbox.x1  # and the legend at the side
