"""`datasets:`: the schema of the block, and the data sets that it resolves to. Pure.

A data set is built in, consists of existing shards, is converted from a source, or mixes others. Information from
stores and sources is passed in as a `Survey`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.core.contract import MISSING_DATA
from orchestrator.core.errors import BadDataError
from orchestrator.core.suggest import did_you_mean
from orchestrator.core.units import MIB
from orchestrator.storage.dataset_files import DatasetFile, join_class_tables, level_counts, weights_problem
from orchestrator.sweepfile.fields import Count, Fraction, Name, Samples, Seed, Strict, refuse_unread
from orchestrator.sweepfile.parse.tree import Path
from orchestrator.sweepfile.problems import Complaints
from orchestrator.sweepfile.values import Dataset

Jobs = Annotated[int, Field(ge=1, le=10_000)]
_Side = Annotated[int, Field(ge=1, le=1024)]
_Patches = Annotated[int, Field(ge=1, le=4096)]
_JOBS = "Jobs that share the writing of its shards. Changes no key but their own."
_MIXTURE = "a mixture"
_CONVERTED = "a conversion"
_SOURCES = {"builtin", "from", "shards", "convert", "mixture"}
_BUILTIN, _EXTERNAL = "a built-in data set", "external shards"  # no key of a sweep.yaml, or errors would point there
_NOT_IN_LISTING: Final = frozenset({"listing", "shard_mib", "shuffle"})
BUILTIN_VERSION = 1
_MAX_LEAVES = 100_000
_SCANS_OF_DIGITS = (178, 182, 177, 183, 181, 182, 181, 179, 174, 180)
"""Scans of the digits 0 to 9 inside scikit-learn."""
WRITER_VERSION = 1  # as in workloads.convert.write, which a test compares
_LISTED = ("num_train", "num_val", "num_classes", "multi_label")
ReadClassTable = Callable[[Dataset], Sequence[Mapping[str, Any]]]
"""The class table of a data set, which may take the data plane to make."""


class SyntheticHierarchy(Strict):
    """Procedural images of a label tree; levels are ``depth1`` (coarsest) ... ``depthN`` (leaf)."""

    builtin: Literal["synthetic-hierarchy"] = Field(description="Which generator.")
    branching: Annotated[list[Count], Field(min_length=2, max_length=8)] = Field(
        [2, 4, 4, 4], description="Children per node, from the root down; the product is the number of leaf classes."
    )
    num_train: Samples = Field(4096, description="Training samples.")
    num_val: Samples = Field(2048, description="Validation samples.")
    # The generator has the same ranges, which a test compares.
    image_size: _Side = Field(32, description="Side of the square images, pixels; a multiple of patch_size.")
    patch_size: int = Field(8, ge=1, le=256, description="Side of a patch, pixels.")
    hard_fraction: Fraction = Field(0.5, description="Share of validation samples without common-feature patches.")
    noise: float = Field(1.0, ge=0, le=100, description="Standard deviation of the pixel noise.")
    feature_amplitude: float = Field(
        1.0, ge=0.001, le=100, description="Root-mean-square pixel value of a feature patch."
    )
    amplitude_jitter: float = Field(
        0.2, ge=0, le=0.99, description="iota: squared amplitudes lie in [1 - iota, 1 + iota]."
    )
    weak_amplitude: Fraction = Field(0.2, description="gamma: largest amplitude of a weak feature of another class.")
    num_weak_features: int = Field(2, ge=0, le=64, description="Weak features in each remaining patch.")
    num_common_patches: _Patches = Field(4, description="Patches that name the superclass, in a normal sample.")
    num_subclass_patches: _Patches = Field(1, description="Patches that name each finer level.")
    seed: Seed = Field(0, description="Seed of the generator.")
    jobs: Jobs = Field(1, description=_JOBS)


class Digits(Strict):
    """The handwritten digits inside scikit-learn: 1,797 real scans of 8x8 pixels; one level, ``digit``."""

    builtin: Literal["digits"] = Field(description="Which data set.")
    val_fraction: float = Field(0.2, gt=0, lt=1, description="Share of samples held out for validation, per class.")
    seed: Seed = Field(0, description="Seed of the split.")
    jobs: Jobs = Field(1, description=_JOBS)


class BadSamplesSpec(Strict):
    """How to handle samples that cannot be used: a truncated image, a class that the table lacks, ..."""

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

    from_: str = Field(
        "", alias="from", description="Path or URI of a folder with dataset.json: `orchestrator data shard`."
    )
    shards: dict[Name, str | Annotated[list[str], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="Paths or URIs by split: with braces (train-{000000..001023}.tar), or a folder, which ends in '/'.",
    )
    classes: str = Field(
        "", description="Path or URI of the class table, classes.json; default with from: the one in the same folder."
    )
    num_train: Samples | None = Field(None, description="Training samples; needed with shards.")
    num_val: Samples | None = Field(None, description="Validation samples.")
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
            remedy = "remove one of them" if self.from_ else "name the folder or the shards"
            message = f"a data set has either 'from' or 'shards'; {remedy}"
            raise PydanticCustomError("one_rule", message)
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
        """Whether the file declares all values that planning needs."""
        return None not in (self.levels, self.num_train, self.num_val, self.num_classes)


_Published = Literal["imagefolder", "imagenet21k", "imagenet1k", "inat2021", "cifar10", "cifar100", "mnist", "svhn"]
_Described = Literal["huggingface", "csv", "parquet"]


FORMATS_OF_FIELDS: Final = (
    (("path_column", "separator", "root"), ("csv", "parquet"), "only csv and parquet name paths"),
    (("label_column", "level_columns"), ("csv", "parquet", "huggingface"), "this format has no columns"),
    (("labels",), ("imagenet1k",), "only imagenet1k keeps labels apart from images"),
)
"""Fields of a conversion that some formats alone read, those formats, and why no other does."""


class ConversionSpec(Strict):
    """A source as it is published, and how shards are made of it."""

    format: Literal[_Published, _Described] = Field(description="What the source is; see `orchestrator data shard`.")
    source: Annotated[str, Field(min_length=1)] = Field(
        description="Folder or file: a path that this machine and all nodes see. A relative one starts from the "
        "folder of the file that names it, and goes to the nodes as an absolute one."
    )
    listing: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = Field(
        None, description="Digest of its listing: then the source is not listed when the sweep is loaded."
    )
    splits: dict[Name, str] = Field(
        default_factory=dict, description="Folders or files of the source by split; default: the usual ones."
    )
    val_fraction: float = Field(0.0, ge=0, lt=1, description="Share of each class of train to hold out as val.")
    seed: Seed = Field(0, description="Of the order of the samples and of what is held out.")
    labels: str = Field("", description="imagenet1k: file with the classes of the validation images.")
    path_column: str = Field("path", description="csv, parquet: column of the images' paths.")
    label_column: str = Field("label", description="csv, parquet, huggingface: column of the labels.")
    separator: str = Field("", description="csv, parquet: between several labels of a sample.")
    level_columns: list[str] = Field(default_factory=list, description="csv, parquet, huggingface: coarser levels.")
    root: str = Field("", description="csv, parquet: what relative paths start from; default: the table's folder.")
    shard_mib: Annotated[int, Field(ge=1, le=100_000)] = Field(256, description="Size of a shard, MiB.")
    shuffle: bool = Field(default=True, description="Samples in random order; else class after class.")
    follow_links: bool = Field(default=False, description="Whether links may lead out of the source.")

    @model_validator(mode="after")
    def _options_are_read(self) -> Self:
        for fields, formats, why in FORMATS_OF_FIELDS:
            if self.format not in formats:
                refuse_unread(self, fields, f"here: {why}")
        if self.format in {"cifar10", "cifar100", "mnist"}:
            refuse_unread(self, ("splits",), "here: this format has fixed files for train and val")
        if not self.source.startswith("file://") and "://" in self.source:
            message = "converters read files, and this is not a path; mount it, or put it on a disk that all nodes see"
            raise PydanticCustomError("refused", message, {"at": ("source",)})
        return self


class ConvertedShards(Strict):
    """Shards that the sweep's own jobs make of a source."""

    convert: ConversionSpec = Field(description="The source and how shards are made of it.")
    jobs: Jobs = Field(1, description=_JOBS)
    num_train: Samples | None = Field(None, description="Training samples; default: those of the source.")
    num_val: Samples | None = Field(None, description="Validation samples.")
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
        """Whether the file declares all values that planning needs, so that the source need not be listed."""
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
        if problem := weights_problem(self.weights or ()):
            raise PydanticCustomError("refused", "{problem}", {"problem": problem, "at": ("weights",)})
        return self


