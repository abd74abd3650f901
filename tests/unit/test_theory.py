"""The shipped simulations: closed forms, trends at tiny sizes, and seeds that do not depend on each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from torch.nn import functional

from workloads.theory import feature_learning, in_context, modular_addition, shared_private, two_layer
from workloads.theory.feature_learning import FeatureLearningParameters, HypercubeParameters
from workloads.theory.granularity import GranularityParameters
from workloads.theory.in_context import PromptParityParameters, PromptRegressionParameters
from workloads.theory.loading import Simulation
from workloads.theory.modular_addition import ModularAdditionParameters
from workloads.theory.shipped import METRICS, SIMULATIONS
from workloads.theory.sparse_coding import SparseCodingParameters

Run = dict[str, float]


class _Context:
    """Keeps nothing."""

    device = torch.device("cpu")

    def save_array(self, name: str, value: NDArray[np.generic]) -> None:
        """Nothing."""

    def save_figure(self, name: str, figure: Figure) -> None:
        """Nothing."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(name: str, *seeds: int, **parameters: Any) -> list[Run]:
    simulation = Simulation.load(name)
    rows = [dict(row) for row in simulation.function(simulation.checked(parameters), seeds or (1,), _Context())]
    assert {metric for row in rows for metric in row} <= set(METRICS[name].split())
    return rows


def averages(name: str, num_seeds: int, **parameters: Any) -> Run:
    rows = run(name, *range(num_seeds), **parameters)
    return {metric: mean(row[metric] for row in rows) for metric in rows[0]}


SMALL_BITS: dict[str, Any] = {
    "dim": 60, "dictionary": 30, "neurons": 60, "samples": 4_000, "batch": 250, "steps": 150, "test_samples": 2_000,
}  # fmt: skip
INTERVAL: dict[str, Any] = SMALL_BITS | {"labels": "interval", "relevant": 9, "interval": (6, 9)}
TINY: dict[str, list[dict[str, Any]]] = {
    "feature-learning": [
        SMALL_BITS | {"steps": 3, "method": "network"},
        SMALL_BITS | {"steps": 3, "method": "ntk"},
        SMALL_BITS | {"steps": 3, "method": "unstructured"},
        INTERVAL | {"steps": 3, "method": "two_steps"},
        SMALL_BITS | {"steps": 3, "labels": "codes", "relevant": 20, "codes_per_label": 5},
    ],
    "hypercube-features": [{"dim": 12, "relevant": 2, "neurons": 30, "steps": 5}],
    "teacher-student": [{"steps": 4, "teacher_steps": 4, "measures": 2}],
    "sparse-coding": [{"dim": 32, "atoms": 8, "neurons": 8, "pairs": 64, "steps": 6, "free_steps": 3}],
    "modular-addition": [
        {"modulus": 7, "neurons": 8, "steps": 5, "train_share": 0.5},
        {"network": "constructed", "modulus": 5},
    ],
    "prompt-regression": [{"draws": 500}],
    "prompt-parity": [{"prompts": 3}],
    "looped-transformer": [{"loops": 5}],
    "nuclear-norm": [{"method": "nuclear", "steps": 5, "test_samples": 100}],
    "rank-bound": [{"samples": 500, "test_samples": 100}],
    "diversity": [{"steps": 3}, {"steps": 3, "pretraining": "regularized"}],
    "label-efficiency": [{}],
}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [(name, parameters) for name, cases in TINY.items() for parameters in cases],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_seed_gives_the_same_bits_alone_and_among_others(name: str, parameters: dict[str, Any]) -> None:
    among = run(name, 1, 2, 3, **parameters)
    assert run(name, 3, **parameters) == [among[2]]
    assert all(math.isfinite(value) for row in among for value in row.values())


def test_metrics_of_every_simulation_are_listed() -> None:
    assert METRICS.keys() == SIMULATIONS.keys()


def test_every_parameter_is_described_and_bounded_by_its_model() -> None:
    for name in SIMULATIONS:
        model = Simulation.load(name).model
        assert model is not None, name
        assert model.model_config.get("frozen"), name
        assert [field for field, info in model.model_fields.items() if not info.description] == [], name


