"""Optimisers, and their state as named tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from orchestrator.errors import CorruptObjectError
from workloads.train.recipe import OptimizerName, Recipe


def build_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """An optimiser over all parameters of a model, in torch's fused form (one call per step, not one per tensor)."""
    parameters = list(model.parameters())
    match recipe.optimizer:
        case OptimizerName.SGD:
            return SGD(
                parameters,
                lr=recipe.lr,
                momentum=recipe.momentum,
                nesterov=recipe.nesterov,
                weight_decay=recipe.weight_decay,
                fused=True,
            )
        case OptimizerName.ADAM:
            return Adam(parameters, lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True)
        case OptimizerName.ADAMW:
            return AdamW(parameters, lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True)


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """The schedule decides the rate of every step; none of it is optimiser state."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def optimizer_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """All state of an optimiser as ``<entry>/<parameter name>`` -> tensor."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{entry}/{name}"] = value
            elif value is not None:
                message = f"{type(optimizer).__name__} keeps {entry}={value!r}, which is no tensor and would be lost"
                raise TypeError(message)
    return tensors


def load_optimizer_tensors(optimizer: Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Inverse of ``optimizer_tensors``.

    Raises:
        CorruptObjectError: a tensor belongs to no parameter of the model.
    """
    parameters = dict(model.named_parameters())
    for path, tensor in tensors.items():
        entry, _, name = path.partition("/")
        if name not in parameters:
            raise CorruptObjectError(f"optimizer state {path!r} belongs to no parameter of the model")
        optimizer.state[parameters[name]][entry] = _like_parameter(tensor, parameters[name])


def clip_gradients(model: nn.Module, max_norm: float) -> None:
    """Scale all gradients so that their joint norm is at most ``max_norm``; 0 = leave them."""
    if max_norm > 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def _like_parameter(tensor: Tensor, parameter: Tensor) -> Tensor:
    """State of a parameter on its device and in its memory layout, in which fused kernels walk through both at once."""
    if tensor.shape != parameter.shape:
        return tensor.to(parameter.device)
    return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
