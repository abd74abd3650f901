"""BatchNorm statistics per norm group, and running statistics that move once per step.

A norm group is the set of samples that share one BatchNorm statistic. A step runs its groups one after the other; every
group normalises with its own statistics, and the running statistics end at the mean of what each group alone would have
made of them, so a step moves them once for any number of groups.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

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
        UserError: the batch is not a whole number of norm groups, or a layer that is trained depends on the batch in
            another way than BatchNorm.
    """
    _refuse_other_statistics(model)
    if norm_group is not None and (norm_group < 1 or batch_size % norm_group):
        raise UserError(_uneven(batch_size, norm_group))
    if not batchnorm_layers(model):
        return batch_size
    group = norm_group or min(batch_size, DEFAULT_NORM_GROUP)
    if batch_size % group:
        raise UserError(_uneven(batch_size, group))
    return group


def _refuse_other_statistics(model: nn.Module) -> None:
    """Refuse layers that would make results depend on the micro-batch and on the number of ranks.

    Such are BatchNorm without running statistics, and other layers with some: EvoNorm-B, InstanceNorm that tracks them.
    """
    frozen: tuple[str, ...] = ()
    for name, layer in model.named_modules():
        parameters = list(layer.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            frozen = (*frozen, name)  # it stays in evaluation mode, with all below it
        buffers = dict(layer.named_buffers(recurse=False))
        has_statistics = any(buffer.startswith("running_") for buffer in buffers)
        if isinstance(layer, _BatchNorm):
            is_wrong = not has_statistics  # which uses those of the batch in evaluation mode, too
        else:
            is_frozen = any(not above or f"{name}.".startswith(f"{above}.") for above in frozen)
            is_wrong = has_statistics and not is_frozen and "weight" not in buffers  # as timm's FrozenBatchNorm has
        if is_wrong:
            raise UserError(
                f"layer {name} of the model is {type(layer).__name__}, whose statistics of a batch do not follow norm "
                "groups: results would depend on the micro-batch and on the number of GPUs; use BatchNorm with running "
                "statistics, or a normalization of single samples such as GroupNorm or LayerNorm"
            )


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

    def begin_pass(self, num_samples: int) -> None:
        """Say how many samples the next forward pass has."""
        _begin_pass(self._layers, num_samples)

    def begin_step(self) -> None:
        """Remember where the step starts."""
        # Frozen layers are in evaluation mode and not touched, not even by the rounding of a mean.
        layers = [layer for layer in self._layers if layer.training]
        moments = [t for layer in layers for t in (layer.running_mean, layer.running_var) if t is not None]
        if not moments:
            self._moments = []
            return
        if len(moments) != len(self._moments) or any(map(operator.is_not, moments, self._moments)):
            self._moments = moments
            self._counters = [t for layer in layers if (t := layer.num_batches_tracked) is not None]
            self._before = [torch.empty_like(tensor) for tensor in moments + self._counters]
            self._sums = [torch.empty_like(tensor) for tensor in moments]
        _copy(self._before, self._moments + self._counters)
        torch._foreach_zero_(self._sums)

    def end_groups(self, num_groups: int = 1) -> None:
        """Add what one forward pass of so many groups made of the statistics, and put them back for the next one."""
        if not self._moments:
            return
        torch._foreach_add_(self._sums, self._moments, alpha=num_groups)
        _copy(self._moments + self._counters, self._before)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The statistics do not move while the body runs, such as a backward pass that computes activations again."""
        tensors = [
            tensor
            for layer in self._layers
            if layer.training
            for tensor in (layer.running_mean, layer.running_var, layer.num_batches_tracked)
            if tensor is not None
        ]
        before = [torch.empty_like(tensor) for tensor in tensors]
        _copy(before, tensors)
        yield
        _copy(tensors, before)

    def end_step(self, num_groups: int) -> None:
        """Move the statistics once, to the mean over all ``num_groups`` groups of the global batch."""
        if not self._moments:
            return
        flat = torch.cat([total.flatten() for total in self._sums])
        means = torch.split(self._sum(flat).div_(num_groups), [total.numel() for total in self._sums])
        torch._foreach_copy_(self._moments, list(means))
        if self._counters:
            torch._foreach_add_(self._counters, 1)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each tensor into its target. On a GPU one kernel copies many tensors, but only if all are of one type."""
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for target, source in zip(targets, sources, strict=True):
        of_this_type = pairs[target.dtype]
        of_this_type[0].append(target)
        of_this_type[1].append(source)
    for into, values in pairs.values():
        torch._foreach_copy_(into, values)


@contextmanager
def ghost_batchnorm(model: nn.Module, group_size: int, *, one_by_one: bool = False) -> Iterator[None]:
    """BatchNorm per ``group_size`` consecutive samples of what passes through, while the body runs.

    A layer in training normalises each group with its own statistics; its running statistics end at the mean over the
    groups of what each alone would have made of them. "Train longer, generalize better", arXiv:1705.08741, algorithm 1.
    ``one_by_one``: each group through the layer's own forward pass. It differs by rounding and takes about three times
    as many operations; layers that are neither torch's BatchNorm nor timm's with an activation always run like this.

    Where a network folds tokens or windows into the first dimension, sample after sample, a layer sees several rows of
    each sample: ``begin_pass`` says how many samples there are. Without it, rows are samples.
    """
    layers = batchnorm_layers(model)
    kinds = {layer: type(layer) for layer in layers}
    for layer in layers:
        layer.pass_size = 0  # type: ignore[assignment]
        grouped = None if one_by_one else _grouped_kind(kinds[layer])  # type: ignore[arg-type] # classes are hashable
        if grouped is None:
            layer.forward = partial(_forward_in_groups, layer, layer.forward, group_size)  # type: ignore[method-assign]
        else:
            # Another class, not another method of the object: so blocks that are alike share compiled code.
            layer.__class__, layer.norm_group = grouped, group_size  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer, kind in kinds.items():
            del layer.pass_size
            if type(layer) is kind:
                del layer.forward
            else:
                layer.__class__ = kind
                del layer.norm_group


def _forward_in_groups(layer: _BatchNorm, forward: Callable[[Tensor], Tensor], group_size: int, x_BC: Tensor) -> Tensor:
    """Shapes (B, C, ...), any number of dimensions; the last group may be smaller."""
    groups = torch.split(x_BC, _rows_of_group(layer, x_BC, group_size))
    if not layer.training or len(groups) == 1:
        return forward(x_BC)
    names = [name for name in _BUFFERS if getattr(layer, name) is not None]
    own = {name: getattr(layer, name) for name in names}
    sums = {name: torch.zeros_like(own[name]) for name in names}
    outputs = []
    try:
        for group in groups:
            # Each group starts from copies: autograd refuses buffers that are written between forward and backward.
            for name in names:
                setattr(layer, name, own[name].clone())
            outputs.append(forward(group))
            for name in names:
                sums[name].add_(getattr(layer, name))
    finally:
        # Activation checkpointing ends a recomputation by an exception in the last operation that saves a tensor.
        for name in names:
            setattr(layer, name, own[name])
    for name in names:
        # The counter too: every group makes it one more than before, and so is their mean.
        own[name].copy_(sums[name] / len(groups))
    return torch.cat(outputs)


def begin_pass(model: nn.Module, num_samples: int) -> None:
    """Say to the layers of ``ghost_batchnorm`` how many samples the next forward pass has."""
    _begin_pass(batchnorm_layers(model), num_samples)


def _begin_pass(layers: Sequence[_BatchNorm], num_samples: int) -> None:
    for layer in layers:
        if layer.__dict__.get("pass_size", num_samples) != num_samples:
            layer.pass_size = num_samples  # type: ignore[assignment]


def _rows_of_group(layer: Any, x_BC: Tensor, group_size: int) -> int:  # noqa: ANN401 - of a class that is made here
    return group_size * max(1, len(x_BC) // layer.pass_size) if layer.pass_size else group_size


@cache
def _grouped_kind(kind: type[_BatchNorm]) -> type[_BatchNorm] | None:
    """A subclass that normalises by groups of ``norm_group`` samples in one operation; None for unknown layers."""
    from timm.layers import BatchNormAct2d  # type: ignore[attr-defined] # see ``build``: this takes seconds

    has_activation = kind.forward is BatchNormAct2d.forward
    if not has_activation and kind.forward is not _BatchNorm.forward:
        return None

    def forward(layer: Any, x_BC: Tensor) -> Tensor:  # noqa: ANN401 - of a class that is made here
        num_rows = _rows_of_group(layer, x_BC, layer.norm_group)
        if not layer.training or len(x_BC) <= num_rows:
            return kind.forward(layer, x_BC)
        normalised_BC = _normalise_groups(layer, x_BC, num_rows)
        return layer.act(layer.drop(normalised_BC)) if has_activation else normalised_BC

    return type(f"Grouped{kind.__name__}", (kind,), {"forward": forward})


def _normalise_groups(layer: _BatchNorm, x_BC: Tensor, group_size: int) -> Tensor:
    """Shapes as of ``_forward_in_groups``."""
    is_traced = torch.compiler.is_compiling() and len(x_BC) % group_size == 0
    kind = _TracedBatchNorm if is_traced else _GhostBatchNorm
    normalised_BC: Tensor
    normalised_BC, means_GC, variances_GC = kind.apply(x_BC, layer.weight, layer.bias, group_size, layer.eps)
    with torch.no_grad():
        if layer.num_batches_tracked is not None:
            layer.num_batches_tracked.add_(1)
        momentum: float | Tensor | None = layer.momentum
        if momentum is None:  # torch's cumulative average
            momentum = 1.0 / layer.num_batches_tracked.float()  # type: ignore[union-attr]
        for running, groups in ((layer.running_mean, means_GC), (layer.running_var, variances_GC)):
            if running is not None:
                running.lerp_(groups.mean(0).to(running.dtype), momentum)
    return normalised_BC


class _AutogradContext(Protocol):
    """What autograd keeps between the passes."""

    saved_tensors: tuple[Any, ...]
    needs_input_grad: tuple[bool, ...]
    settings: tuple[int, float]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


class _GhostBatchNorm(torch.autograd.Function):
    """BatchNorm's own kernels, a group at a time, into one output: outputs (B, C, ...), means and variances (G, C).

    On CPUs outputs and gradients of inputs have the bits of the groups passed one by one. Variances are the unbiased
    ones.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes tensors by position
        ctx: _AutogradContext, x_BC: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, group_size: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = torch.split(x_BC, group_size)
        # Kernels for 16 bit keep statistics in float32.
        dtype = torch.promote_types(x_BC.dtype, torch.float32)
        statistics = torch.zeros(4, len(groups), x_BC.shape[1], dtype=dtype, device=x_BC.device)
        means_GC, variances_GC, saved_means_GC, saved_inverses_GC = statistics.unbind()
        normalised_BC = torch.empty_like(x_BC)
        rows = zip(*(part.unbind() for part in statistics.unbind()), strict=True)
        for group, out, (mean, variance, saved_mean, saved_inverse) in zip(
            groups, torch.split(normalised_BC, group_size), rows, strict=True
        ):
            # A momentum of 1 makes running statistics those of the group.
            torch.ops.aten.native_batch_norm.out(
                group,
                weight_C,
                bias_C,
                mean,
                variance,
                training=True,
                momentum=1.0,
                eps=eps,
                out=out,
                save_mean=saved_mean,
                save_invstd=saved_inverse,
            )
        ctx.save_for_backward(x_BC, weight_C, saved_means_GC, saved_inverses_GC)
        ctx.settings = (group_size, eps)
        ctx.mark_non_differentiable(means_GC, variances_GC)
        return normalised_BC, means_GC, variances_GC

    @staticmethod
    def backward(ctx: _AutogradContext, grad_BC: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x_BC, weight_C, means_GC, inverses_GC = ctx.saved_tensors
        group_size, eps = ctx.settings
        wanted = list(ctx.needs_input_grad[:3])
        found = [
            torch.ops.aten.native_batch_norm_backward(
                grad, group, weight_C, None, None, mean, inverse, train=True, eps=eps, output_mask=wanted
            )
            for grad, group, mean, inverse in zip(
                torch.split(grad_BC, group_size),
                torch.split(x_BC, group_size),
                means_GC.unbind(),
                inverses_GC.unbind(),
                strict=True,
            )
        ]
        inputs, weights, biases = zip(*found, strict=True)
        return (
            torch.cat(inputs) if wanted[0] else None,
            torch.stack(weights).sum(0) if wanted[1] else None,
            torch.stack(biases).sum(0) if wanted[2] else None,
            None,
            None,
        )


class _TracedBatchNorm(torch.autograd.Function):
    """As ``_GhostBatchNorm`` for whole groups, in operations that a compiler fuses with their neighbours.

    The backward pass is written out (arXiv:1502.03167, section 3), so that weights and inputs share their sums, which
    autograd computes in two passes over memory. Uncompiled all of this would take 2 to 5 times as long, because each
    operation passes over all of memory.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes tensors by position
        ctx: _AutogradContext, x_BC: Tensor, weight_C: Tensor | None, bias_C: Tensor | None, group_size: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        x_GSC = _wide_groups(x_BC, group_size)
        variances, means = torch.var_mean(x_GSC, dim=_samples_and_space(x_GSC), correction=0, keepdim=True)
        inverses = torch.rsqrt(variances + eps)
        normalised_BC = ((x_GSC - means) * inverses).flatten(0, 1)
        shape = (-1, *[1] * (x_BC.ndim - 2))
        # Never a view: an activation in place would copy gradients of a view to another memory format.
        normalised_BC = normalised_BC.clone() if weight_C is None else normalised_BC * weight_C.view(shape)
        if bias_C is not None:
            normalised_BC = normalised_BC + bias_C.view(shape)
        ctx.save_for_backward(x_BC, weight_C, means, inverses)
        ctx.settings = (group_size, eps)
        number, shape_GC = x_GSC.numel() // means.numel(), (x_GSC.shape[0], x_GSC.shape[2])
        means_GC = means.reshape(shape_GC)
        variances_GC = variances.reshape(shape_GC) * (number / max(number - 1, 1))
        ctx.mark_non_differentiable(means_GC, variances_GC)
        return normalised_BC.to(x_BC.dtype), means_GC, variances_GC

    @staticmethod
    def backward(ctx: _AutogradContext, grad_BC: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x_BC, weight_C, means, inverses = ctx.saved_tensors
        group_size = ctx.settings[0]
        grad_GSC = _wide_groups(grad_BC, group_size)
        normalised_GSC = (_wide_groups(x_BC, group_size) - means) * inverses
        others = _samples_and_space(grad_GSC)
        bias_grads = grad_GSC.sum(others, keepdim=True)
        weight_grads = (grad_GSC * normalised_GSC).sum(others, keepdim=True)
        number = x_BC.numel() // means.numel()
        scales = inverses if weight_C is None else inverses * weight_C.view(-1, *[1] * (x_BC.ndim - 2))
        x_grad_GSC = (grad_GSC - bias_grads / number - normalised_GSC * (weight_grads / number)) * scales
        wanted = ctx.needs_input_grad
        return (
            x_grad_GSC.flatten(0, 1).to(x_BC.dtype) if wanted[0] else None,
            weight_grads.sum(0).flatten() if wanted[1] else None,
            bias_grads.sum(0).flatten() if wanted[2] else None,
            None,
            None,
        )


def _wide_groups(x_BC: Tensor, group_size: int) -> Tensor:
    """(G, S, C, ...), in the precision of statistics."""
    return x_BC.reshape(-1, group_size, *x_BC.shape[1:]).to(torch.promote_types(x_BC.dtype, torch.float32))


def _samples_and_space(x_GSC: Tensor) -> list[int]:
    return [1, *range(3, x_GSC.ndim)]


def _uneven(batch_size: int, norm_group: int) -> str:
    return (
        f"recipe.batch_size {batch_size} is not a multiple of norm_group {norm_group}: BatchNorm statistics need whole "
        f"groups; set recipe.norm_group to a divisor of {batch_size}"
    )