# ------------------------------------------------------------------------------------------------- two layers, S2


def test_the_means_over_noise_are_those_of_draws() -> None:
    noise_N = torch.randn(200_000, generator=two_layer.stream(0)).double() * 0.3
    for z in (-0.4, 0.1, 0.7, 1.2):
        at = torch.tensor(z, dtype=torch.float64)
        mean, slope = two_layer.smoothed_clipped_relu(at, 0.3)
        assert float(mean) == pytest.approx(float(two_layer.clipped_relu(z + noise_N).mean()), abs=3e-3)
        active = ((z + noise_N > 0) & (z + noise_N < 1)).double().mean()
        assert float(slope) == pytest.approx(float(active), abs=5e-3)


def best_monotone_parity_accuracy(relevant: int, irrelevant_rate: float) -> float:
    """The best accuracy of a rule that is monotone in the number of relevant bits, on the parity mixture.

    It answers +1 from some number of bits on: on uniform inputs it is right as often as parity and a threshold agree.
    """
    counts = [math.comb(relevant, n) for n in range(relevant + 1)]
    agreement = max(
        sum(count for n, count in enumerate(counts) if (n % 2 == 1) == (n >= threshold))
        for threshold in range(1, relevant + 1)
    )
    return 1 - irrelevant_rate + irrelevant_rate * agreement / sum(counts)


def test_the_best_monotone_rule_of_parity() -> None:
    assert best_monotone_parity_accuracy(5, 0.5) == 0.84375


@pytest.mark.parametrize(
    "parameters",
    [FeatureLearningParameters(), FeatureLearningParameters(labels="interval", relevant=30)],
    ids=["parity", "interval"],
)
def test_the_gap_is_that_of_draws(parameters: FeatureLearningParameters) -> None:
    bits_ND, signs_N = feature_learning.draw_bits(parameters, 100_000, two_layer.stream(4))
    relevant_NK = bits_ND[:, : parameters.relevant]
    found = (signs_N @ relevant_NK / len(signs_N) - signs_N.mean() * relevant_NK.mean(0)).mean()
    assert float(found) == pytest.approx(feature_learning.label_gap(parameters), rel=0.03)


def test_parity_labels_count_relevant_bits_and_uneven_classes_have_their_share() -> None:
    parameters = FeatureLearningParameters(negative_share=0.8)
    bits_ND, signs_N = feature_learning.draw_bits(parameters, 20_000, two_layer.stream(1))
    assert torch.equal(bits_ND[:, :5].sum(1) % 2, (signs_N > 0).float())
    assert float((signs_N < 0).float().mean()) == pytest.approx(0.8, abs=0.02)


@pytest.mark.parametrize(("method", "rate"), [("network", 0.2), ("unstructured", 0.5)])
def test_irrelevant_bits_of_interval_labels_have_their_rate(method: Any, rate: float) -> None:
    parameters = FeatureLearningParameters(labels="interval", relevant=30, irrelevant_rate=0.2, method=method)
    bits_ND, _ = feature_learning.draw_bits(parameters, 5_000, two_layer.stream(1))
    assert float(bits_ND[:, 30:].mean()) == pytest.approx(rate, abs=0.01)


@pytest.mark.ci
def test_two_gradient_steps_find_the_relevant_bits_that_fixed_features_miss() -> None:
    network, fixed, late, unstructured = (
        averages("feature-learning", 2, method=method, **SMALL_BITS | {"steps": 400})
        for method in ("network", "random_features", "two_steps", "unstructured")
    )
    assert network["test_accuracy"] > 0.98
    assert late["test_accuracy"] > 0.98
    assert late["cosine"] > 0.97
    assert 0.6 < fixed["test_accuracy"] < 0.9
    assert fixed["cosine"] < 0.6
    assert unstructured["test_accuracy"] < 0.57


