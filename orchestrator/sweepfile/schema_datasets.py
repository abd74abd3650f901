"""The part of a sweep.yaml that names data sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.sweepfile.fields import MAX_INTEGER, Count, Fraction, Name, Seed, Strict, refuse_unread

Jobs = Annotated[int, Field(ge=1, le=10_000)]
_JOBS = "Jobs that share the writing of its shards. Changes no key but their own."


class SyntheticHierarchy(Strict):
    """Procedural images of a label tree; levels are ``depth1`` (coarsest) ... ``depthN`` (leaf)."""

    builtin: Literal["synthetic-hierarchy"] = Field(description="Which generator.")
    branching: Annotated[list[Count], Field(min_length=2, max_length=8)] = Field(
        [2, 4, 4, 4], description="Children per node, from the root down; the product is the number of leaf classes."
    )
    num_train: Count = Field(4096, description="Training samples.")
    num_val: Count = Field(2048, description="Validation samples.")
    image_size: Count = Field(32, description="Side of the square images, pixels; a multiple of patch_size.")
    patch_size: Count = Field(8, description="Side of a patch, pixels.")
    hard_fraction: Fraction = Field(0.5, description="Share of validation samples without common-feature patches.")
    noise: float = Field(1.0, ge=0, description="Standard deviation of the pixel noise.")
    feature_amplitude: float = Field(1.0, gt=0, description="Root-mean-square pixel value of a feature patch.")
    amplitude_jitter: float = Field(
        0.2, ge=0, lt=1, description="iota: squared amplitudes lie in [1 - iota, 1 + iota]."
    )
    weak_amplitude: Fraction = Field(0.2, description="gamma: largest amplitude of a weak feature of another class.")
    num_weak_features: int = Field(2, ge=0, le=MAX_INTEGER, description="Weak features in each remaining patch.")
    num_common_patches: Count = Field(4, description="Patches that name the superclass, in a normal sample.")
    num_subclass_patches: Count = Field(1, description="Patches that name each finer level.")
    seed: Seed = Field(0, description="Seed of the generator.")
    jobs: Jobs = Field(1, description=_JOBS)


class Digits(Strict):
    """The handwritten digits inside scikit-learn: 1,797 real scans of 8x8 pixels; one level, ``digit``."""

    builtin: Literal["digits"] = Field(description="Which data set.")
    val_fraction: float = Field(0.2, gt=0, lt=1, description="Share of samples held out for validation, per class.")
    seed: Seed = Field(0, description="Seed of the split.")
    jobs: Jobs = Field(1, description=_JOBS)


class BadSamplesSpec(Strict):
    """What a sample does that cannot be used: a truncated image, a class that the table lacks, ..."""

    policy: Literal["fail", "replace"] = Field(
        "fail", description="fail: so does the job. replace: counted and left out, or replaced if it fails to decode."
    )
    budget: Fraction = Field(0.01, description="Share of a split's samples above which jobs fail nevertheless.")

    @model_validator(mode="after")
    def _budget_is_used(self) -> Self:
        if self.policy != "replace":
            refuse_unread(self, ("budget",), "without policy: replace, because the first bad sample fails the job")
        return self


class ExternalShards(Strict):
    """WebDataset shards that exist: beside a dataset.json (``from``), or found by URIs (``shards``)."""

    from_: str = Field("", alias="from", description="URI of a folder with dataset.json: `orchestrator data shard`.")
    shards: dict[Name, str | Annotated[list[str], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="URIs by split: with braces (train-{000000..001023}.tar), or a folder, which ends in '/'.",
    )
    classes: str = Field("", description="URI of the class table, classes.json; default with from: the one beside it.")
    num_train: Count | None = Field(None, description="Training samples; needed with shards.")
    num_val: Count | None = Field(None, description="Validation samples.")
    num_classes: Count | None = Field(None, description="Leaf classes; needed where there is no class table.")
    levels: dict[str, Count] | None = Field(
        None,
        description="Classes of each level of the class table, which is checked. With num_train, num_val and "
        "num_classes the sweep can be planned, though not submitted, where the data set is not there.",
    )
    multi_label: bool | None = Field(None, description="Whether samples have any number of classes; default: no.")
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        None, description="Digest of the shards, as `orchestrator data index` prints it: then it alone identifies them."
    )
    bad_samples: BadSamplesSpec = Field(BadSamplesSpec(), description="What samples do that cannot be used.")

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if bool(self.from_) == bool(self.shards):
            raise PydanticCustomError("one_rule", "a data set has either 'from' or 'shards'; remove one of them")
        if self.shards and "train" not in self.shards:
            message = "the splits have no 'train'; name the shards to train on: train: s3://..."
            raise PydanticCustomError("refused", message, {"at": ("shards",)})
        if self.shards and self.num_train is None:
            message = "'num_train' is missing; `orchestrator data index` counts the samples of shards"
            raise PydanticCustomError("refused", message)
        if self.shards and not self.classes and self.num_classes is None:
            message = "there is neither 'classes' (URI of a class table) nor 'num_classes'; add one"
            raise PydanticCustomError("refused", message)
        return self

    @property
    def is_declared(self) -> bool:
        """Whether the file says all that planning asks of a data set."""
        return None not in (self.levels, self.num_train, self.num_val, self.num_classes)


class ConversionSpec(Strict):
    """A source as it is published, and how shards are made of it."""

    format: Literal["imagefolder", "imagenet21k", "imagenet1k", "inat2021", "csv", "parquet"] = Field(
        description="What the source is; see `orchestrator data shard`."
    )
    source: Annotated[str, Field(min_length=1)] = Field(
        description="Folder or file: a path that this machine and all nodes see. A relative one starts from the "
        "directory in which the sweep is planned, and goes to the nodes as an absolute one."
    )
    listing: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        None, description="Digest of its listing: then the source is not listed when the sweep is loaded."
    )
    splits: dict[Name, str] = Field(
        default_factory=dict, description="Folders or files of the source by split; default: the usual ones."
    )
    val_fraction: float = Field(0.0, ge=0, lt=1, description="Share of each class of train to hold out as val.")
    seed: Seed = Field(0, description="Of the order of the samples and of what is held out.")
    labels: str = Field("", description="imagenet1k: what says the classes of validation images.")
    path_column: str = Field("path", description="csv, parquet: column of the images' paths.")
    label_column: str = Field("label", description="csv, parquet: column of the labels.")
    separator: str = Field("", description="csv, parquet: between several labels of a sample.")
    level_columns: list[str] = Field(default_factory=list, description="csv, parquet: coarser levels.")
    root: str = Field("", description="csv, parquet: what relative paths start from; default: the table's folder.")
    shard_mib: Annotated[int, Field(ge=1, le=100_000)] = Field(256, description="Size of a shard, MiB.")
    shuffle: bool = Field(default=True, description="Samples in random order; else class after class.")
    follow_links: bool = Field(default=False, description="Whether links may lead out of the source.")

    @model_validator(mode="after")
    def _options_are_read(self) -> Self:
        if self.format not in {"csv", "parquet"}:
            columns = ("path_column", "label_column", "separator", "level_columns", "root")
            refuse_unread(self, columns, "to this format: only tables, csv and parquet, have columns")
        if self.format != "imagenet1k":
            refuse_unread(self, ("labels",), "to this format: only imagenet1k keeps labels apart from images")
        if not self.source.startswith("file://") and "://" in self.source:
            message = "converters read files, and this is no path; mount it, or put it on a disk that all nodes see"
            raise PydanticCustomError("refused", message, {"at": ("source",)})
        return self


class ConvertedShards(Strict):
    """Shards that the sweep's own jobs make of a source."""

    convert: ConversionSpec = Field(description="The source and how shards are made of it.")
    jobs: Jobs = Field(1, description=_JOBS)
    num_train: Count | None = Field(None, description="Training samples; default: those of the source.")
    num_val: Count | None = Field(None, description="Validation samples.")
    num_classes: Count | None = Field(None, description="Leaf classes.")
    levels: dict[str, Count] | None = Field(None, description="Classes of each level of the class table.")
    multi_label: bool | None = Field(None, description="Whether samples have any number of classes.")
    bad_samples: BadSamplesSpec = Field(BadSamplesSpec(), description="What samples do that cannot be used.")

    @model_validator(mode="after")
    def _check_declaration(self) -> Self:
        needed = ("num_train", "num_val", "num_classes", "levels")
        missing = [name for name in needed if getattr(self, name) is None]
        if self.convert.listing and missing:
            context = {"missing": ", ".join(missing)}
            message = "with convert.listing the source is not listed now, so declare {missing}, or remove 'listing'"
            raise PydanticCustomError("refused", message, context)
        return self

    @property
    def is_declared(self) -> bool:
        """Whether the file says all that planning asks, so that nobody need list the source."""
        return self.convert.listing is not None


