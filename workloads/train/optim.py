"""Optimisers, and their state as named tensors.

A new optimiser is an entry of ``OPTIMIZER_BUILDERS`` here and of ``OPTIMIZERS`` in
``orchestrator.core.hyper_parameters``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from orchestrator.core.errors import CorruptObjectError, UserError
from workloads.train.recipe import Recipe

_ADAM_EPS = 1e-8
_LAMB_EPS = 1e-6
_LARS_EPS = 1e-8
_LARS_TRUST = 0.001
_GROUP = "group_step"
"""Entry of a step counter that an optimiser keeps per group (timm's LAMB), under the group's first parameter."""
Groups = list[dict[str, Any]]
"""Parameters that learn, as ``torch.optim`` takes them."""


def build_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    """An optimiser over all parameters that learn, in torch's fused form (one call per step, not one per tensor).

    Weight decay is added to the gradient by ``sgd``, ``adam`` and ``lars``, and to the update by ``lamb``; ``adamw``
    shrinks the weights themselves. Sources: LAMB arXiv:1904.00962, algorithm 2; LARS arXiv:1708.03888, equation 6 with
    trust coefficient 0.001; AdamW arXiv:1711.05101, algorithm 2. timm gives a trust ratio to parameters with weight
    decay only: at ``weight_decay`` 0 LAMB updates as Adam, LARS as SGD.
    """
    return OPTIMIZER_BUILDERS[recipe.optimizer](recipe, _parameter_groups(recipe, model))


def _sgd(recipe: Recipe, groups: Groups) -> Optimizer:
    return SGD(groups, **_common(recipe), momentum=recipe.momentum, nesterov=recipe.nesterov, fused=True)


def _adam(recipe: Recipe, groups: Groups) -> Optimizer:
    return Adam(groups, **_common(recipe), betas=recipe.betas, eps=recipe.eps or _ADAM_EPS, fused=True)


def _adamw(recipe: Recipe, groups: Groups) -> Optimizer:
    return AdamW(groups, **_common(recipe), betas=recipe.betas, eps=recipe.eps or _ADAM_EPS, fused=True)


def _lamb(recipe: Recipe, groups: Groups) -> Optimizer:
    from timm.optim.lamb import Lamb

    # Clipping is the recipe's own grad_clip, not LAMB's.
    return Lamb(groups, **_common(recipe), betas=recipe.betas, eps=recipe.eps or _LAMB_EPS, max_grad_norm=None)


def _lars(recipe: Recipe, groups: Groups) -> Optimizer:
    from timm.optim.lars import Lars

    momentum, nesterov, eps = recipe.momentum, recipe.nesterov, recipe.eps or _LARS_EPS
    return Lars(groups, **_common(recipe), momentum=momentum, nesterov=nesterov, eps=eps, trust_coeff=_LARS_TRUST)


def _common(recipe: Recipe) -> dict[str, Any]:
    return {"lr": recipe.lr, "weight_decay": recipe.weight_decay}


OPTIMIZER_BUILDERS: Final[Mapping[str, Callable[[Recipe, Groups], Optimizer]]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
    "lamb": _lamb,
    "lars": _lars,
}
"""By the names in ``OPTIMIZERS`` of ``orchestrator.core.hyper_parameters``, which says what each reads."""


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """The schedule decides the rate of every step; none of it is optimiser state."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def optimizer_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """All state of an optimiser as ``<entry>/<parameter name>`` -> tensor."""
    tensors = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{entry}/{name}"] = value
            elif value is not None:
                message = f"{type(optimizer).__name__} keeps {entry}={value!r}, which is not a tensor and would be lost"
                raise TypeError(message)
    for group in optimizer.param_groups:
        if "step" in group:
            tensors[f"{_GROUP}/{names[id(group['params'][0])]}"] = group["step"]
    return tensors


def load_optimizer_tensors(optimizer: Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Inverse of ``optimizer_tensors``.

    Raises:
        CorruptObjectError: a tensor belongs to no parameter of the model.
    """
    parameters = dict(model.named_parameters())
    groups = {id(group["params"][0]): group for group in optimizer.param_groups}
    for group in groups.values():
        group.pop("step", None)  # before its first update a group has none, and a rewind may lead there
    for path, tensor in tensors.items():
        entry, _, name = path.partition("/")
        parameter = parameters.get(name)
        if parameter is None or (entry == _GROUP and id(parameter) not in groups):
            raise CorruptObjectError(f"optimizer state {path!r} belongs to no parameter of the model")
        if entry == _GROUP:
            groups[id(parameter)]["step"] = tensor.clone()
        else:
            optimizer.state[parameter][entry] = _like_parameter(tensor, parameter)


def _parameter_groups(recipe: Recipe, model: nn.Module) -> Groups:
    """Parameters that learn; those without weight decay in a group of their own."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not learning:
        raise UserError("recipe.freeze leaves no parameter to learn; freeze fewer")
    if recipe.weight_decay_on == "all":
        return [{"params": learning}]
    # no_bias_norm spares vectors and scalars: biases, scales of normalisation layers, layer scales.
    decayed = [parameter for parameter in learning if parameter.ndim > 1]
    spared = [parameter for parameter in learning if parameter.ndim <= 1]
    groups: Groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _like_parameter(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A copy on the parameter's device and in its memory layout, in which fused kernels walk through both at once."""
    if tensor.shape != parameter.shape:
        # Also on the same device: step counters grow in place, and a run may go back to where they came from again.
        return tensor.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
