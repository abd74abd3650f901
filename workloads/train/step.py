"""One update: forward and backward per micro-batch, the sum over ranks, then the optimiser.

Nothing here waits for the device: what the host wants to know is summed up on the device and read later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from workloads.models.batchnorm import RunningStatistics
from workloads.train.gradients import GradientSum
from workloads.train.layout import Layout
from workloads.train.learner import Learner
from workloads.train.linear_form import Targets
from workloads.train.optim import set_learning_rate
from workloads.train.ranks import Ranks
from workloads.train.stragglers import RankTimes
from workloads.train.task import TrainInputs

LossOf = Callable[[Tensor, Targets], tuple[Tensor, Tensor]]
"""Inputs (B, ...) and targets to the losses (B,) in float32 and the number of wrong predictions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Votes:
    """What this rank tells the others along with an update."""

    stop: bool = False
    save: bool = False
    data_wait_s: float = 0.0
    """How long it waited for its batch."""


class Update:
    """Makes the updates of one learner, together with all ranks; ``max_norm`` 0 = gradients are not clipped.

    Passes of several norm groups need ``ghost_batchnorm`` around all updates.
    """

    def __init__(
        self, learner: Learner, losses_of: LossOf, layout: Layout, *, max_norm: float = 0.0, ranks: Ranks | None = None
    ) -> None:
        self._learner, self._losses_of, self._layout, self._max_norm = learner, losses_of, layout, max_norm
        self._ranks = ranks or Ranks()
        self._gradients = GradientSum(learner.model.parameters(), self._ranks)
        self._statistics = RunningStatistics(learner.model, self._ranks.sum_)
        # One group that is the whole batch moves the running statistics by itself.
        self._is_grouped = layout.has_batchnorm and layout.num_groups > 1
        self.times = RankTimes(self._ranks, learner.arithmetic.device, _mean_share(layout, self._ranks))
        self.losses_B = torch.empty(0)
        """Losses of this rank's share in the last update, on the device."""

    def __call__(self, batch: TrainInputs, learning_rate: float, votes: Votes | None = None) -> Tensor:
        """Update the weights; returns the sums of ``workloads.train.readings``, over all ranks."""
        self.times.begin()
        self._gradients.begin()
        loss, num_wrong = self._backward(batch)
        gradients = self._gradients.finish()
        arithmetic, optimizer = self._learner.arithmetic, self._learner.optimizer
        arithmetic.unscale_(optimizer)
        norm = get_total_norm(gradients)
        if self._max_norm > 0:
            clip_grads_with_norm_(self._learner.model.parameters(), self._max_norm, norm)
        set_learning_rate(optimizer, learning_rate)
        arithmetic.step(optimizer)
        return self._sums(loss, num_wrong, norm, votes or Votes())

    def _backward(self, batch: TrainInputs) -> tuple[Tensor, Tensor]:
        size, micro_batch = len(batch.inputs), self._layout.micro_batch
        losses, wrongs = [], []
        if self._is_grouped:
            self._statistics.begin_step()
        for start in range(0, size, micro_batch):
            stop = min(start + micro_batch, size)
            if stop == size:
                self._gradients.last_pass()
            losses_B, num_wrong = self._pass(batch.inputs[start:stop], batch.targets[start:stop])
            losses.append(losses_B.detach())
            wrongs.append(num_wrong)
        self.times.computed()
        if self._is_grouped:
            self._statistics.end_step(self._layout.num_groups)
        self.losses_B = losses[0] if len(losses) == 1 else torch.cat(losses)
        return self.losses_B.sum(dtype=torch.float64), torch.stack(wrongs).sum()

    def _pass(self, inputs: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        arithmetic, layout = self._learner.arithmetic, self._layout
        with arithmetic.autocast():
            losses_B, num_wrong = self._losses_of(inputs, targets)
        # Divided by the global batch, whatever the share: gradients of all passes and ranks add up to the batch's mean.
        loss = losses_B.sum() / layout.batch_size
        arithmetic.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self._is_grouped:
            self._statistics.end_groups(len(inputs) // layout.norm_group)
        return losses_B, num_wrong

    def _sums(self, loss: Tensor, num_wrong: Tensor, norm: Tensor, votes: Votes) -> Tensor:
        first = self._ranks.is_first
        # Filled, not copied from the host, which would wait for the device.
        flags = [torch.full((), float(flag), dtype=loss.dtype, device=loss.device) for flag in (votes.stop, votes.save)]
        # The norm is the same on all ranks, up to what unlike devices make of it: all believe the first one's.
        norm = norm.double() if first else torch.zeros_like(loss)
        sums = torch.stack([loss, num_wrong.double(), norm, *flags])
        times = self.times.fields(votes.data_wait_s, like=sums)
        return self._ranks.sum_(torch.cat([sums, *times]) if times else sums)


def _mean_share(layout: Layout, ranks: Ranks) -> float:
    """Samples of a step on a rank on average, by those on this one."""
    return layout.batch_size / (ranks.world_size * max(1, layout.share))
