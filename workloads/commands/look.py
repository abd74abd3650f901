"""Recognises the data set in a folder: its form, classes, levels and sizes.

The forms are those of the converters and shards with a class table. A form is recognised only by names of files and
folders; then its converter lists the content.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from PIL import Image

from orchestrator.core.errors import NotFoundError, UserError
from orchestrator.storage.dataset_files import (
    CLASSES_FILE,
    ClassRows,
    level_counts,
    level_problem,
    read_class_table,
    read_dataset_file,
)
from workloads.commands.data import ShardInputRequest, index, open_shard_input, show_samples, to_uri
from workloads.convert import huggingface
from workloads.convert.inat import is_rank_folder
from workloads.convert.items import Conversion, ConvertRequest, is_image
from workloads.convert.left_out import describe_notes
from workloads.convert.listing import list_source
from workloads.convert.tabular import find_level_columns
from workloads.convert.write import source_samples
from workloads.data.images import FORMATS, IMAGE_ERRORS

_NUM_MEASURED: Final = 48
HELD_OUT: Final = 0.2
"""Share of each class that becomes ``val`` where a source has no such split."""
_FORMS: Final = (
    "known: folders of classes, CIFAR, MNIST, SVHN, iNaturalist, Hugging Face, csv, parquet, shards with classes.json"
)
_CIFAR: Final = {"cifar10": ("data_batch_1", "data_batch_1.bin"), "cifar100": ("train", "train.bin")}


def look(request: Mapping[str, Any]) -> dict[str, Any]:
    """What is at ``place``, and how a sweep names it: ``entry`` of ``datasets``, with the place as it was given.

    Further ``form`` (a word for people), ``num_samples`` by split, ``num_classes``, ``levels``, ``incomplete`` (levels
    at which some classes have no value), ``left_out`` (columns of a table that would be levels under other names, and
    why), ``multi_label``, ``notes`` for people, ``pixels`` (the median of the shorter sides of some images) and
    ``gpus`` of this machine.

    Raises:
        UserError: nothing is there, or nothing that this program reads.
    """
    place = request["place"]
    found = _shards(place) if _has_shards(place) else _source(Path(place), place)
    return {**found, "gpus": _num_gpus()}


# ------------------------------------------------------------------------------------------------------------- shards


def _has_shards(place: str) -> bool:
    if "://" in place or place.endswith(".tar"):
        return True
    path = Path(place)
    has_tars = any(path.glob("*.tar")) and (path / CLASSES_FILE).is_file()
    return (path / "dataset.json").is_file() or has_tars


def _shards(place: str) -> dict[str, Any]:
    uri = to_uri(place).rstrip("/")
    target: dict[str, Any] = {"place": place, "splits": {}, "classes": "", "num_classes": 0, "multi_label": False}
    try:
        described = read_dataset_file(uri)
        entry: dict[str, Any] = {"from": place.rstrip("/")}
        rows, _ = read_class_table(f"{uri}/{CLASSES_FILE}")
        counts = {split: described.num_samples(split) for split in described.splits}
        levels, num_classes, multi_label = level_counts(rows), len(rows), described.multi_label
        incomplete = _incomplete(rows)
    except NotFoundError:
        if not place.endswith(".tar"):
            target["classes"] = f"{uri}/{CLASSES_FILE}"
        scan = {"target": target, "policy": "fail", "budget": 0.0, "write": False, "num_processes": 1}
        found = index(scan)
        entry, counts = found["entry"], {split: sizes["num_samples"] for split, sizes in found["splits"].items()}
        levels, num_classes, multi_label = found["levels"], found["num_classes"], found["multi_label"]
        incomplete = _incomplete(read_class_table(target["classes"])[0]) if target["classes"] else []
    if "val" not in counts:
        message = f"{place} has no shards of a split 'val', on which backbones are measured; name some val-000000.tar"
        raise UserError(message + ", or convert the images again with --val-fraction")
    shard_input = open_shard_input(ShardInputRequest(**target))
    sizes = show_samples(shard_input, "train", num_samples=_NUM_MEASURED, seed=0)
    return {
        "form": "WebDataset shards",
        "entry": entry,
        "num_samples": counts,
        "num_classes": num_classes,
        "levels": levels,
        "incomplete": incomplete,
        "left_out": {},
        "multi_label": multi_label,
        "notes": [],
        "pixels": int(statistics.median(min(row["width"], row["height"]) for row in sizes)),
    }


def _incomplete(rows: ClassRows) -> list[str]:
    return [level for level in level_counts(rows) if level_problem(rows, level)]


# ------------------------------------------------------------------------------------------------------------ sources


def _source(path: Path, place: str) -> dict[str, Any]:
    if not path.exists():
        raise UserError(f"{place} does not exist; name a folder of images, or one of shards")
    inner, found = _form(path)
    options = {"format": found.pop("format"), "source": str(Path(place) / inner), **found}
    left_out: dict[str, str] = {}
    if options["format"] in {"csv", "parquet"}:
        request = ConvertRequest(source=path / inner)
        with suppress(UserError):  # the converter says what is wrong, unless it is in a column that it does not read
            columns, left_out = find_level_columns(request, options["format"])
            options |= {"level_columns": columns} if columns else {}
    conversion = list_source({**options, "source": str(path / inner)})
    if "val" not in conversion.splits:
        options["val_fraction"] = HELD_OUT
        conversion = list_source({**options, "source": str(path / inner)})
    if not len(conversion.splits.get("train", ())):
        raise UserError(f"{place} has no images to train on; name the folder that holds those of 'train'")
    return {
        "form": options["format"],
        "entry": {"convert": options},
        "num_samples": {split: len(table) for split, table in conversion.splits.items()},
        "num_classes": len(conversion.classes),
        "levels": level_counts(conversion.classes),
        "incomplete": _incomplete(conversion.classes),
        "left_out": left_out,
        "multi_label": conversion.multi_label,
        "notes": describe_notes(conversion.notes),
        "pixels": _pixels(conversion, place),
    }


def _form(path: Path) -> tuple[str, dict[str, Any]]:
    """The subfolder that holds a source (empty: the folder itself), and how a converter is told of it."""
    if path.is_file():
        suffix = path.suffix.removeprefix(".").lower()
        if suffix in {"csv", "parquet"}:
            return "", {"format": suffix}
        raise UserError(f"{path} is a file that is not a table (csv, parquet); name the folder that holds the images")
    if found := _published(path):
        return "", found
    below = [child for child in _folders(path) if not _has_images(child)]
    if len(below) == 1 and len(_folders(path)) == 1 and (found := _published(below[0])):
        return below[0].name, found
    if not _has_images(path) and any(path.glob("*.tar")):
        message = (
            f"{path} holds tars and no classes.json. Beside WebDataset shards put one that names the classes, or run "
        )
        message += (
            f"`orchestrator data index {path} --num-classes N`, which prints the entry of a sweep; of ImageNet's "
        )
        raise UserError(f"{message}archives `orchestrator data shard imagenet1k` or `imagenet21k` makes shards")
    if not _has_images(path):
        raise UserError(f"{path} has no images in class folders, and no data set in a form that is known; {_FORMS}")
    return "", {"format": "imagefolder"}


def _published(path: Path) -> dict[str, Any] | None:
    """A form that is known by the names of its files; None: class folders at best."""
    names = {child.name for child in path.iterdir()}
    cifar100 = names & {"meta", "fine_label_names.txt"} and any((path / name).is_file() for name in _CIFAR["cifar100"])
    is_of_form = {
        "huggingface": huggingface.is_saved(path),
        "cifar10": bool(names & set(_CIFAR["cifar10"])),
        "cifar100": bool(cifar100),
        "mnist": any("-images" in name and "-ubyte" in name for name in names),
        "svhn": "train_32x32.mat" in names,
    }
    certain = next((name for name, is_it in is_of_form.items() if is_it), "")
    if certain:
        return {"format": certain}
    if inat := _inat(path, names):
        return inat
    table = next((suffix for suffix in ("csv", "parquet") if f"train.{suffix}" in names), "")
    has_parquet = any(path.glob("*.parquet")) or any(path.glob("data/*.parquet"))
    found = table or ("huggingface" if has_parquet else "")
    return {"format": found} if found else None


def _inat(path: Path, names: set[str]) -> dict[str, Any] | None:
    if names & {"train.json", "train_mini.json"} and names & {"train", "train_mini"}:
        return {"format": "inat2021"}
    for name in ("train", "train_mini"):
        if name in names and _are_ranks(path / name):
            return {"format": "inat2021"}
    return {"format": "inat2021", "splits": {"train": "."}} if _are_ranks(path) else None


def _are_ranks(path: Path) -> bool:
    folders = _folders(path)
    return bool(folders) and all(is_rank_folder(folder.name) for folder in folders)


def _folders(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))


def _has_images(path: Path) -> bool:
    return any(is_image(child.name) for child in _below(path))


def _below(path: Path, depth: int = 8) -> Iterator[Path]:
    """Files below a folder; links to folders are left to the converter."""
    for child in sorted(path.iterdir()):
        if child.is_file():
            yield child
        elif depth and child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
            yield from _below(child, depth - 1)


def _pixels(conversion: Conversion, place: str) -> int:
    table = conversion.splits["train"]
    step = max(1, len(table) // _NUM_MEASURED)
    items = (table.item(row) for row in range(0, len(table), step))
    sides = []
    for _, members in source_samples(items, multi_label=conversion.multi_label):
        content = next(iter(members.values()))
        try:
            with Image.open(BytesIO(content), formats=FORMATS) as image:
                sides.append(min(image.size))
        except IMAGE_ERRORS:
            continue  # a bad sample, which the index counts
    if not sides:
        raise UserError(f"none of the images of {place} that were looked at can be read; look at them with a viewer")
    return int(statistics.median(sides))


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()
