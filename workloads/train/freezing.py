"""Parameters that stay as they are while the others learn."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from orchestrator.core.errors import UserError


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Stop gradients of the parameters whose names match one of the globs; returns their names.

    Raises:
        UserError: a pattern matches nothing, or nothing is left to learn.
    """
    parameters = dict(model.named_parameters())
    frozen: list[str] = []
    for pattern in patterns:
        matches = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matches:
            examples = ", ".join(list(parameters)[:3])
            raise UserError(f"recipe.freeze: {pattern!r} matches no parameter; names look like {examples}")
        frozen += [name for name in matches if name not in frozen]
    if patterns and len(frozen) == len(parameters):
        raise UserError(f"recipe.freeze: {list(patterns)} freezes all {len(frozen)} parameters; leave some to learn")
    for name in frozen:
        parameters[name].requires_grad = False
    return frozen


def train_mode(model: nn.Module) -> None:
    """Put a model into training mode, but for modules whose parameters are all frozen.

    These behave as in evaluation: frozen BatchNorm layers keep their running statistics, frozen blocks drop nothing.
    """
    model.train()
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()
