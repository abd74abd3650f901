"""``huggingface``: data sets of the library ``datasets``, as ``save_to_disk`` and ``load_dataset`` leave them.

Images lie encoded in Arrow files, uncompressed, so that each is a run of bytes of such a file, as those of a tar are:
they are packed as they are. What ``save_to_disk`` wrote is read with pyarrow alone. Names on the hub and folders in
other forms (Parquet, ImageFolder) are loaded by the library first, into its cache; it runs no code of theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.errors import UserError
from orchestrator.storage.dataset_files import ClassRows, is_missing
from workloads.convert.imagefolder import SPLIT_FOLDERS, check_splits, with_val
from workloads.convert.items import WHOLE_FILE, Conversion, ConvertRequest, ItemTable, LinkRule, image_bytes, level_of

_LABELS: Final = ("label", "labels", "fine_label", "class", "target", "cls")
"""Columns of leaf classes, in this order, where none is named."""
_FORMS: Final = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpg"), (b"RIFF", "webp"), (b"BM", "bmp"))
_DICT_FILE: Final = "dataset_dict.json"
_STATE_FILE: Final = "state.json"
_INFO_FILE: Final = "dataset_info.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A split."""

    files: Sequence[Path]
    features: Mapping[str, Any]
    """As ``dataset_info.json`` has them: ``_type`` and, of a ``ClassLabel``, ``names``."""


