"""What learns: a model with its optimiser, its moving average and its loss scale, as one thing to save and restore."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from torch import Tensor, nn
from torch.optim import Optimizer

from workloads.checkpoint.snapshot import Checkpoint
from workloads.train.arithmetic import Arithmetic
from workloads.train.averaging import WeightAverage, build_average
from workloads.train.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors
from workloads.train.ranks import Ranks
from workloads.train.recipe import Recipe
from workloads.train.schedule import Calendar
from workloads.train.state import RunState

_AVERAGE: Final = "average/"
_SCALER: Final = "scaler"


class Learner:
    """All tensors of a run that change while it trains."""

    def __init__(self, model: nn.Module, recipe: Recipe, calendar: Calendar, arithmetic: Arithmetic) -> None:
        self.model, self.arithmetic = model, arithmetic
        self.optimizer: Optimizer = build_optimizer(recipe, model)
        self.average: WeightAverage | None = build_average(recipe, model, calendar)

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the model holds the weights that are evaluated and committed: the averaged ones, if any."""
        return nullcontext() if self.average is None else self.average.applied()

    def checkpoint(self, state: RunState) -> Checkpoint:
        """All that a run needs to go on from here; its tensors are the live ones."""
        average = {} if self.average is None else self.average.tensors()
        optimizer = optimizer_tensors(self.optimizer, self.model)
        return Checkpoint(
            step=state.step,
            model=self.model.state_dict(),
            optimizer=optimizer | {f"{_AVERAGE}{name}": tensor for name, tensor in average.items()},
            state=state.to_json() | {_SCALER: self.arithmetic.state_dict()},
        )

    def restore(self, checkpoint: Checkpoint) -> RunState:
        """Go on from a checkpoint, whatever was before; it is copied."""
        self.model.load_state_dict(dict(checkpoint.model))
        if self.average is not None:
            self.average.load_tensors(_averages(checkpoint.optimizer))
        own = {name: tensor for name, tensor in checkpoint.optimizer.items() if not name.startswith(_AVERAGE)}
        # What the checkpoint does not name has not existed at its step: a momentum before the first update.
        self.optimizer.state.clear()
        load_optimizer_tensors(self.optimizer, self.model, own)
        state = dict(checkpoint.state)
        self.arithmetic.load_state_dict(state.pop(_SCALER, {}))
        return RunState.from_json(checkpoint.step, state)

    def load_committed(self, checkpoint: Checkpoint) -> None:
        """Make the model what a run that ended here would commit: the weights, or their averages in their place.

        For the end of a run, within ``averaged`` or not: it overwrites the last weights.
        """
        self.model.load_state_dict({**checkpoint.model, **_averages(checkpoint.optimizer)})

    def share_weights(self, ranks: Ranks) -> None:
        """Give every rank the initial weights of rank 0: equal seeds need not mean equal bits on unequal machines."""
        if ranks.is_solo:
            return
        average = {} if self.average is None else self.average.tensors()
        for tensor in (*self.model.state_dict().values(), *average.values()):
            ranks.broadcast_(tensor)


def _averages(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(_AVERAGE): tensor for name, tensor in tensors.items() if name.startswith(_AVERAGE)}
