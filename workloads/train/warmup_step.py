"""How a training fits its device: the micro-batch (the layout's rule on CPUs, found by trial on GPUs), compilation.

Both take training steps that leave no trace: to find what fits into memory, and to compile before the clock runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.core.activity import Activity
from orchestrator.core.contract import Execution
from workloads.models.batchnorm import begin_pass, ghost_batchnorm
from workloads.runtime.enums import Precision
from workloads.runtime.precision import Arithmetic, is_compile_failure, kept_state
from workloads.train.learner import Learner
from workloads.train.linear_form import Targets
from workloads.train.micro_batch import (
    CudaMemory,
    Layout,
    MicroBatchMemory,
    chosen_micro_batch,
    find_micro_batch,
    micro_batch_of,
    out_of_memory_at,
)
from workloads.train.step import LossOf
from workloads.train.task import JobContext, Task

_FOLDER = "micro-batches"
_RECIPE_FIELDS = ("precision", "tf32", "norm_group", "loss", "optimizer", "momentum", "dropout", "mixup", "cutmix")
Example = Callable[[int], tuple[Tensor, Targets]]
"""Inputs and targets of so many made-up samples, on the device."""


def _search_unit(layout: Layout) -> int:
    """Samples that must stay in one pass: a norm group."""
    return layout.norm_group if layout.has_batchnorm else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchSearch:
    """What decides how many samples fit into the device's memory."""

    learner: Learner
    losses_of: LossOf
    task: Task
    job: JobContext

    def layout(self) -> Layout:
        """The layout. Ranks wait for one another, so none takes more passes than the one that needs most.

        Raises:
            UserError: see ``Layout.of``.
            OutOfMemoryError: not even one norm group fits.
        """
        recipe, ranks = self.job.recipe, self.job.ranks
        plain = Layout.of(self.task.model, recipe, ranks=ranks)
        with ranks.activity.during(Activity.COMPILE):
            size = self._micro_batch(self.job.request.execution, plain)
        if not self.job.request.execution.micro_batch:
            passes = torch.zeros(ranks.world_size, dtype=torch.int64)
            passes[ranks.rank] = -(-plain.share // size) if size else 0
            size = micro_batch_of(plain.share, int(ranks.sum_(passes).max()), _search_unit(plain))
        return Layout.of(self.task.model, recipe, micro_batch=size, ranks=ranks)

    @contextmanager
    def training(self, layout: Layout, *, one_by_one: bool = False) -> Iterator[float]:
        """Training runs inside; gives the seconds that compilation took before the first step.

        ``one_by_one``: norm groups as in ``ghost_batchnorm``.

        Raises:
            OutOfMemoryError: the step that compiles did not fit.
        """
        with ExitStack() as stack:
            if layout.has_groups_at_once:
                stack.enter_context(ghost_batchnorm(self.task.model, layout.norm_group, one_by_one=one_by_one))
            with self.step(layout), self.job.ranks.activity.during(Activity.COMPILE):
                compile_s = self._warmup_step().compile(layout.micro_batch)
            yield compile_s

    def step(self, layout: Layout) -> AbstractContextManager[None]:
        """One step of training runs inside; this node remembers a micro-batch that does not fit.

        Raises:
            OutOfMemoryError: it did not fit.
        """
        return out_of_memory_at(layout.micro_batch, self._failed)

    def _failed(self, micro_batch: int) -> None:
        memory = self._memory()
        if memory is not None:
            memory.failed(micro_batch)

    def _micro_batch(self, execution: Execution, layout: Layout) -> int:
        """That of this rank; 0 = the layout's own rule."""
        unit = _search_unit(layout)
        memory = self._memory()
        search = None if memory is None else lambda: self._search(unit, layout.share)
        return chosen_micro_batch(
            execution,
            unit=unit,
            share=layout.share,
            has_batchnorm=layout.has_batchnorm,
            search=search,
            memory=memory,
        )

    def _memory(self) -> MicroBatchMemory | None:
        """What this node remembers; None on CPUs, where nothing is searched."""
        device = self.learner.arithmetic.device
        if device.type != "cuda":
            return None
        here = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
        return MicroBatchMemory(self.job.context.cache / _FOLDER, {**self.setting(), **here}, self._device_memory())

    def _device_memory(self) -> CudaMemory:
        return CudaMemory(self.learner.arithmetic.device, self.job.context.gpu_share)

    def setting(self) -> dict[str, Any]:
        """Besides the device, how many samples fit: a node remembers a size under it."""
        job = self.job
        return {
            "kind": job.request.kind.value,
            "model": job.model.to_json(),
            "num_classes": self.task.num_classes,
            "recipe": {name: getattr(job.recipe, name) for name in _RECIPE_FIELDS},
            "trained": _digest_of_trained(self.learner.model),
            "average": self.learner.average is not None,
            "gpu_share": job.context.gpu_share,
            "compile": job.request.execution.compile,
            **({"activation_checkpointing": True} if job.request.execution.activation_checkpointing else {}),
            # Gradients take memory during the whole step, and a second time where they are rounded.
            **({} if job.ranks.is_solo else {"grad_reduction": job.recipe.grad_reduction}),
        }

    def _search(self, unit: int, share: int) -> int:
        learner = self.learner
        state_bytes = sum(parameter.nbytes for parameter in learner.model.parameters() if parameter.requires_grad)
        inputs, _ = self._example(1)
        is_solo = self.job.ranks.is_solo
        # Two moments of an optimiser at most; as uint8 the images at hand, the next, and those on their way. Averaged
        # weights are in every peak: they exist since the learner does.
        later_bytes = 2 * state_bytes + 3 * share * inputs.nbytes // 4
        if not is_solo and Precision(self.job.recipe.grad_reduction) is Precision.BF16:
            later_bytes += state_bytes // 2  # the rounded gradients of a step stay until those of the next
        # As in ``GradientSum``: alone and in one pass, a step begins without gradients.
        has_buckets, step = learner.arithmetic.has_cuda_graphs or not is_solo, self._warmup_step().step
        return find_micro_batch(
            lambda size: step(size, has_gradients=has_buckets or size < share),
            unit=unit,
            limit=share,
            memory=self._device_memory(),
            later_bytes=later_bytes,
            sample_bytes=inputs.nbytes,
        )

    def _warmup_step(self) -> WarmupStep:
        return WarmupStep(self.task.model, self.losses_of, self.learner.arithmetic, self._example)

    def _example(self, num_samples: int) -> tuple[Tensor, Targets]:
        batch = self.task.trial_batch(num_samples)
        return batch.inputs, batch.targets


def _digest_of_trained(model: nn.Module) -> str:
    """Of the names of the weights that learn: the others need no gradients, and keep no activations."""
    names = sorted(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return sha256("\n".join(names).encode()).hexdigest()[:16]


class WarmupStep:
    """Forward and backward passes after which weights, buffers, gradients and random states are as before."""

    def __init__(self, model: nn.Module, losses_of: LossOf, arithmetic: Arithmetic, example: Example) -> None:
        self._model, self._losses_of, self._arithmetic, self._example = model, losses_of, arithmetic, example

    def step(self, num_samples: int, *, has_gradients: bool = False) -> None:
        """One pass of so many samples, uncompiled: a search should not compile every size it tries.

        ``has_gradients``: it adds to gradients, which take memory from its begin on.
        """
        with self._arithmetic.uncompiled():
            self._run(num_samples, has_gradients=has_gradients)

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

    def _run(self, num_samples: int, *, has_gradients: bool = False) -> None:
        model, arithmetic = self._model, self._arithmetic
        put_back = kept_state(model, [arithmetic.device])
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        try:
            for parameter, _ in gradients:
                parameter.grad = torch.zeros_like(parameter) if has_gradients and parameter.requires_grad else None
            inputs, targets = self._example(num_samples)
            begin_pass(model, len(inputs))
            with arithmetic.autocast():
                losses_B, _ = self._losses_of(inputs, targets)
            losses_B.sum().backward()  # type: ignore[no-untyped-call]
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            put_back()
