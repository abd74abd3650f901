"""Heads over chunks of classes: the same losses, gradients and predictions as with all logits at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from workloads.models.build import Classifier
from workloads.train import large_head
from workloads.train.large_head import LossForward, head_losses
from workloads.train.linear_form import MixedTargets, Targets
from workloads.train.objective import SigmoidObjective, SoftmaxObjective

NUM_CLASSES = 37
Objective = SoftmaxObjective | SigmoidObjective


def _head(num_features: int = 8, *, bias: bool = True) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = nn.Linear(num_features, NUM_CLASSES, bias=bias)
        return head.requires_grad_()


def _features(batch_size: int = 6) -> Tensor:
    return torch.randn(batch_size, 8, generator=torch.Generator().manual_seed(1)).mul_(3).requires_grad_()


def _classes(batch_size: int = 6) -> Tensor:
    return torch.randint(0, NUM_CLASSES, (batch_size,), generator=torch.Generator().manual_seed(2))


def _targets(kind: str, batch_size: int = 6) -> Targets:
    first = _classes(batch_size)
    if kind == "single":
        return first
    if kind == "sets":
        # Every third sample has no class at all, every third one class, every third two.
        second = torch.where(torch.arange(batch_size) % 3 == 2, (first + 5) % NUM_CLASSES, -1)
        return torch.stack([torch.where(torch.arange(batch_size) % 3 == 0, -1, first), second], 1)
    # Pairs of equal classes too: their weights add up on one logit.
    other = first.flip(0).clone()
    other[0] = first[0]
    return MixedTargets(first=first, second=other, weight_B=torch.linspace(0, 1, batch_size))


CASES = [
    (SoftmaxObjective(NUM_CLASSES), "single"),
    (SoftmaxObjective(NUM_CLASSES, 0.1), "single"),
    (SoftmaxObjective(NUM_CLASSES, 0.1), "mixed"),
    (SigmoidObjective(NUM_CLASSES), "single"),
    (SigmoidObjective(NUM_CLASSES, 0.1), "sets"),
    (SigmoidObjective(NUM_CLASSES), "mixed"),
]


def _gradients(losses_B: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    # Unequal weights: a gradient that is taken to be the same for all samples would show.
    weights_B = torch.linspace(0.5, 2, len(losses_B))
    return list(torch.autograd.grad((losses_B * weights_B).sum(), tensors))


@pytest.mark.parametrize("chunk", [1, 8, 36, 37, 100])
@pytest.mark.parametrize(("objective", "kind"), CASES)
def test_head_losses_chunked_equal_the_plain_ones(objective: Objective, kind: str, chunk: int) -> None:
    head, features, targets = _head(), _features(), _targets(kind)
    tensors = [features, head.weight, head.bias]
    plain_B = objective.losses(head(features), targets)
    chunked_B, predicted_B = head_losses(features, head, objective.linear_form(targets), chunk)
    torch.testing.assert_close(chunked_B, plain_B)
    for mine, theirs in zip(_gradients(chunked_B, tensors), _gradients(plain_B, tensors), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert torch.equal(predicted_B, head(features).argmax(1))


def test_head_losses_huge_logits_stay_finite() -> None:
    head, targets = _head(), _classes()
    features = (_features().detach() * 1e4).requires_grad_()
    losses_B, _ = head_losses(features, head, SoftmaxObjective(NUM_CLASSES).linear_form(targets), 8)
    torch.testing.assert_close(losses_B, nn.functional.cross_entropy(head(features), targets, reduction="none"))
    assert all(torch.isfinite(gradient).all() for gradient in _gradients(losses_B, [features, head.weight]))


def test_head_losses_equal_logits_predict_the_first_class() -> None:
    head = _head()
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    _, predicted_B = head_losses(_features(), head, SoftmaxObjective(NUM_CLASSES).linear_form(_targets("single")), 8)
    assert predicted_B.tolist() == [0] * 6


def test_head_losses_without_bias_match() -> None:
    head, features, targets = _head(bias=False), _features(), _classes()
    losses_B, _ = head_losses(features, head, SoftmaxObjective(NUM_CLASSES).linear_form(targets), 8)
    torch.testing.assert_close(losses_B, nn.functional.cross_entropy(head(features), targets, reduction="none"))


@pytest.mark.parametrize("objective", [SoftmaxObjective(NUM_CLASSES), SigmoidObjective(NUM_CLASSES)])
def test_head_losses_in_bf16_keep_the_gradient_of_a_confident_sample(objective: Objective) -> None:
    # A target's probability of 0.999 rounds to 1 in bf16: its gradient must be 1 - p taken before the rounding.
    head = _head()
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
        head.bias[3] = 10.5
    features, targets = _features(2), torch.tensor([3, 3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses_B, _ = head_losses(features, head, objective.linear_form(targets), 8)
    assert losses_B.dtype == torch.float32
    exact_B = objective.losses(head(features), targets)
    mine, theirs = _gradients(losses_B, [head.weight])[0], _gradients(exact_B, [head.weight])[0]
    assert (mine - theirs).norm() < 0.01 * theirs.norm()


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(2, 40), st.integers(1, 41), st.floats(0, 0.5))
def test_head_losses_any_sizes_match(batch_size: int, num_classes: int, chunk: int, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(batch_size * 100 + num_classes)
    head = nn.utils.skip_init(nn.Linear, 4, num_classes)
    with torch.no_grad():
        head.weight.normal_(generator=generator)
        head.bias.normal_(generator=generator)
    features = torch.randn(batch_size, 4, generator=generator)
    targets = torch.randint(0, num_classes, (batch_size,), generator=generator)
    for objective in (SoftmaxObjective(num_classes, smoothing), SigmoidObjective(num_classes, smoothing)):
        losses_B, _ = head_losses(features, head, objective.linear_form(targets), chunk)
        torch.testing.assert_close(losses_B, objective.losses(head(features), targets), rtol=1e-4, atol=1e-5)


def _classifier() -> Classifier:
    return Classifier(nn.Flatten(), _head())


@pytest.mark.parametrize(("objective", "kind"), CASES)
def test_loss_of_large_head_equals_the_plain_path(
    objective: Objective, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, features, targets = _classifier(), _features(), _targets(kind)
    plain_B, plain_wrong = LossForward(model, objective)(features, targets)
    monkeypatch.setattr(large_head, "LARGE_LOGITS", 6 * NUM_CLASSES)
    chunked_B, chunked_wrong = LossForward(model, objective)(features, targets)
    assert chunked_B.grad_fn is not None
    assert "Chunked" in chunked_B.grad_fn.name()
    torch.testing.assert_close(chunked_B, plain_B)
    assert torch.equal(chunked_wrong, plain_wrong)


def test_loss_of_small_head_is_the_objective_itself() -> None:
    model, objective, targets = _classifier(), SoftmaxObjective(NUM_CLASSES), _targets("single")
    losses_B, wrong = LossForward(model, objective)(_features(), targets)
    logits = model(_features())
    assert torch.equal(losses_B, objective.losses(logits, targets))
    assert torch.equal(wrong, objective.num_wrong(logits, targets))


def test_loss_of_head_alone_takes_features(monkeypatch: pytest.MonkeyPatch) -> None:
    head, objective, targets = _head(), SoftmaxObjective(NUM_CLASSES), _targets("single")
    plain_B, _ = LossForward(head, objective)(_features(), targets)
    monkeypatch.setattr(large_head, "LARGE_LOGITS", 1)
    chunked_B, _ = LossForward(head, objective)(_features(), targets)
    torch.testing.assert_close(chunked_B, plain_B)


def test_loss_of_objective_without_a_linear_form_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Squared(SoftmaxObjective):
        def linear_form(self, targets: Targets) -> None:  # type: ignore[override]
            return None

    monkeypatch.setattr(large_head, "LARGE_LOGITS", 1)
    losses_B, _ = LossForward(_classifier(), Squared(NUM_CLASSES))(_features(), _targets("single"))
    assert losses_B.grad_fn is not None
    assert "Chunked" not in losses_B.grad_fn.name()


def test_head_losses_many_classes_never_hold_all_logits() -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    batch_size, num_classes = 64, 5000
    head, features = nn.Linear(4, num_classes), torch.randn(batch_size, 4, requires_grad=True)
    form = SoftmaxObjective(num_classes).linear_form(torch.zeros(batch_size, dtype=torch.int64))
    with Watch():
        losses_B, _ = head_losses(features, head, form, 500)
        losses_B.sum().backward()
    assert largest <= max(batch_size * 500, 4 * num_classes)
