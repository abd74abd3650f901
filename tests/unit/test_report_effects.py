"""Main effects and interactions against statsmodels and scipy, and on designs with gaps."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import statsmodels.formula.api as smf  # type: ignore[import-untyped]
from pandas import DataFrame
from scipy import stats
from statsmodels.stats.anova import AnovaRM  # type: ignore[import-untyped]

from orchestrator.report.statistics.corrections import corrected
from orchestrator.report.statistics.effects import (
    DesignCell,
    FactorialDesign,
    WelchDifference,
    balanced,
    balanced_means,
    independent_difference,
)
from orchestrator.report.statistics.intervals import RATE
from orchestrator.report.statistics.summaries import SeedPair, paired_difference
from tests.null_sweeps import independent_established

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


def _cells_of_errors(levels, *errors):
    """Of each cell its errors by pretraining seed; None: no run."""
    return [
        DesignCell(
            values=values,
            runs={SeedPair(pretrain=seed, transfer=0): error for seed, error in enumerate(some) if error is not None},
        )
        for values, some in zip(product(*levels.values()), errors, strict=True)
    ]


def test_interval_that_errors_cannot_have_is_none_of_an_effect_and_ends_where_errors_do():
    """Of two seeds; by the subtracted errors over the seeds that count, which all but two of sgd's are not."""
    cells = _cells_of_errors(TWO_CELLS, (0.3, 0.3), (0.3, 0.3), (0.1, 0.9), (0.9, 0.1))
    both = [("optimizer", "lamb", "sgd"), ("data", "tenth", "all")]
    for is_paired in (True, False):
        design = _design(cells, TWO_CELLS, is_paired=lambda *_, found=is_paired: found)
        interaction = _contrast(design.effects(RATE), *both).difference
        unlimited = _contrast(design.effects(), *both).difference
        assert (interaction.low, interaction.high) == (max(-2.0, unlimited.low), min(2.0, unlimited.high))
        assert unlimited.family_low < -1
        assert (interaction.family_low, interaction.family_high) == (None, None)
        assert interaction.p_family == unlimited.p_family
    levels = {"optimizer": ("sgd", "lamb")}
    first, second = _cells_of_errors(levels, (0.5, 0.5, *[0.01] * 7), (0.52, 0.47))
    found = _design([first, second], levels).effects(RATE).contrasts[0].difference
    (expected,) = corrected([paired_difference(second.runs, first.runs)])
    assert expected is not None
    assert (found.family_low, found.family_high) == pytest.approx((expected.family_low, expected.family_high))


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


def _cells_of_effects(effects, seeds=5):
    """Two cells of each optimizer; of ``effects`` by cell, each value is the effect of lamb in one seed."""
    noise = np.random.default_rng(3).normal(0, 0.01, (2, seeds))
    return [
        DesignCell(
            values=(optimizer, data),
            runs={
                SeedPair(pretrain=seed, transfer=0): 3.0 + noise[index, seed] * (1 + is_lamb) + is_lamb * effect
                for seed, effect in enumerate(some)
            },
        )
        for index, (data, some) in enumerate(effects.items())
        for is_lamb, optimizer in enumerate(("sgd", "lamb"))
    ]


TWO_CELLS = {"optimizer": ("sgd", "lamb"), "data": ("all", "tenth")}


@pytest.mark.parametrize(
    ("survivors", "mean", "matched", "seeds"),
    [(1, -1.0, (1, 2), (5, 5)), (4, 0.0, (2, 2), (4, 5)), (5, 0.0, (2, 2), (5, 5))],
)
def test_cells_do_not_weigh_by_how_many_of_their_seeds_survived(survivors, mean, matched, seeds):
    """-1 in one cell, +1 in the other, where some seeds diverged: it was -0.80 and significant with four of five."""
    cells = _cells_of_effects({"all": [-1.0] * 5, "tenth": [1.0] * survivors})
    effect = _contrast(_design(cells, TWO_CELLS).effects(), ("optimizer", "lamb", "sgd"))
    assert effect.difference.mean == pytest.approx(mean, abs=0.02)
    assert (effect.num_matched, effect.num_combinations) == matched
    assert (effect.difference.num_pretrain_seeds, effect.num_seeds) == seeds
    assert (effect.difference.p_value < 0.05) == (mean < 0)


