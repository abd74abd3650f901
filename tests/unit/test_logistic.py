"""Logistic regression on features: the optimum that scikit-learn and scipy find, whatever the scale of the features."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize as scipy_minimize
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression as Sklearn
from torch import Tensor
from torch.nn import functional

from workloads.runtime.fingerprint import deterministic_numerics
from workloads.solvers.lbfgs import End, Minimum, Pair, minimize, newest_pairs
from workloads.solvers.logistic import LearnedHessian, LogisticRegression, Scaling

NUM_CLASSES = 5


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These matrices are too small to share, and two threads that wait for each other are slow on a busy machine."""
    with deterministic_numerics(1):
        yield


def samples(
    num_samples: int = 400, num_features: int = 12, *, seed: int = 0, spread: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Overlapping classes; the features' scales differ by ``spread`` to each side, and none is centred."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    means = torch.randn(NUM_CLASSES, num_features, generator=generator)
    features = means[targets] + 1.5 * torch.randn(num_samples, num_features, generator=generator) + 3.0
    return features * torch.logspace(-np.log10(spread), np.log10(spread), num_features), targets


def fit(features: Tensor, targets: Tensor, l2: float, *, loss: str = "softmax", tolerance: float = 1e-7) -> Minimum:
    regression = LogisticRegression(features, targets, num_classes=NUM_CLASSES, loss=loss, poll=lambda: None)
    return regression.fit(regression.start(), l2, tolerance=tolerance, max_iterations=1000)


def objective(features: Tensor, targets: Tensor, solution: Tensor, l2: float) -> float:
    logits = features.double() @ solution[:, :-1].T + solution[:, -1]
    return float(functional.cross_entropy(logits, targets) + l2 / 2 * solution[:, :-1].square().sum())


@pytest.mark.parametrize("l2", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("spread", [1.0, 100.0])
@pytest.mark.parametrize("seed", [0, 9])  # of 9, the last steps at 1e-4 gain little and long
def test_fit_softmax_is_the_optimum_of_scikit_learn(l2: float, spread: float, seed: int) -> None:
    features, targets = samples(spread=spread, seed=seed)
    scaled = Scaling.of(features, is_standardized=True).apply_(features.clone())
    found = fit(scaled, targets, l2)
    peer = Sklearn(C=1 / (l2 * len(targets)), tol=1e-9, max_iter=100_000).fit(scaled.double().numpy(), targets.numpy())
    assert found.end is not End.MAX_ITERATIONS
    theirs = torch.from_numpy(np.hstack([peer.coef_, peer.intercept_[:, None]]))
    assert objective(scaled, targets, found.x, l2) == pytest.approx(objective(scaled, targets, theirs, l2), rel=1e-5)
    shares = (scaled.double() @ found.x[:, :-1].T + found.x[:, -1]).softmax(1).numpy()
    assert shares == pytest.approx(peer.predict_proba(scaled.double().numpy()), abs=1e-2)


def test_fit_sigmoid_of_sets_is_one_regression_per_class() -> None:
    features, first = samples()
    targets = torch.stack([first, torch.where(first < 2, first + 2, -1)], 1)
    scaled = Scaling.of(features, is_standardized=True).apply_(features)
    found = fit(scaled, targets, 1e-2, loss="sigmoid")
    for k in range(NUM_CLASSES):
        is_k = (targets == k).any(1).numpy()
        peer = Sklearn(C=1 / (1e-2 * len(first)), tol=1e-9, max_iter=100_000).fit(scaled.double().numpy(), is_k)
        assert found.x[k, :-1].numpy() == pytest.approx(peer.coef_[0], abs=2e-3)
        assert found.x[k, -1].item() == pytest.approx(peer.intercept_[0], abs=2e-3)


def test_loss_gradient_is_that_of_autograd() -> None:
    features, targets = samples(num_samples=5000)  # more than one run of rows
    regression = LogisticRegression(features, targets, num_classes=NUM_CLASSES, loss="softmax", poll=lambda: None)
    solution = 0.1 * torch.randn(NUM_CLASSES, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    value, gradient = regression.loss(solution)
    wanted = solution.clone().requires_grad_()
    loss = functional.cross_entropy(features.double() @ wanted[:, :-1].T + wanted[:, -1], targets)
    loss.backward()
    assert value == pytest.approx(loss.item(), rel=1e-6)
    assert gradient.numpy() == pytest.approx(wanted.grad.numpy(), abs=1e-5)  # type: ignore[union-attr]


def test_fit_converges_in_few_passes_whatever_the_scales() -> None:
    features, targets = samples(num_samples=2000, num_features=64, spread=1000.0)
    scaled = Scaling.of(features, is_standardized=False).apply_(features)
    for l2 in (1e-1, 1e-3, 1e-5):
        found = fit(scaled, targets, l2, tolerance=1e-4)
        assert found.end is End.CONVERGED
        assert found.num_evaluations < 250


def test_fit_is_the_same_to_the_last_bit_again() -> None:
    features, targets = samples(num_samples=9000)
    first, again = (fit(features, targets, 1e-3) for _ in range(2))
    assert torch.equal(first.x, again.x)


STRENGTHS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)


def path(
    features: Tensor, targets: Tensor, learned: LearnedHessian | None, *, loss: str = "softmax"
) -> tuple[list[Minimum], int]:
    """Fits from strong to weak, each from the end of the one before; and how often all of them polled."""
    num_classes, polls = int(targets.max()) + 1, list[None]()
    poll = partial(polls.append, None)
    regression = LogisticRegression(features, targets, num_classes=num_classes, loss=loss, poll=poll)
    start, found = regression.start(), list[Minimum]()
    for l2 in STRENGTHS:
        found.append(regression.fit(start, l2, tolerance=1e-3, max_iterations=1000, learned=learned))
        start = found[-1].x
    return found, len(polls)


def scans() -> tuple[Tensor, Tensor]:
    """Digits, scaled."""
    digits = load_digits()
    features, targets = torch.from_numpy(digits.data).float(), torch.from_numpy(digits.target).long()
    return Scaling.of(features, is_standardized=True).apply_(features), targets


def test_path_that_learns_the_hessian_ends_in_the_same_optima_with_fewer_passes() -> None:
    features, targets = scans()
    (alone, num_alone), (learning, num_learning) = (path(features, targets, each) for each in (None, LearnedHessian()))
    regression = LogisticRegression(features, targets, num_classes=10, loss="softmax", poll=lambda: None)
    for l2, first, second in zip(STRENGTHS, alone, learning, strict=True):
        best = regression.fit(second.x, l2, tolerance=1e-9, max_iterations=10_000).x
        optimum = objective(features, targets, best, l2)
        # What is left is estimated at the rate of the last steps, which processors round differently: of a tolerance
        # of 0.1 %, up to 0.5 % were left alone and 0.4 % with the Hessian, each the larger one on some machine.
        assert objective(features, targets, first.x, l2) <= 1.008 * optimum
        assert objective(features, targets, second.x, l2) <= 1.008 * optimum
    # 104 of 136 here. Fewer than 0.7 were counted when a fit that went on under a new spectrum could end too early.
    assert num_learning < 0.8 * num_alone


def test_sigmoid_path_that_learns_the_hessian_ends_in_the_same_optima() -> None:
    features, targets = scans()
    (alone, _), (learning, _) = (path(features, targets, each, loss="sigmoid") for each in (None, LearnedHessian()))
    for first, second in zip(alone, learning, strict=True):
        assert second.value <= first.value * 1.002


def test_learned_spectrum_serves_until_its_iterations_are_over() -> None:
    features, targets = scans()
    learned = LearnedHessian()
    regression = LogisticRegression(features, targets, num_classes=10, loss="softmax", poll=lambda: None)
    first = regression.fit(regression.start(), 1e-1, tolerance=1e-3, max_iterations=1000, learned=learned)
    spectrum = learned.spectrum
    second = regression.fit(first.x, 1e-2, tolerance=1e-3, max_iterations=1000, learned=learned)
    assert first.num_iterations + second.num_iterations < 25
    assert learned.spectrum is spectrum
    long = regression.fit(second.x, 1e-6, tolerance=1e-7, max_iterations=1000, learned=learned)
    assert long.num_iterations > 25
    assert learned.spectrum is not spectrum


def test_loss_of_the_last_solution_needs_no_other_pass() -> None:
    features, targets = samples()
    polls = list[None]()
    poll = partial(polls.append, None)
    regression = LogisticRegression(features, targets, num_classes=NUM_CLASSES, loss="softmax", poll=poll)
    solution = regression.start()
    value, gradient = regression.loss(solution)
    unspoiled = gradient.clone()
    gradient.zero_()
    again, second = regression.loss(solution)
    assert (again, len(polls)) == (value, 1)
    assert torch.equal(second, unspoiled)
    regression.loss(solution.clone())
    assert len(polls) == 2


def test_fit_after_a_path_of_quite_other_samples_still_finds_the_optimum() -> None:
    features, targets = samples(num_samples=2000)
    scaled = Scaling.of(features, is_standardized=True).apply_(features)
    learned = LearnedHessian()
    path(scaled * torch.logspace(-2, 2, 12), targets.flip(0), learned)
    regression = LogisticRegression(scaled, targets, num_classes=NUM_CLASSES, loss="softmax", poll=lambda: None)
    found = regression.fit(regression.start(), 1e-2, tolerance=1e-7, max_iterations=1000, learned=learned)
    wanted = objective(scaled, targets, fit(scaled, targets, 1e-2).x, 1e-2)
    assert objective(scaled, targets, found.x, 1e-2) == pytest.approx(wanted, rel=1e-5)


def test_learned_pairs_at_another_strength_are_those_of_its_hessian() -> None:
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(6, 6, dtype=torch.float64, generator=generator)
    learned, step = LearnedHessian(), torch.randn(2, 3, dtype=torch.float64, generator=generator)

    def change(l2: float) -> Tensor:
        of_strength = torch.tensor([[l2, l2, 0.0]], dtype=torch.float64) * step  # the bias is free
        return (factor @ factor.T @ step.ravel()).view(2, 3) + of_strength

    learned.pairs(0.3).append(Pair.of(step, change(0.3)))
    for l2 in (0.3, 0.01, 2.0):
        (pair,) = learned.pairs(l2)
        assert pair.change.numpy() == pytest.approx(change(l2).numpy(), rel=1e-12)
        assert pair.curvature == pytest.approx(float((step * change(l2)).sum()), rel=1e-12)


def test_scaling_head_on_raw_features_gives_the_logits_of_scaled_ones() -> None:
    features, targets = samples(spread=10.0)
    features[:, 3] = 7.0  # never changes
    scaling = Scaling.of(features, is_standardized=True)
    scaled = scaling.apply_(features.clone())
    found = fit(scaled, targets, 1e-2)
    weight, bias = scaling.head(found.x)
    expected = scaled.double() @ found.x[:, :-1].T + found.x[:, -1]
    assert (features @ weight.T + bias).numpy() == pytest.approx(expected.numpy(), abs=1e-3)
    assert torch.isfinite(weight).all()


def test_fit_class_without_samples_gets_no_votes() -> None:
    features, targets = samples()
    kept = targets != 2
    found = fit(features[kept], targets[kept], 1e-3)
    assert not ((features @ found.x[:, :-1].float().T + found.x[:, -1].float()).argmax(1) == 2).any()


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), size=st.integers(1, 12), condition=st.sampled_from([1.0, 1e2, 1e4]))
def test_minimize_quadratic_finds_its_minimum(seed: int, size: int, condition: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))[0]
    hessian = basis @ torch.diag(torch.logspace(0, -np.log10(condition), size, dtype=torch.float64)) @ basis.T
    target = torch.randn(size, dtype=torch.float64, generator=generator)

    def function(x: Tensor) -> tuple[float, Tensor]:
        gap = x - target
        return 1 + float(gap @ hessian @ gap) / 2, hessian @ gap

    start = torch.zeros(size, dtype=torch.float64)
    rough = torch.linalg.inv(hessian + 0.3 * torch.diag(torch.diag(hessian)))
    found = minimize(function, start, precondition=lambda g: rough @ g, tolerance=1e-12, max_iterations=500)
    assert found.end is not End.MAX_ITERATIONS
    # What is left is estimated from the last steps; far from round (a condition of 1e4), the estimate is too small.
    assert found.value == pytest.approx(1.0, abs=1e-4)
    exact = minimize(
        function, start, precondition=lambda g: torch.linalg.solve(hessian, g), tolerance=1e-9, max_iterations=500
    )
    assert exact.num_iterations <= 2  # Newton's method


