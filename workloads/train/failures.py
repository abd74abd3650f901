"""What a run says of an update whose numbers are wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workloads.train.layout import Layout
from workloads.train.ranks import Ranks
from workloads.train.safety import Reading
from workloads.train.task import Task

_NAMED_SAMPLES = 8


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