def is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote a folder."""
    return (folder / _DICT_FILE).is_file() or (folder / _STATE_FILE).is_file()


def convert(request: ConvertRequest) -> Conversion:
    """List the images of a data set.

    Raises:
        UserError: it is not there, has no column of images or labels, has a split twice, or cannot be loaded.
    """
    stored = _read_saved(request.source) if is_saved(request.source) else _load(request.source)
    stored = _chosen(stored, request)
    features = dict(next(iter(stored.values())).features)
    image = _image_column(features, request.source)
    label = _label_column(features, request)
    others = [name for name, feature in features.items() if _type_of(feature) == "ClassLabel" and name != label]
    levels = [*request.level_columns] or others
    for column in (label, *levels):
        feature = _numbering(stored, column)
        if feature is not None:
            features[column] = feature
        elif column in {label, *request.level_columns}:
            message = f"{request.source} numbers the classes of {column!r} differently in its splits "
            message += f"({', '.join(stored)}): cast all of them to one ClassLabel, and save the data set again"
            raise UserError(message)
    levels = [level for level in levels if level in request.level_columns or _numbering(stored, level) is not None]
    nodes = _Nodes(features, levels)
    splits = {split: _table(_rows(found, image, (label, *levels)), nodes, request) for split, found in stored.items()}
    if not nodes.of_label:
        raise UserError(f"{request.source} has no images; name another data set")
    names = _names(features[label], nodes)
    leaf_of = {value: leaf for leaf, value in enumerate(names)}
    final = {number: leaf_of[value] for number, value in enumerate(nodes.of_label)}
    for table in splits.values():
        table.map_leaves(final)
    classes = _classes(features[label], names, nodes, is_asked=bool(request.level_columns))
    return Conversion(converter="huggingface", classes=classes, splits=with_val(splits, request))


def _chosen(stored: Mapping[str, _Stored], request: ConvertRequest) -> dict[str, _Stored]:
    if not request.splits:
        check_splits({name: name for name in stored}, request.source)
        found = {SPLIT_FOLDERS.get(name, name): of_split for name, of_split in stored.items()}
        if "val" not in found and "test" in found and not request.val_fraction:
            found["val"] = found.pop("test")  # as of other data sets that are published with these two
        return found if "train" in found or len(found) > 1 else {"train": next(iter(found.values()))}
    missing = [name for name in request.splits.values() if name not in stored]
    if missing:
        raise UserError(f"{request.source} has no split {missing[0]!r}; it has {', '.join(stored)}")
    return {split: stored[name] for split, name in request.splits.items()}


def _numbering(stored: Mapping[str, _Stored], column: str) -> Mapping[str, Any] | None:
    """The feature of a column that numbers most classes; None if a number is not the same class in all splits.

    They are numbered apart where they were loaded apart. A split may lack the last classes.
    """
    features = [split.features[column] for split in stored.values() if column in split.features]
    if not features:
        return {}
    most = max(features, key=lambda feature: len(feature.get("names") or ()))
    names = list(most.get("names") or ())
    is_same = all(names[: len(of.get("names") or ())] == list(of.get("names") or ()) for of in features)
    return most if is_same else None


# ------------------------------------------------------------------------------------------------------ finding files


def _read_saved(folder: Path) -> dict[str, _Stored]:
    if not (folder / _DICT_FILE).is_file():
        return {"train": _read_split(folder)}
    names = _json(folder / _DICT_FILE).get("splits")
    if not isinstance(names, list) or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UserError(f"{folder / _DICT_FILE} names no splits; save the data set again")
    return {name: _read_split(folder / name) for name in names}


def _read_split(folder: Path) -> _Stored:
    state, info = _json(folder / _STATE_FILE), _json(folder / _INFO_FILE)
    files = [Path(str(file.get("filename", ""))) for file in state.get("_data_files") or () if isinstance(file, dict)]
    if not files or any(file.name != str(file) for file in files) or not isinstance(info.get("features"), dict):
        raise UserError(f"{folder} is not a data set that save_to_disk has written; save it again")
    return _Stored(files=[folder / file for file in files], features=info["features"])


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); save the data set again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} is not a mapping; save the data set again")
    return found


def _load(source: Path) -> dict[str, _Stored]:
    """By the library: a name on the hub, or a folder in one of its forms."""
    try:
        from datasets import load_dataset  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        message = f"{source} was not written by save_to_disk, so the library 'datasets' has to load it; install it: "
        raise UserError(message + "pip install 'pretraining-orchestrator[huggingface]'") from error
    try:
        loaded = load_dataset(str(source))
    except Exception as error:
        what = "the folder" if source.exists() else "the data set of the hub"
        raise UserError(f"{what} {source} cannot be loaded by the library 'datasets': {error}") from error
    found = {}
    for name, split in loaded.items():
        files = [Path(file["filename"]) for file in split.cache_files]
        found[str(name)] = _Stored(files=files, features=split.features.to_dict())
    return found


# ----------------------------------------------------------------------------------------------------- columns and rows


def _type_of(feature: object) -> str:
    """Of a column; empty for a structure of several."""
    return str(feature.get("_type", "")) if isinstance(feature, dict) else ""


def _image_column(features: Mapping[str, Any], source: Path) -> str:
    for name, feature in features.items():
        if _type_of(feature) == "Image":
            return str(name)
    raise UserError(f"{source} has no column of images; its columns are {', '.join(features)}")


def _label_column(features: Mapping[str, Any], request: ConvertRequest) -> str:
    given = () if request.label_column == _LABELS[0] else (request.label_column,)
    named = [name for name, feature in features.items() if _type_of(feature) == "ClassLabel"]
    for name in given or (*_LABELS, *(named if len(named) == 1 else ())):
        if name in features:
            return str(name)
    message = f"{request.source} has no column {given[0]!r}" if given else f"{request.source} has no column of labels"
    raise UserError(f"{message}; its columns are {', '.join(features)}: name one with --label-column")


def _rows(stored: _Stored, image: str, columns: Sequence[str]) -> Iterator[tuple[Path, int, int, str, tuple[Any, ...]]]:
    """File, offset, size, path and the values of the columns of each image; without a file its path is the image."""
    from pyarrow import ArrowException, BufferReader, ipc, memory_map  # type: ignore[import-untyped]

    for file in stored.files:
        image_bytes(file, LinkRule.within(file.parent, follow_links=False))
        try:
            whole = memory_map(str(file)).read_buffer()
            for batch in ipc.open_stream(BufferReader(whole)):
                batch.validate(full=True)
                missing = [name for name in (image, *columns) if name not in batch.schema.names]
                if missing:
                    raise UserError(f"{file} has no column {missing[0]!r}; it has {', '.join(batch.schema.names)}")
                values = list(zip(*(batch.column(name).to_pylist() for name in columns), strict=True))
                pixels = batch.column(image)
                offsets, base = _places(pixels, whole, file)
                paths = pixels.field("path").to_pylist()
                has_bytes = pixels.field("bytes").is_valid().to_pylist()
                for row, found in enumerate(values):
                    start, size = int(offsets[row]), int(offsets[row + 1] - offsets[row])
                    path = str(paths[row] or "")
                    yield (file, base + start, size, path, found) if has_bytes[row] else (Path(), 0, 0, path, found)
        except (ArrowException, OSError, KeyError) as error:
            raise UserError(f"{file} cannot be read as Arrow ({error}); save the data set again") from error


def _places(pixels: Any, whole: Any, file: Path) -> tuple[NDArray[np.int64], int]:  # noqa: ANN401 - pyarrow is untyped
    """Offsets [N + 1] of images within a buffer of the file, and where that begins."""
    column = pixels.field("bytes")
    _, ends, data = column.buffers()
    width = np.dtype(np.int64 if str(column.type) == "large_binary" else np.int32)
    offsets = np.frombuffer(ends, dtype=width)[column.offset : column.offset + len(column) + 1] if ends else None
    if data is None or not data.size or offsets is None:
        return np.zeros(len(column) + 1, dtype=np.int64), 0
    base = data.address - whole.address
    if not 0 <= base <= whole.size - data.size:
        raise UserError(f"{file} is compressed, and images are read in place; save the data set again without")
    return offsets.astype(np.int64), base


class _Nodes:
    """What the columns of levels say of each label. Nothing is kept per image: there may be millions."""

    def __init__(self, features: Mapping[str, Any], levels: Sequence[str]) -> None:
        self.levels = levels
        self._features = features
        self.of_label: dict[Any, list[set[str | None]]] = {}
        """Nodes of each level by label, in the order in which labels are met."""
        self._number_of: dict[Any, int] = {}

    def number(self, row: int, values: tuple[Any, ...]) -> int:
        """A provisional class: labels are counted as they come.

        Raises:
            UserError: the image has no label, or several.
        """
        label, *others = values
        if isinstance(label, list):
            raise UserError(
                "an image has a list of labels; convert a data set with several labels by a table: csv, parquet"
            )
        if is_missing(label):
            raise UserError(f"image {row} has no label; leave images without a label out before they are saved")
        nodes = self.of_label.setdefault(label, [set() for _ in self.levels])
        for level, found, value in zip(self.levels, nodes, others, strict=True):
            found.add(_shown(self._features[level], value))
        return self._number_of.setdefault(label, len(self._number_of))


def _names(feature: Mapping[str, Any], nodes: _Nodes) -> list[Any]:
    """Values of the leaf classes, in the order of their numbers.

    Raises:
        UserError: an image has a number that the feature does not name.
    """
    if feature.get("_type") == "ClassLabel" and feature.get("names"):
        numbers = range(len(feature["names"]))
        if unknown := [value for value in nodes.of_label if value not in numbers]:
            message = f"an image has the label {unknown[0]!r}, which is none of the {len(numbers)} classes"
            raise UserError(f"{message}; leave images without a label out before they are saved")
        return list(numbers)
    return sorted(nodes.of_label, key=lambda value: (isinstance(value, str), value))


def _shown(feature: Mapping[str, Any], value: Any) -> str | None:  # noqa: ANN401 - of any column
    if is_missing(value):
        return None
    names = feature.get("names") or ()
    return str(names[value]) if isinstance(value, int) and 0 <= value < len(names) else str(value)


def _classes(feature: Mapping[str, Any], names: Sequence[Any], nodes: _Nodes, *, is_asked: bool) -> ClassRows:
    """Columns of which a class has several values are no levels."""
    rows: ClassRows = [{"class": leaf, "name": _shown(feature, value)} for leaf, value in enumerate(names)]
    for position, level in enumerate(nodes.levels):
        found = [nodes.of_label[value][position] if value in nodes.of_label else set() for value in names]
        if all(len(values) == 1 for values in found):
            for row, values in zip(rows, found, strict=True):
                row[level_of(level)] = next(iter(values))
        elif is_asked:
            raise UserError(
                f"classes have several values, or none, in column {level!r}; a level follows from the class"
            )
    return rows


def _table(
    rows: Iterable[tuple[Path, int, int, str, tuple[Any, ...]]], nodes: _Nodes, request: ConvertRequest
) -> ItemTable:
    """Images with provisional classes."""
    table, containers = ItemTable(), dict[Path, int]()
    rule = LinkRule.within(request.source, follow_links=request.follow_links)
    for number, (file, offset, size, path, values) in enumerate(rows):
        is_whole = file == Path()
        container = request.source if is_whole else file
        if container not in containers:
            containers[container] = table.container(container)
        table.add(
            _inside(path, request) if is_whole else f"{number:09d}.{_extension(file, offset)}",
            container=containers[container],
            leaves=(nodes.number(number, values),),
            length_bytes=image_bytes(Path(path), rule) if is_whole else size,
            offset_bytes=WHOLE_FILE if is_whole else offset,
        )
    return table


def _inside(path: str, request: ConvertRequest) -> str:
    root = request.source.resolve()
    real = Path(path).resolve()
    if not real.is_relative_to(root):
        raise UserError(f"the image {path!r} lies outside of {request.source}; save the data set with its images")
    return str(real.relative_to(root))


_heads: dict[Path, Any] = {}


def _extension(file: Path, offset: int) -> str:
    if file not in _heads:
        _heads.clear()
        _heads[file] = np.memmap(file, dtype=np.uint8, mode="r")
    head = _heads[file][offset : offset + 4].tobytes()
    return next((extension for sign, extension in _FORMS if head.startswith(sign)), "jpg")
