"""BatchNorm statistics per norm group, and running statistics that move once per step.

A norm group is the set of samples that share one BatchNorm statistic. A step runs its groups one after the other; every
group normalises with its own statistics, and the running statistics end at the mean of what each group alone would have
made of them, so a step moves them once however many groups it has.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from orchestrator.errors import UserError

# Identities hold norm_group null, not this number: changing it needs a bump of code_version of the training kinds.
DEFAULT_NORM_GROUP = 64


def batchnorm_layers(model: nn.Module) -> list[_BatchNorm]:
    """The layers that keep running statistics."""
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]


def resolve_norm_group(model: nn.Module, batch_size: int, norm_group: int | None) -> int:
    """Samples per forward pass: one norm group with BatchNorm, else the whole batch.

    Raises:
        UserError: the batch is not a whole number of norm groups.
    """
    if norm_group is not None and (norm_group < 1 or batch_size % norm_group):
        raise UserError(_uneven(batch_size, norm_group))
    if not batchnorm_layers(model):
        return batch_size
    group = norm_group or min(batch_size, DEFAULT_NORM_GROUP)
    if batch_size % group:
        raise UserError(_uneven(batch_size, group))
    return group


class RunningStatistics:
    """Averages the running statistics of a model over the groups of one step."""

    def __init__(self, model: nn.Module) -> None:
        layers = batchnorm_layers(model)
        self._moments = [t for layer in layers for t in (layer.running_mean, layer.running_var) if t is not None]
        self._counters = [t for layer in layers if (t := layer.num_batches_tracked) is not None]
        self._before: list[Tensor] = []
        self._sums: list[Tensor] = []

    def begin_step(self) -> None:
        """Remember where the step starts."""
        self._before = [tensor.clone() for tensor in self._moments + self._counters]
        self._sums = [torch.zeros_like(tensor) for tensor in self._moments]

    def end_group(self) -> None:
        """Add what this group made of the statistics, and put them back for the next group."""
        torch._foreach_add_(self._sums, self._moments)
        for tensor, before in zip(self._moments + self._counters, self._before, strict=True):
            tensor.copy_(before)

    def end_step(self, num_groups: int) -> None:
        """Move the statistics once."""
        for tensor, total in zip(self._moments, self._sums, strict=True):
            tensor.copy_(total / num_groups)
        for counter in self._counters:
            counter.add_(1)


def _uneven(batch_size: int, norm_group: int) -> str:
    return (
        f"recipe.batch_size {batch_size} is not a multiple of norm_group {norm_group}: BatchNorm statistics need whole "
        f"groups; set recipe.norm_group to a divisor of {batch_size}"
    )
