"""``inat2021``: iNaturalist 2021 with its JSON files (https://github.com/visipedia/inat_comp/tree/master/2021).

Leaf classes are the species, numbered as in the JSON. Levels, coarse to fine: ``supercategory`` and the Linnaean ranks;
the rank "class" is called ``taxonomic_class``, since ``class`` is the number of the leaf class, and the binomial
``species``: a ``specific_epithet`` alone is shared by species of many genera.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchestrator.core.errors import UserError
from orchestrator.storage.dataset_files import ClassRows
from orchestrator.storage.files import NotRegularFileError, read_regular
from workloads.convert.imagefolder import with_val
from workloads.convert.items import Conversion, ConvertRequest, ItemTable, LinkRule, image_bytes

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

    Raises:
        UserError: a JSON is missing or not of this form, its class tables differ, or images are missing.
    """
    files = request.splits or _usual(request.source)
    documents = {split: _read(request.source / f"{name}.json") for split, name in files.items()}
    tables = {split: _classes(document) for split, document in documents.items()}
    classes = tables[next(iter(tables))]
    if any(rows != classes for rows in tables.values()):
        raise UserError(f"the JSON files of {', '.join(files)} have different categories; use files of one release")
    leaf_of = _leaf_of(documents[next(iter(documents))])
    splits = {split: _images(document, request, leaf_of) for split, document in documents.items()}
    return Conversion(converter="inat2021", classes=classes, splits=with_val(splits, request))


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
        message = f"{path} is missing; download it beside the images, or name the files: --split train=train_mini"
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
    table, rule = ItemTable(), LinkRule.within(request.source, follow_links=request.follow_links)
    container = table.container(request.source)
    for image in document["images"]:
        name, category = image["file_name"], category_of.get(image["id"])
        path = request.source / name
        try:
            size = image_bytes(path, rule)
        except FileNotFoundError as error:
            raise UserError(f"{path} is named in the JSON, but is not there; unpack the images beside it") from error
        if category not in leaf_of:
            raise UserError(f"{name} has the category {category!r}, which the JSON does not list; download it again")
        table.add(name, container=container, leaves=(leaf_of[category],), length_bytes=size)
    return table