def _form(value: object) -> str:
    """The member of the union to which a value belongs."""
    if isinstance(value, MixtureSpec) or (isinstance(value, Mapping) and "mixture" in value):
        return _MIXTURE
    if isinstance(value, ConvertedShards) or (isinstance(value, Mapping) and "convert" in value):
        return _CONVERTED
    if isinstance(value, Mapping):
        return _EXTERNAL if {"from", "shards"} & set(value) else _BUILTIN
    return _EXTERNAL if isinstance(value, ExternalShards) else _BUILTIN


def _names_its_source(value: object) -> object:
    """The value, if it says in some form where images come from; errors name the form that was probably meant."""
    message, at = "", tuple[str, ...]()
    if isinstance(value, str):
        forms = f"{{from: {value}}} for shards, or {{convert: {{format: imagefolder, source: {value}}}}} for images"
        message = f"'{value}' is text; write {forms}"
    elif isinstance(value, Mapping):
        asked = str(value.get("builtin", "")).lower().replace("-", "")
        if not _SOURCES & value.keys():
            given = f"this says {', '.join(map(str, value))}, but not" if value else "this does not say"
            message = f"{given} where the images come from; add one of {', '.join(sorted(_SOURCES))}"
        elif isinstance(value.get("shards"), str | list):
            message, at = "shards are named by split; write shards: {train: ..., val: ...}", ("shards",)
        elif asked in get_args(ConversionSpec.model_fields["format"].annotation):
            form = f"{{convert: {{format: {asked}, source: FOLDER}}}}"
            message, at = f"'{asked}' is not built in, but read from files; write {form}", ("builtin",)
    if message:
        raise PydanticCustomError("refused", "{message}", {"message": message, "at": at})
    return value


