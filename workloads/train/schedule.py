"""When things happen in a training run, as pure functions of the step: epochs, evaluations, the learning rate.

A step counts finished updates: update number ``s`` (from 0) takes the run from step ``s`` to step ``s + 1``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Self

from orchestrator.errors import UserError
from workloads.data.order import total_steps
from workloads.train.recipe import Recipe, ScheduleName

_LINE_EVERY_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Calendar:
    """The steps of one run; ``epoch_ends`` are ascending, the last one is ``total_steps``, also of a broken epoch."""

    num_samples: int
    batch_size: int
    total_steps: int
    epoch_ends: tuple[int, ...]
    eval_every_epochs: int

    @classmethod
    def of(cls, recipe: Recipe, num_samples: int) -> Self:
        """The calendar of a recipe on a training split. Raises ``UserError`` if there is nothing to train."""
        total = total_steps(recipe.epochs, num_samples, recipe.batch_size)
        if total < 1:
            message = f"{recipe.epochs:g} epochs of {num_samples} samples give no batch of {recipe.batch_size}; "
            raise UserError(message + "raise recipe.epochs or lower recipe.batch_size")
        whole = (total_steps(epoch, num_samples, recipe.batch_size) for epoch in range(1, math.ceil(recipe.epochs)))
        ends = tuple(sorted({end for end in whole if 0 < end < total} | {total}))
        return cls(
            num_samples=num_samples,
            batch_size=recipe.batch_size,
            total_steps=total,
            epoch_ends=ends,
            eval_every_epochs=recipe.eval_every_epochs,
        )

    def epoch(self, step: int) -> float:
        """Passes over the training split that ``step`` updates have made."""
        return step * self.batch_size / self.num_samples

    def is_epoch_end(self, step: int) -> bool:
        """Whether an epoch ends with this step."""
        return self.epoch_ends[bisect_left(self.epoch_ends, step)] == step

    def is_evaluated(self, step: int) -> bool:
        """Whether the validation split is evaluated at this step; the last step always is."""
        if step == self.total_steps:
            return True
        return self.is_epoch_end(step) and (bisect_left(self.epoch_ends, step) + 1) % self.eval_every_epochs == 0

    def has_line(self, step: int) -> bool:
        """Whether metrics are written at this step: at every epoch's end, and in long epochs in between."""
        if self.is_epoch_end(step):
            return True
        earlier = bisect_left(self.epoch_ends, step)
        start = self.epoch_ends[earlier - 1] if earlier else 0
        return (step - start) % _LINE_EVERY_STEPS == 0

    def has_checkpoint(self, step: int, every_steps: int) -> bool:
        """Whether a checkpoint is due; ``every_steps`` 0 = at epochs' ends. Never at the end: the artifact follows."""
        if step == self.total_steps:
            return False
        return step % every_steps == 0 if every_steps else self.is_epoch_end(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """Linear warm-up from 0, then constant, or linearly or along half a cosine down to 0 at ``total_steps``.

    Cosine without restarts: "SGDR", arXiv:1608.03983, equation 5.
    """

    base: float
    schedule: ScheduleName
    warmup_steps: int
    total_steps: int

    @classmethod
    def of(cls, recipe: Recipe, calendar: Calendar) -> Self:
        """The schedule of a recipe; a warm-up that rounds to nothing is none."""
        warmup = total_steps(recipe.warmup_epochs, calendar.num_samples, calendar.batch_size)
        return cls(base=recipe.lr, schedule=recipe.schedule, warmup_steps=warmup, total_steps=calendar.total_steps)

    def at(self, step: int) -> float:
        """Learning rate of update number ``step`` (from 0). The warm-up's first update has ``base / warmup_steps``."""
        if step < self.warmup_steps:
            return self.base * ((step + 1) / self.warmup_steps)
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return self.base * _remaining(self.schedule, done)


def _remaining(schedule: ScheduleName, done: float) -> float:
    if schedule is ScheduleName.LINEAR:
        return 1 - done
    if schedule is ScheduleName.COSINE:
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1.0
