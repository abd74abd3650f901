"""A model with its optimiser, average and loss scale, which are saved and restored together.

With the run's own state (plain JSON) this is the whole checkpoint. Of the average only the tensors are saved:
how much a step counts is a pure function of the step, so that a resumed run needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.core.errors import CorruptObjectError
from workloads.checkpoint.snapshot import Checkpoint
from workloads.data.order import total_steps
from workloads.models.batchnorm import batchnorm_layers
from workloads.runtime.fingerprint import Fingerprint
from workloads.runtime.precision import Arithmetic
from workloads.runtime.ranks import Ranks
from workloads.train.optim import build_optimizer, load_optimizer_tensors, optimizer_tensors
from workloads.train.recipe import Recipe
from workloads.train.safety import NormTrend, Rewind
from workloads.train.schedule import Calendar
from workloads.train.step_metrics import Tally

AWAITS_EVALUATION: Final = "awaits_evaluation"
"""Field of ``RunState``; in the state of a checkpoint only where it is true."""
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


@dataclass(slots=True, kw_only=True)
class RunState:
    """Where a run is after ``step`` updates. Every number survives JSON exactly (Python prints floats reversibly)."""

    step: int = 0
    since_line: Tally = field(default_factory=Tally)
    """Training samples since the last metrics line."""
    in_epoch: Tally = field(default_factory=Tally)
    """Training samples of the present epoch."""
    norms: NormTrend = field(default_factory=NormTrend)
    """Gradient norms so far."""
    latest: dict[str, float] = field(default_factory=dict)
    """Metrics of the last complete epoch and the last evaluation."""
    best_val_error: float = 1.0
    peak_epoch: float = 0.0
    """Epoch of the first evaluation with ``best_val_error``; 0 before any."""
    kept: list[dict[str, Any]] = field(default_factory=list)
    """Steps whose weights the artifact will hold besides the last one's; see ``workloads.checkpoint.retention``."""
    rewinds: list[Rewind] = field(default_factory=list)
    """Numerics failures that this run went back behind, in the order in which they happened."""
    bad_samples: dict[str, Any] = field(default_factory=dict)
    """As of the last checkpoint, those that were counted so far; see ``RunMemory``."""
    awaits_evaluation: bool = False
    """The run stopped within the evaluation at ``step``: it goes on with this evaluation, and all that follows it."""
    resumed_steps: list[int] = field(default_factory=list)
    fingerprint: Fingerprint = field(default_factory=dict)
    fingerprint_changes: list[str] = field(default_factory=list)
    """Differences of numerics that this run met when it resumed; empty = bit-exact."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form without the step, which the checkpoint itself carries."""
        left_out = {"step"} if self.awaits_evaluation else {"step", AWAITS_EVALUATION}
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    @classmethod
    def from_json(cls, step: int, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``; what an older program did not write is as at the start."""
        parsed: dict[str, Any] = {name: Tally(**document[name]) for name in ("since_line", "in_epoch")}
        parsed["norms"] = NormTrend(**document.get("norms", {}))
        parsed["rewinds"] = [Rewind.from_json(rewind) for rewind in document.get("rewinds", ())]
        parsed["latest"] = dict(document.get("latest", {}))  # of a held state, which the run may go back to again
        return cls(**{**document, **parsed, "step": step})


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