class MixtureSpec(Strict):
    """Several data sets as one; classes of one name are one class."""

    mixture: Annotated[list[str], Field(min_length=2)] = Field(description="Names of other entries of datasets.")
    weights: list[Annotated[float, Field(gt=0)]] | None = Field(
        None, description="Shares of the training samples; default: every sample once per epoch."
    )

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.weights is not None and len(self.weights) != len(self.mixture):
            context = {"parts": len(self.mixture), "weights": len(self.weights), "at": ("weights",)}
            message = "{weights} weights for {parts} data sets; give one for each"
            raise PydanticCustomError("refused", message, context)
        return self


_MIXTURE = "a mixture"
_CONVERTED = "a conversion"
_BUILTIN, _EXTERNAL = "a built-in data set", "external shards"  # no key of a sweep.yaml, or errors would point there


def _form(value: object) -> str:
    """Which member of the union a value is meant to be."""
    if isinstance(value, MixtureSpec) or (isinstance(value, Mapping) and "mixture" in value):
        return _MIXTURE
    if isinstance(value, ConvertedShards) or (isinstance(value, Mapping) and "convert" in value):
        return _CONVERTED
    if isinstance(value, Mapping):
        return _EXTERNAL if {"from", "shards"} & set(value) else _BUILTIN
    return _EXTERNAL if isinstance(value, ExternalShards) else _BUILTIN


_BuiltinSpec = Annotated[SyntheticHierarchy | Digits, Field(discriminator="builtin")]
DatasetSpec = Annotated[
    Annotated[_BuiltinSpec, Tag(_BUILTIN)]
    | Annotated[ExternalShards, Tag(_EXTERNAL)]
    | Annotated[ConvertedShards, Tag(_CONVERTED)]
    | Annotated[MixtureSpec, Tag(_MIXTURE)],
    Discriminator(_form),
]