def test_minimize_rosenbrock_like_scipy() -> None:
    def function(x: Tensor) -> tuple[float, Tensor]:
        x = x.detach().requires_grad_()
        value = (torch.log(torch.cosh(3 * x[0] - x[1])) + (x[1] - 2) ** 2 + 1).sum()
        (gradient,) = torch.autograd.grad(value, x)
        return value.item(), gradient

    start = torch.tensor([5.0, -4.0], dtype=torch.float64)
    found = minimize(function, start, precondition=lambda g: g, tolerance=1e-10, max_iterations=200)
    peer = scipy_minimize(lambda x: function(torch.tensor(x))[0], start.numpy(), tol=1e-12)
    assert found.x.numpy() == pytest.approx(peer.x, abs=1e-3)


def test_minimize_drops_foreign_pairs_that_lead_nowhere() -> None:
    def function(x: Tensor) -> tuple[float, Tensor]:
        return 1 + float(x @ x) / 2, x

    start = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    flat = newest_pairs([Pair.of(start, 1e-60 * start)])  # as if the function hardly bent: steps of 1e60
    found = minimize(function, start, precondition=lambda g: g, tolerance=1e-9, max_iterations=20, pairs=flat)
    assert found.end is End.CONVERGED
    assert found.value == pytest.approx(1.0)


