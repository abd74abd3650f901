"""One update: forward and backward per micro-batch, the sum over ranks, then the optimiser.

Nothing here waits for the device: numbers for the host are summed on the device and read later. Only a rank of a gang
with a parameter that its own losses do not depend on waits, to see whether those of another rank do.

Gradients are summed over the ranks of a gang while the backward pass still runs. Why not DistributedDataParallel: it
averages over ranks, which weights uneven shares wrongly; it rebuilds its buckets after the first step of every process,
so that a resumed gang of three adds in another order than an undisturbed one; and it wraps the model, which renames
what is checkpointed. Here gradients live in flat buckets whose layout follows from the order of the parameters alone,
for the life of the run, and buckets are sent in one fixed order. ``benchmarks/bench_training.py`` compares
the speed of both.

All ranks of a gang take the same time per step, because they wait for each other. A slow rank is recognised by its
own times: until it has its batch, and until its gradients are computed. Each rank adds them to the all-reduce of every
step. On CUDA the second is measured between two events on the device, and known a step or two later; the host never
waits for them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from workloads.models.batchnorm import RunningStatistics
from workloads.runtime.enums import Precision
from workloads.runtime.ranks import Ranks
from workloads.train.learner import Learner
from workloads.train.linear_form import Targets
from workloads.train.micro_batch import Layout
from workloads.train.optim import set_learning_rate
from workloads.train.task import TrainInputs

LossOf = Callable[[Tensor, Targets], tuple[Tensor, Tensor]]
"""Inputs (B, ...) and targets to the losses (B,) in float32 and the number of wrong predictions."""
# The first bucket is small, so that sending begins early; a large one amortises latency. Sizes of DDP's defaults.
# Part of the numerics: another layout adds in another order.
_FIRST_BUCKET_BYTES: Final = 1024**2
_BUCKET_BYTES: Final = 25 * 1024**2
_UNTOUCHED: Final = -0.0
"""What a rank adds to the gradient of a parameter that its losses do not depend on. It changes no other number, and a
sum is -0.0 only if all ranks added it: gradients begin as 0.0, and what is added to that is never -0.0. (Rounded to
bf16, a parameter with no gradient but negative ones below 2^-134 in size looks left out.)"""
_REMEMBERED_STEPS: Final = 20
"""Steps over which the running means forget, and the fewest before a rank is called slow."""
PER_RANK: Final = 2
"""Numbers that each rank adds to the sums: seconds of computing, seconds of waiting for its batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Votes:
    """What this rank tells the others along with an update."""

    stop: bool = False
    save: bool = False
    data_wait_s: float = 0.0
    """How long it waited for its batch."""


