"""Main effects and interactions against statsmodels and scipy, and on designs with gaps."""

from itertools import product

import numpy as np
import pytest
import statsmodels.formula.api as smf  # type: ignore[import-untyped]
from pandas import DataFrame
from scipy import stats
from statsmodels.stats.anova import AnovaRM  # type: ignore[import-untyped]

from orchestrator.report.statistics.effects import DesignCell, FactorialDesign, WelchDifference
from orchestrator.report.statistics.summaries import SeedPair, paired_difference

LEVELS = {"optimizer": ("sgd", "lamb"), "mix": ("none", "mixup", "cutmix"), "data": ("all", "tenth")}
SEEDS, TRANSFERS = range(5), range(2)


def _error(random, values):
    """A true effect of each factor, and an interaction of two."""
    return 0.3 + 0.02 * (values[0] == "lamb") - 0.03 * (values[1] == "mixup") * (values[2] == "tenth")


def _cells(levels=LEVELS, seeds=SEEDS, transfers=TRANSFERS, seed=1):
    random = np.random.default_rng(seed)
    shared = random.normal(0, 0.03, 100)
    cells = []
    for values in product(*levels.values()):
        of_seed = random.normal(0, 0.01, 100)
        runs = {
            SeedPair(pretrain=i, transfer=j): float(
                _error(random, (*values, "", "")) + shared[i] + of_seed[i] + random.normal(0, 0.004)
            )
            for i, j in product(seeds, transfers)
        }
        cells.append(DesignCell(values=values, runs=runs))
    return cells


def _design(cells, levels=LEVELS, **options):
    return FactorialDesign(tuple(levels), cells, levels=levels, **options)


def _table(cells, levels=LEVELS):
    """A line per run, as statsmodels wants it."""
    rows = [
        {**dict(zip(levels, cell.values, strict=True)), "seed": pair.pretrain, "transfer": pair.transfer, "y": value}
        for cell in cells
        for pair, value in cell.runs.items()
    ]
    return DataFrame(rows)


def _contrast(effects, *parts):
    """The contrast of ``factor, value, reference`` triples."""
    wanted = tuple(zip(*parts, strict=True))
    return next(e for e in effects.contrasts if (e.factors, e.values, e.references) == wanted)


def test_tests_of_whole_factors_are_those_of_statsmodels_repeated_measures():
    cells = _cells()
    expected = AnovaRM(_table(cells), "y", "seed", within=list(LEVELS), aggregate_func="mean").fit().anova_table
    found = {":".join(test.factors): test for test in _design(cells).effects().tests}
    assert found.keys() == {name for name in expected.index if name.count(":") < 2}
    for name, test in found.items():
        f_value, freedom, error_freedom, p_value = expected.loc[name, ["F Value", "Num DF", "Den DF", "Pr > F"]]
        assert (test.freedom, test.error_freedom) == (freedom, error_freedom)
        assert test.f_value == pytest.approx(f_value, rel=1e-9)
        assert test.p_value == pytest.approx(p_value, rel=1e-9, abs=1e-12)


def test_contrasts_of_two_values_are_the_root_of_the_repeated_measures_test():
    levels = {"optimizer": ("sgd", "lamb"), "data": ("all", "tenth")}
    cells = _cells(levels)
    effects = _design(cells, levels).effects()
    expected = AnovaRM(_table(cells, levels), "y", "seed", within=list(levels), aggregate_func="mean").fit().anova_table
    parts = {
        "optimizer": [("optimizer", "lamb", "sgd")],
        "data": [("data", "tenth", "all")],
        "optimizer:data": [("optimizer", "lamb", "sgd"), ("data", "tenth", "all")],
    }
    for name, triples in parts.items():
        difference = _contrast(effects, *triples).difference
        assert (difference.mean / difference.std_error) ** 2 == pytest.approx(expected.loc[name, "F Value"], rel=1e-9)
        assert difference.p_value == pytest.approx(expected.loc[name, "Pr > F"], rel=1e-9, abs=1e-12)


def test_contrasts_are_those_of_the_mixed_model_with_seeds_and_backbones_as_random_effects():
    """Without replication within a seed and value its residual is the interaction of seed and value."""
    levels = {"mix": ("none", "mixup")}
    cells = _cells(levels)
    fit = smf.mixedlm(
        "y ~ C(mix, Treatment('none'))",
        _table(cells, levels).assign(y=lambda rows: 100 * rows["y"]),  # its optimiser likes numbers near 1
        groups="seed",
        vc_formula={"backbone": "0 + C(mix)"},
        re_formula="1",
    ).fit(reml=True, method=["lbfgs", "powell"])
    difference = _contrast(_design(cells, levels).effects(), ("mix", "mixup", "none")).difference
    name = next(name for name in fit.params.index if "mixup" in name)
    assert 100 * difference.mean == pytest.approx(fit.params[name], rel=1e-4)
    assert 100 * difference.std_error == pytest.approx(fit.bse[name], rel=1e-4)


