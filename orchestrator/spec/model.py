"""The resolved sweep: frozen values without defaults left open, globs or names of recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.contract import JobKind, Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A data set; ``parameters`` are its whole identity. ``levels`` maps levels to their number of classes."""

    name: str
    readable: str
    parameters: Mapping[str, Any]
    levels: Mapping[str, int]
    num_classes: int
    num_train: int
    location: Mapping[str, Any] = field(default_factory=dict)
    """Where its shards lie that others wrote (``Execution.data_location``); empty: a ``dataset`` job writes them."""
    class_table: tuple[Mapping[str, Any], ...] = ()
    """Rows of an external data set's class table."""
    multi_label: bool = False
    has_val: bool = True
    """Whether a validation split is known to be there, or may be."""
    components: tuple[str, ...] = ()
    """Data sets that this one mixes; empty otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A timm architecture; ``kwargs`` go to ``timm.create_model`` as they are."""

    name: str
    image_size: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """Whose features are clustered: the pretrained ``backbone`` (a label space) of ``seed``, or ``model``."""

    pretrain: str = ""
    """Name of the block that pretrains the backbone."""
    backbone: str | None
    seed: int
    model: Model | None
    initial: Mapping[str, str]
    """Weights of ``model``: one of ``artifact``, ``uri`` with ``sha256``, ``timm``."""
    look: Mapping[str, Any]
    """How images are seen; None = as the weights were trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clustering:
    """Clusters of features; ``parameters`` are the identity of the job that makes them, apart from the features."""

    embedding: Embedding
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSpace:
    """A label space, by its path ``<entry>/<level>``, ``<entry>/<num_classes>`` or ``<entry>``."""

    name: str
    entry: str
    level: str
    dataset: str
    space: Mapping[str, Any]
    num_classes: int
    """0 = not known before it is made."""
    multi_label: bool = False
    """A leaf class has several targets."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Where the files lie that ``space`` names by their digest; never identity."""
    clustering: Clustering | None = None
    """How it is made, if it is made of clusters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """How often a run is saved; see the fields of ``Execution``. Never changes a result."""

    every_steps: int = 0
    every_epochs: int = 1
    mtbf_s: float = 0.0
    keep_last: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrain:
    """Backbones to make: ``labels`` (names of label spaces, in order) x ``seeds``."""

    name: str = ""
    """Name of the block; empty for a sweep's only, unnamed one."""
    model: Model
    labels: tuple[str, ...]
    recipe: Mapping[str, Any]
    seeds: tuple[int, ...]
    subset: Mapping[str, Any] = field(default_factory=dict)
    """Part of the training split; empty = all of it."""
    initial: Mapping[str, str] = field(default_factory=dict)
    """Where the backbone's weights start: one of ``artifact``, ``uri`` with ``sha256``, ``timm``; empty = random."""
    keep: Mapping[str, Any] = field(default_factory=dict)
    """Checkpoints that become part of the artifact, and so of its identity; empty = none."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One way to measure every backbone on one target."""

    name: str
    target: str
    protocol: JobKind
    recipe: Mapping[str, Any]
    seeds: tuple[int, ...]
    subset: Mapping[str, Any] = field(default_factory=dict)
    """As in `Pretrain`."""
    pretrains: tuple[str, ...] = ("",)
    """Names of the blocks whose backbones are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A whole sweep.yaml, resolved. ``store`` and ``tracking_uri`` are empty when the project's defaults apply."""

    name: str
    datasets: Mapping[str, Dataset]
    labels: Mapping[str, LabelSpace]
    pretrains: tuple[Pretrain, ...]
    """With different names, or a single one without."""
    transfer: tuple[Transfer, ...]
    baseline: str
    metric: str
    resources: Mapping[JobKind, Resources]
    num_workers: Mapping[JobKind, int]
    """Processes that work on one job of a kind together."""
    compute: Mapping[str, Any]
    """Fields of ``Execution`` that say how training computes."""
    store: str
    tracking_uri: str
    experiment: str
    max_failures: int

    def pretrain(self, name: str) -> Pretrain:
        """The block of a name. Raises ``KeyError``."""
        return {block.name: block for block in self.pretrains}[name]