class Update:
    """Makes the updates of one learner, together with all ranks; ``max_norm`` 0 = gradients are not clipped.

    Passes of several norm groups need ``ghost_batchnorm`` around all updates. ``recomputes``: backward passes run
    forward passes again, which must not count in running statistics.
    """

    def __init__(
        self,
        learner: Learner,
        losses_of: LossOf,
        layout: Layout,
        *,
        max_norm: float = 0.0,
        ranks: Ranks | None = None,
        grad_reduction: Precision = Precision.FP32,
        recomputes: bool = False,
    ) -> None:
        self._learner, self._losses_of, self._layout, self._max_norm = learner, losses_of, layout, max_norm
        self._ranks, self._recomputes = ranks or Ranks(), recomputes
        self._gradients = GradientSum(
            learner.model.parameters(),
            self._ranks,
            precision=grad_reduction,
            in_buckets=learner.arithmetic.has_cuda_graphs,
        )
        self._statistics = RunningStatistics(learner.model, self._ranks.sum_)
        # One group that is the whole batch moves the running statistics by itself.
        self._is_grouped = layout.has_batchnorm and layout.num_groups > 1
        self.times = RankTimes(self._ranks, learner.arithmetic.device, _mean_share(layout, self._ranks))
        self.losses_B = torch.empty(0)
        """Losses of this rank's share in the last update, on the device."""

    def __call__(self, batch: TrainInputs, learning_rate: float, votes: Votes | None = None) -> Tensor:
        """Update the weights; returns the sums of ``workloads.train.step_metrics``, over all ranks."""
        self.times.begin()
        self._gradients.begin()
        loss, num_wrong = self._backward(batch)
        gradients = self._gradients.finish()
        if self._is_grouped:
            # Only now: a rank that leaves out parameters sends buckets as late as in `finish`; all need the same order.
            self._statistics.end_step(self._layout.num_groups)
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
        self.losses_B = losses[0] if len(losses) == 1 else torch.cat(losses)
        return self.losses_B.sum(dtype=torch.float64), torch.stack(wrongs).sum()

    def _pass(self, inputs: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        arithmetic, layout = self._learner.arithmetic, self._layout
        self._statistics.begin_pass(len(inputs))
        with arithmetic.autocast():
            losses_B, num_wrong = self._losses_of(inputs, targets)
        # Divided by the global batch, whatever the share: gradients of all passes and ranks add up to the batch's mean.
        loss = losses_B.sum() / layout.batch_size
        with self._statistics.held() if self._recomputes else nullcontext():
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


@dataclass(slots=True, eq=False)
class _Bucket:
    """Gradients of some parameters in one flat tensor."""

    flat: Tensor
    views: dict[Parameter, Tensor]
    num_waiting: int = 0
    rounded: Tensor | None = None
    """What is sent of it, where that is not the gradients themselves."""
    finish: Callable[[], object] | None = field(default=None)


class GradientSum:
    """Sums the gradients of ``parameters`` over ranks, in place; alone it only does what an optimiser expects.

    Per step: ``begin``, any number of backward passes of which the last follows ``last_pass``, ``finish``. With
    ``precision`` bf16 every rank rounds its gradients before they are sent, as DistributedDataParallel's
    ``bf16_compress_hook`` does; alone nothing is sent or rounded. ``in_buckets``: gradients have their own memory also
    alone, because backward passes that are CUDA graphs write the next gradients where the last ones were.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        ranks: Ranks,
        *,
        precision: Precision = Precision.FP32,
        in_buckets: bool = False,
    ) -> None:
        self._dtype = torch.bfloat16 if precision is Precision.BF16 and not ranks.is_solo else None
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._ranks = ranks
        # Backward passes end at a network's first parameters.
        self._buckets = _buckets(self._parameters[::-1]) if in_buckets or not ranks.is_solo else []
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.views}
        self._touched: set[Parameter] = set()
        self._num_sent = 0
        self._is_last_pass = False
        hook = _weak_hook(self._is_accumulated)
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        if not self._buckets:
            for parameter in self._parameters:
                parameter.grad = None
            return
        self._touched.clear()
        self._num_sent, self._is_last_pass = 0, False
        for bucket in self._buckets:
            bucket.flat.zero_()
            for parameter, view in bucket.views.items():
                parameter.grad = view

    def last_pass(self) -> None:
        """The next backward pass is the step's last one: what it completes may be sent."""
        self._is_last_pass = True
        for bucket in self._buckets:
            bucket.num_waiting = len(bucket.views)

    def finish(self) -> list[Tensor]:
        """Wait for the sums; returns the gradients of all parameters that the step's losses depend on, on any rank.

        Raises:
            PeerLostError: another rank is gone.
        """
        for bucket in self._buckets[self._num_sent :]:
            self._send(bucket)
        for bucket in self._buckets:
            if bucket.finish is not None:
                bucket.finish()
            if bucket.rounded is not None:
                bucket.flat.copy_(bucket.rounded)
        if self._buckets:
            self._leave_out_untouched()
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def _is_accumulated(self, parameter: Tensor) -> None:
        """Called by autograd when a backward pass has added all it has to a parameter's gradient."""
        if not isinstance(parameter, Parameter):
            return
        self._touched.add(parameter)
        if not self._is_last_pass:
            return
        self._bucket_of[parameter].num_waiting -= 1
        # Strictly in order: ranks whose backward passes run in another order still send the same bucket next.
        while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].num_waiting:
            self._send(self._buckets[self._num_sent])

    def _send(self, bucket: _Bucket) -> None:
        self._num_sent += 1
        if bucket.num_waiting:
            for parameter in bucket.views.keys() - self._touched:
                bucket.views[parameter].fill_(_UNTOUCHED)
        bucket.rounded = None if self._dtype is None else bucket.flat.to(self._dtype)
        bucket.finish = self._ranks.sum_in_background(bucket.flat if bucket.rounded is None else bucket.rounded)

    def _leave_out_untouched(self) -> None:
        """A parameter that no loss of any rank depends on has no gradient, as without a gang.

        Zero would let weight decay at it. Where this rank alone left it out, it takes the gradient of the others.
        """
        untouched = [parameter for parameter in self._parameters if parameter not in self._touched]
        if untouched:
            sums = [self._bucket_of[parameter].views[parameter] for parameter in untouched]
            everywhere = [True] * len(sums)
            if not self._ranks.is_solo:
                everywhere = torch.stack([((total == 0) & total.signbit()).all() for total in sums]).tolist()
            for parameter, is_left_out in zip(untouched, everywhere, strict=True):
                if is_left_out:
                    parameter.grad = None


