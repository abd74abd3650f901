"""Failures of numerics: what counts as one, its message, and how a run goes back and skips batches.

The rewinding follows "PaLM", arXiv:2204.02311, section 5.1: return to a state from before the failure and leave out the
batches that led to it. Leaving out the last one alone would, after an exact replay of the others, end at the same bits.
States to go back to are held in host memory while training goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor

from workloads.checkpoint.retention import kept_steps
from workloads.checkpoint.snapshot import Checkpoint
from workloads.runtime.ranks import Ranks
from workloads.train.micro_batch import Layout
from workloads.train.task import Task

_TREND_STEPS: Final = 50
"""Steps over which the running mean of gradient norms forgets, and the fewest before it is trusted."""
_MOST_OVERFLOWS: Final = 40
"""Updates in a row that fp16 skips. Each halves the loss scale, which begins at 2^16; below 1 no scale is too large."""
_NAMED_SAMPLES = 8
_HELD: Final = 2
"""With a state every n updates, one of the two newest is at least n updates back, or the run has just begun."""


@dataclass(slots=True)
class NormTrend:
    """Gradient norms of a run: a running mean over its last ~50 steps, and sums since the last metrics line."""

    mean: float = 0.0
    num_steps: int = 0
    line_sum: float = 0.0
    line_max: float = 0.0
    line_steps: int = 0
    num_overflows: int = 0
    """Updates in a row, up to the last one, that fp16 skipped."""

    def add(self, norm: float) -> None:
        """Take one norm in; one that is not finite, of an update that fp16 skips, only counts."""
        if not math.isfinite(norm):
            self.num_overflows += 1
            return
        self.num_overflows = 0
        self.num_steps += 1
        # A plain mean at first, then an exponential one.
        self.mean += (norm - self.mean) / min(self.num_steps, _TREND_STEPS)
        self.line_sum, self.line_steps = self.line_sum + norm, self.line_steps + 1
        self.line_max = max(self.line_max, norm)

    def is_spike(self, norm: float, factor: float) -> bool:
        """Whether a norm is above ``factor`` times the running mean; never for factor 0 or in the first steps."""
        return factor > 0 and self.num_steps >= _TREND_STEPS and norm > factor * self.mean

    def take_line(self) -> dict[str, float]:
        """Mean and maximum since the last call; nothing without steps."""
        if not self.line_steps:
            return {}
        metrics = {"grad_norm": self.line_sum / self.line_steps, "grad_norm_max": self.line_max}
        self.line_sum, self.line_max, self.line_steps = 0.0, 0.0, 0
        return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What all ranks know of one finished update, the same on each."""

    step: int
    """Updates before this one."""
    loss: float
    """Sum over the samples of the global batch."""
    num_wrong: int
    grad_norm: float
    """Norm of all gradients, before clipping."""
    wants_stop: bool = False
    """Some rank is asked to stop."""
    wants_save: bool = False
    """Rank 0 would like a checkpoint now."""
    rank_times: tuple[float, ...] = ()
    """Of a gang, what ``stragglers`` measures on each rank."""

    def failure(self, norms: NormTrend, *, spike_factor: float, may_overflow: bool) -> str | None:
        """What is wrong with this update, or None.

        ``may_overflow``: gradients that are not finite were not applied. They mean that the loss scale was too large,
        unless they come again and again.
        """
        if not math.isfinite(self.loss):
            return f"loss is {self.loss}"
        if not math.isfinite(self.grad_norm):
            if not may_overflow:
                return f"gradient norm is {self.grad_norm}"
            if norms.num_overflows < _MOST_OVERFLOWS:
                return None
            before = f"as in the {norms.num_overflows} updates before"
            return f"gradient norm is {self.grad_norm}, {before}: no loss scale makes it finite"
        if norms.is_spike(self.grad_norm, spike_factor):
            return (
                f"gradient norm is {self.grad_norm:.4g}, more than recipe.grad_spike = {spike_factor:g} times its "
                f"running mean {norms.mean:.4g}"
            )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """A return from the failed update number ``failed_step`` to the state after ``to_step`` updates."""

    failed_step: int
    to_step: int
    first_batch: int
    """First of the consecutive batches that are left out from then on."""
    num_batches: int
    reason: str
    samples: Sequence[str] = ()
    """Some samples of the batch that failed, the ones without a finite loss first."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``dataclasses.asdict``, through JSON."""
        return cls(**{**document, "samples": tuple(document["samples"])})

    @property
    def end(self) -> int:
        """Last of the batches that are left out."""
        return self.first_batch + self.num_batches - 1