@pytest.mark.parametrize("scale", [1.0, 2.0**-50, 2.0**-110])
def test_cosines_do_not_depend_on_the_length_of_weights(scale: float) -> None:
    inputs_ND = torch.randn(20, 5, generator=two_layer.stream(3))
    data = feature_learning.LabelledBits(inputs_ND=inputs_ND, signs_N=torch.ones(20), scale=1.0)
    mean_D = inputs_ND.sum(0)
    weights_MD = torch.stack([mean_D, mean_D + 0.1, -3 * mean_D, torch.zeros(5)])
    assert torch.equal(two_layer.unit_rows(scale * weights_MD), functional.normalize(weights_MD, dim=1))
    assert two_layer.largest_cosine(scale * weights_MD, mean_D) == pytest.approx(1.0)
    assert two_layer.largest_cosine(scale * weights_MD[3:], mean_D) == 0.0
    assert feature_learning._clustered_share(scale * weights_MD, data) == 0.75


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"relevant": 4}, "is even.*take an odd number"),
        ({"dictionary": 600}, "part of the dictionary.*or raise dim"),
        ({"labels": "codes", "method": "unstructured"}, "no label"),
        ({"labels": "interval", "relevant": 30, "negative_share": 0.8}, "for parity labels only; leave it out"),
        ({"labels": "interval", "relevant": 10}, "says nothing of a single bit.*another interval"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        FeatureLearningParameters(**parameters)


def test_cube_with_more_relevant_coordinates_than_inputs_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"relevant 4 of dim 2.*raise dim"):
        HypercubeParameters(dim=2, relevant=4)
    assert HypercubeParameters(dim=4, relevant=4).relevant == 4


def test_neurons_come_to_cover_the_corners_of_the_cube() -> None:
    found = averages("hypercube-features", 2, dim=20, relevant=2, noise=0.5, neurons=40, steps=200, learning_rate=0.01)
    assert found["worst_covered"] > 0.8 > found["covered_at_start"]
    assert found["test_accuracy"] > found["bayes_accuracy"] - 0.03


def test_the_injected_part_is_learned_worse_on_average_over_training() -> None:
    found = averages("teacher-student", 1, steps=300, teacher_steps=300, measures=10)
    assert found["teacher_accuracy"] > 0.9
    assert found["speed_gap"] > 0.05


# --------------------------------------------------------------------------------------------------------- S3


def test_masks_teach_the_code_and_not_the_noise() -> None:
    small = {"dim": 64, "atoms": 8, "neurons": 16, "pairs": 1_024, "steps": 120, "free_steps": 120, "negatives": 128}
    masked, plain = (averages("sparse-coding", 1, augmentation=one, active=1, **small) for one in ("mask", "none"))
    assert masked["span_share"] > plain["span_share"] + 0.2
    assert masked["error"] < plain["error"]


# --------------------------------------------------------------------------------------------------------- S4


@pytest.mark.parametrize(("terms", "modulus"), [(2, 7), (2, 11), (3, 7)])
def test_the_constructed_network_has_the_largest_margin(terms: int, modulus: int) -> None:
    (found,) = run("modular-addition", network="constructed", terms=terms, modulus=modulus)
    assert found["margin_ratio"] == pytest.approx(1, rel=1e-6)
    assert (found["accuracy"], found["frequency_share"]) == (1, 1)
    assert modular_addition.largest_margin(3, 7) == pytest.approx(3 / (16 * 7 * 6))


