"""Objectives: equal to dense reference losses, gradients included, on every kind of target."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from orchestrator.core.errors import UserError
from orchestrator.core.plugins import OBJECTIVES, InstalledPlugins
from tests.tiny_training import RECIPE
from workloads.train.linear_form import MixedTargets
from workloads.train.objective import Objective, SigmoidObjective, SoftmaxObjective, build_objective
from workloads.train.recipe import Recipe

CLASSES, BATCH = 7, 6


def recipe_of(**fields: Any) -> Recipe:
    return Recipe.from_mapping({**RECIPE, **fields})


def logits() -> Tensor:
    return 4 * torch.randn(BATCH, CLASSES, generator=torch.Generator().manual_seed(3))


SINGLE = torch.tensor([0, 6, 2, 2, 5, 1])
OTHERS = torch.tensor([3, 6, 1, 0, 5, 4])
SETS = torch.tensor([[0, 3, -1], [6, -1, -1], [-1, -1, -1], [1, 2, 5], [4, -1, 6], [2, 0, -1]])
OTHER_SETS = SETS.flip(0)
WEIGHTS = torch.tensor([0.0, 1.0, 0.25, 0.5, 0.7, 0.499])


def dense(targets: Tensor) -> Tensor:
    """Multi-hot (B, K) of targets (B,) or (B, M)."""
    hot = torch.zeros(BATCH, CLASSES, dtype=torch.float64)
    for row, classes in enumerate(targets.reshape(BATCH, -1).tolist()):
        for label in classes:
            if label >= 0:
                hot[row, label] = 1
    return hot


def mixed(first: Tensor, second: Tensor) -> tuple[MixedTargets, Tensor]:
    weights = WEIGHTS.double()[:, None]
    targets = MixedTargets(first=first, second=second, weight_B=WEIGHTS)
    return targets, weights * dense(first) + (1 - weights) * dense(second)


def reference(objective: Objective, logits_BK: Tensor, hot_BK: Tensor) -> Tensor:
    """The loss of each sample in float64 from a dense target matrix."""
    assert isinstance(objective, SoftmaxObjective | SigmoidObjective)
    smoothing = objective.label_smoothing
    targets_BK = (1 - smoothing) * hot_BK + smoothing / CLASSES
    if isinstance(objective, SoftmaxObjective):
        return -(targets_BK * functional.log_softmax(logits_BK, 1)).sum(1)
    return functional.binary_cross_entropy_with_logits(logits_BK, targets_BK, reduction="none").sum(1)


KINDS: list[tuple[Any, Tensor]] = [
    (SINGLE, dense(SINGLE)),
    mixed(SINGLE, OTHERS),
    (SETS, dense(SETS)),
    mixed(SETS, OTHER_SETS),
]
ALL = [
    (objective, kind) for objective in ("softmax", "sigmoid") for kind in range(4) if objective == "sigmoid" or kind < 2
]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("loss", "kind"), ALL)
def test_losses_and_gradients_equal_those_of_dense_targets(loss: str, kind: int, smoothing: float) -> None:
    targets, hot_BK = KINDS[kind]
    objective = build_objective(recipe_of(loss=loss, label_smoothing=smoothing), CLASSES)
    found, wanted = logits().requires_grad_(), logits().double().requires_grad_()
    losses = objective.losses(found, targets)
    expected = reference(objective, wanted, hot_BK)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    (losses.sum() / BATCH).backward()
    (expected.sum() / BATCH).backward()
    assert found.grad is not None
    assert wanted.grad is not None
    torch.testing.assert_close(found.grad.double(), wanted.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softmax_gradients_have_the_bits_of_torch_cross_entropy(smoothing: float) -> None:
    ours, plain = logits().requires_grad_(), logits().requires_grad_()
    (SoftmaxObjective(CLASSES, smoothing).losses(ours, SINGLE).sum() / BATCH).backward()
    (functional.cross_entropy(plain, SINGLE, reduction="sum", label_smoothing=smoothing) / BATCH).backward()
    assert ours.grad is not None
    assert plain.grad is not None
    assert torch.equal(ours.grad, plain.grad)


@pytest.mark.parametrize(("loss", "kind"), ALL)
def test_linear_form_of_a_slice_is_the_slice_of_the_losses(loss: str, kind: int) -> None:
    targets, _ = KINDS[kind]
    objective = build_objective(recipe_of(loss=loss, label_smoothing=0.1), CLASSES)
    form = objective.linear_form(targets[2:5])
    assert form is not None
    torch.testing.assert_close(form.losses(logits()[2:5]), objective.losses(logits(), targets)[2:5])


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_losses_of_half_precision_logits_are_float32(loss: str) -> None:
    objective = build_objective(recipe_of(loss=loss), CLASSES)
    exact = logits().bfloat16()
    torch.testing.assert_close(objective.losses(exact, SINGLE), objective.losses(exact.float(), SINGLE))


def test_sigmoid_loss_of_huge_logits_does_not_overflow() -> None:
    huge = torch.tensor([[80.0, -80.0, 0.0]])
    right, wrong = (SigmoidObjective(3).losses(huge, torch.tensor([label])) for label in (0, 1))
    assert float(right) == pytest.approx(0.6931472, abs=1e-5)
    assert float(wrong) == pytest.approx(160.6931472, abs=1e-4)


@given(st.lists(st.integers(0, CLASSES - 1), min_size=BATCH, max_size=BATCH))
def test_num_wrong_counts_what_a_loop_counts(predicted: list[int]) -> None:
    objective = SigmoidObjective(CLASSES)
    predicted_B = torch.tensor(predicted)
    logits_BK = functional.one_hot(predicted_B, CLASSES).float()
    heavier = [
        first if weight >= 0.5 else second for first, second, weight in zip(SINGLE, OTHERS, WEIGHTS, strict=True)
    ]
    cases: list[tuple[Any, list[bool]]] = [
        (SINGLE, [guess != target for guess, target in zip(predicted, SINGLE.tolist(), strict=True)]),
        (SETS, [guess not in row for guess, row in zip(predicted, SETS.tolist(), strict=True)]),
        (mixed(SINGLE, OTHERS)[0], [guess != int(target) for guess, target in zip(predicted, heavier, strict=True)]),
    ]
    for targets, wrong in cases:
        assert int(objective.num_wrong(logits_BK, targets)) == sum(wrong)
        assert int(objective.num_wrong_of(predicted_B, targets)) == sum(wrong)


def test_mixed_sets_count_as_the_heavier_set() -> None:
    targets, _ = mixed(SETS, OTHER_SETS)
    assert targets.heavier.tolist() == [
        (SETS if weight >= 0.5 else OTHER_SETS)[row].tolist() for row, weight in enumerate(WEIGHTS.tolist())
    ]
    assert len(targets[1:3]) == 2


def test_softmax_of_sets_of_classes_is_refused() -> None:
    for targets in (SETS, mixed(SETS, OTHER_SETS)[0]):
        with pytest.raises(UserError, match="use loss: sigmoid"):
            SoftmaxObjective(CLASSES).losses(logits(), targets)
    with pytest.raises(UserError, match="use loss: sigmoid"):
        build_objective(recipe_of(), CLASSES, is_multi_label=True)
    assert build_objective(recipe_of(loss="sigmoid"), CLASSES, is_multi_label=True) == SigmoidObjective(CLASSES)


def test_objective_of_a_single_class_is_refused() -> None:
    with pytest.raises(UserError, match="1 class: there is nothing to tell apart"):
        build_objective(recipe_of(), 1)


def test_unsmoothed_objective_is_the_same_without_smoothing() -> None:
    assert SoftmaxObjective(5, 0.1).unsmoothed() == SoftmaxObjective(5)
    assert SigmoidObjective(5, 0.1).unsmoothed() == SigmoidObjective(5)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed distribution with an objective, as pip leaves it."""
    (tmp_path / "halved_loss.py").write_text(
        "from workloads.train.objective import SoftmaxObjective\n"
        "def halved(recipe, num_classes):\n    return SoftmaxObjective(num_classes, recipe.label_smoothing / 2)\n"
        "class Bare:\n    def losses(self, logits_BK, targets):\n        return logits_BK.sum(1)\n"
        "    def num_wrong(self, logits_BK, targets):\n        return logits_BK.new_zeros(())\n"
        "class Small(Bare):\n    def unsmoothed(self):\n        return self\n"
        "def bare(recipe, num_classes):\n    return Bare()\n"
        "def small(recipe, num_classes):\n    return Small()\n"
    )
    folder = tmp_path / "halved_loss-1.5.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: halved-loss\nVersion: 1.5\n")
    (folder / "entry_points.txt").write_text(
        f"[{OBJECTIVES}]\n" + "".join(f"{name} = halved_loss:{name}\n" for name in ("halved", "bare", "small"))
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "halved_loss", raising=False)
    planned = InstalledPlugins(OBJECTIVES)["halved"]
    assert "halved_loss" not in sys.modules
    return planned


def test_objective_of_a_plugin_is_planned_with_its_version_and_built(plugin: str) -> None:
    assert plugin == "halved-loss==1.5:halved"
    assert build_objective(recipe_of(loss=plugin, label_smoothing=0.2), CLASSES) == SoftmaxObjective(CLASSES, 0.1)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("halved-loss==1.4:halved", r"planned with halved-loss 1.4; 1.5 is installed here"),
        ("halved-loss==1.5:other", r"halved-loss 1.5 has no objective 'other'"),
        (
            "no-such-package==1:x",
            r"no-such-package, which is not installed here: install no-such-package==1",
        ),
        ("hinge", "'hinge': softmax, sigmoid or an objective of a package"),
        ("halved-loss==1.5:bare", r"halved-loss==1.5:bare gives Bare, which lacks unsmoothed; give it"),
    ],
)
def test_objective_that_is_not_what_was_planned_is_refused(plugin: str, loss: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_objective(recipe_of(loss=loss), CLASSES)


def test_objective_of_a_plugin_needs_no_methods_for_heads_with_very_many_classes(plugin: str) -> None:
    loss = plugin.partition(":")[0] + ":small"
    objective = build_objective(recipe_of(loss=loss), CLASSES)
    assert not hasattr(objective, "linear_form")
