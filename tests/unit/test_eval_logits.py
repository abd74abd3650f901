"""Evaluation of heads with very many classes: the same metrics from a few samples' logits at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.test_evaluate import CLASSES, LEVELS, NAMES, Split, split_of
from workloads.models.build import Classifier
from workloads.train.evaluate import MOST_LOGITS, EvalForward, EvalInputs, evaluate
from workloads.train.objective import SigmoidObjective, SoftmaxObjective

BATCH_SIZE = 7


def head() -> nn.Linear:
    """One that says what it is told."""
    one = nn.Linear(CLASSES, CLASSES)
    with torch.no_grad():
        one.weight.copy_(torch.eye(CLASSES))
        one.bias.zero_()
    return one


MODELS = {"head": head, "classifier": lambda: Classifier(nn.BatchNorm1d(CLASSES, affine=False), head())}


def metrics(model: nn.Module, split: Split, objective: Any) -> dict[str, float]:
    return evaluate(model, split.batches(BATCH_SIZE), NAMES, objective=objective, levels=LEVELS)


@pytest.mark.parametrize("rows", [1, 2, 6])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_multi_label", [False, True])
def test_metrics_from_a_few_samples_at_a_time_are_those_of_whole_batches(
    monkeypatch: pytest.MonkeyPatch, name: str, *, is_multi_label: bool, rows: int
) -> None:
    model, split = MODELS[name](), split_of(40, is_multi_label=is_multi_label)
    objective = SigmoidObjective(CLASSES) if is_multi_label else SoftmaxObjective(CLASSES)
    whole = metrics(model, split, objective)
    monkeypatch.setattr("workloads.train.evaluate.MOST_LOGITS", rows * CLASSES)
    seen = [len(logits) for logits in EvalForward(model.eval()).logits_in_parts(split.logits_NK[:BATCH_SIZE])]
    assert seen == [rows] * (BATCH_SIZE // rows) + [BATCH_SIZE % rows] * (BATCH_SIZE % rows > 0)
    parted = metrics(model, split, objective)
    assert parted.pop("val_loss") == pytest.approx(whole.pop("val_loss"), rel=1e-6)
    assert parted == whole


def test_model_without_a_linear_head_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workloads.train.evaluate.MOST_LOGITS", 1)
    (logits,) = EvalForward(nn.Identity()).logits_in_parts(torch.zeros(5, CLASSES))
    assert len(logits) == 5


def test_evaluation_of_half_a_million_classes_never_holds_all_logits() -> None:
    num_classes, batch_size = 500_000, 256
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            largest = max(largest, result.numel() if isinstance(result, Tensor) else 0)
            return result

    targets = torch.arange(batch_size)
    batch = EvalInputs(
        inputs=torch.randn(batch_size, 2), targets_B=targets, subsets_B=np.full(batch_size, -1, dtype=np.int16)
    )
    with Watch():
        found = evaluate(nn.Linear(2, num_classes), [batch], (), objective=SoftmaxObjective(num_classes))
    assert largest <= MOST_LOGITS < batch_size * num_classes
    assert found["val_loss"] > 1


class SmallDevice(nn.Module):
    """Has memory for so many samples; its inputs are the logits."""

    def __init__(self, most: int, error: Exception) -> None:
        super().__init__()
        self.most, self.error, self.asked = most, error, list[int]()

    def forward(self, inputs: Tensor) -> Tensor:
        self.asked.append(len(inputs))
        if len(inputs) > self.most:
            raise self.error
        return inputs


@pytest.mark.parametrize("most", [1, 2, 3, 6])
def test_evaluation_that_does_not_fit_goes_through_in_halves_and_remembers(most: int) -> None:
    split, model = split_of(40), SmallDevice(most, torch.OutOfMemoryError("CUDA out of memory"))
    whole = metrics(SmallDevice(40, MemoryError()), split, SoftmaxObjective(CLASSES))
    assert metrics(model, split, SoftmaxObjective(CLASSES)) == whole
    # Halved from 7 on until it fits, and never again.
    too_large = [size for size in (7, 4, 2) if size > most]
    assert [size for size in model.asked if size > most] == too_large


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), torch.OutOfMemoryError("CUDA out of memory")])
def test_evaluation_of_one_sample_that_fails_and_other_errors_are_raised(error: Exception) -> None:
    model = SmallDevice(0, error)
    with pytest.raises(type(error)):
        metrics(model, split_of(10), SoftmaxObjective(CLASSES))
    assert model.asked[-1] == (1 if isinstance(error, torch.OutOfMemoryError) else BATCH_SIZE)


def test_batch_of_which_no_sample_can_be_decoded_is_evaluated_by_a_network_that_cannot_reshape_nothing() -> None:
    class Windows(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.reshape(len(inputs), -1, CLASSES).mean(1)

    whole = split_of(20).batches(BATCH_SIZE)
    inputs, targets_B, subsets_B = whole[0].inputs[:0], whole[0].targets_B[:0], whole[0].subsets_B[:0]
    empty = EvalInputs(inputs=inputs, targets_B=targets_B, subsets_B=subsets_B)
    for model in (Windows(), Classifier(Windows(), head())):
        assert evaluate(model, [empty, *whole], NAMES, levels=LEVELS) == evaluate(model, whole, NAMES, levels=LEVELS)
