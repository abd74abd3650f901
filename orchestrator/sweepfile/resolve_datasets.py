"""From the schema of a data set to its resolved form. Pure."""

from __future__ import annotations

from math import prod
from typing import Any

from orchestrator.core.contract import MISSING_DATA
from orchestrator.storage.dataset_files import level_counts
from orchestrator.sweepfile.complaints import Complaints
from orchestrator.sweepfile.model import Dataset
from orchestrator.sweepfile.parse.tree import Path
from orchestrator.sweepfile.resolve_conversion import resolve_conversion
from orchestrator.sweepfile.schema_datasets import ConvertedShards, Digits, ExternalShards, SyntheticHierarchy
from orchestrator.sweepfile.suggest import did_you_mean
from orchestrator.sweepfile.survey import Survey

BUILTIN_VERSION = 1
_SCANS_OF_DIGITS = (178, 182, 177, 183, 181, 182, 181, 179, 174, 180)
"""Scans of the digits 0 to 9 inside scikit-learn."""


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
    """A data set with its levels and sizes, as far as the file and a look at its shards tell."""
    if isinstance(entry, ExternalShards):
        return _resolve_external(name, entry, survey or Survey(), complaints)
    if isinstance(entry, ConvertedShards):
        return resolve_conversion(name, entry, survey or Survey(), complaints)
    parameters = {**entry.model_dump(exclude={"jobs"}), "version": BUILTIN_VERSION}
    if isinstance(entry, Digits):
        num_train, _ = digits_split(entry.val_fraction)
        return Dataset(
            name=name,
            readable="digits",
            parameters=parameters,
            levels={"digit": 10},
            num_classes=10,
            num_train=num_train,
            jobs=entry.jobs,
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
        return _declared(name, entry, survey)
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
        multi_label=multi_label,
        has_val=bool(described.num_samples("val")) if described else "val" in survey.splits,
    )


def _declared(name: str, entry: ExternalShards, survey: Survey) -> Dataset:
    """A data set that is not there, as its file declares it; its keys are those of no real one."""
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