def test_scores_of_many_inputs_are_found_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, those of four terms modulo 23 took 32 GB."""
    cases: list[dict[str, Any]] = [
        {"network": "constructed", "terms": 3, "modulus": 5},
        {"modulus": 7, "neurons": 8, "steps": 5},
    ]
    whole = [run("modular-addition", **case) for case in cases]
    held: list[int] = []
    scores = modular_addition.PolynomialNetwork.scores

    def counted(network: modular_addition.PolynomialNetwork, inputs_NK: torch.Tensor) -> torch.Tensor:
        held.append(len(inputs_NK))
        return scores(network, inputs_NK)

    monkeypatch.setattr(modular_addition.PolynomialNetwork, "scores", counted)
    monkeypatch.setattr(modular_addition, "_NUMBERS_AT_ONCE", 10 * 250)
    for case, before in zip(cases, whole, strict=True):
        held.clear()
        assert run("modular-addition", **case)[0] == pytest.approx(before[0], rel=1e-5)
        if "network" in case:
            assert held == [10] * 12 + [5]


def test_sums_that_do_not_fit_into_memory_are_refused_by_their_size() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"modulus": 9}, "is not prime.*take a prime number"),
        ({"terms": 3, "modulus": 97}, "300,000 that are held.*fewer terms"),
        (
            {"terms": 3, "modulus": 61, "neurons": 10_000},
            "226,981 inputs x 10,000 neurons, 8.5 GiB each.*lower neurons",
        ),
    ]
    for parameters, reason in refused:
        with pytest.raises(ValidationError, match=reason):
            ModularAdditionParameters(**parameters)
    for network, train_share in (("constructed", 1.0), ("trained", 0.2)):
        case = refused[-1][0] | {"network": network, "train_share": train_share}
        assert ModularAdditionParameters(**case).neurons == 10_000


@pytest.mark.parametrize(
    ("model", "parameters", "remedy"),
    [
        (PromptRegressionParameters, {"rank": 9}, "neither can exceed dim 8; lower them or raise dim"),
        (PromptParityParameters, {"small_bits": 4}, "less than large_bits 4; lower small_bits or raise large_bits"),
        (SparseCodingParameters, {"atoms": 300}, "change atoms, raise dim or lower active"),
        (
            GranularityParameters,
            {"k": 1, "labels": "fine", "patches": 2},
            "3 cannot be expected; lower expected_patches or raise patches",
        ),
    ],
)
def test_refusals_say_what_to_do(model: type[BaseModel], parameters: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValidationError, match=remedy):
        model(**parameters)


def test_trained_neurons_have_one_frequency_and_no_larger_margin() -> None:
    (found,) = run("modular-addition", modulus=7, neurons=24, steps=800)
    assert found["accuracy"] == 1
    assert found["max_power"] > 0.9
    assert 0.5 < found["margin_ratio"] <= 1


def test_draws_of_prompts_lose_what_the_theorem_says() -> None:
    for rank in (2, 8):
        found = averages("prompt-regression", 4, rank=rank, draws=20_000)
        assert found["ratio"] == pytest.approx(1, abs=0.05)
    found = averages("prompt-regression", 4, rank=4, signal_rank=2, draws=20_000)
    eigenvalues_D = np.arange(1, 9, dtype=np.float64) ** -0.5
    gains_D = in_context.optimal_gains(eigenvalues_D, 200, 8)
    added = ((eigenvalues_D * gains_D)[4:] ** 2).sum() / 16
    (row,) = run("prompt-regression", 1, rank=4, signal_rank=2, draws=200)
    w_D = np.random.default_rng(1).standard_normal(8)[:2]
    assert row["excess_closed_form"] == pytest.approx(added * ((w_D**2 * eigenvalues_D[:2]).sum() + 0.49))
    assert found["excess"] == pytest.approx(found["excess_closed_form"], rel=0.1)


def test_prompts_that_do_not_fit_into_memory_are_refused_by_their_size() -> None:
    largest = {"dim": 256, "prompt": 25, "draws": 1_000_000}
    assert PromptRegressionParameters(**largest).draws == 1_000_000
    for more in ({"prompt": 26}, {"prompt": 4_096}):
        with pytest.raises(ValidationError, match=r"20,000 prompts of .* examples in 256 dimensions take \d+\.\d+ GiB"):
            PromptRegressionParameters(**largest | more)
    assert PromptRegressionParameters(dim=256, prompt=4_096, draws=100).draws == 100  # few of them do fit


def test_queries_of_a_finite_prompt_keep_none_of_its_examples_in_memory() -> None:
    rng = np.random.default_rng(0)
    _, queries_ND, labels_N = in_context._finite_prompt(PromptParityParameters(), (0, 1), 16, rng)
    assert queries_ND.base is None
    assert labels_N.base is None


@pytest.mark.parametrize(("small", "large"), [(1, 3), (2, 4), (2, 5)])
def test_optimal_heads_have_no_hinge_loss_and_the_large_model_hears_more_noise(small: int, large: int) -> None:
    found = averages("prompt-parity", 2, small_bits=small, large_bits=large, prompts=50)
    assert (found["small_hinge"], found["large_hinge"]) == (0, 0)
    assert (found["small_rare_accuracy"], found["large_rare_accuracy"]) == (0, 1)
    assert found["small_accuracy"] > found["large_accuracy"] + 0.05
    assert found["head_ratio"] == (small + 1) / (large + 1)


def test_heads_answer_every_sign_pattern_with_the_product() -> None:
    heads = in_context.parity_heads(2, 4, 0.1)
    for i, j in itertools.combinations(range(4), 2):
        moment_D = np.zeros(4)
        moment_D[[i, j]] = 0.2
        queries_ND = np.array(list(itertools.product((-1.0, 1.0), repeat=4)))
        assert (in_context.parity_scores(heads, moment_D, queries_ND) * queries_ND[:, i] * queries_ND[:, j]).min() >= 1


def test_the_looped_layer_is_gradient_descent() -> None:
    rows = run("looped-transformer", *range(20), alpha=-0.7, loops=100)
    assert max(row["deviation"] for row in rows) < 1e-12
    assert sum(row["violations"] for row in rows) == 0


def test_the_rank_bound_generalises_and_small_weights_do_not() -> None:
    found = {method: averages("rank-bound", 1, method=method, samples=4_000) for method in ("l2", "rank")}
    assert found["l2"]["in_domain"] > 0.99
    assert found["l2"]["out_of_domain"] <= found["l2"]["bound"]
    assert 1 < found["l2"]["weight_ratio"] < found["l2"]["ratio_bound"]
    assert found["rank"]["out_of_domain"] == 1


def test_margins_are_fitted_to_a_zero_gradient() -> None:
    margins_ND = np.random.default_rng(0).standard_normal((200, 3)) + 0.3
    w_D = two_layer.fit_margins(margins_ND, 0.1)
    slopes_N = 1 / (1 + np.exp(margins_ND @ w_D))
    assert np.abs(0.1 * w_D - (slopes_N[:, None] * margins_ND).mean(0)).max() < 1e-5


def test_at_convergence_both_methods_use_the_stable_coordinate() -> None:
    for method in ("erm", "nuclear"):
        found = averages("nuclear-norm", 2, method=method, steps=400, learning_rate=0.5, test_samples=2_000)
        assert found["out_of_domain"] > 0.95


def test_singular_values_are_found_where_divide_and_conquer_does_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*_: object, **__: object) -> None:
        raise np.linalg.LinAlgError("SVD did not converge")

    w_DD = np.diag([1.0, 1.0, 0.5])
    monkeypatch.setattr(np.linalg, "svd", diverge)
    u_DD, values_D, vt_DD = shared_private._svd(w_DD)
    assert u_DD * values_D @ vt_DD == pytest.approx(w_DD)


def test_feature_weights_are_those_of_the_propositions() -> None:
    small: dict[str, Any] = {"tasks": 4, "spurious": 8, "steps": 800}
    universal = averages("diversity", 1, **small)
    assert universal["target_closed_form"] == 0.25
    assert universal["shared"] > 0.9
    assert universal["target_ratio"] == pytest.approx(1, abs=0.1)
    assert universal["spurious"] < 0.01
    specific = averages("diversity", 1, pretraining="specific", **small)
    assert specific["target"] > 0.95
    assert specific["others"] < 0.05
    regularized = averages("diversity", 1, pretraining="regularized", gamma=0.5, **small | {"steps": 300})
    assert regularized["target_ratio"] == pytest.approx(1, abs=0.02)
    sizes = {"shared": 5, "private": 10}
    uneven = averages("diversity", 1, pretraining="regularized", gamma=0.5, **small | sizes | {"steps": 300})
    assert uneven["target_ratio"] == pytest.approx(1, abs=0.03)
    assert shared_private.regularized_weight(10, 5, 1.0) == pytest.approx(0.583, abs=1e-3)


def test_few_labels_suffer_more_from_diverse_pretraining() -> None:
    found = {
        (tasks, labels): averages("label-efficiency", 60, tasks=tasks, labels=labels)["accuracy"]
        for tasks in (1, 25)
        for labels in (20, 1_000)
    }
    gaps = {labels: found[1, labels] - found[25, labels] for labels in (20, 1_000)}
    assert gaps[20] > 2 * gaps[1_000] > 0
