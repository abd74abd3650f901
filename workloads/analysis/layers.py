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

    A pass that fails counts for nothing: one that does not fit into memory is repeated in halves.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._layers = [(name, module) for name, module in network.named_modules() if isinstance(module, _COUNTED)]
        self._handles: list[Any] = []
        self._calls: dict[str, int] = {}
        self._counts: dict[str, tuple[int, int]] = {}
        """Of the pass that is under way: activations above 0, and all."""
        self._active: dict[str, int] = {}
        self._all: dict[str, int] = {}

    def __enter__(self) -> Self:
        layers = [module.register_forward_hook(partial(self._count, name)) for name, module in self._layers]
        begin = self._network.register_forward_pre_hook(self._begin)
        self._handles = [begin, *layers, self._network.register_forward_hook(self._end)]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def shares(self) -> Mapping[str, float]:
        """By layer in the order of the pass: share of activations above 0, over samples, units and positions."""
        return {name: active / self._all[name] for name, active in self._active.items()}

    def _begin(self, *_: object) -> None:
        self._calls, self._counts = {}, {}

    def _count(self, module: str, _: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
        call = self._calls[module] = self._calls.get(module, 0) + 1
        name = module if call == 1 else f"{module}:{call}"
        self._counts[name] = int((output > 0).sum()), output.numel()

    def _end(self, *_: object) -> None:
        for name, (active, number) in self._counts.items():
            self._active[name] = self._active.get(name, 0) + active
            self._all[name] = self._all.get(name, 0) + number
