"""How a training fits its device: the micro-batch (the layout's rule on CPUs, found by trial on GPUs), compilation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orchestrator.core.activity import Activity
from orchestrator.core.contract import Execution
from workloads.models.batchnorm import ghost_batchnorm
from workloads.train.layout import Layout
from workloads.train.learner import Learner
from workloads.train.linear_form import Targets
from workloads.train.micro_batch import (
    CudaMemory,
    MicroBatchMemory,
    chosen_micro_batch,
    find_micro_batch,
    out_of_memory_at,
)
from workloads.train.ranks import Ranks
from workloads.train.recipe import Recipe
from workloads.train.rehearsal import Rehearsal
from workloads.train.step import LossOf
from workloads.train.task import Task

_FOLDER = "micro-batches"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """What decides how many samples fit: ``setting`` names it for the memory of a node."""

    learner: Learner
    losses_of: LossOf
    task: Task
    ranks: Ranks
    cache: Path
    setting: Mapping[str, Any]

    def layout(self, recipe: Recipe, execution: Execution) -> Layout:
        """The layout, with the same micro-batch on all ranks.

        Raises:
            UserError: see ``Layout.of``.
            OutOfMemoryError: not even one norm group fits.
        """
        plain = Layout.of(self.task.model, recipe, ranks=self.ranks)
        with self.ranks.activity.during(Activity.COMPILE):
            mine = self._micro_batch(execution, plain)
        micro_batch = self._smallest(mine)
        return Layout.of(self.task.model, recipe, micro_batch=micro_batch, ranks=self.ranks)

    @contextmanager
    def training(self, layout: Layout) -> Iterator[float]:
        """Training runs inside; gives the seconds that compilation took before the first step.

        Raises:
            OutOfMemoryError: a step did not fit.
        """
        memory = self._memory()
        with ExitStack() as stack:
            if layout.has_batchnorm and layout.micro_batch > layout.norm_group:
                stack.enter_context(ghost_batchnorm(self.task.model, layout.norm_group))
            stack.enter_context(out_of_memory_at(layout.micro_batch, None if memory is None else memory.failed))
            with self.ranks.activity.during(Activity.COMPILE):
                compile_s = self._rehearsal().compile(layout.micro_batch)
            yield compile_s

    def _micro_batch(self, execution: Execution, layout: Layout) -> int:
        """That of this rank; 0 = the layout's own rule."""
        unit = layout.norm_group if layout.has_batchnorm else 1
        memory = self._memory()
        search = None if memory is None else lambda: self._search(unit, layout.share)
        return chosen_micro_batch(execution, unit=unit, share=layout.share, search=search, memory=memory)

    def _smallest(self, mine: int) -> int:
        sizes = torch.zeros(self.ranks.world_size, dtype=torch.int64)
        sizes[self.ranks.rank] = mine
        return int(self.ranks.sum_(sizes).min())

    def _memory(self) -> MicroBatchMemory | None:
        """What this node remembers; None on CPUs, where nothing is searched."""
        device = self.learner.arithmetic.device
        if device.type != "cuda":
            return None
        here = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
        return MicroBatchMemory(self.cache / _FOLDER, {**self.setting, **here})

    def _search(self, unit: int, share: int) -> int:
        learner = self.learner
        state_bytes = sum(parameter.nbytes for parameter in learner.model.parameters() if parameter.requires_grad)
        # Two moments of an optimiser at most, and averaged weights.
        later_bytes = (2 + (learner.average is not None)) * state_bytes
        memory = CudaMemory(learner.arithmetic.device)
        step = self._rehearsal().step
        return find_micro_batch(step, unit=unit, limit=share, memory=memory, later_bytes=later_bytes)

    def _rehearsal(self) -> Rehearsal:
        return Rehearsal(self.task.model, self.losses_of, self.learner.arithmetic, self._example)

    def _example(self, num_samples: int) -> tuple[Tensor, Targets]:
        batch = self.task.trial_batch(num_samples)
        return batch.inputs, batch.targets