@pytest.mark.parametrize(("num_steps", "num_kept"), [(10, 10), (1, 0)])
def test_minimize_that_finds_no_step_keeps_its_pairs_if_none_is_foreign(num_steps: int, num_kept: int) -> None:
    hessian = torch.logspace(0, 3, 16, dtype=torch.float64)
    accepted = [math.inf]

    def function(x: Tensor) -> tuple[float, Tensor]:
        value = 1 + float(x @ (hessian * x)) / 2
        if len(accepted) == num_steps + 2:  # the start is one of them
            return 1e9, hessian * x  # it goes up wherever one goes
        if value < accepted[-1]:
            accepted.append(value)
        return value, hessian * x

    start = torch.ones(16, dtype=torch.float64)
    foreign = newest_pairs(Pair.of(axis, hessian * axis) for axis in torch.eye(16, dtype=torch.float64)[:10])
    found = minimize(
        function, start, precondition=lambda g: 1e-3 * g, tolerance=1e-12, max_iterations=50, pairs=foreign
    )
    assert found.end is End.ROUNDING
    assert (found.num_iterations, len(foreign)) == (num_steps + (num_kept == 0), num_kept)


def test_minimize_ends_where_steps_no_longer_gain_whatever_the_gradient_says() -> None:
    def function(x: Tensor) -> tuple[float, Tensor]:
        return 1 + 1e-9 * float(x.exp()), torch.ones_like(x)  # as if the gradient were all rounding

    start = torch.zeros(1, dtype=torch.float64)
    found = minimize(function, start, precondition=lambda g: 1e-5 * g, tolerance=1e-9, max_iterations=100)
    assert (found.end, found.num_iterations) == (End.ROUNDING, 3)


def test_minimize_says_when_its_iterations_ran_out() -> None:
    features, targets = samples()
    regression = LogisticRegression(features, targets, num_classes=NUM_CLASSES, loss="softmax", poll=lambda: None)
    found = regression.fit(regression.start(), 1e-6, tolerance=1e-9, max_iterations=2)
    assert (found.end, found.num_iterations) == (End.MAX_ITERATIONS, 2)
