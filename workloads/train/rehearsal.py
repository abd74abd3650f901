"""Training steps that leave no trace: to find what fits into memory, and to compile before the clock runs."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from workloads.train.arithmetic import Arithmetic
from workloads.train.compiled import is_compile_failure
from workloads.train.linear_form import Targets

Example = Callable[[int], tuple[Tensor, Targets]]
"""Inputs and targets of so many made-up samples, on the device."""
LossOf = Callable[[Tensor, Targets], tuple[Tensor, Tensor]]


class Rehearsal:
    """Forward and backward passes after which weights, buffers, gradients and random states are as before."""

    def __init__(self, model: nn.Module, losses_of: LossOf, arithmetic: Arithmetic, example: Example) -> None:
        self._model, self._losses_of, self._arithmetic, self._example = model, losses_of, arithmetic, example

    def step(self, num_samples: int) -> None:
        """One pass of so many samples, uncompiled: a search should not compile every size it tries."""
        with self._arithmetic.uncompiled():
            self._run(num_samples)

    def compile(self, num_samples: int) -> float:
        """One pass that compiles, if the job is to run compiled; returns the seconds that took, 0 without.

        Backward passes compile when they first run, so only a whole step shows whether all of it can be compiled.
        """
        if not self._arithmetic.is_compiled:
            return 0.0
        started_s = time.perf_counter()
        try:
            self._run(num_samples)
        except Exception as error:
            if not is_compile_failure(error):
                raise
            self._arithmetic.give_up(error)
        return time.perf_counter() - started_s

    def _run(self, num_samples: int) -> None:
        model, arithmetic = self._model, self._arithmetic
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        devices = [arithmetic.device] if arithmetic.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):
                inputs, targets = self._example(num_samples)
                with arithmetic.autocast():
                    losses_B, _ = self._losses_of(inputs, targets)
                losses_B.sum().backward()  # type: ignore[no-untyped-call]
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
