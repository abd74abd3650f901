"""Data sets that jobs of the sweep convert from a source. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.core.units import MIB
from orchestrator.sweepfile.complaints import Complaints
from orchestrator.sweepfile.list_source import source_arguments
from orchestrator.sweepfile.model import Dataset
from orchestrator.sweepfile.parse.tree import Path
from orchestrator.sweepfile.schema_datasets import ConvertedShards
from orchestrator.sweepfile.suggest import did_you_mean
from orchestrator.sweepfile.survey import Survey

WRITER_VERSION = 1  # as in workloads.convert.write, which a test compares
_LISTED = ("num_train", "num_val", "num_classes", "multi_label")


def resolve_conversion(name: str, entry: ConvertedShards, survey: Survey, complaints: Complaints) -> Dataset:
    """The data set with the levels and sizes that its listing has, or that the file declares in its place."""
    path: Path = ("datasets", name)
    listed = survey.listed
    found = _facts(listed) if listed else _declared(entry)
    _check(path, entry, found, complaints)
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
    )


def _facts(listed: Mapping[str, Any]) -> dict[str, Any]:
    samples = listed["num_samples"]
    return {
        "num_train": samples.get("train", 0),
        "num_val": samples.get("val", 0),
        **{name: listed[name] for name in ("num_classes", "levels", "multi_label")},
    }


def _declared(entry: ConvertedShards) -> dict[str, Any]:
    numbers = {name: getattr(entry, name) or 0 for name in ("num_train", "num_val")}
    others = {"num_classes": entry.num_classes or 1, "levels": entry.levels or {}}
    return {**numbers, **others, "multi_label": bool(entry.multi_label)}


def _check(path: Path, entry: ConvertedShards, found: Mapping[str, Any], complaints: Complaints) -> None:
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
