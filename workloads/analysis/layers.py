"""How many units are active in each layer of a network, counted while samples pass through it.

A layer is an activation function that is a module, as in timm's networks: its name is the module's path. One
that is called several times in a pass is a layer for each call (``act``, ``act:2``). Functions that are called without
a module (``torch.nn.functional.relu``) cannot be counted, and the layers behind them are not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import timm.layers.activations as timm_activations
from torch import Tensor, nn

_COUNTED: Final = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.CELU, nn.SELU),
    *(nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish),
    *(timm_activations.Swish, timm_activations.Mish, timm_activations.HardSwish, timm_activations.HardMish),
    *(timm_activations.GELU, timm_activations.GELUTanh, timm_activations.QuickGELU),
)
"""Functions with a side on which units are off. Those that are above 0 everywhere (sigmoids of gates) have none."""


class ActivityCounter:
    """Counts activations above 0 by layer, from when it is entered until it is left.

    Call ``next_pass`` before each pass of the network.
    """

    def __init__(self, network: nn.Module) -> None:
        self._layers = [(name, module) for name, module in network.named_modules() if isinstance(module, _COUNTED)]
        self._handles: list[Any] = []
        self._calls: dict[str, int] = {}
        self._active: dict[str, int] = {}
        self._all: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._handles = [module.register_forward_hook(partial(self._count, name)) for name, module in self._layers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def next_pass(self) -> None:
        """The calls that follow are those of the next batch."""
        self._calls.clear()

    @property
    def shares(self) -> Mapping[str, float]:
        """By layer in the order of the pass: share of activations above 0, over samples, units and positions."""
        return {name: active / self._all[name] for name, active in self._active.items()}

    def _count(self, module: str, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        call = self._calls[module] = self._calls.get(module, 0) + 1
        name = module if call == 1 else f"{module}:{call}"
        self._active[name] = self._active.get(name, 0) + int((output > 0).sum())
        self._all[name] = self._all.get(name, 0) + output.numel()
