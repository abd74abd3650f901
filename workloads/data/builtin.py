"""The two built-in data sets as samples: ``synthetic-hierarchy`` and ``digits``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from orchestrator.storage.dataset_files import ClassRows
from workloads.data import synthetic
from workloads.data.shards import ShardSample
from workloads.runtime.streams import Purpose, Stage, permutation, seed_sequence

DIGITS_VERSION = 1
_DIGITS_WHITE = 16  # the scans' pixels count the ink of 4x4 blocks: 0 ... 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinSplit:
    """Samples that can be made from any one on."""

    num_samples: int
    samples: Callable[[int, int], Iterator[ShardSample]]
    """Those numbered ``start <= i < stop``, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinDataset:
    """A class table (columns ``class``, ``name`` and one per level) and the samples of each split."""

    classes: ClassRows
    splits: Mapping[str, BuiltinSplit]


def open_builtin(parameters: Mapping[str, Any]) -> BuiltinDataset:
    """The data set that a ``dataset`` job's parameters describe.

    Raises:
        UserError: there is no such data set, this code makes another version of it, or a parameter is wrong.
    """
    name, version = str(parameters.get("builtin")), parameters.get("version")
    if name not in _BUILTINS:
        raise UserError(f"there is no built-in data set {name!r}; built-in are {', '.join(_BUILTINS)}")
    current, make = _BUILTINS[name]
    if version != current:
        raise UserError(f"{name} was planned as version {version!r}, this code makes version {current}: plan again")
    own = {field: value for field, value in parameters.items() if field not in {"builtin", "version"}}
    try:
        return make(own)
    except (TypeError, ValueError) as error:
        raise UserError(f"data set {name}: {error}") from error


def _synthetic(parameters: Mapping[str, Any]) -> BuiltinDataset:
    params = synthetic.SyntheticParameters.from_mapping(parameters)
    splits = {
        "train": BuiltinSplit(num_samples=params.num_train, samples=partial(_synthetic_samples, params, "train")),
        "val": BuiltinSplit(num_samples=params.num_val, samples=partial(_synthetic_samples, params, "val")),
    }
    return BuiltinDataset(classes=synthetic.class_table(params), splits=splits)


def _synthetic_samples(
    params: synthetic.SyntheticParameters, split: synthetic.Split, start: int, stop: int
) -> Iterator[ShardSample]:
    for sample in synthetic.render_split(params, split, start, stop):
        metadata = {**sample.metadata, "subset": sample.subset}
        yield ShardSample(key=sample.key, image=sample.image_HWC, leaf=sample.leaf, metadata=metadata)


def _digits(parameters: Mapping[str, Any]) -> BuiltinDataset:
    """The scans of handwritten digits that scikit-learn ships (test part of UCI's optdigits)."""
    from sklearn.datasets import load_digits

    val_fraction, seed = _digits_parameters(**parameters)
    scans = load_digits()
    images = np.rint(scans.images * (255 / _DIGITS_WHITE)).astype(np.uint8)
    leaves = scans.target.astype(np.int64)
    is_val = _stratified(leaves, val_fraction, seed)
    names = [str(name) for name in scans.target_names]
    classes: list[dict[str, object]] = [{"class": leaf, "name": name, "digit": name} for leaf, name in enumerate(names)]
    members = {"train": np.flatnonzero(~is_val), "val": np.flatnonzero(is_val)}
    splits = {
        split: BuiltinSplit(num_samples=len(rows), samples=partial(_digits_samples, (images, leaves), rows, split))
        for split, rows in members.items()
    }
    return BuiltinDataset(classes=classes, splits=splits)


def _digits_parameters(*, val_fraction: float, seed: int) -> tuple[float, int]:
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction: {val_fraction!r} is not valid; it must lie between 0 and 1, both excluded")
    if seed < 0:
        raise ValueError(f"seed: {seed!r} is not valid; it must be an integer >= 0")
    return val_fraction, seed


def _stratified(leaves: NDArray[np.int64], val_fraction: float, seed: int) -> NDArray[np.bool_]:
    """Which samples are validation samples: of each class the same fraction, at random."""
    is_val = np.zeros(len(leaves), dtype=np.bool_)
    for leaf in np.unique(leaves):
        members = np.flatnonzero(leaves == leaf)
        order = permutation(seed_sequence(seed, Stage.DATASET, Purpose.VAL_SPLIT, int(leaf)), len(members))
        is_val[members[order[: round(val_fraction * len(members))]]] = True
    return is_val


def _digits_samples(
    scans: tuple[NDArray[np.uint8], NDArray[np.int64]], rows: NDArray[np.int64], split: str, start: int, stop: int
) -> Iterator[ShardSample]:
    images, leaves = scans
    for number in rows[start:stop].tolist():
        leaf = int(leaves[number])
        metadata = {"class": leaf, "index": number, "name": str(leaf), "split": split}
        yield ShardSample(key=f"digit-{number:04d}", image=images[number], leaf=leaf, metadata=metadata)


_BUILTINS: Mapping[str, tuple[int, Callable[[Mapping[str, Any]], BuiltinDataset]]] = {
    "synthetic-hierarchy": (synthetic.VERSION, _synthetic),
    "digits": (DIGITS_VERSION, _digits),
}
