"""``inat2021``: iNaturalist 2021 (https://github.com/visipedia/inat_comp/tree/master/2021), with or without its JSON.

Without the JSON files the taxonomy is read from the names of the folders of images, which hold all ranks:
``00000_Animalia_Annelida_Clitellata_Haplotaxida_Lumbricidae_Lumbricus_terrestris``; only the ``supercategory`` is not
among them. Leaf classes are the species, numbered as in the JSON. Levels, coarse to fine: ``supercategory`` and the
Linnaean ranks; the rank "class" is called ``taxonomic_class``, since ``class`` is the number of the leaf class, and the
binomial ``species``: a ``specific_epithet`` alone is shared by species of many genera.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from orchestrator.core.errors import UserError
from orchestrator.storage.dataset_files import ClassRows
from orchestrator.storage.files import NotRegularFileError, read_regular
from workloads.convert.imagefolder import with_val
from workloads.convert.items import (
    Conversion,
    ConvertRequest,
    ItemTable,
    LinkRule,
    folder_images,
    image_bytes,
    is_image,
)
from workloads.convert.left_out import LeftOut

_FOLDER_RANKS = ("kingdom", "phylum", "taxonomic_class", "order", "family", "genus", "specific_epithet")
_FOLDER = re.compile(rf"([0-9]+)_{'_'.join(['([^_/]+)'] * (len(_FOLDER_RANKS) - 1))}_([^/]+)")
_FOLDERS = {"train": ("train", "train_mini"), "val": ("val",)}
_LEVELS = {
    "supercategory": "supercategory",
    "kingdom": "kingdom",
    "phylum": "phylum",
    "taxonomic_class": "class",
    "order": "order",
    "family": "family",
    "genus": "genus",
    "specific_epithet": "specific_epithet",
}


def convert(request: ConvertRequest) -> Conversion:
    """List the images of ``train.json`` (or of ``train_mini.json``: ``--split train=train_mini``) and ``val.json``.

    Where none of these files is there, the images of the folders ``train`` (or ``train_mini``) and ``val``.

    Raises:
        UserError: a JSON or folder is missing or not of this form, its class tables differ, or images are missing.
    """
    if not any((request.source / f"{name}.json").exists() for name in ("train", "train_mini", "val")):
        return _convert_folders(request)
    files = request.splits or _usual(request.source)
    documents = {split: _read(request.source / f"{name}.json") for split, name in files.items()}
    tables = {split: _classes(document) for split, document in documents.items()}
    classes = tables[next(iter(tables))]
    leaf_of = _leaf_of(documents[next(iter(documents))])
    if any(rows != classes or _leaf_of(documents[split]) != leaf_of for split, rows in tables.items()):
        raise UserError(f"the JSON files of {', '.join(files)} have different categories; use files of one release")
    splits = {split: _images(document, request, leaf_of) for split, document in documents.items()}
    return Conversion(converter="inat2021", classes=classes, splits=with_val(splits, request))


def _convert_folders(request: ConvertRequest) -> Conversion:
    usual = {
        split: next((name for name in names if (request.source / name).is_dir()), "")
        for split, names in _FOLDERS.items()
    }
    folders = dict(request.splits) or {split: name for split, name in usual.items() if name}
    if "train" not in folders:
        message = f"{request.source} has neither train.json nor a folder train or train_mini; name the folder with them"
        raise UserError(message)
    rule = LinkRule.within(request.source, follow_links=request.follow_links)
    left_out, found = LeftOut(), dict[str, list[tuple[str, int]]]()
    for split, name in folders.items():
        if not (request.source / name).is_dir():
            raise UserError(f"{request.source / name} is not a folder; --split names folders in {request.source}")
        found[split] = list(folder_images(request.source / name, rule, left_out))
        left_out.check_classes(request.source / name, {path.partition("/")[0] for path, _ in found[split]}, depth=1)
    names = sorted({name.partition("/")[0] for images in found.values() for name, _ in images})
    leaf_of = {name: leaf for leaf, name in enumerate(names)}
    splits: dict[str, ItemTable] = {}
    for split, images in found.items():
        splits[split] = table = ItemTable()
        container = table.container(request.source / folders[split])
        for name, size in images:
            table.add(name, container=container, leaves=(leaf_of[name.partition("/")[0]],), length_bytes=size)
    classes = [_folder_class(leaf, name, request.source) for leaf, name in enumerate(names)]
    return Conversion(converter="inat2021", classes=classes, splits=with_val(splits, request), notes=left_out.notes())


def is_rank_folder(name: str) -> bool:
    """Whether the name of a folder holds a number and all ranks."""
    return _FOLDER.fullmatch(name) is not None


def _folder_class(leaf: int, folder: str, source: Path) -> dict[str, Any]:
    match = _FOLDER.fullmatch(folder)
    if match is None:
        message = f"the folder {folder!r} below {source} does not hold a number and seven ranks, as those of iNat 2021 "
        raise UserError(message + "do (00000_Animalia_..._terrestris); use the converter imagefolder for other folders")
    ranks = dict(zip(_FOLDER_RANKS, match.groups()[1:], strict=True))
    species = f"{ranks['genus']} {ranks['specific_epithet']}"
    return {"class": leaf, "name": species, **ranks, "species": species}


def _usual(source: Path) -> dict[str, str]:
    train = next((name for name in ("train", "train_mini") if (source / f"{name}.json").is_file()), "train")
    val = {"val": "val"} if (source / "val.json").is_file() else {}
    return {"train": train, **val}


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(read_regular(path))
    except NotRegularFileError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; name the downloaded file") from error
    except FileNotFoundError as error:
        message = (
            f"{path} is missing; download it into the folder of the images, or name the files: --split train=train_mini"
        )
        raise UserError(message) from error
    except ValueError as error:
        raise UserError(f"{path} is not whole JSON ({error}); download it again") from error
    if not all(isinstance(document.get(key), list) for key in ("images", "annotations", "categories")):
        raise UserError(f"{path} lacks images, annotations or categories; it is not the JSON of iNat 2021")
    return document


def _leaf_of(document: dict[str, Any]) -> dict[int, int]:
    ids = sorted(category["id"] for category in document["categories"])
    return {number: leaf for leaf, number in enumerate(ids)}


def _classes(document: dict[str, Any]) -> ClassRows:
    categories = sorted(document["categories"], key=lambda category: category["id"])
    return [
        {
            "class": leaf,
            "name": category["name"],
            **{level: category[field] for level, field in _LEVELS.items() if field in category},
            "species": category["name"],
        }
        for leaf, category in enumerate(categories)
    ]


def _images(document: dict[str, Any], request: ConvertRequest, leaf_of: dict[int, int]) -> ItemTable:
    category_of = {note["image_id"]: note["category_id"] for note in document["annotations"]}
    usual = (request.source / name for names in _FOLDERS.values() for name in names)  # may be links
    table, rule = ItemTable(), LinkRule.within(request.source, *usual, follow_links=request.follow_links)
    container, folders = table.container(request.source), set[Path]()
    for image in document["images"]:
        name, category = image["file_name"], category_of.get(image["id"])
        path = request.source / name
        if not is_image(name):
            raise UserError(f"the JSON names {name!r}, which has no extension of an image; download it again")
        if path.parent not in folders:
            rule.check_folder(path.parent)
            folders.add(path.parent)
        try:
            size = image_bytes(path, rule)
        except FileNotFoundError as error:
            raise UserError(
                f"{path} is named in the JSON, but does not exist; unpack the images into its folder"
            ) from error
        if category not in leaf_of:
            raise UserError(f"{name} has the category {category!r}, which the JSON does not list; download it again")
        table.add(name, container=container, leaves=(leaf_of[category],), length_bytes=size)
    return table
