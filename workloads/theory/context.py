"""What a simulation is, and what it may ask of the job that runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

if TYPE_CHECKING:  # a plan checks parameters and needs neither
    import torch
    from matplotlib.figure import Figure


Floats = NDArray[np.float64]


class SimulationContext(Protocol):
    """Given to a simulation as its third argument.

    A simulation is ``(parameters, seeds, context) -> Iterator[Mapping[str, float]]``: it yields one mapping of metrics
    per seed, in the order of the seeds. What it yields for a seed depends on the parameters and that seed alone, so
    that blocks of seeds that run one after another, side by side or after an interruption give the same bits. If the
    first argument is annotated with a pydantic model, the parameters are checked by it when the sweep is planned;
    otherwise it is a plain mapping.
    """

    @property
    def device(self) -> torch.device:
        """Where tensors should live: the job's GPU, or the CPU."""

    def save_array(self, name: str, value: NDArray[np.generic]) -> None:
        """Keep an array of the seed in progress, as ``arrays/<seed>/<name>.npy`` of the artifact.

        Args:
            name: letters, digits, ``_`` and ``-``.
            value: any shape; numbers or booleans.
        """

    def save_figure(self, name: str, figure: Figure) -> None:
        """Keep a matplotlib figure of the seed in progress, as ``figures/<seed>/<name>.png`` of the artifact."""


class ShippedParameters(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Parameters of a shipped simulation: fixed once they are checked, no unknown names, finite numbers."""
