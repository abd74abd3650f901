"""Numbers that a paper printed, to stand beside ours in the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One printed result. It names the place in the report that it belongs to, as the facets of jobs do."""

    transfer: str
    label_space: str
    """Path of the label space; empty for the one-pass baseline."""
    value: float
    """In the unit of the report's metric: a fraction for errors and accuracies."""
    std: float | None = None
    """As printed; None where none is."""
    source: str = ""
    """Where it is printed: paper and table."""
    pretrain: str = ""
    """Name of the pretrain block; empty for the unnamed one."""
    checkpoint: str = ""
    """``epoch50``; empty for the final weights."""
    fraction: str = ""
    """Fraction of the labels as text; empty for all."""
    cell: str = ""
    """Cell of a grid (``lr=0.4``); empty for the selected one."""
    num_runs: int | None = None
    """Runs behind it, where that is stated."""

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``dataclasses.asdict``."""
        return cls(**document)