def test_independent_samples_average_the_same_cells_too():
    cells = _cells_of_effects({"all": [-1.0] * 5, "tenth": [1.0] * 1})
    cells[2] = DesignCell(values=cells[2].values, runs=_cells_of_effects({"": [0.0] * 5})[0].runs)  # sgd has them all
    effect = _contrast(_design(cells, TWO_CELLS, is_paired=lambda *_: False).effects(), ("optimizer", "lamb", "sgd"))
    assert (effect.difference.mean, effect.num_matched) == (pytest.approx(-1.0, abs=0.02), 1)


def test_independent_samples_use_all_seeds_of_each_side_as_rows_do():
    """They used the seeds that both sides have: a report gave two differences of the same runs."""
    sgd, lamb = (cell.runs for cell in _cells_of_effects({"all": [0.5] * 5}))
    for shift in (2, 4, 5):
        moved = {replace(pair, pretrain=pair.pretrain + shift): value for pair, value in lamb.items()}
        cells = [DesignCell(values=(name, "all"), runs=runs) for name, runs in (("sgd", sgd), ("lamb", moved))]
        effects = _design(cells, TWO_CELLS, is_paired=lambda *_: False).effects()
        effect = _contrast(effects, ("optimizer", "lamb", "sgd"))
        expected = stats.ttest_ind(list(lamb.values()), list(sgd.values()), equal_var=False)
        assert effect.difference.p_value == pytest.approx(expected.pvalue, rel=1e-9)
        assert (effect.difference.num_pretrain_seeds, effect.num_seeds) == (5, 5)
        of_rows = independent_difference(moved, sgd)
        assert of_rows is not None
        assert (effect.difference.mean, effect.difference.std_error) == (of_rows.mean, of_rows.std_error)


@pytest.mark.parametrize(("sizes", "stds"), [((10, 2, 2), (1, 1, 1)), ((10, 3, 3, 3, 3), (1, 2, 2, 2, 2))])
def test_null_sweeps_of_independent_rows_with_unequal_seeds_are_given_a_verdict_in_five_percent_at_most(sizes, stds):
    """Satterthwaite's degrees of freedom alone gave one to 10 and 9 % of them."""
    found = independent_established(sizes, stds, np.random.default_rng(0), 400)
    assert np.mean(found.any(axis=0)) <= 0.05


def test_where_seeds_lack_different_cells_some_of_both_are_left_out():
    present = ~np.eye(4, 3, dtype=bool)  # the fourth seed lacks none
    columns, (rows,) = balanced([present])
    assert (len(columns), rows.sum()) == (2, 2)  # four runs; one cell, or one seed, would leave three


def test_means_of_a_figure_are_over_the_same_seeds():
    """A cell of which most seeds diverged is left out; one that another block has of other seeds is not."""
    first, second = _cells_of_effects({"all": [0.0] * 5})
    lost = DesignCell(values=("lamb", "tenth"), runs=dict(list(second.runs.items())[:1]))
    others = DesignCell(values=("sgd", "tenth"), runs={SeedPair(pretrain=9, transfer=0): 7.0})
    cells = [first, second, lost, others]
    means = balanced_means(cells, [first.runs, second.runs, second.runs, others.runs])
    assert means == [pytest.approx(np.mean(list(cell.runs.values()))) for cell in cells[:2]] + [None, 7.0]


def test_interaction_that_is_none_is_not_tested_on_its_rounding():
    """0.1 + 0.2 - 0.3 is 5e-17: of equal effects, what is left over has no spread between seeds."""
    random = np.random.default_rng(0)
    base = random.uniform(0.1, 0.9, 5)
    cells = [
        DesignCell(
            values=values,
            runs={
                SeedPair(pretrain=seed, transfer=0): float(
                    base[seed] + 0.1 * (values[0] == "lamb") + 0.2 * (values[1] == "tenth")
                )
                for seed in range(5)
            },
        )
        for values in product(*TWO_CELLS.values())
    ]
    both = [("optimizer", "lamb", "sgd"), ("data", "tenth", "all")]
    for is_paired in (lambda *_: True, lambda factor, *_: factor == "optimizer"):
        found = _contrast(_design(cells, TWO_CELLS, is_paired=is_paired).effects(), *both).difference
        assert (found.mean, found.low, found.p_value, found.std_error) == (0.0, None, None, None)
