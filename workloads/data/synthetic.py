"""The built-in dataset ``synthetic-hierarchy``: procedural images of a label tree.

It realises the data model of appendix B.1 of "Towards Understanding the Effect of Pretraining Label
Granularity" as small pictures, with a tree of any depth in place of the paper's two levels:

* an image is a grid of P patches; every node of the label tree owns one *feature*, a row of an
  orthonormal dictionary in patch space;
* *common-feature* patches show the feature of the sample's superclass (``depth1``), *subclass-feature*
  patches show the features of its finer nodes (``depth2`` ... ``depthN``), at random places;
* all other patches are *feature noise*: weak features of nodes under other superclasses;
* every pixel has Gaussian noise on top;
* *hard* samples have feature noise where the common-feature patches would be. They occur in ``val`` only.

Two departures from the paper: the numbers of patches are fixed instead of Bernoulli (every sample is
learnable, however small the image), and the noise is far above the paper's asymptotic 1/(ln^10(d) sqrt(d)).

Amplitudes are root-mean-square pixel values: a feature patch is ``sqrt(d) * amplitude * row``, d being the
length of a patch, so ``noise = feature_amplitude`` means equal energy per patch.

Pixels are stored as ``uint8 = rint(127.5 * (1 + x / limit))``, clipped to [0, 255], where ``limit`` is three
times the root-mean-square value of a feature patch with noise (`SyntheticParameters.pixel_limit`); 0.3 %
of such pixels clip. The step is below 2 % of that value, far below the noise. Write them as PNG: JPEG
blurs the features together with the noise and is no smaller on such pictures.

Sample i of a split depends on (parameters other than ``num_train``/``num_val``, split, i) alone, so a
larger dataset starts with the smaller one. Randomness is drawn per block of `BLOCK_SIZE` samples.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "val"]
Subset = Literal["normal", "hard"]

VERSION: Final = 1
"""Version of the generator; part of the dataset's identity. Bump it when any pixel or label changes."""

BLOCK_SIZE: Final = 256
NUM_CHANNELS: Final = 3
_LIMIT_IN_RMS: Final = 3.0

# First element of every spawn key; the values are part of the identity and are never reused.
_DICTIONARY, _ORDER, _SUBSET, _BLOCK = range(4)
_SPLIT_CODE: Final[Mapping[Split, int]] = {"train": 0, "val": 1}

