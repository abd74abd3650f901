"""Gradients summed over the ranks of a gang while the backward pass still runs.

Why not DistributedDataParallel: it averages over ranks, which weights uneven shares wrongly; it rebuilds its buckets
after the first step of every process, so that a resumed gang of three adds in another order than an undisturbed one;
and it wraps the model, which renames what is checkpointed. Here gradients live in flat buckets whose layout follows
from the order of the parameters alone, for the life of the run, and buckets are sent in one fixed order.
``benchmarks/bench_training.py`` compares the speed of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter

from workloads.train.ranks import Ranks

# The first bucket is small, so that sending begins early; a large one amortises latency. Sizes of DDP's defaults.
# Part of the numerics: another layout adds in another order.
_FIRST_BUCKET_BYTES: Final = 1024**2
_BUCKET_BYTES: Final = 25 * 1024**2


@dataclass(slots=True, eq=False)
class _Bucket:
    """Gradients of some parameters in one flat tensor."""

    flat: Tensor
    views: dict[Parameter, Tensor]
    num_waiting: int = 0
    finish: Callable[[], object] | None = field(default=None)


class GradientSum:
    """Sums the gradients of ``parameters`` over ranks, in place; alone it only does what an optimiser expects.

    Per step: ``begin``, any number of backward passes of which the last follows ``last_pass``, ``finish``.
    """

    def __init__(self, parameters: Iterable[Parameter], ranks: Ranks) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._ranks = ranks
        # Backward passes end at a network's first parameters.
        self._buckets = [] if ranks.is_solo else _buckets(self._parameters[::-1])
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.views}
        self._touched: set[Parameter] = set()
        self._num_sent = 0
        self._is_last_pass = False
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._is_accumulated)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        if self._ranks.is_solo:
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
        """Wait for the sums; returns the gradients of all parameters that the step's losses depend on.

        Raises:
            PeerLostError: another rank is gone.
        """
        for bucket in self._buckets[self._num_sent :]:
            self._send(bucket)
        for bucket in self._buckets:
            if bucket.finish is not None:
                bucket.finish()
        if not self._ranks.is_solo:
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
        bucket.finish = self._ranks.sum_in_background(bucket.flat)

    def _leave_out_untouched(self) -> None:
        """A parameter that no loss depends on has no gradient, as without a gang; zero would let weight decay at it."""
        for parameter in self._parameters:
            if parameter not in self._touched:
                parameter.grad = None


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
