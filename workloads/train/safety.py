"""When numbers go wrong: what counts as a failure, and which batches a run leaves out once it went back.

The rewinding follows "PaLM", arXiv:2204.02311, section 5.1: return to a state from before the failure and leave out the
batches that led to it. Leaving out the last one alone would, after an exact replay of the others, end at the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

_TREND_STEPS: Final = 50
"""Steps over which the running mean of gradient norms forgets, and the fewest before it is trusted."""


@dataclass(slots=True)
class NormTrend:
    """Gradient norms of a run: a running mean over its last ~50 steps, and sums since the last metrics line."""

    mean: float = 0.0
    num_steps: int = 0
    line_sum: float = 0.0
    line_max: float = 0.0
    line_steps: int = 0

    def add(self, norm: float) -> None:
        """Take one norm in; an infinite one, of an update that fp16 skips, says nothing."""
        if not math.isfinite(norm):
            return
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

        ``may_overflow``: infinite gradients only mean that a loss scale was too large, and were not applied.
        """
        if not math.isfinite(self.loss):
            return f"loss is {self.loss}"
        if not math.isfinite(self.grad_norm):
            return None if may_overflow else f"gradient norm is {self.grad_norm}"
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
