"""BatchNorm statistics per norm group, and running statistics that move once per step.

A norm group is the set of samples that share one BatchNorm statistic. A step runs its groups one after the other; every
group normalises with its own statistics, and the running statistics end at the mean of what each group alone would have
made of them, so a step moves them once for any number of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from orchestrator.core.errors import UserError

# Identities hold norm_group null, not this number: changing it needs a bump of code_version of the training kinds.
DEFAULT_NORM_GROUP = 64
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def _alone(tensor: Tensor) -> Tensor:
    return tensor


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
    """Averages the running statistics of a model over the groups of one step, on all ranks.

    ``sum_`` replaces a tensor by its sum over the ranks that share the step; alone it does nothing.
    """

    def __init__(self, model: nn.Module, sum_: Callable[[Tensor], Tensor] = _alone) -> None:
        self._layers, self._sum = batchnorm_layers(model), sum_
        self._moments: list[Tensor] = []
        self._counters: list[Tensor] = []
        self._before: list[Tensor] = []
        self._sums: list[Tensor] = []

    def begin_step(self) -> None:
        """Remember where the step starts."""
        # Frozen layers are in evaluation mode and not touched, not even by the rounding of a mean.
        layers = [layer for layer in self._layers if layer.training]
        self._moments = [t for layer in layers for t in (layer.running_mean, layer.running_var) if t is not None]
        self._counters = [t for layer in layers if (t := layer.num_batches_tracked) is not None]
        self._before = [tensor.clone() for tensor in self._moments + self._counters]
        self._sums = [torch.zeros_like(tensor) for tensor in self._moments]

    def end_groups(self, num_groups: int = 1) -> None:
        """Add what one forward pass of so many groups made of the statistics, and put them back for the next one."""
        if not self._moments:
            return
        torch._foreach_add_(self._sums, self._moments, alpha=num_groups)
        for tensor, before in zip(self._moments + self._counters, self._before, strict=True):
            tensor.copy_(before)

    def end_step(self, num_groups: int) -> None:
        """Move the statistics once, to the mean over all ``num_groups`` groups of the global batch."""
        if not self._moments:
            return
        flat = torch.cat([total.flatten() for total in self._sums])
        means = torch.split(self._sum(flat).div_(num_groups), [total.numel() for total in self._sums])
        for tensor, mean in zip(self._moments, means, strict=True):
            tensor.copy_(mean)
        for counter in self._counters:
            counter.add_(1)


@contextmanager
def ghost_batchnorm(model: nn.Module, group_size: int) -> Iterator[None]:
    """BatchNorm per ``group_size`` consecutive samples of what passes through, while the body runs.

    A layer in training normalises each group with its own statistics; its running statistics end at the mean over the
    groups of what each alone would have made of them. "Train longer, generalize better", arXiv:1705.08741, algorithm 1.
    """
    layers = batchnorm_layers(model)
    for layer in layers:
        grouped = partial(_forward_in_groups, layer, layer.forward, group_size)
        layer.forward = grouped  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _forward_in_groups(layer: _BatchNorm, forward: Callable[[Tensor], Tensor], group_size: int, x_BC: Tensor) -> Tensor:
    """Shapes (B, C, ...), any number of dimensions; B is a multiple of the group size."""
    groups = torch.split(x_BC, group_size)
    if not layer.training or len(groups) == 1:
        return forward(x_BC)
    names = [name for name in _BUFFERS if getattr(layer, name) is not None]
    own = {name: getattr(layer, name) for name in names}
    sums = {name: torch.zeros_like(own[name]) for name in names}
    outputs = []
    for group in groups:
        # Each group starts from copies: autograd refuses buffers that are written between forward and backward.
        for name in names:
            setattr(layer, name, own[name].clone())
        outputs.append(forward(group))
        for name in names:
            sums[name].add_(getattr(layer, name))
    for name in names:
        # The counter too: every group makes it one more than before, and so is their mean.
        own[name].copy_(sums[name] / len(groups))
        setattr(layer, name, own[name])
    return torch.cat(outputs)


def _uneven(batch_size: int, norm_group: int) -> str:
    return (
        f"recipe.batch_size {batch_size} is not a multiple of norm_group {norm_group}: BatchNorm statistics need whole "
        f"groups; set recipe.norm_group to a divisor of {batch_size}"
    )
