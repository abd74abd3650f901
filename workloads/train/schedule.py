"""When things happen in a training run, as pure functions of the step: epochs, evaluations, the learning rate.

A step counts finished updates: update number ``s`` (from 0) takes the run from step ``s`` to step ``s + 1``.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Self

from orchestrator.core.errors import UserError
from workloads.data.order import total_steps
from workloads.train.recipe import Recipe

_LINE_EVERY_STEPS = 100
_EPOCHS = {"step": 0.0, "half_epoch": 0.5, "epoch": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Calendar:
    """The steps of one run; ``epoch_ends`` are ascending, the last one is ``total_steps``, also of a broken epoch."""

    num_samples: int
    batch_size: int
    total_steps: int
    epoch_ends: tuple[int, ...]
    last_epochs: tuple[int, ...]
    """Number, from 1, of the last epoch that ends with each: epochs that are smaller than a batch may share a step."""
    eval_every_epochs: int

    @classmethod
    def of(cls, recipe: Recipe, num_samples: int) -> Self:
        """The calendar of a recipe on a training split. Raises ``UserError`` if there is nothing to train."""
        total = total_steps(recipe.epochs, num_samples, recipe.batch_size)
        if total < 1:
            message = f"{recipe.epochs:g} epochs of {num_samples} samples give no batch of {recipe.batch_size}; "
            raise UserError(message + "raise recipe.epochs or lower recipe.batch_size")
        last = math.ceil(recipe.epochs)
        whole = {total_steps(epoch, num_samples, recipe.batch_size): epoch for epoch in range(1, last)}
        ends = {end: epoch for end, epoch in whole.items() if 0 < end < total} | {total: last}
        return cls(
            num_samples=num_samples,
            batch_size=recipe.batch_size,
            total_steps=total,
            epoch_ends=tuple(ends),
            last_epochs=tuple(ends.values()),
            eval_every_epochs=recipe.eval_every_epochs,
        )

    def epoch(self, step: int) -> float:
        """Passes over the training split that ``step`` updates have made."""
        return step * self.batch_size / self.num_samples

    def ended_epoch(self, step: int) -> int:
        """Number, from 1, of the epoch that ends with this step; of several the nearest one."""
        return round(self.epoch(step))

    def is_epoch_end(self, step: int, every_epochs: int = 1) -> bool:
        """Whether an epoch ends with this step whose number, from 1, is a multiple of ``every_epochs``."""
        place = bisect_left(self.epoch_ends, step)
        before = self.last_epochs[place - 1] if place else 0
        return self.epoch_ends[place] == step and self.last_epochs[place] // every_epochs > before // every_epochs

    def is_evaluated(self, step: int) -> bool:
        """Whether the validation split is evaluated at this step; the last step always is."""
        if step == self.total_steps:
            return True
        return self.is_epoch_end(step, self.eval_every_epochs)

    def has_line(self, step: int) -> bool:
        """Whether metrics are written at this step: at every epoch's end, and in long epochs in between."""
        if self.is_epoch_end(step):
            return True
        earlier = bisect_left(self.epoch_ends, step)
        start = self.epoch_ends[earlier - 1] if earlier else 0
        return (step - start) % _LINE_EVERY_STEPS == 0

    def has_checkpoint(self, step: int, every_steps: int, every_epochs: int = 1) -> bool:
        """Whether a checkpoint is due: every so many steps, or with ``every_steps`` 0 at the end of so many epochs.

        Never at the end: the artifact follows.
        """
        if step == self.total_steps:
            return False
        return step % every_steps == 0 if every_steps else self.is_epoch_end(step, every_epochs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Linear warm-up from 0 to ``base``, then ``constant_steps`` at ``base``, then a decay until ``total_steps``.

    With ``done`` = the share in [0, 1] of the decay's steps that are past, and ``epochs`` = epochs since its start:

    - constant: ``base``
    - linear: ``final + (base - final) (1 - done)``
    - cosine: ``final + (base - final) (1 + cos(pi done)) / 2``, without restarts: "SGDR", arXiv:1608.03983, equation 5
    - step: ``base rate^m`` after m milestones, which count from the start of training
    - exponential: ``base rate^(epochs / decay_every_epochs)``

    With ``every_epochs`` > 0 a decay holds its value until the next multiple of so many epochs of training; the value
    is that of the multiple's own step.
    """

    base: float
    schedule: str
    warmup_steps: int
    total_steps: int
    constant_steps: int = 0
    final: float = 0.0
    decay_rate: float = 1.0
    decay_every_epochs: float = 1.0
    milestone_steps: tuple[int, ...] = ()
    every_epochs: float = 0.0
    epoch_samples: tuple[int, int] = (1, 1)
    """Samples of an epoch and of a step; only exponential decay and ``every_epochs`` need them."""

    @classmethod
    def of(cls, recipe: Recipe, calendar: Calendar) -> Self:
        """The schedule of a recipe; a warm-up in epochs that rounds to nothing is none.

        Raises:
            UserError: warm-up and constant phase last longer than the training.
        """
        warmup = recipe.warmup_steps or _steps(recipe.warmup_epochs, calendar)
        # Rounded once, where the decay begins: 0.5 + 0.5 epochs are one epoch, whatever half of it rounds to.
        decay_start = recipe.warmup_steps + _steps(recipe.warmup_epochs + recipe.constant_epochs, calendar)
        if decay_start > calendar.total_steps:
            raise UserError(_too_long(recipe, calendar, decay_start))
        return cls(
            base=recipe.lr,
            schedule=recipe.schedule,
            warmup_steps=warmup,
            total_steps=calendar.total_steps,
            constant_steps=decay_start - warmup,
            final=recipe.lr_final,
            decay_rate=recipe.decay_rate,
            decay_every_epochs=recipe.decay_every_epochs,
            milestone_steps=tuple(_steps(epoch, calendar) for epoch in recipe.milestones),
            every_epochs=_EPOCHS[recipe.lr_every],
            epoch_samples=(calendar.num_samples, calendar.batch_size),
        )

    def at(self, step: int) -> float:
        """Learning rate of update number ``step`` (from 0). The warm-up's first update has ``base / warmup_steps``."""
        if step < self.warmup_steps:
            return self.base * ((step + 1) / self.warmup_steps)
        return SCHEDULE_FUNCTIONS[self.schedule](self, step)

    def step_decay(self, step: int) -> float:
        """``step``: multiplied at each milestone that is past."""
        return self.base * math.pow(self.decay_rate, bisect_right(self.milestone_steps, step))

    def exponential_decay(self, step: int) -> float:
        """``exponential``: multiplied once a period, in equal parts."""
        return self.base * math.pow(self.decay_rate, self._decay_epochs(step) / self.decay_every_epochs)

    def linear_decay(self, step: int) -> float:
        """``linear``: down to ``final`` by equal differences."""
        return self._above_final(1 - self._done(step))

    def cosine_decay(self, step: int) -> float:
        """``cosine``: down to ``final`` by half a wave."""
        return self._above_final(0.5 * (1 + math.cos(math.pi * self._done(step))))

    def _above_final(self, remaining: float) -> float:
        return self.final + (self.base - self.final) * remaining

    @property
    def _decay_start(self) -> int:
        return self.warmup_steps + self.constant_steps

    def _done(self, step: int) -> float:
        """Share of the decay that is over, in [0, 1]."""
        held = self._held_epoch(step)
        at = step if held is None else total_steps(held, *self.epoch_samples)
        return max(0, at - self._decay_start) / max(1, self.total_steps - self._decay_start)

    def _decay_epochs(self, step: int) -> float:
        """Epochs since the decay began, >= 0."""
        num_samples, batch_size = self.epoch_samples
        held, start = self._held_epoch(step), self._decay_start * batch_size / num_samples
        # Without warm-up the exponent is a whole number of multiples, free of rounding.
        return max(0.0, (step * batch_size / num_samples if held is None else held) - start)

    def _held_epoch(self, step: int) -> float | None:
        """The last multiple of ``every_epochs`` whose step is not after ``step``; None when every step counts."""
        if not self.every_epochs:
            return None
        num_samples, batch_size = self.epoch_samples
        # A multiple's step is rounded by at most half a step, so it is this multiple or the next one.
        multiple = math.floor(step * batch_size / num_samples / self.every_epochs)
        while total_steps((multiple + 1) * self.every_epochs, num_samples, batch_size) <= step:
            multiple += 1
        while multiple and total_steps(multiple * self.every_epochs, num_samples, batch_size) > step:
            multiple -= 1
        return multiple * self.every_epochs


SCHEDULE_FUNCTIONS: Final[Mapping[str, Callable[[LearningRate, int], float]]] = {
    "constant": lambda rate, _: rate.base,
    "linear": LearningRate.linear_decay,
    "cosine": LearningRate.cosine_decay,
    "step": LearningRate.step_decay,
    "exponential": LearningRate.exponential_decay,
}
"""What follows the warm-up, by the names in ``SCHEDULES`` of ``orchestrator.core.hyper_parameters``."""


def _steps(epochs: float, calendar: Calendar) -> int:
    return total_steps(epochs, calendar.num_samples, calendar.batch_size)


def _too_long(recipe: Recipe, calendar: Calendar, num_steps: int) -> str:
    return (
        f"warm-up and constant phase take {num_steps} steps, but {recipe.epochs:g} epochs of {calendar.num_samples} "
        f"samples in batches of {calendar.batch_size} are {calendar.total_steps}: the learning rate would never decay; "
        "lower recipe.warmup_steps, warmup_epochs or constant_epochs, or train longer"
    )
