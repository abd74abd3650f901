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


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelSpace:
    """A label space, by its path ``<entry>/<level>``, ``<entry>/<num_classes>`` or ``<entry>``."""

    name: str
    entry: str
    level: str
    dataset: str
    space: Mapping[str, Any]
    num_classes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A timm architecture; ``kwargs`` go to ``timm.create_model`` as they are."""

    name: str
    image_size: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrain:
    """Backbones to make: ``labels`` (names of label spaces, in order) x ``seeds``."""

    model: Model
    labels: tuple[str, ...]
    recipe: Mapping[str, Any]
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One way to measure every backbone on one target."""

    name: str
    target: str
    protocol: JobKind
    recipe: Mapping[str, Any]
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A whole sweep.yaml, resolved. ``store`` and ``tracking_uri`` are empty when the project's defaults apply."""

    name: str
    datasets: Mapping[str, Dataset]
    labels: Mapping[str, LabelSpace]
    pretrain: Pretrain
    transfer: tuple[Transfer, ...]
    baseline: str
    metric: str
    resources: Mapping[JobKind, Resources]
    store: str
    tracking_uri: str
    experiment: str
    max_failures: int
