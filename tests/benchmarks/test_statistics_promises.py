"""What docs/report.md promises of power and of image-by-image intervals, over many simulated sweeps."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.planning.estimate.power import Comparisons, Design, power_of, smallest_difference
from orchestrator.report.compare_samples import NetworkPair, compare_samples
from orchestrator.report.statistics.summaries import SeedPair
from orchestrator.storage.sample_outcomes import SampleOutcomes
from tests.power_simulation import Truth, found_share

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]

NUM_SWEEPS = 2000
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
        simulated = found_share(truth, design, num_spaces, num_sweeps=NUM_SWEEPS, seed=seed)
        print(f"{design} {num_spaces} label spaces: predicted {predicted:.3f}, simulated {simulated:.3f}")  # noqa: T201 - a result
        assert simulated == pytest.approx(predicted, abs=0.03)


@pytest.mark.parametrize(("num_seeds", "promised"), [(3, 0.84), (5, 0.89), (10, 0.94)])
@pytest.mark.parametrize("seed_std", [0.0, 0.03])
def test_interval_over_seeds_and_images_covers_the_truth(num_seeds: int, promised: float, seed_std: float) -> None:
    """Networks agree on which images are hard; each label space and seed has an error of its own besides."""
    random, covered, num, effect = np.random.default_rng(num_seeds), 0, NUM_INTERVALS, 0.02
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
        covered += both.low <= effect <= both.high
    print(f"{num_seeds} seeds, spread {seed_std}: {covered / num:.3f}")  # noqa: T201 - a result
    assert covered / num >= promised - 3 * np.sqrt(promised * (1 - promised) / num)
