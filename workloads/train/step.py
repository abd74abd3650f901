"""One update: forward and backward per norm group, then the optimiser."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from workloads.models.batchnorm import RunningStatistics
from workloads.train.optim import clip_gradients, set_learning_rate
from workloads.train.recipe import Recipe


class Update:
    """Makes updates of one model; ``group_size`` samples run at a time and gradients add up over the groups."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, recipe: Recipe, group_size: int) -> None:
        self._model = model
        self._optimizer = optimizer
        self._recipe = recipe
        self._group_size = group_size
        self._statistics = RunningStatistics(model)

    def __call__(self, inputs: Tensor, targets_B: Tensor, learning_rate: float) -> tuple[float, int]:
        """Update the weights; returns the sum of the losses and the number of wrong predictions of the batch."""
        self._optimizer.zero_grad(set_to_none=True)
        loss, errors = self._backward(inputs, targets_B)
        clip_gradients(self._model, self._recipe.grad_clip)
        set_learning_rate(self._optimizer, learning_rate)
        self._optimizer.step()
        return loss, errors

    def _backward(self, inputs: Tensor, targets_B: Tensor) -> tuple[float, int]:
        batch_size = len(targets_B)
        if self._group_size == batch_size:
            return self._backward_group(inputs, targets_B, batch_size)
        self._statistics.begin_step()
        loss, errors, groups = 0.0, 0, torch.split(inputs, self._group_size)
        for group, targets in zip(groups, torch.split(targets_B, self._group_size), strict=True):
            group_loss, group_errors = self._backward_group(group, targets, batch_size)
            self._statistics.end_group()
            loss, errors = loss + group_loss, errors + group_errors
        self._statistics.end_step(len(groups))
        return loss, errors

    def _backward_group(self, inputs: Tensor, targets_B: Tensor, batch_size: int) -> tuple[float, int]:
        logits_BK = self._model(inputs)
        smoothing = self._recipe.label_smoothing
        loss = functional.cross_entropy(logits_BK, targets_B, reduction="sum", label_smoothing=smoothing)
        # Divided by the global batch, not by the group: the groups' gradients add up to the batch's mean exactly.
        (loss / batch_size).backward()  # type: ignore[no-untyped-call]
        wrong = (logits_BK.detach().argmax(1) != targets_B).sum()
        return float(loss.detach()), int(wrong)
