"""States to go back to, held in host memory while training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from workloads.checkpoint.snapshot import Checkpoint

_HELD: Final = 2
"""With a state every n updates, one of the two newest is at least n updates back, or the run has just begun."""


class RewindPoints:
    """The newest states at multiples of ``every_steps``; None = no rewinds, nothing is held."""

    def __init__(self, every_steps: int | None) -> None:
        self._every_steps = every_steps
        self._held: list[Checkpoint] = []
        self._initial: Checkpoint | None = None

    def is_due(self, step: int) -> bool:
        """Whether the state after ``step`` updates is to be held."""
        return self._every_steps is not None and step % self._every_steps == 0

    def target(self, failed_step: int) -> int:
        """The step to go back to from the failed update: at least ``every_steps`` updates back, where there are.

        A function of the step alone, so that a run that was resumed in between goes back to the same one.
        """
        every = self._every_steps or 1
        return max(0, (failed_step + 1 - every) // every * every)

    def hold(self, checkpoint: Checkpoint) -> None:
        """Copy a state; the oldest of those held makes room."""
        held = _held(checkpoint)
        others = [other for other in self._held if other.step != held.step]
        self._held = [*others[-_HELD + 1 :], held]

    def begin(self, checkpoint: Checkpoint) -> None:
        """Hold the state before the first update, which a fresh network has on every attempt."""
        if self._every_steps is not None:
            self._initial = _held(checkpoint)

    def find(self, step: int) -> Checkpoint | None:
        """The state after exactly ``step`` updates, if it is held."""
        return next((held for held in self._held if held.step == step), None)

    def replayed(self, step: int) -> Checkpoint | None:
        """A state from which ``step`` is not far, of a run that was resumed behind it without older checkpoints.

        Near its beginning that is the beginning. Later it is the oldest state held, which lies behind ``step``: going
        on from there is no longer what an undisturbed run does, but repeating everything would cost more than it saves.
        """
        if step <= _HELD * (self._every_steps or 1):
            return self._initial
        return self._held[0] if self._held else None

    def forget_after(self, step: int) -> None:
        """Drop later states: the run goes on from this step in another way."""
        self._held = [held for held in self._held if held.step <= step]


def _held(checkpoint: Checkpoint) -> Checkpoint:
    return Checkpoint(
        step=checkpoint.step,
        model=_copied(checkpoint.model),
        optimizer=_copied(checkpoint.optimizer),
        state=checkpoint.state,
    )


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