# Closed ranges, as in the sweep language; the upper ends only stop typing errors.
_INTEGER_RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "image_size": (1, 1024),
    "patch_size": (1, 256),
    "num_train": (1, 100_000_000_000),
    "num_val": (0, 100_000_000_000),
    "num_common_patches": (1, 4096),
    "num_subclass_patches": (1, 4096),
    "num_weak_features": (0, 64),
    "seed": (0, 2**63 - 1),
}
_FLOAT_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "hard_fraction": (0.0, 1.0),
    "noise": (0.0, 100.0),
    "feature_amplitude": (0.001, 100.0),
    "weak_amplitude": (0.0, 1.0),
    "amplitude_jitter": (0.0, 0.99),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticParameters:
    """What determines the dataset, together with `VERSION`. All fields belong to its identity.

    branching: children per node, from the root down; (2, 4, 4, 4) = 2 superclasses and 128 leaves.
    image_size, patch_size: side lengths in pixels; images are square and hold whole patches.
    num_train, num_val: samples per split.
    hard_fraction: share of hard samples in ``val``, in [0, 1].
    noise: standard deviation of the pixel noise (the paper's sigma_zeta).
    feature_amplitude: root-mean-square pixel value of a feature patch.
    amplitude_jitter: iota; squared amplitudes lie in [1 - iota, 1 + iota] times the squared amplitude.
    weak_amplitude: gamma; each weak feature has an amplitude in [0, gamma] times ``feature_amplitude``.
    num_weak_features: weak features summed in each patch of feature noise.
    num_common_patches: patches with the superclass's feature in a normal sample.
    num_subclass_patches: patches per finer level.

    Raises ValueError, naming field, value and valid range, on construction.
    """

    branching: tuple[int, ...] = (2, 4, 4, 4)
    image_size: int = 32
    patch_size: int = 8
    num_train: int = 4096
    num_val: int = 2048
    hard_fraction: float = 0.5
    noise: float = 1.0
    feature_amplitude: float = 1.0
    amplitude_jitter: float = 0.2
    weak_amplitude: float = 0.2
    num_weak_features: int = 2
    num_common_patches: int = 4
    num_subclass_patches: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_branching(self.branching)
        _check_layout(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> "SyntheticParameters":
        """Build from plain YAML/JSON values; absent fields take their defaults. Raises ValueError."""
        known = {field.name for field in fields(cls)}
        for name in mapping:
            if name not in known:
                raise ValueError(f"{name}: no such parameter; valid are {', '.join(sorted(known))}")
        return cls(**{name: _parse(name, value) for name, value in mapping.items()})  # type: ignore[arg-type]

    @property
    def num_levels(self) -> int:
        """N, the depth of the label tree."""
        return len(self.branching)

    @property
    def num_leaves(self) -> int:
        """Number of leaf classes."""
        return math.prod(self.branching)

    @property
    def num_features(self) -> int:
        """Nodes of the tree without its root = rows of the dictionary."""
        return sum(math.prod(self.branching[: depth + 1]) for depth in range(self.num_levels))

    @property
    def num_patches(self) -> int:
        """P."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_length(self) -> int:
        """d, the number of values in one patch (all channels)."""
        return self.patch_size**2 * NUM_CHANNELS

    @property
    def pixel_limit(self) -> float:
        """The value stored as 255; its negative is stored as 0."""
        return _LIMIT_IN_RMS * math.hypot(self.feature_amplitude, self.noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSample:
    """One image of [image_size, image_size, 3] uint8 with its leaf class; ``metadata`` is JSON-ready."""

    key: str
    image_HWC: NDArray[np.uint8]
    leaf: int
    subset: Subset
    metadata: dict[str, object]


def class_table(params: SyntheticParameters) -> list[dict[str, object]]:
    """One row per leaf class: ``class`` (id), ``name``, and the node's path at ``depth1`` ... ``depthN``."""
    return [_class_row(params.branching, leaf) for leaf in range(params.num_leaves)]


@lru_cache(maxsize=4)
def feature_dictionary(params: SyntheticParameters) -> NDArray[np.float32]:
    """Orthonormal features [num_features, patch_length], patches flattened in (row, column, channel) order.

    QR of a seeded Gaussian. The sign convention and the rounding to 6 decimals make it the same under
    every LAPACK; the rows stay orthonormal within 1e-5.
    """
    gaussian = _generator(params, _DICTIONARY).standard_normal((params.patch_length, params.num_features))
    q, r = np.linalg.qr(gaussian)
    return np.round(q * np.sign(np.diag(r)), 6).T.astype(np.float32)


def feature_rows(params: SyntheticParameters, leaves: NDArray[np.int64]) -> NDArray[np.int64]:
    """Dictionary rows [n, num_levels] of the nodes on the paths to ``leaves`` [n]; column 0 = superclass.

    The rows of one superclass are contiguous: its own, then those below it, level by level.
    """
    num_superclasses = params.branching[0]
    first = leaves // (params.num_leaves // num_superclasses) * (params.num_features // num_superclasses)
    columns, num_nodes = [], num_superclasses
    for branches in (*params.branching[1:], 1):
        node = leaves // (params.num_leaves // num_nodes)
        columns.append(first + node % (num_nodes // num_superclasses))
        first = first + num_nodes // num_superclasses
        num_nodes *= branches
    return np.stack(columns, axis=1)


def render_split(
    params: SyntheticParameters, split: Split, start: int = 0, stop: int | None = None
) -> Iterator[SyntheticSample]:
    """Yield the samples ``start <= i < stop`` of a split, by default all: leaf classes mixed, each as often (+- 1)."""
    dictionary = feature_dictionary(params)
    stop = (params.num_train if split == "train" else params.num_val) if stop is None else stop
    for number in range(start // BLOCK_SIZE, -(-stop // BLOCK_SIZE)):
        # The whole block is rendered even if its ends are not wanted: see the module's docstring.
        block = _block(params, split, number)
        images = _render(params, dictionary, block)
        first = number * BLOCK_SIZE
        for row in range(max(start - first, 0), min(stop - first, BLOCK_SIZE)):
            yield _sample(params, block, row, images[row])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """What `BLOCK_SIZE` consecutive samples show: their leaf classes [n] and which of them are hard [n]."""

    split: Split
    number: int
    leaves: NDArray[np.int64]
    hard: NDArray[np.bool_]


def _block(params: SyntheticParameters, split: Split, number: int) -> _Block:
    indices = np.arange(number * BLOCK_SIZE, (number + 1) * BLOCK_SIZE)
    leaves = _leaves(params, split, indices)
    return _Block(split=split, number=number, leaves=leaves, hard=_hardness(params, split, indices, leaves))


def _sample(params: SyntheticParameters, block: _Block, row: int, image: NDArray[np.uint8]) -> SyntheticSample:
    index, leaf = block.number * BLOCK_SIZE + row, int(block.leaves[row])
    subset: Subset = "hard" if block.hard[row] else "normal"
    metadata: dict[str, object] = {
        "index": index,
        "split": block.split,
        "class": leaf,
        "name": _path(params.branching, leaf),
        "subset": subset,
    }
    key = f"{block.split}-{index:08d}"
    return SyntheticSample(key=key, image_HWC=image, leaf=leaf, subset=subset, metadata=metadata)


def _generator(params: SyntheticParameters, *spawn_key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(params.seed, spawn_key=spawn_key))


def _leaves(params: SyntheticParameters, split: Split, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Leaf classes [n]: the samples come in rounds, each round a permutation of all the leaves."""
    rounds = indices // params.num_leaves
    permutations = [
        _generator(params, _ORDER, _SPLIT_CODE[split], number).permutation(params.num_leaves)
        for number in range(rounds[0], rounds[-1] + 1)
    ]
    leaves: NDArray[np.int64] = np.stack(permutations)[rounds - rounds[0], indices % params.num_leaves]
    return leaves


def _hardness(
    params: SyntheticParameters, split: Split, indices: NDArray[np.int64], leaves: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which samples are hard [n]: ``hard_fraction`` of every leaf and of every round, up to rounding.

    Leaf c is hard in round r iff floor(f * (r + 1) + u_c) > floor(f * r + u_c); the phases u_c are evenly spaced.
    """
    fraction = params.hard_fraction if split == "val" else 0.0
    phases = _generator(params, _SUBSET).permutation(params.num_leaves) / params.num_leaves
    rounds = indices // params.num_leaves
    # One expression for both ends, so that the counts telescope in spite of floating-point rounding.
    start, stop = (np.floor(fraction * number + phases[leaves]) for number in (rounds, rounds + 1))
    hard: NDArray[np.bool_] = stop > start
    return hard


def _render(params: SyntheticParameters, dictionary: NDArray[np.float32], block: _Block) -> NDArray[np.uint8]:
    """Images [n, H, W, 3] of one block, H = W = image_size."""
    rng = _generator(params, _BLOCK, _SPLIT_CODE[block.split], block.number)
    shape = (len(block.leaves), params.num_patches, params.patch_length)
    patches = rng.standard_normal(shape, dtype=np.float32) * np.float32(params.noise)
    signal = _signal(params, dictionary, rng, block)
    # Each sample lays its patches out in an order of its own.
    layout = rng.permuted(np.tile(np.arange(params.num_patches), (len(block.leaves), 1)), axis=1)
    patches += np.take_along_axis(signal, layout[:, :, None], axis=1)
    return _quantise(_assemble(patches, params.patch_size), params.pixel_limit)


def _signal(
    params: SyntheticParameters, dictionary: NDArray[np.float32], rng: np.random.Generator, block: _Block
) -> NDArray[np.float32]:
    """Noiseless patches [n, P, d] before their shuffle: common, then subclass by level, then feature noise."""
    counts = [params.num_common_patches] + [params.num_subclass_patches] * (params.num_levels - 1)
    rows = np.repeat(feature_rows(params, block.leaves), counts, axis=1)
    iota = params.amplitude_jitter
    strong = np.sqrt(rng.uniform(1 - iota, 1 + iota, rows.shape))
    signal = _feature_noise(params, dictionary, rng, block.leaves)
    is_shown = np.ones(rows.shape, dtype=np.bool_)
    is_shown[block.hard, : params.num_common_patches] = False
    scale = math.sqrt(params.patch_length) * params.feature_amplitude
    features = (scale * strong)[:, :, None].astype(np.float32) * dictionary[rows]
    np.copyto(signal[:, : rows.shape[1]], features, where=is_shown[:, :, None])
    return signal


def _feature_noise(
    params: SyntheticParameters,
    dictionary: NDArray[np.float32],
    rng: np.random.Generator,
    leaves: NDArray[np.int64],
) -> NDArray[np.float32]:
    """Sums [n, P, d] of weak features, drawn from the nodes under the other superclasses."""
    per_superclass = params.num_features // params.branching[0]
    own = leaves // (params.num_leaves // params.branching[0]) * per_superclass
    shape = (len(leaves), params.num_patches)
    scale = math.sqrt(params.patch_length) * params.feature_amplitude * params.weak_amplitude
    total = np.zeros((*shape, params.patch_length), dtype=np.float32)
    for _ in range(params.num_weak_features):
        step = rng.integers(per_superclass, params.num_features, shape)
        rows = (own[:, None] + step) % params.num_features
        weak = rng.uniform(0.0, scale, shape).astype(np.float32)
        total += weak[:, :, None] * dictionary[rows]
    return total


def _assemble(patches: NDArray[np.float32], patch_size: int) -> NDArray[np.float32]:
    """Put patches [n, P, d] together into images [n, H, W, 3]; patches run row by row."""
    num_images, num_patches, _ = patches.shape
    side = math.isqrt(num_patches)
    grid = patches.reshape(num_images, side, side, patch_size, patch_size, NUM_CHANNELS)
    return grid.swapaxes(2, 3).reshape(num_images, side * patch_size, side * patch_size, NUM_CHANNELS)


def _quantise(values: NDArray[np.float32], limit: float) -> NDArray[np.uint8]:
    scaled = np.rint(values * np.float32(127.5 / limit) + np.float32(127.5))
    pixels: NDArray[np.uint8] = np.clip(scaled, 0, 255).astype(np.uint8)
    return pixels


def _class_row(branching: Sequence[int], leaf: int) -> dict[str, object]:
    path = _path(branching, leaf)
    steps = path.split(".")
    levels = {f"depth{depth}": ".".join(steps[:depth]) for depth in range(1, len(steps) + 1)}
    return {"class": leaf, "name": path, **levels}


def _path(branching: Sequence[int], leaf: int) -> str:
    """Dotted child numbers from the root to a leaf, e.g. ``0.3.1.2``."""
    return ".".join(str(int(step)) for step in np.unravel_index(leaf, branching))


def _parse(name: str, value: object) -> object:
    """Turn a YAML value into the field's type; ranges are checked on construction."""
    if name == "branching":
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"branching: {value!r} is not a list of integers such as [2, 4, 4, 4]")
        return tuple(value)
    if name in _FLOAT_RANGES and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _check_ranges(params: SyntheticParameters) -> None:
    for name, bounds in _INTEGER_RANGES.items():
        _check_range(name, getattr(params, name), bounds, int)
    for name, limits in _FLOAT_RANGES.items():
        _check_range(name, getattr(params, name), limits, float)


def _check_range(name: str, value: object, bounds: tuple[float, float], kind: type[int] | type[float]) -> None:
    """Refuse wrong types (True is not an integer here) and values outside ``bounds``, NaN among them."""
    low, high = bounds
    if type(value) is not kind or not low <= value <= high:
        noun = "an integer" if kind is int else "a number"
        raise ValueError(f"{name}: {value!r} is not valid; it must be {noun} in [{low}, {high}]")


def _check_branching(branching: tuple[int, ...]) -> None:
    if not all(type(branches) is int and branches >= 1 for branches in branching):
        raise ValueError(f"branching: {list(branching)!r} is not valid; every entry must be an integer >= 1")
    if len(branching) < 2 or branching[0] < 2 or math.prod(branching) > 100_000:
        raise ValueError(
            f"branching: {list(branching)!r} is not valid; it needs at least two levels, at least 2"
            " superclasses (the first entry) and at most 100000 leaves (the product)"
        )


def _check_layout(params: SyntheticParameters) -> None:
    if params.image_size % params.patch_size:
        raise ValueError(f"patch_size: {params.patch_size} must divide image_size {params.image_size}")
    num_strong = params.num_common_patches + params.num_subclass_patches * (params.num_levels - 1)
    if num_strong > params.num_patches:
        raise ValueError(
            f"num_common_patches + num_subclass_patches * finer levels: {num_strong} patches exceed the"
            f" {params.num_patches} of an image; valid sums are in [1, {params.num_patches}]"
        )
    if params.num_features > params.patch_length:
        raise ValueError(
            f"branching: its {params.num_features} nodes need as many orthonormal features, but a patch has only"
            f" {params.patch_length} values; use fewer nodes or a patch_size of at least"
            f" {math.ceil(math.sqrt(params.num_features / NUM_CHANNELS))} (now {params.patch_size})"
        )
