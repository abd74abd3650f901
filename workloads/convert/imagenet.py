"""``imagenet1k`` and ``imagenet21k``: as image-net.org publishes them, without unpacking.

A class is a WordNet synset (``n01440764``), and classes are numbered in the order of their ids, as usual. The
column ``synset`` of the class table holds the id, from which label spaces walk WordNet. Images are found inside
uncompressed tars, and inside tars inside tars, without extracting anything.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import tarfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

from orchestrator.core.errors import UserError
from orchestrator.core.units import printable
from orchestrator.storage.dataset_files import ClassRows
from orchestrator.storage.files import open_regular, read_regular
from workloads.convert.imagefolder import with_val
from workloads.convert.items import Conversion, ConvertRequest, ItemTable, LinkRule, folder_images, is_image
from workloads.convert.left_out import LeftOut, may_be_image
from workloads.convert.matlab import read_matlab
from workloads.data.scan import DamagedArchiveError, check_end

SYNSET = re.compile(r"n\d{8}")
_NAMES_FILES = ("LOC_synset_mapping.txt", "synset_mapping.txt", "words.txt", "imagenet21k_wordnet_lemmas.txt")
_TRAIN_1K = ("ILSVRC2012_img_train.tar", "train")
_VAL_1K = ("ILSVRC2012_img_val.tar", "val")
_KIT_BYTES = 64 * 1024**2
"""Of a whole development kit when it is expanded: ten times of what the published one is."""
_WITH_VAL_21K = ("winter21_whole.tar", "fall11_whole.tar", "winter21_whole", "fall11_whole")
_TRAIN_OF_VAL_21K = "imagenet21k_train"
_WHOLE_21K = (*_WITH_VAL_21K, _TRAIN_OF_VAL_21K, "train")
_VAL_21K = ("imagenet21k_val", "val")
_MAX_HEADER_BYTES = 16 * 1024**2
"""Names and notes of a member; a broken header claims terabytes, or less than nothing."""
TAR_ERRORS = (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, RecursionError, zlib.error)
"""What ``tarfile`` raises for archives that are none. ``ValueError``: numbers and encodings in notes."""
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Image:
    """An image on the way into a table."""

    container: Path
    name: str
    synset: str
    length_bytes: int
    offset_bytes: int = -1


def convert_21k(request: ConvertRequest) -> Conversion:
    """List ImageNet-21k: a folder of per-synset tars (also winter21's, unpacked once), a tar of such tars, or folders.

    Raises:
        UserError: nothing of the kind is there, a named split is not there or empty, or the usual folder of val is a
            part of the usual one of train.
    """
    places = _places(request, {"train": _WHOLE_21K, "val": _VAL_21K})
    if not request.splits:
        train = places.setdefault("train", request.source)
        val = places.get("val", train)
        if val == train:
            places.pop("val", None)
        elif val.name == _VAL_21K[0] and train.name in _WITH_VAL_21K and train != request.source:
            message = (
                f"{train} already contains the images of {val.name}, so they would be in both splits; choose with "
            )
            processed = _TRAIN_OF_VAL_21K
            both = f"--split train={processed} --split val={val.name}, or " if (val.parent / processed).exists() else ""
            raise UserError(f"{message}{both}--split train={train.name}")
    rule, left_out = _link_rule(request), LeftOut()
    splits = {split: _by_synset(place, rule, left_out) for split, place in places.items()}
    return _conversion("imagenet21k", splits, places, request, left_out)


def convert_1k(request: ConvertRequest) -> Conversion:
    """List ImageNet-1k: train as the published tar of tars, a folder of tars or folders; val as tar or folder.

    Flat validation images get their classes from ``labels``: Kaggle's ``LOC_val_solution.csv``, the development kit
    (folder or ``.tar.gz``), or a text file of lines ``<image> <synset>`` or, in the order of the images, ``<synset>``.

    Raises:
        UserError: a part is missing, or images have no class.
    """
    places = _places(request, {"train": _TRAIN_1K, "val": _VAL_1K})
    if "train" not in places and not request.splits:
        raise UserError(f"{request.source} has neither {_TRAIN_1K[0]} nor a folder train; name the folder that has one")
    left_out = LeftOut()
    splits: dict[str, Iterable[_Image]] = {}
    for split, place in places.items():
        if split == "train" or (request.splits and _has_synsets(place)):
            splits[split] = _by_synset(place, _link_rule(request), left_out)
        else:
            splits[split] = _validation(place, request, left_out)
    return _conversion("imagenet1k", splits, places, request, left_out)


def _places(request: ConvertRequest, usual: Mapping[str, tuple[str, ...]]) -> dict[str, Path]:
    """Where each split is: as the request says, else the first of the usual ones that is there."""
    if not request.splits:
        found = {split: _first(request.source, names) for split, names in usual.items()}
        return {split: place for split, place in found.items() if place is not None}
    places = {split: request.source / name for split, name in request.splits.items()}
    if missing := [str(place) for place in places.values() if not place.exists()]:
        raise UserError(f"{', '.join(missing)}: no such file; --split names tars and folders in {request.source}")
    return places


def _conversion(
    converter: str,
    splits: Mapping[str, Iterable[_Image]],
    places: Mapping[str, Path],
    request: ConvertRequest,
    left_out: LeftOut,
) -> Conversion:
    seen: dict[str, int] = {}
    tables = {split: _table(images, seen) for split, images in splits.items()}
    if empty := [split for split, table in tables.items() if not len(table) and split in request.splits]:
        raise UserError(f"split {empty[0]!r} ({request.splits[empty[0]]}) has no images of synsets; name another place")
    if not seen:
        raise UserError(
            f"{request.source} has no images of synsets; it needs tars or folders named n01440764 and so on"
        )
    left_out.note_empty(places.values(), seen, depth=1)
    synsets, names = sorted(seen), _names(request.source)
    final = {seen[synset]: leaf for leaf, synset in enumerate(synsets)}
    for table in tables.values():
        table.map_leaves(final)
    rows: ClassRows = [
        {"class": leaf, "name": names.get(synset, synset), "synset": synset} for leaf, synset in enumerate(synsets)
    ]
    # Last: it is counted while the images are listed.
    return Conversion(converter=converter, classes=rows, splits=with_val(tables, request), notes=left_out.notes())


def _table(images: Iterable[_Image], seen: dict[str, int]) -> ItemTable:
    """Images with provisional classes: synsets in the order in which they are met."""
    table, containers = ItemTable(), dict[Path, int]()
    for image in images:
        number = containers.get(image.container)
        if number is None:
            number = containers[image.container] = table.container(image.container)
        table.add(
            image.name,
            container=number,
            leaves=(seen.setdefault(image.synset, len(seen)),),
            length_bytes=image.length_bytes,
            offset_bytes=image.offset_bytes,
        )
    return table


def _has_synsets(place: Path) -> bool:
    """Whether a folder or tar holds folders or tars of synsets."""
    names = (path.name for path in place.iterdir()) if place.is_dir() else (one.name for one in tar_entries(place))
    return any(
        Path(name).suffix in {"", ".tar"} and SYNSET.fullmatch(Path(name).stem) for name in islice(names, 10_000)
    )


def _link_rule(request: ConvertRequest) -> LinkRule:
    """Its train and val folders are what the source is known by: they may be links to where the data lie."""
    usual = (*_TRAIN_1K, *_VAL_1K, *_WHOLE_21K, *_VAL_21K, *request.splits.values())
    roots = (request.source / name for name in usual)
    return LinkRule.within(request.source, *roots, follow_links=request.follow_links)


def _by_synset(place: Path, rule: LinkRule, left_out: LeftOut) -> Iterator[_Image]:
    """Images whose tar or folder is named by their synset.

    Raises:
        UserError: a synset has images in two places, such as a tar and the folder that it was unpacked to; it is there
            in other forms alone, such as a compressed tar; or an image is of no synset, as in a folder half sorted.
    """
    kept: dict[str, tuple[int, str]] = {}
    others: dict[str, str] = {}
    for number, (name, images) in enumerate(_synsets(place, rule, left_out, others)):
        is_empty = True
        for image in images:
            is_empty = False
            first, held_by = kept.setdefault(image.synset, (number, name))
            if first != number:
                message = f"{place} has images of {image.synset} in {held_by} and in {name}: they would be read twice; "
                raise UserError(printable(f"{message}keep one of the two"))
            yield image
        if is_empty:
            left_out.add_empty(place / Path(name).stem)
    left_out.check_classes(place, (Path(name).name for _, name in kept.values()), depth=1)
    lost = sorted(others.keys() - kept.keys())
    if lost:
        more = f" (so have {len(lost) - 1} more synsets)" if len(lost) > 1 else ""
        message = f"{lost[0]} has {others[lost[0]]} in {place} and no images in {lost[0]}.tar or a folder {lost[0]}"
        message += f"{more}, so its class would be missing, and later ones would have other numbers: unpack it to "
        raise UserError(printable(f"{message}{lost[0]}.tar, download it again, or move it out of the source"))


def _synsets(
    place: Path, rule: LinkRule, left_out: LeftOut, others: dict[str, str]
) -> Iterator[tuple[str, Iterator[_Image]]]:
    """Name of each tar or folder of a synset, with its images. Into ``others`` goes a file of other forms by synset."""
    if place.is_file():
        for entry in tar_entries(place):
            path = Path(entry.name)
            if path.suffix in {"", ".tar"} and SYNSET.fullmatch(path.stem):
                yield entry.name, _in_tar(place, path.stem, entry, left_out)
            else:
                _leave_out(place, path.name, left_out, others)
        return
    for path in sorted(place.iterdir()):
        if path.suffix == ".tar" and SYNSET.fullmatch(path.stem):
            yield path.name, _in_tar(path, path.stem, None, left_out)
        elif path.is_dir() and SYNSET.fullmatch(path.name):
            if path.is_symlink():
                rule.check(path)
            yield path.name, _in_folder(path, rule, left_out)
        elif SYNSET.match(path.name):
            _leave_out(place, path.name, left_out, others)
        elif is_image(path.name):
            message = (
                f"{path} is in no folder and no tar of a synset; move it into the folder of its class, or elsewhere"
            )
            raise UserError(printable(message))


def _leave_out(place: Path, name: str, left_out: LeftOut, others: dict[str, str]) -> None:
    left_out.add(place, name)
    synset = SYNSET.match(name)
    if synset and may_be_image(name):
        others.setdefault(synset.group(), name)


def _in_folder(path: Path, rule: LinkRule, left_out: LeftOut) -> Iterator[_Image]:
    for name, size in folder_images(path, rule, left_out):
        yield _Image(container=path.parent, name=f"{path.name}/{name}", synset=path.name, length_bytes=size)


def _in_tar(path: Path, synset: str, within: TarEntry | None, left_out: LeftOut) -> Iterator[_Image]:
    folder = path / Path(within.name).name if within else path
    for entry in tar_entries(path, within):
        if is_image(entry.name):
            yield _Image(
                container=path,
                name=entry.name,
                synset=synset,
                length_bytes=entry.length_bytes,
                offset_bytes=entry.offset_bytes,
            )
        else:
            left_out.add(folder, entry.name)


def _validation(place: Path, request: ConvertRequest, left_out: LeftOut) -> Iterable[_Image]:
    if place.is_dir() and any(SYNSET.fullmatch(path.name) for path in place.iterdir()):
        return _by_synset(place, _link_rule(request), left_out)
    images = sorted(_flat(place, _link_rule(request), left_out), key=lambda image: image.name)
    labels = _validation_labels(request, [Path(image.name).stem for image in images])
    return [
        _Image(
            container=image.container,
            name=image.name,
            synset=labels[Path(image.name).stem],
            length_bytes=image.length_bytes,
            offset_bytes=image.offset_bytes,
        )
        for image in images
    ]


def _flat(place: Path, rule: LinkRule, left_out: LeftOut) -> Iterator[_Image]:
    if place.is_file():
        yield from _in_tar(place, "", None, left_out)
        return
    for name, size in folder_images(place, rule, left_out):
        yield _Image(container=place, name=name, synset="", length_bytes=size)


def _validation_labels(request: ConvertRequest, stems: list[str]) -> dict[str, str]:
    """Synset of each validation image, by its name without extension."""
    usual = ("LOC_val_solution.csv", "ILSVRC2012_devkit_t12", "ILSVRC2012_devkit_t12.tar.gz", "val_labels.txt")
    path = request.labels or _first(request.source, usual)
    if path is None:
        message = f"the validation images are in no class folders, and {request.source} has none of {', '.join(usual)}"
        raise UserError(message + "; name what says their classes with --labels")
    if path.is_dir() or path.name.endswith(".tar.gz"):
        labels = dict(zip(stems, _devkit(path, len(stems)), strict=True))
    elif path.suffix == ".csv":
        with path.open(newline="") as file:
            try:
                labels = {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(file)}
            except (KeyError, IndexError, AttributeError) as error:
                message = f"{path} is not a table of ImageId and PredictionString with a synset in each row ({error!r})"
                raise UserError(message) from error
    else:
        labels = _text_labels(path, stems)
    if missing := [stem for stem in stems if not SYNSET.fullmatch(labels.get(stem, ""))]:
        raise UserError(f"{path} has no synset for {len(missing)} validation images, the first is {missing[0]}")
    return labels


def _text_labels(path: Path, stems: list[str]) -> dict[str, str]:
    lines = [line.split() for line in path.read_text().splitlines() if line.strip()]
    if all(len(line) == 1 for line in lines):
        if len(lines) != len(stems):
            raise UserError(f"{path} has {len(lines)} lines for {len(stems)} validation images; write one for each")
        return dict(zip(stems, (line[0] for line in lines), strict=True))
    return {Path(line[0]).stem: line[1] for line in lines}


def _devkit(path: Path, num_images: int) -> list[str]:
    """Synsets of the validation images in order: the ground truth counts ids of ``meta.mat`` (readme.txt, 2.2)."""
    files = {"meta.mat": b"", "ILSVRC2012_validation_ground_truth.txt": b""}
    if path.is_dir():
        for file in path.rglob("*"):
            if file.name in files and file.is_file():
                files[file.name] = read_regular(file)
    else:
        files |= _from_archive(path, files.keys())
    if missing := [name for name, content in files.items() if not content]:
        raise UserError(f"{path} has no {' and no '.join(missing)}; it is not the development kit of ILSVRC2012")
    try:
        synsets = read_matlab(files["meta.mat"], max_bytes=_KIT_BYTES, squeeze=True)["synsets"]
        synset_of = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
        ids = [int(line) for line in files["ILSVRC2012_validation_ground_truth.txt"].split()]
    except (ValueError, TypeError, LookupError) as error:
        raise UserError(f"{path} has a meta.mat or ground truth that cannot be read ({error}); download it") from error
    if len(ids) != num_images:
        raise UserError(f"{path} has classes for {len(ids)} validation images, there are {num_images}")
    if unknown := [number for number in ids if number not in synset_of]:
        raise UserError(f"{path} has the id {unknown[0]} in its ground truth, and no synset for it; download it again")
    return [synset_of[number] for number in ids]


def _from_archive(path: Path, names: Collection[str]) -> dict[str, bytes]:
    """Files of the development kit; what it would take to expand is bounded before it is taken."""
    found: dict[str, bytes] = {}
    try:
        with gzip.open(path) as content:
            bounded = BoundedFile(cast("BinaryIO", content), max_read_bytes=_KIT_BYTES, size_bytes=_KIT_BYTES)
            with tarfile.open(fileobj=cast("BinaryIO", bounded), mode="r:") as tar:
                for member in forward(tar):
                    if member.isreg() and (name := Path(member.name).name) in names:
                        bounded.seek(member.offset_data)
                        found[name] = bounded.read(member.size)
    except TAR_ERRORS as error:
        raise UserError(f"{path} cannot be read as a development kit ({error}); download it again") from error
    return found


def _names(source: Path) -> dict[str, str]:
    """First lemma of each synset, from whichever list of names is there."""
    path = _first(source, _NAMES_FILES)
    if path is None:
        return {}
    lines = (line.split(None, 1) for line in path.read_text(encoding="utf-8").splitlines())
    return {line[0]: line[1].split(",")[0].strip() for line in lines if len(line) == 2 and SYNSET.fullmatch(line[0])}


def _first(source: Path, names: tuple[str, ...]) -> Path | None:
    if not source.is_dir():
        return source if source.name in names else None
    return next((source / name for name in names if (source / name).exists()), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TarEntry:
    """A plain file in a tar; ``offset_bytes`` counts from the beginning of the outermost file."""

    name: str
    offset_bytes: int
    length_bytes: int


def tar_entries(path: Path, within: TarEntry | None = None) -> Iterator[TarEntry]:
    """Plain files of a tar, or of a tar that is an entry ``within`` it, in the order of the archive.

    Raises:
        UserError: it is no tar, is compressed, is cut off or otherwise damaged.
    """
    with _opened(path, within) as (file, start):
        bounded = BoundedFile(file)
        try:
            with tarfile.open(fileobj=cast("BinaryIO", bounded), mode="r:") as tar:
                for member in forward(tar):
                    tar.members = []  # type: ignore[attr-defined] # tarfile would keep every header
                    if not member.isreg() or member.issparse():
                        _check_is_no_image(member, path, within)
                    else:
                        offset = start + member.offset_data
                        yield TarEntry(name=member.name, offset_bytes=offset, length_bytes=member.size)
                check_end(bounded, tar.offset)
        except (*TAR_ERRORS, DamagedArchiveError) as error:
            place = f"{path}:{within.name}" if within else str(path)
            raise UserError(f"{place} is not a whole tar ({error}); download it again") from error


def _check_is_no_image(member: tarfile.TarInfo, path: Path, within: TarEntry | None) -> None:
    """An image that has no bytes of its own here would be missing, and perhaps its class with it."""
    if not member.isdir() and is_image(member.name):
        place = f"{path}:{within.name}" if within else str(path)
        message = f"{place} has {member.name!r} as a link or a sparse file, not as an image; write the tar again with "
        raise UserError(message + "GNU tar's --hard-dereference --dereference, without --sparse")


class BoundedFile:
    """A file as ``tarfile`` may read it: no more than ``max_read_bytes`` at once, and not beyond ``size_bytes``."""

    def __init__(
        self, file: BinaryIO, *, max_read_bytes: int = _MAX_HEADER_BYTES, size_bytes: int | None = None
    ) -> None:
        self._file, self._max_read_bytes, self._size_bytes = file, max_read_bytes, size_bytes

    def read(self, size: int = -1) -> bytes:
        """Bytes from the position; a negative size would read everything, and is refused."""
        if not 0 <= size <= self._max_read_bytes:
            raise tarfile.ReadError(f"a header claims {size} bytes")
        return self._file.read(size)

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        """Move; what is compressed is expanded up to there."""
        if self._size_bytes is not None and position > self._size_bytes:
            raise tarfile.ReadError(f"it expands to more than {self._size_bytes} bytes")
        return self._file.seek(position, whence)

    def tell(self) -> int:
        """The position."""
        return self._file.tell()


def forward(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Members in the order of the archive. A size below zero, which would lead in a circle, raises ``ReadError``."""
    for member in tar:
        if member.size < 0:
            raise tarfile.ReadError(f"{member.name!r} claims {member.size} bytes")
        yield member


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self._start, self._size, self._position = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + position
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._file.seek(self._start + self._position)
        wanted = max(0, min(len(buffer), self._size - self._position))
        content = self._file.read(wanted)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


@contextmanager
def _opened(path: Path, within: TarEntry | None) -> Iterator[tuple[BinaryIO, int]]:
    try:
        opened = open_regular(path)[0]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; name a tar file that may be read") from error
    with opened as file:
        magic = _COMPRESSED.get(file.read(2))
        if magic is not None:
            message = f"{path} is compressed ({magic}): single images cannot be read from it; unpack it to a .tar first"
            raise UserError(message)
        file.seek(0)
        if within is None:
            yield file, 0
        else:
            window = _Window(file, within.offset_bytes, within.length_bytes)
            yield cast("BinaryIO", io.BufferedReader(window)), within.offset_bytes
