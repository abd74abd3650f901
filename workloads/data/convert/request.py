"""What somebody asks a converter for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from orchestrator.core.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRequest:
    """A source and how to read it; what a converter does not know it ignores."""

    source: Path
    splits: Mapping[str, str] = field(default_factory=dict)
    """Folders or files of the source by split; empty: the usual ones."""
    val_fraction: float = 0.0
    """Share of each class of ``train`` to hold out as ``val``, in [0, 1); 0 = none."""
    seed: int = 0
    """Of the held-out samples and of the order in shards."""
    labels: Path | None = None
    """``imagenet1k``: file or folder that says the classes of validation images."""
    path_column: str = "path"
    label_column: str = "label"
    separator: str = ""
    """Between the labels of one sample; empty: each has one."""
    level_columns: tuple[str, ...] = ()
    root: Path | None = None
    """What relative paths of a table start from; default: the table's folder."""
    follow_links: bool = False
    """Whether links may lead out of the source."""


class Layout(Protocol):
    """What decides, besides the listing, which image goes into which shard."""

    @property
    def shard_bytes(self) -> int:
        """Size that a shard stays below, unless one image alone is larger."""

    @property
    def shuffle_seed(self) -> int | None:
        """Draws the order of the samples; None = that of the listing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """See `Layout`."""

    shard_bytes: int
    shuffle_seed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRequest:
    """How to write shards."""

    destination_uri: str
    shard_bytes: int = 256 * MIB
    """Size that a shard stays below, unless one image alone is larger."""
    shuffle: bool = True
    """Whether samples are written in an order drawn from the seed; sorted classes make poor blocks to shuffle in."""
    seed: int = 0
    num_processes: int = 1

    @property
    def shuffle_seed(self) -> int | None:
        """See `Layout`."""
        return self.seed if self.shuffle else None