def batch_of(step: int, rewinds: Iterable[Rewind]) -> int:
    """The batch that update number ``step`` takes: batches follow each other, without those left out.

    A later rewind to an earlier step counts alone: it leaves out all that lies between, earlier gaps included.
    """
    batch = step
    for rewind in _in_force(rewinds):
        if rewind.to_step <= step:
            batch += rewind.num_batches
    return batch


def steps_before_gap(step: int, total_steps: int, rewinds: Iterable[Rewind]) -> int:
    """How many updates from ``step`` on take consecutive batches."""
    return min([rewind.to_step for rewind in _in_force(rewinds) if rewind.to_step > step] + [total_steps]) - step


def rewind_to(
    to_step: int, failed_step: int, rewinds: Sequence[Rewind], *, reason: str, samples: Sequence[str]
) -> Rewind:
    """The rewind that leaves out all batches of the updates ``to_step`` to ``failed_step``, both included."""
    before = [rewind for rewind in rewinds if rewind.to_step < to_step]
    first = batch_of(to_step, before)
    return Rewind(
        failed_step=failed_step,
        to_step=to_step,
        first_batch=first,
        num_batches=batch_of(failed_step, rewinds) + 1 - first,
        reason=reason,
        samples=tuple(samples),
    )


def _in_force(rewinds: Iterable[Rewind]) -> list[Rewind]:
    """Without those that a later one, to the same or an earlier step, makes void."""
    kept: list[Rewind] = []
    for rewind in rewinds:
        kept = [earlier for earlier in kept if earlier.to_step < rewind.to_step]
        kept.append(rewind)
    return kept


class FailedUpdateError(Exception):
    """An update whose numbers are wrong; the training loop catches it."""

    def __init__(self, reading: Reading, reason: str) -> None:
        super().__init__(reading, reason)
        self.reading, self.reason = reading, reason


def failed_samples(task: Task, batch: int, losses_B: Tensor, layout: Layout, ranks: Ranks) -> list[str]:
    """Some samples of a global batch, those without a finite loss first, wherever in the gang they were.

    ``losses_B`` are those of this rank's share. A collective.
    """
    is_bad_B = torch.zeros(layout.batch_size, device=losses_B.device)
    is_bad_B[layout.offset : layout.offset + layout.share] = (~losses_B.isfinite()).float()
    order = ranks.sum_(is_bad_B).argsort(descending=True, stable=True).cpu().numpy()
    ordinals_B = task.batch_ordinals(batch)
    return task.sample_names([int(ordinal) for ordinal in ordinals_B[order[:_NAMED_SAMPLES]]])


def rank_at_fault(losses_B: Tensor, ranks: Ranks) -> int | None:
    """The only rank whose samples have losses that are not finite; None = several have, none has, or there is one rank.

    ``losses_B`` are those of this rank's share. A collective.
    """
    if ranks.is_solo:
        return None
    is_bad_R = torch.zeros(ranks.world_size, device=losses_B.device)
    is_bad_R[ranks.rank] = (~losses_B.isfinite()).any()
    bad = ranks.sum_(is_bad_R).nonzero().flatten().tolist()
    return int(bad[0]) if len(bad) == 1 else None


def failure_message(job: str, step: int, reason: str, samples: Sequence[str]) -> str:
    """The message of a numerics failure."""
    return (
        f"{reason} at step {step} of {job}; lower recipe.lr, raise warmup_epochs, set grad_clip, or let the run go "
        "back with recipe.on_numerics: {rewind: n}; samples of the batch, those without a finite loss first: "
        f"{', '.join(samples)}"
    )


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

    def kept_steps(self) -> set[int]:
        """Steps that a state held names as kept: a run that goes back to it keeps them again."""
        return set[int]().union(*(kept_steps(held.state) for held in self._held))

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
