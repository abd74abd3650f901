"""How a global batch is cut: into shares of ranks, and these into forward passes. Never changes what is computed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from torch import nn

from orchestrator.core.errors import UserError
from workloads.data.order import rank_slice
from workloads.models.batchnorm import batchnorm_layers, resolve_norm_group
from workloads.train.ranks import Ranks
from workloads.train.recipe import Recipe

_PAIR = 2
"""Samples that are mixed with each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes in samples. ``unit`` consecutive samples stay on one rank; ``micro_batch`` go through the model at once."""

    batch_size: int
    norm_group: int
    """Samples per BatchNorm statistic; the whole batch without BatchNorm."""
    has_batchnorm: bool
    unit: int
    share: int
    """Of the global batch, on this rank."""
    offset: int
    """Of the share within the global batch."""
    micro_batch: int

    @classmethod
    def of(cls, model: nn.Module, recipe: Recipe, *, micro_batch: int = 0, ranks: Ranks) -> Self:
        """The layout of a model's batches; ``micro_batch`` 0 = one norm group with BatchNorm, else the whole share.

        Raises:
            UserError: the batch is not made of whole groups, a micro-batch is not, or there are more ranks than groups.
        """
        group = resolve_norm_group(model, recipe.batch_size, recipe.norm_group)
        has_batchnorm = bool(batchnorm_layers(model))
        unit = math.lcm(group if has_batchnorm else 1, _PAIR if recipe.is_mixed else 1)
        start, stop = 0, recipe.batch_size
        if not ranks.is_solo:
            start, stop = rank_slice(start, stop, rank=ranks.rank, world_size=ranks.world_size, group_size=unit)
        if has_batchnorm and micro_batch % group:
            message = (
                f"execution.micro_batch is {micro_batch}, which is no multiple of the norm group of {group} samples: "
            )
            raise UserError(message + f"BatchNorm statistics need whole groups; set it to a multiple of {group}")
        return cls(
            batch_size=recipe.batch_size,
            norm_group=group,
            has_batchnorm=has_batchnorm,
            unit=unit,
            share=stop - start,
            offset=start,
            micro_batch=min(micro_batch or (group if has_batchnorm else stop - start), stop - start),
        )

    @property
    def num_groups(self) -> int:
        """Norm groups of the global batch."""
        return self.batch_size // self.norm_group