def test_interval_of_a_main_effect_is_scipys_over_means_of_each_seed():
    cells = _cells()
    effect = _contrast(_design(cells).effects(), ("optimizer", "lamb", "sgd"))
    by_side = {
        side: [
            np.mean(
                [
                    cell.runs[SeedPair(pretrain=i, transfer=j)]
                    for cell in cells
                    if cell.values[0] == side
                    for j in TRANSFERS
                ]
            )
            for i in SEEDS
        ]
        for side in ("lamb", "sgd")
    }
    expected = stats.ttest_rel(by_side["lamb"], by_side["sgd"])
    low, high = expected.confidence_interval(0.95)
    assert (effect.num_matched, effect.num_combinations, effect.is_paired) == (6, 6, True)
    assert (effect.difference.low, effect.difference.high) == pytest.approx((low, high), rel=1e-9)
    assert effect.difference.p_value == pytest.approx(expected.pvalue, rel=1e-9)


def test_two_cells_give_exactly_the_paired_difference_of_two_label_spaces():
    levels = {"optimizer": ("sgd", "lamb")}
    first, second = _cells(levels)
    found = _design([first, second], levels).effects().contrasts[0].difference
    expected = paired_difference(second.runs, first.runs)
    assert expected is not None
    assert (found.mean, found.low, found.high, found.p_value) == (
        expected.mean,
        expected.low,
        expected.high,
        expected.p_value,
    )


def test_missing_cell_leaves_matched_ones_and_no_test_of_whole_factors():
    cells = [cell for cell in _cells() if cell.values != ("lamb", "mixup", "all")]
    effects = _design(cells).effects()
    effect = _contrast(effects, ("optimizer", "lamb", "sgd"))
    matched = [cell for cell in cells if cell.values[1:] != ("mixup", "all")]
    assert (effect.num_matched, effect.num_combinations) == (5, 6)
    assert effect.difference.mean == _contrast(_design(matched).effects(), ("optimizer", "lamb", "sgd")).difference.mean
    assert effects.tests == ()
    interaction = _contrast(effects, ("optimizer", "lamb", "sgd"), ("mix", "mixup", "none"))
    assert (interaction.num_matched, interaction.num_combinations) == (1, 2)


def test_one_at_a_time_has_main_effects_from_single_cells_and_no_interaction():
    base = ("sgd", "none", "all")
    wanted = [cell for cell in _cells() if sum(a != b for a, b in zip(cell.values, base, strict=True)) <= 1]
    effects = _design(wanted).effects()
    assert {len(effect.factors) for effect in effects.contrasts} == {1}
    # mixup against cutmix besides: the pairs of a factor with three values.
    assert [(e.values, e.num_matched) for e in effects.contrasts] == [
        (("lamb",), 1),
        (("mixup",), 1),
        (("cutmix",), 1),
        (("cutmix",), 1),
        (("tenth",), 1),
    ]


def test_values_that_share_no_more_than_the_number_of_the_seed_are_compared_by_welch():
    levels = {"optimizer": ("sgd", "lamb"), "data": ("all", "tenth")}
    cells = _cells(levels)
    effects = _design(cells, levels, is_paired=lambda factor, a, b: factor != "data").effects()
    effect = _contrast(effects, ("data", "tenth", "all"))
    sides = {
        side: [
            np.mean([c.runs[SeedPair(pretrain=i, transfer=j)] for c in cells if c.values[1] == side for j in TRANSFERS])
            for i in SEEDS
        ]
        for side in ("tenth", "all")
    }
    expected = stats.ttest_ind(sides["tenth"], sides["all"], equal_var=False)
    assert isinstance(effect.difference, WelchDifference)
    assert not effect.is_paired
    assert effect.difference.p_value == pytest.approx(expected.pvalue, rel=1e-9)
    assert effect.difference.freedom == pytest.approx(expected.df, rel=1e-9)
    assert (effect.difference.low, effect.difference.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
    # Optimizers are still subtracted seed by seed within either data set, and these differences are independent.
    within = {
        side: [
            np.mean(
                [
                    sign * cell.runs[SeedPair(pretrain=i, transfer=j)]
                    for sign, name in ((1, "lamb"), (-1, "sgd"))
                    for cell in cells
                    if cell.values == (name, side)
                    for j in TRANSFERS
                ]
            )
            * 2
            for i in SEEDS
        ]
        for side in ("tenth", "all")
    }
    interaction = _contrast(effects, ("optimizer", "lamb", "sgd"), ("data", "tenth", "all")).difference
    expected = stats.ttest_ind(within["tenth"], within["all"], equal_var=False)
    assert interaction.p_value == pytest.approx(expected.pvalue, rel=1e-9)


def test_effects_are_one_family_in_which_main_effects_have_half_of_the_level():
    levels = {"optimizer": ("sgd", "lamb"), "data": ("all", "tenth")}
    found = {e.factors: e.difference for e in _design(_cells(levels), levels).effects().contrasts}
    assert len(found) == 3
    # 0.9 of the level: two thirds of it, which is more than half, for two main effects; the rest for the interaction.
    for difference in found.values():
        assert difference.p_family == pytest.approx(min(1.0, difference.p_value / 0.3))


def test_reference_is_what_others_are_compared_with():
    effects = _design(_cells(), references={"optimizer": "lamb", "mix": "mixup"}).effects()
    main = [(e.values[0], e.references[0]) for e in effects.contrasts if len(e.factors) == 1]
    assert main == [("sgd", "lamb"), ("none", "mixup"), ("cutmix", "mixup"), ("cutmix", "none"), ("tenth", "all")]


def test_one_seed_has_effects_and_no_interval():
    effects = _design(_cells(seeds=(0,))).effects()
    assert {e.difference.p_family for e in effects.contrasts} == {None}
    assert effects.tests == ()