_BuiltinSpec = Annotated[SyntheticHierarchy | Digits, Field(discriminator="builtin")]
DatasetSpec = Annotated[
    Annotated[_BuiltinSpec, Tag(_BUILTIN)]
    | Annotated[ExternalShards, Tag(_EXTERNAL)]
    | Annotated[ConvertedShards, Tag(_CONVERTED)]
    | Annotated[MixtureSpec, Tag(_MIXTURE)],
    Discriminator(_form),
    BeforeValidator(_names_its_source),
]

# ---------------------------------------------------------------------------------------- what a look outside has found


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The information that was read about one external data set."""

    described: DatasetFile | None = None
    """Its ``dataset.json``, for ``from``."""
    listing: str = ""
    """Digest of names, sizes and versions of its shards; empty where the digest of their content is known."""
    class_table: Sequence[Mapping[str, Any]] = ()
    classes_uri: str = ""
    """Empty: classes are numbers."""
    classes_sha256: str = ""
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """URI patterns of ``shards``."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """Arguments with which the source of a conversion is listed."""
    listed: Mapping[str, Any] = field(default_factory=dict)
    """Content of the source of a conversion; empty: it was not listed, since its listing is declared."""
    missing: str = ""
    """Why the data set cannot be read, where it is declared in full; empty if it was."""


Surveys = Mapping[str, Survey]


def source_arguments(entry: ConversionSpec) -> dict[str, Any]:
    """How the data plane lists a source, as JSON, with paths as the file has them. Pure."""
    # Left out at its default: nodes with an older version of this program do not know the field.
    excluded = _NOT_IN_LISTING if entry.follow_links else _NOT_IN_LISTING | {"follow_links"}
    return entry.model_dump(exclude=set(excluded))


# --------------------------------------------------------------------- built-in data sets, and shards that others wrote


def digits_split(val_fraction: float) -> tuple[int, int]:
    """Training and validation samples of the built-in digits, as the data plane splits them: digit by digit."""
    num_val = sum(round(val_fraction * scans) for scans in _SCANS_OF_DIGITS)
    return sum(_SCANS_OF_DIGITS) - num_val, num_val


def resolve_dataset(
    name: str,
    entry: SyntheticHierarchy | Digits | ExternalShards | ConvertedShards,
    complaints: Complaints,
    survey: Survey | None = None,
) -> Dataset:
    """A data set with its levels and sizes, as far as the file and its shards have them."""
    if isinstance(entry, ExternalShards):
        return _resolve_external(name, entry, survey or Survey(), complaints)
    if isinstance(entry, ConvertedShards):
        return resolve_conversion(name, entry, survey or Survey(), complaints)
    parameters = {**entry.model_dump(exclude={"jobs"}), "version": BUILTIN_VERSION}
    if isinstance(entry, Digits):
        num_train, num_val = digits_split(entry.val_fraction)
        return Dataset(
            name=name,
            readable="digits",
            parameters=parameters,
            levels={"digit": 10},
            num_classes=10,
            num_train=num_train,
            jobs=entry.jobs,
            has_val=num_val > 0,
        )
    _check_patches(("datasets", name), entry, complaints)
    levels = {f"depth{depth}": prod(entry.branching[:depth]) for depth in range(1, len(entry.branching) + 1)}
    return Dataset(
        name=name,
        readable="synthetic-" + "x".join(str(children) for children in entry.branching),
        parameters=parameters,
        levels=levels,
        num_classes=prod(entry.branching),
        num_train=entry.num_train,
        jobs=entry.jobs,
    )


def _resolve_external(name: str, entry: ExternalShards, survey: Survey, complaints: Complaints) -> Dataset:
    described, path = survey.described, ("datasets", name)
    if survey.missing:
        return _declared_shards(name, entry, survey)
    _check_described(path, entry, survey, complaints)
    _check_levels((*path, "levels"), entry, survey, complaints)
    num_classes = len(survey.class_table) or entry.num_classes or (described.num_classes if described else 1)
    num_train = entry.num_train or (described.num_samples("train") if described else 0)
    digest = entry.digest or (described.digest if described else "")
    multi_label = described.multi_label if described and entry.multi_label is None else bool(entry.multi_label)
    parameters: dict[str, Any] = {
        **({"digest": digest} if digest else {"listing": survey.listing}),
        **({"classes_sha256": survey.classes_sha256} if survey.classes_uri else {"num_classes": num_classes}),
        "multi_label": multi_label,
        "bad_samples": entry.bad_samples.model_dump(),
    }
    location: dict[str, Any] = {"classes": survey.classes_uri} if survey.classes_uri else {}
    location |= (
        {"dataset": entry.from_}
        if entry.from_
        else {"splits": {split: list(patterns) for split, patterns in survey.splits.items()}}
    )
    declared = {split: getattr(entry, f"num_{split}") for split in ("train", "val")}
    if entry.shards:  # the index job compares: counting them takes reading them
        location["num_samples"] = {split: number for split, number in declared.items() if number is not None}
    return Dataset(
        name=name,
        readable=f"shards-{(digest or survey.listing)[:8]}",
        parameters=parameters,
        levels=level_counts(survey.class_table),
        num_classes=num_classes,
        num_train=num_train,
        location=location,
        class_table=tuple(survey.class_table),
        class_counts=_class_counts(described, num_classes),
        multi_label=multi_label,
        has_val=bool(described.num_samples("val")) if described else "val" in survey.splits,
    )


def _class_counts(described: DatasetFile | None, num_classes: int) -> tuple[int, ...]:
    found = described.class_counts.get("train", ()) if described else ()
    return found if len(found) == num_classes else ()


def _declared_shards(name: str, entry: ExternalShards, survey: Survey) -> Dataset:
    """A missing data set, as its file declares it; its keys are not those of the real data."""
    return Dataset(
        name=name,
        readable=f"declared-{name}",
        parameters={"declared": entry.model_dump(include={"num_train", "num_val", "num_classes", "levels"})},
        levels=entry.levels or {},
        num_classes=entry.num_classes or 1,
        num_train=entry.num_train or 0,
        location={MISSING_DATA: survey.missing, "num_samples": {"train": entry.num_train, "val": entry.num_val}},
        multi_label=bool(entry.multi_label),
        missing=survey.missing,
    )


def _check_levels(path: Path, entry: ExternalShards, survey: Survey, complaints: Complaints) -> None:
    """Levels that the file declares must be those of the class table."""
    found = level_counts(survey.class_table)
    for level, number in (entry.levels or {}).items():
        if level not in found:
            hint = did_you_mean(level, found) if found else "it has none; remove the line"
            complaints.add((*path, level), f"'{level}' is not a level of the class table: {hint}")
        elif found[level] != number:
            message = f"{number} is declared, but the class table has {found[level]}; is it the right data set?"
            complaints.add((*path, level), message)


def _check_described(path: Path, entry: ExternalShards, survey: Survey, complaints: Complaints) -> None:
    """What the file declares must be what ``dataset.json`` and the class table say."""
    described, declared = survey.described, {"num_classes": entry.num_classes}
    found: dict[str, int] = {"num_classes": len(survey.class_table)} if survey.classes_uri else {}
    if described is not None:
        declared |= {"num_train": entry.num_train, "num_val": entry.num_val}
        found |= {"num_train": described.num_samples("train"), "num_val": described.num_samples("val")}
        if entry.digest not in {None, described.digest}:
            message = f"the shards beside dataset.json have the digest {described.digest}; correct one of the two"
            complaints.add((*path, "digest"), message)
        if not found["num_train"]:
            complaints.add(
                (*path, "from"), "dataset.json names no shards of a split 'train'; there is nothing to train on"
            )
    for key, value in declared.items():
        if value is not None and key in found and value != found[key]:
            complaints.add((*path, key), f"{value} is declared, but the data set has {found[key]}; remove the line")


def _check_patches(path: Path, entry: SyntheticHierarchy, complaints: Complaints) -> None:
    if entry.image_size % entry.patch_size:
        message = f"{entry.image_size} is not a multiple of patch_size {entry.patch_size}; images hold whole patches"
        complaints.add((*path, "image_size"), message)
        return
    patches = (entry.image_size // entry.patch_size) ** 2
    needed = entry.num_common_patches + entry.num_subclass_patches * (len(entry.branching) - 1)
    if needed > patches:
        message = f"an image has {patches} patches, but features need {needed}; use smaller patches or fewer"
        complaints.add(path, message)
    if entry.branching[0] < 2:
        message = f"{entry.branching} has a single superclass; the first number must be at least 2"
        complaints.add((*path, "branching"), message)
    nodes = sum(prod(entry.branching[:depth]) for depth in range(1, len(entry.branching) + 1))
    if nodes > (values := 3 * entry.patch_size**2):
        message = f"the tree has {nodes} nodes, but a patch of {entry.patch_size} pixels has {values} values and so"
        complaints.add(path, f"{message} at most {values} independent features; use fewer nodes or larger patches")
    elif (leaves := prod(entry.branching)) > _MAX_LEAVES:
        message = f"{entry.branching} has {leaves:,} leaf classes; use {_MAX_LEAVES:,} or fewer"
        complaints.add((*path, "branching"), message)


# ----------------------------------------------------------------------- shards that jobs of the sweep make of a source


def resolve_conversion(name: str, entry: ConvertedShards, survey: Survey, complaints: Complaints) -> Dataset:
    """The data set with the levels and sizes that its listing has, or that the file declares in its place."""
    path: Path = ("datasets", name)
    listed = survey.listed
    found = _listed_facts(listed) if listed else _declared_facts(entry)
    _check_source(path, entry, found, complaints)
    convert, listing = entry.convert, listed.get("listing") or entry.convert.listing or ""
    num_samples = {"train": found["num_train"], "val": found["num_val"]}
    source: dict[str, Any] = {"convert": survey.source or source_arguments(convert)}
    if not listed:
        declared = {"num_samples": num_samples, "num_classes": found["num_classes"], "levels": dict(found["levels"])}
        source["declared"] = {**declared, "multi_label": found["multi_label"]}
    return Dataset(
        name=name,
        readable=f"{convert.format}-{listing[:8]}",
        parameters={
            "shards": {
                "version": WRITER_VERSION,
                "shard_bytes": convert.shard_mib * MIB,
                "shuffle_seed": convert.seed if convert.shuffle else None,
            }
        },
        levels=found["levels"],
        num_classes=found["num_classes"],
        num_train=found["num_train"],
        location={"num_samples": num_samples},
        jobs=entry.jobs,
        listing={"format": convert.format, "listing": listing},
        source=source,
        scan={"multi_label": found["multi_label"], "bad_samples": entry.bad_samples.model_dump()},
        class_table=tuple(listed.get("classes", ())),
        multi_label=found["multi_label"],
        has_val=found["num_val"] > 0,
        notes=tuple(f"{name}: {note}" for note in listed.get("notes", ())),
    )


def _listed_facts(listed: Mapping[str, Any]) -> dict[str, Any]:
    samples = listed["num_samples"]
    return {
        "num_train": samples.get("train", 0),
        "num_val": samples.get("val", 0),
        **{name: listed[name] for name in ("num_classes", "levels", "multi_label")},
    }


def _declared_facts(entry: ConvertedShards) -> dict[str, Any]:
    numbers = {name: getattr(entry, name) or 0 for name in ("num_train", "num_val")}
    others = {"num_classes": entry.num_classes or 1, "levels": entry.levels or {}}
    return {**numbers, **others, "multi_label": bool(entry.multi_label)}


def _check_source(path: Path, entry: ConvertedShards, found: Mapping[str, Any], complaints: Complaints) -> None:
    """What the file declares must be what the source has."""
    for key in _LISTED:
        value = getattr(entry, key)
        if value is not None and value != found[key]:
            complaints.add((*path, key), f"{value} is declared, but the source has {found[key]}; remove the line")
    for level, number in (entry.levels or {}).items():
        if level not in found["levels"]:
            hint = did_you_mean(level, found["levels"]) if found["levels"] else "it has none; remove the line"
            complaints.add((*path, "levels", level), f"'{level}' is not a level of the source: {hint}")
        elif found["levels"][level] != number:
            message = f"{number} is declared, but the source has {found['levels'][level]}; is it the right one?"
            complaints.add((*path, "levels", level), message)
    if not found["num_train"]:
        complaints.add((*path, "convert", "source"), "it has no images of a split 'train'; name the splits")


# ------------------------------------------------------------------------------------------------------------- mixtures


def resolve_mixture(
    name: str,
    entry: MixtureSpec,
    datasets: Mapping[str, Dataset],
    complaints: Complaints,
    read_table: ReadClassTable | None,
) -> Dataset | None:
    """A mixture of resolved data sets; None if something is wrong with it."""
    path = ("datasets", name, "mixture")
    complaints.refuse_repeats(path, entry.mixture)
    unknown = [part for part in entry.mixture if part not in datasets]
    for part in unknown:
        hint = did_you_mean(part, datasets)
        complaints.add((*path, entry.mixture.index(part)), f"'{part}' is not a data set that can be mixed: {hint}")
    if unknown:
        return None
    parts = [datasets[part] for part in entry.mixture]
    try:
        rows, _ = join_class_tables([_table(part, read_table) for part in parts])
    except BadDataError as error:
        complaints.add(path, str(error))
        return None
    return Dataset(
        name=name,
        readable=f"mixture{len(parts)}",
        parameters={"mixture": {"weights": entry.weights}},
        levels=level_counts(rows),
        num_classes=len(rows),
        num_train=sum(part.num_train for part in parts),
        class_table=tuple(rows),
        multi_label=any(part.multi_label for part in parts),
        has_val=any(part.has_val for part in parts),
        components=tuple(entry.mixture),
    )


def _table(dataset: Dataset, read_table: ReadClassTable | None) -> Sequence[Mapping[str, Any]]:
    if dataset.class_table:
        return dataset.class_table
    if dataset.location:
        raise BadDataError(f"data set '{dataset.name}' has no class table; classes are joined by name, so give it one")
    if read_table is None:
        raise BadDataError(f"the classes of '{dataset.name}' are only known where the data plane can be asked")
    return read_table(dataset)
