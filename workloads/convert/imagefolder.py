"""``imagefolder``: classes are folders; nested folders are a taxonomy.

``train/animal/dog/x.jpg`` has the class ``animal/dog`` and the levels ``depth1`` = ``animal``, ``depth2`` =
``animal/dog``. Classes are numbered in the order of their paths, as torchvision's ``ImageFolder`` numbers flat folders.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from orchestrator.core.errors import UserError
from orchestrator.storage.dataset_files import ClassRows
from workloads.convert.items import Conversion, ConvertRequest, ItemTable, LinkRule, folder_images, hold_out
from workloads.convert.left_out import LeftOut

SPLIT_FOLDERS = {"train": "train", "val": "val", "validation": "val", "valid": "val", "test": "test"}
_LIKE_SPLITS: Final = {"train": "train", "training": "train", "trainset": "train", "testing": "test", "testset": "test"}


def convert(request: ConvertRequest) -> Conversion:
    """List a tree of class folders, by split.

    Raises:
        UserError: there are no images, images without a class folder, class folders whose images are all of forms that
            are not read, or links that may not be followed.
    """
    folders = split_folders(request)
    rule = LinkRule.within(request.source, *folders.values(), follow_links=request.follow_links)
    left_out = LeftOut()
    found = {split: list(folder_images(folder, rule, left_out)) for split, folder in folders.items()}
    for split, images in found.items():
        left_out.check_classes(folders[split], {name.rpartition("/")[0] for name, _ in images})
    paths = sorted({_class_of(name, folders[split]) for split, images in found.items() for name, _ in images})
    if not paths:
        raise UserError(f"{request.source} has no images in class folders; it needs train/<class>/<image>.jpg")
    left_out.note_empty(folders.values(), paths)
    leaf_of = {path: leaf for leaf, path in enumerate(paths)}
    splits: dict[str, ItemTable] = {}
    for split, images in found.items():
        splits[split] = table = ItemTable()
        container = table.container(folders[split])
        for name, size in images:
            leaf = leaf_of[_class_of(name, folders[split])]
            table.add(name, container=container, leaves=(leaf,), length_bytes=size)
    classes = folder_classes(paths)
    return Conversion(
        converter="imagefolder", classes=classes, splits=with_val(splits, request), notes=left_out.notes()
    )


def split_folders(request: ConvertRequest) -> dict[str, Path]:
    """Folders by split: those the request names, else the usual ones that exist, else the source is all ``train``.

    Raises:
        UserError: a named folder is not there, two usual ones are of one split, or the folders of the source look like
            splits and none is called ``train``.
    """
    if request.splits:
        chosen = {split: request.source / folder for split, folder in request.splits.items()}
        if missing := [str(folder) for folder in chosen.values() if not folder.is_dir()]:
            raise UserError(f"{', '.join(missing)}: no such folder; --split names folders in {request.source}")
        return chosen
    there = [name for name in SPLIT_FOLDERS if (request.source / name).is_dir()]
    if "train" not in there:
        _refuse_likely_splits(request.source, there)
        return {"train": request.source}
    # Links to one folder are no two.
    check_splits({name: os.path.realpath(request.source / name) for name in there}, request.source)
    return {SPLIT_FOLDERS[name]: request.source / name for name in there}


def _refuse_likely_splits(source: Path, there: Collection[str]) -> None:
    """Refuse ``Training`` and ``Testing``, which would be two classes with the test images in training."""
    inside = source.iterdir() if source.is_dir() else ()
    folders = sorted(path.name for path in inside if path.is_dir() and not path.name.startswith("."))
    likely = {name: split for name in folders if (split := _likely_split(name))}
    if not there and (len(likely) < len(folders) or len(folders) < 2):
        return
    message = f"{source} has no folder 'train', but folders that look like splits and not like classes: "
    message += f"{', '.join(likely)}; name the splits with --split (in a sweep: 'splits' of 'convert'), "
    by_split = {split: name for name, split in likely.items()}
    if "train" in by_split and len(by_split) == len(likely):
        message += f"{' '.join(f'--split {split}={name}' for split, name in by_split.items())}, "
    raise UserError(message + "or --split train=. if they are classes")


def _likely_split(name: str) -> str:
    """The split of which a folder is by its first or last word; empty if it looks like a class."""
    words = re.split(r"[^a-z]+", name.lower().strip(" _-0123456789"))
    known = {**SPLIT_FOLDERS, **_LIKE_SPLITS}
    return known.get(words[0]) or known.get(words[-1]) or ""


def check_splits(there: Mapping[str, str], source: Path) -> None:
    """See that the usual names in a source are of different splits.

    Args:
        there: where each of them is; a place may have several names.
        source: of which a message speaks.

    Raises:
        UserError: two are of one split, so that one of them would be left out.
    """
    of_split: dict[str, str] = {}
    for name in there:
        of_split.setdefault(SPLIT_FOLDERS.get(name, name), name)
    for name, place in there.items():
        first = of_split[SPLIT_FOLDERS.get(name, name)]
        if there[first] != place:
            options = " ".join(f"--split {split}={read}" for split, read in of_split.items())
            message = (
                f"{source} has {first!r} and {name!r}, which are both the split {SPLIT_FOLDERS[name]!r}; name those "
            )
            raise UserError(message + f"to read: {options}")


def with_val(splits: Mapping[str, ItemTable], request: ConvertRequest) -> dict[str, ItemTable]:
    """The splits; if asked for, with a ``val`` held out of ``train``."""
    if not request.val_fraction:
        return dict(splits)
    if "val" in splits:
        raise UserError("there is a split 'val' already; leave --val-fraction out")
    if "train" not in splits:
        raise UserError(f"--val-fraction needs a split 'train'; --split names only {', '.join(splits)}")
    return {**splits, **hold_out(splits["train"], request.val_fraction, request.seed)}


def folder_classes(paths: list[str]) -> ClassRows:
    """Class table of folder paths: the last part names a class if no other class has it."""
    depth = max(path.count("/") + 1 for path in paths)
    names = [path.rpartition("/")[2] for path in paths]
    repeated = {name for name, number in Counter(names).items() if number > 1}
    rows: ClassRows = []
    for leaf, (path, name) in enumerate(zip(paths, names, strict=True)):
        parts = path.split("/")
        levels = {f"depth{level}": "/".join(parts[:level]) for level in range(1, depth + 1)}
        rows.append({"class": leaf, "name": path if name in repeated else name, **levels})
    return rows


def _class_of(name: str, folder: Path) -> str:
    path = name.rpartition("/")[0]
    if not path:
        raise UserError(f"{folder / name} is in no class folder; move it into one, or name the folders with --split")
    return path
