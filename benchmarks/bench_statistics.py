"""What docs/report.md promises: how often a report errs, and whether power and intervals come true."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
import pytest

from orchestrator.planning.estimate.power import Comparisons, Design, power_of, smallest_difference
from orchestrator.report.compare_samples import NetworkPair, compare_samples
from orchestrator.report.statistics.effects import DesignCell, FactorialDesign
from orchestrator.report.statistics.summaries import SeedPair
from orchestrator.storage.sample_outcomes import SampleOutcomes
from tests.null_sweeps import (
    TABLE_5,
    Floats,
    Scenario,
    established,
    independent_established,
    lowest_can_be_best,
    pairs_of,
    pooled_established,
    variances_of_table_5,
)
from tests.power_simulation import Truth, found_share

# ---------------------------------------------------------------------------------------------------------------------
# How often a report claims something where nothing is, over 20,000 simulated sweeps of each design.

NUM_SWEEPS, CHUNK = 20_000, 500
SEEDS, SIZES = (2, 3, 5, 10), (5, 7, 34)
NOISE = 3 * math.sqrt(0.05 * 0.95 / NUM_SWEEPS)
"""Three standard errors of a simulated 5 %."""

Rates = dict[str, float]


def variances(num_spaces: int) -> dict[str, tuple[float, ...]]:
    """The patterns that are simulated."""
    return {"equal": (1.0,) * num_spaces, "table 5": variances_of_table_5(num_spaces)}


def rates(scenario: Scenario, measure: Callable[[Floats], Rates]) -> Rates:
    """What is measured of a chunk of sweeps, averaged over all."""
    random, sums = np.random.default_rng(abs(hash(scenario)) % 2**32), dict[str, float]()
    for _ in range(NUM_SWEEPS // CHUNK):
        for name, value in measure(scenario.draw(random, CHUNK)).items():
            sums[name] = sums.get(name, 0.0) + value * CHUNK / NUM_SWEEPS
    return sums


def _any(found: Sequence[Sequence[bool]] | np.ndarray) -> float:
    return float(np.mean(np.any(found, axis=0)))


def _errors(means: Floats) -> Rates:
    return {
        "family": _any(established(means)),
        "pooled": _any(pooled_established(means)),
        "pooled, unchecked": _any(pooled_established(means, is_checked=False)),
    }


def _designs() -> Iterator[tuple[str, Scenario]]:
    for num_spaces, num_seeds, num_transfers in product(SIZES, SEEDS, (1, 3)):
        for name, stds in variances(num_spaces).items():
            title = f"{num_spaces:2} label spaces, {num_seeds:2} x {num_transfers} seeds, {name} variances"
            yield title, Scenario(num_seeds=num_seeds, stds=stds, num_transfers=num_transfers)


def _print(title: str, found: Rates) -> None:
    sys.stdout.write(f"{title}: {', '.join(f'{name} {100 * value:.2f} %' for name, value in found.items())}\n")
    sys.stdout.flush()


def test_null_sweeps_are_given_a_verdict_in_five_percent_at_most() -> None:
    worst = 0.0
    for title, scenario in _designs():
        found = rates(scenario, _errors)
        _print(title, found)
        worst = max(worst, found["family"])
    assert worst <= 0.05


@pytest.mark.parametrize("ratio", [1.0, 2.0])
@pytest.mark.parametrize(
    "sizes", [(10, 2, 2), (10, 3, 3, 3, 3), (20, 3, 3), (10, 5, 5), (5, 4, 4), (5, 3, 3), (3, 2, 2)]
)
def test_null_sweeps_of_independent_rows_with_unequal_seeds_are_given_a_verdict_in_five_percent_at_most(
    sizes: tuple[int, ...], ratio: float
) -> None:
    """Rows that share only the seed number; ``ratio``: how much more those with fewer seeds than the first vary."""
    stds = [1.0, *(ratio for _ in sizes[1:])]
    found = _any(independent_established(sizes, stds, np.random.default_rng(sum(sizes)), NUM_SWEEPS))
    _print(f"{sizes} seeds, standard deviations x {ratio:g}", {"family": found})
    assert found <= 0.05


def test_confidence_set_of_the_best_has_the_best() -> None:
    for num_spaces, num_seeds, gap in product((2, *SIZES), SEEDS, (0.0, 0.5, 5.0)):
        for name, stds in variances(num_spaces).items():
            unit = float(np.median(stds))
            scenario = Scenario(num_seeds=num_seeds, stds=stds, effects=(0.0, *(gap * unit,) * (num_spaces - 1)))

            def measure(means: Floats) -> Rates:
                return {"kept": float(np.mean(lowest_can_be_best(means, established(means))))}

            found = rates(scenario, measure)
            _print(f"{num_spaces:2} label spaces, {num_seeds:2} seeds, gap {gap} standard deviations, {name}", found)
            assert found["kept"] >= 0.95 - NOISE


def test_effects_of_table_5_are_found() -> None:
    """Any of the label spaces that are lower than the baseline, and the share of all 33 that are found."""
    effects = tuple(mean for mean, _ in TABLE_5)
    with_baseline = [index for index, pair in enumerate(pairs_of(len(effects))) if pair[0] == 0]
    for num_seeds in SEEDS:
        for name, stds in {"std 0.05": (0.05,) * 34, "its own variances": variances_of_table_5(34)}.items():
            scenario = Scenario(num_seeds=num_seeds, stds=stds, effects=effects)

            def measure(means: Floats) -> Rates:
                one, two = established(means)[with_baseline], pooled_established(means)[with_baseline]
                return {
                    "family, any": _any(one),
                    "family, share": float(one.mean()),
                    "pooled, any": _any(two),
                    "pooled, share": float(two.mean()),
                }

            _print(f"{num_seeds:2} seeds, {name}", rates(scenario, measure))


# ---------------------------------------------------------------------------------------------------------------------
# What docs/report.md promises of power and of image-by-image intervals, over many simulated sweeps.

PROMISES_NUM_SWEEPS = 2000
NUM_INTERVALS = 400


@pytest.mark.parametrize("num_transfers", [1, 3])
@pytest.mark.parametrize("num_spaces", [2, 5, 34])
@pytest.mark.parametrize("num_seeds", [2, 3, 5, 10])
def test_predicted_power_is_the_simulated_one_to_3_points(num_seeds: int, num_spaces: int, num_transfers: int) -> None:
    design = Design(num_pretrain_seeds=num_seeds, num_transfer_seeds=num_transfers)
    noise = Truth(transfer_std=0.3).noise
    comparisons = Comparisons.of_spaces(num_spaces, has_baseline=True)
    least = noise.of_seed(num_transfers) * smallest_difference(num_seeds, comparisons)
    for seed, share in enumerate((0.5, 0.8, 1.0)):
        truth = Truth(effect=share * least, transfer_std=0.3)
        predicted = power_of(design, noise, truth.effect, comparisons)
        simulated = found_share(truth, design, num_spaces, num_sweeps=PROMISES_NUM_SWEEPS, seed=seed)
        print(f"{design} {num_spaces} label spaces: predicted {predicted:.3f}, simulated {simulated:.3f}")  # noqa: T201 - a result
        assert simulated == pytest.approx(predicted, abs=0.03)


@pytest.mark.parametrize(("num_seeds", "promised"), [(3, 0.92), (5, 0.94), (10, 0.94)])
@pytest.mark.parametrize("seed_std", [0.0, 0.03, 0.1])
def test_interval_over_seeds_and_images_covers_the_truth(num_seeds: int, promised: float, seed_std: float) -> None:
    """Networks agree on which images are hard; each label space and seed has an error of its own besides."""
    random, covered, num, effect = np.random.default_rng(num_seeds), 0, NUM_INTERVALS, 0.02
    errors_RN = random.beta(0.3, 1.7, size=2000) + seed_std * random.standard_normal((1000, 1))
    errors = [np.clip(errors_RN + shift, 0, 1).mean() for shift in (0.0, effect)]
    truth = errors[1] - errors[0]  # less than the effect: no image is wrong less than never
    for _ in range(num):
        hardness_N = random.beta(0.3, 1.7, size=1000)  # most images are easy, some nearly always wrong: 15 % errors
        pairs = []
        for seed in range(num_seeds):
            right = [
                random.random(1000) >= np.clip(hardness_N + shift + seed_std * random.standard_normal(), 0, 1)
                for shift in (0.0, effect)
            ]
            first, second = (
                SampleOutcomes(right_N=right_N, counted_N=np.ones(1000, dtype=np.bool_), order_sha256="")
                for right_N in right
            )
            names = {"first": "a", "second": "b", "first_outcomes": first, "second_outcomes": second}
            pairs.append(NetworkPair(seeds=SeedPair(pretrain=seed, transfer=0), **names))  # type: ignore[arg-type]
        both = compare_samples(pairs, first="a", second="b").over_both
        assert both is not None
        covered += both.low <= truth <= both.high
    print(f"{num_seeds} seeds, spread {seed_std}: {covered / num:.3f}")  # noqa: T201 - a result
    assert covered / num >= promised - 3 * np.sqrt(promised * (1 - promised) / num)


# ---------------------------------------------------------------------------------------------------------------------
# How often the intervals of main effects and interactions hold the truth: 2 x 2 x 2 cells, two transfers of each
# backbone, and values that vary unequally over seeds.

NUM_DESIGNS = int(os.environ.get("NUM_DESIGNS", "20000"))
LEVELS = {"optimizer": ("a", "b"), "mix": ("a", "b"), "data": ("a", "b")}
EFFECT, INTERACTION, SEED_STD, TRANSFER_STD = -0.01, 0.006, 0.03, 0.004


@pytest.mark.parametrize(
    ("num_seeds", "num_others", "is_paired"),
    [*((num, num, is_paired) for num in (3, 5, 10) for is_paired in (True, False)), (10, 3, False), (10, 5, False)],
)
def test_intervals_of_effects_cover_the_truth(num_seeds: int, num_others: int, is_paired: bool) -> None:
    """Welch's intervals (values of one factor that share no random stream) may be wider with few seeds.

    ``num_others`` are the seeds of the second optimizer.
    """
    random, covered, total = np.random.default_rng(num_seeds), dict[str, int](), dict[str, int]()
    truth = {
        ("optimizer",): EFFECT,
        ("mix",): INTERACTION / 2,
        ("data",): INTERACTION / 2,
        ("optimizer", "mix"): 0.0,
        ("optimizer", "data"): 0.0,
        ("mix", "data"): INTERACTION,
    }
    for _ in range(NUM_DESIGNS):
        design = FactorialDesign(
            tuple(LEVELS),
            _cells(random, num_seeds, num_others, is_paired=is_paired),
            levels=LEVELS,
            is_paired=lambda factor, *_: is_paired or factor != "optimizer",
        )
        for effect in design.effects().contrasts:
            low, high = effect.difference.low, effect.difference.high
            name = "x".join(effect.factors)
            total[name] = total.get(name, 0) + 1
            holds = low is not None and high is not None and low <= truth[effect.factors] <= high
            covered[name] = covered.get(name, 0) + holds
    shares = {name: covered[name] / total[name] for name in total}
    seeds = f"{num_seeds:2} seeds" + (f" and {num_others}" if num_others != num_seeds else "")
    _print(f"{seeds}, {'paired' if is_paired else 'optimizer not paired'}, {NUM_DESIGNS} sweeps", shares)
    assert all(0.93 <= share <= (0.97 if is_paired else 1.0) for share in shares.values())


def _cells(random: np.random.Generator, num_seeds: int, num_others: int, *, is_paired: bool) -> list[DesignCell]:
    cells, shared = [], random.normal(0, SEED_STD, (2, num_seeds))
    for values in product(*LEVELS.values()):
        optimizer, mix, data = (value == "b" for value in values)
        mean = 0.3 + EFFECT * optimizer + INTERACTION * mix * data
        backbones = shared[0 if is_paired else int(optimizer)] + random.normal(0, 0.005 * (1 + optimizer), num_seeds)
        errors = mean + backbones[:, None] + random.normal(0, TRANSFER_STD, (num_seeds, 2))
        num = num_others if optimizer else num_seeds
        runs = {SeedPair(pretrain=i, transfer=j): float(errors[i, j]) for i in range(num) for j in range(2)}
        cells.append(DesignCell(values=values, runs=runs))
    return cells
