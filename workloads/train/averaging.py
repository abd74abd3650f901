"""Averages of the weights over a run: what is evaluated and committed instead of the last weights.

The state is the averaged tensors alone; how much a step counts is a pure function of the step, so that a resumed run
needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum

import torch
from torch import Tensor, nn

from orchestrator.core.errors import CorruptObjectError
from workloads.data.order import total_steps
from workloads.models.batchnorm import batchnorm_layers
from workloads.train.recipe import Recipe
from workloads.train.schedule import Calendar


class AverageName(StrEnum):
    """Which average of the weights is evaluated and committed."""

    NONE = "none"
    EMA = "ema"
    POLYAK = "polyak"


class WeightAverage:
    """The average of a model's trained parameters and of its BatchNorm statistics.

    Until ``start_step`` it equals the weights. Afterwards, ``ema`` moves it by ``1 - decay`` towards the weights after
    each step, as timm and TensorFlow do without their warm-up; ``polyak`` is the mean of the weights after each step
    from ``start_step`` on (Polyak and Juditsky, 1992).

    BatchNorm's running statistics are averaged like the weights: those of the last weights would belong to other
    activations than the averaged weights give. Everything else (frozen parameters, constants, counters) is the model's.
    """

    def __init__(self, model: nn.Module, *, kind: AverageName, decay: float, start_step: int) -> None:
        self._kind, self._decay, self._start_step = kind, decay, start_step
        self._live = _averaged_tensors(model)
        self._averaged = {name: tensor.detach().clone() for name, tensor in self._live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights after ``step`` updates into the average; call it once after each update, in order."""
        weight = self._weight(step)
        live, averaged = list(self._live.values()), list(self._averaged.values())
        if weight == 1:
            torch._foreach_copy_(averaged, live)
        else:
            torch._foreach_lerp_(averaged, live, weight)

    def tensors(self) -> dict[str, Tensor]:
        """The averaged tensors by their names in the model's state: all that a checkpoint needs."""
        return dict(self._averaged)

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of ``tensors``.

        Raises:
            CorruptObjectError: the names or shapes are those of another model.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        wanted = {name: tuple(tensor.shape) for name, tensor in self._averaged.items()}
        if shapes != wanted:
            differing = sorted(name for name in shapes.keys() | wanted if shapes.get(name) != wanted.get(name))
            raise CorruptObjectError(f"averaged weights of another model: {differing[:5]} differ in name or shape")
        for name, tensor in tensors.items():
            self._averaged[name].copy_(tensor)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model holds the averaged weights; afterwards its own, bit for bit. Neither train nor checkpoint
        inside.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        # Contents are exchanged, not tensors: compiled graphs and gradient buckets hold on to the tensors.
        for name, live in self._live.items():
            kept = live.detach().clone()
            live.copy_(self._averaged[name])
            self._averaged[name].copy_(kept)

    def _weight(self, step: int) -> float:
        """How much the weights after ``step`` updates count against all earlier ones."""
        if step <= self._start_step:
            return 1.0
        if self._kind is AverageName.POLYAK:
            # The weights at the start are the first of the mean; those after no update at all are random, and none.
            return 1 / (step - max(self._start_step, 1) + 1)
        return 1 - self._decay


def build_average(recipe: Recipe, model: nn.Module, calendar: Calendar) -> WeightAverage | None:
    """The average of a recipe, or None if the last weights count. Call it after ``freeze``."""
    kind = AverageName(recipe.average)
    if kind is AverageName.NONE:
        return None
    start_step = total_steps(recipe.average_start_epoch, calendar.num_samples, calendar.batch_size)
    return WeightAverage(model, kind=kind, decay=recipe.average_decay, start_step=start_step)


def _averaged_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Trained parameters, and the moments of the BatchNorm layers, by their names in the model's state."""
    moments = {
        id(tensor)
        for layer in batchnorm_layers(model)
        for tensor in (layer.running_mean, layer.running_var)
        if tensor is not None
    }
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return trained | {name: buffer for name, buffer in model.named_buffers() if id(buffer) in moments}