def _weak_hook(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """The method for autograd, which keeps its hooks where the garbage collector does not look.

    The method itself would be a cycle, parameter, hook, sum, parameter, that is never freed.
    """
    weak = WeakMethod(method)

    def hook(parameter: Tensor) -> None:
        alive = weak()
        if alive is not None:
            alive(parameter)

    return hook


def _buckets(parameters: Sequence[Parameter]) -> list[_Bucket]:
    """Parameters in order, cut where a bucket is full or the kind of tensor changes."""
    groups: list[list[Parameter]] = []
    size_bytes, limit_bytes = 0, _FIRST_BUCKET_BYTES
    for parameter in parameters:
        fits = bool(groups) and _kind(groups[-1][0]) == _kind(parameter) and size_bytes < limit_bytes
        if not fits:
            limit_bytes = _BUCKET_BYTES if groups else _FIRST_BUCKET_BYTES
            groups.append([])
            size_bytes = 0
        groups[-1].append(parameter)
        size_bytes += parameter.nbytes
    return [_bucket(group) for group in groups]


def _kind(parameter: Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def _bucket(parameters: Sequence[Parameter]) -> _Bucket:
    dtype, device = _kind(parameters[0])
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=dtype, device=device)
    pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
    views = {parameter: _like(parameter, piece) for parameter, piece in zip(parameters, pieces, strict=True)}
    return _Bucket(flat=flat, views=views)


def _like(parameter: Parameter, piece: Tensor) -> Tensor:
    """A piece of the bucket in the parameter's own memory layout, which fused optimisers walk through beside it."""
    layout = torch.empty_like(parameter)  # dense, in the parameter's order of dimensions
    return piece.as_strided(layout.shape, layout.stride())


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The slowest rank of a gang, as of the last steps."""

    rank: int
    slowdown: float
    """Its own time per step by the median of the others'."""
    compute_s: float
    data_wait_s: float

    def counters(self) -> dict[str, float]:
        """For ``Progress.counters``."""
        return {
            "slow_rank": float(self.rank),
            "slow_rank_slowdown": self.slowdown,
            "slow_rank_compute_s": self.compute_s,
            "slow_rank_data_wait_s": self.data_wait_s,
        }


class RankTimes:
    """Measures this rank's steps and keeps what all ranks told; does nothing alone.

    ``weight``: mean share of a rank by this rank's, so that a rank with more samples is not taken for a slow one.
    """

    def __init__(self, ranks: Ranks, device: torch.device, weight: float = 1.0) -> None:
        self._ranks, self._weight, self._is_cuda = ranks, weight, device.type == "cuda"
        self._started_s = self._compute_s = 0.0
        self._started: torch.cuda.Event | None = None
        self._under_way: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._means = [[0.0] * PER_RANK for _ in range(ranks.world_size)]
        self._num_steps = 0

    def begin(self) -> None:
        """The batch is there; the forward pass begins."""
        if self._ranks.is_solo:
            return
        self._started_s = time.perf_counter()
        self._started = self._mark()

    def computed(self) -> None:
        """The last backward pass is done or enqueued; from here on the rank waits for others."""
        if self._ranks.is_solo:
            return
        ended = self._mark()
        if self._started is None or ended is None:
            self._compute_s = time.perf_counter() - self._started_s
            return
        self._under_way.append((self._started, ended))
        while self._under_way and self._under_way[0][1].query():  # type: ignore[no-untyped-call]
            first, last = self._under_way.pop(0)
            self._compute_s = first.elapsed_time(last) / 1e3

    def fields(self, data_wait_s: float, like: Tensor) -> list[Tensor]:
        """What this rank adds to the sums, zeros in the places of others; nothing alone. Waits for no device."""
        if self._ranks.is_solo:
            return []
        told = torch.zeros(PER_RANK * self._ranks.world_size, dtype=like.dtype, device=like.device)
        place = PER_RANK * self._ranks.rank
        told[place].fill_(self._compute_s * self._weight)
        told[place + 1].fill_(data_wait_s)
        return [told]

    def take(self, told: Sequence[float]) -> None:
        """What all ranks told with one step."""
        if not told:
            return
        self._num_steps += 1
        share = 1.0 / min(self._num_steps, _REMEMBERED_STEPS)
        for place, value in enumerate(told):
            means = self._means[place // PER_RANK]
            means[place % PER_RANK] += share * (value - means[place % PER_RANK])

    def slowest(self) -> Straggler | None:
        """None alone, and before there are enough steps to tell."""
        if self._ranks.is_solo or self._num_steps < _REMEMBERED_STEPS:
            return None
        own_s = [sum(means) for means in self._means]
        rank = max(range(len(own_s)), key=own_s.__getitem__)
        others_s = statistics.median(own_s[:rank] + own_s[rank + 1 :])
        compute_s, data_wait_s = self._means[rank]
        return Straggler(
            rank=rank,
            slowdown=own_s[rank] / others_s if others_s > 0 else 1.0,
            compute_s=compute_s,
            data_wait_s=data_wait_s,
        )

    def _mark(self) -> torch.cuda.Event | None:
        if not self._is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
