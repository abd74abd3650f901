"""Files of a source that are not converted, because their names are not those of images.

They are counted, so that people are told. A class whose images are all left out would vanish, and later classes would
get other numbers: it is refused. Only files that may be images make a class; others, such as masks in ``.npy`` files or
a folder of annotations, lie beside the classes of many sources. Empty folders are named, since a class may be among
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from orchestrator.core.errors import UserError
from orchestrator.core.units import printable
from workloads.data.scan import IMAGE_EXTENSIONS, SPARE_IMAGE_EXTENSIONS

_FIELD: Final = "left_out"
_EMPTY_FIELD: Final = "empty"
COLUMNS_FIELD: Final = "columns"
"""Of `Conversion.notes`: sentences about columns of tables."""
_OTHER_IMAGES: Final = frozenset(
    (
        *("tif", "tiff", "heic", "heif", "avif", "jp2", "jxl", "tga", "psd", "svg"),
        *("raw", "dng", "cr2", "nef", "arw"),  # of cameras
    )
)
_ARCHIVES: Final = frozenset(("tar", "tgz", "zip", "7z", "rar"))
_MAY_BE_IMAGES: Final = frozenset((*IMAGE_EXTENSIONS, *SPARE_IMAGE_EXTENSIONS, *_OTHER_IMAGES, *_ARCHIVES))
"""Photographs are published in these forms and archives. Forms that hold other data, too, are no reason to refuse."""
_WRAPPERS: Final = frozenset(("gz", "bz2", "xz", "zst", "part", "partial", "crdownload", "aria2"))
"""Extensions that compression and unfinished downloads append to a name."""
_NAMES_OF_DOCUMENTS: Final = ("readme", "license", "copying")
"""Without an extension; any other name without one may be an image's."""
_NUM_NAMED: Final = 8


class LeftOut:
    """Files that are left out, by folder; a tar counts as a folder. Hidden files do not count."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._images: dict[Path, Counter[str]] = {}
        """Those that may be images."""
        self._empty: list[Path] = []
        self._classless: list[str] = []

    def add(self, folder: Path, name: str) -> None:
        """Count a file."""
        base, extension = PurePosixPath(name).name, PurePosixPath(name).suffix.lower()
        if base.startswith("."):
            return
        self._counts[extension] += 1
        if may_be_image(base):
            self._images.setdefault(folder, Counter())[extension] += 1

    def add_empty(self, folder: Path) -> None:
        """Note a folder that holds nothing, or a tar without images (by its name without ``.tar``)."""
        self._empty.append(folder)

    def notes(self) -> dict[str, Any]:
        """For `Conversion`: number of files by extension, the most frequent first, and folders that are empty."""
        counts = {_FIELD: dict(self._counts.most_common())} if self._counts else {}
        return counts | ({_EMPTY_FIELD: self._classless} if self._classless else {})

    def check_classes(self, root: Path, kept: Iterable[str], *, depth: int | None = None) -> None:
        """See that no class is lost.

        Args:
            root: of the folders of the classes, as of the files that were counted.
            kept: paths of folders below it that hold images.
            depth: how many parts of a path name a class; None = all of them.

        Raises:
            UserError: a class has files that may be images, and none that is converted.
        """
        lost: dict[PurePosixPath, Counter[str]] = {}
        for folder, extensions in self._images.items():
            if root in folder.parents:
                name = PurePosixPath(*folder.relative_to(root).parts[:depth])
                lost.setdefault(name, Counter()).update(extensions)
        for path in map(PurePosixPath, kept) if lost else ():
            for held in (path, *path.parents):
                lost.pop(held, None)
        if not lost:
            return
        first = min(lost)
        more = f" (so do {len(lost) - 1} more)" if len(lost) > 1 else ""
        message = f"{root / first} holds {_named(lost[first])} and no image{more}, so its class would be missing, and "
        message += "later ones would have other numbers: convert the files to one of the forms that are read "
        message += f"({', '.join(IMAGE_EXTENSIONS)}; .jfif and .jpe are JPEGs: rename them to .jpg), unpack "
        message += "archives, complete downloads, or move it out of the source"
        raise UserError(printable(message))

    def note_empty(self, roots: Collection[Path], kept: Iterable[str], *, depth: int | None = None) -> None:
        """Note the empty folders that would each be a class if they held images, and have none in another split either.

        Args:
            roots: of the folders of the classes, one per split.
            kept: paths of folders below any of them that hold images.
            depth: how many parts of a path name a class; None = all of them.
        """
        held = {str(above) for path in map(PurePosixPath, kept) for above in (path, *path.parents)}
        lost: dict[str, None] = {}
        for folder in sorted(self._empty):
            names = {
                str(PurePosixPath(*folder.relative_to(root).parts[:depth])) for root in roots if root in folder.parents
            }
            lost |= dict.fromkeys(sorted(names)) if names and not names & held else {}
        self._classless = list(lost)


def may_be_image(name: str) -> bool:
    """Whether a file may be an image or an archive of images, also a compressed or an unfinished one."""
    path = PurePosixPath(PurePosixPath(name).name)
    while _extension(path) in _WRAPPERS:
        path = PurePosixPath(path.stem)
    extension = _extension(path)
    return extension in _MAY_BE_IMAGES if extension else not path.name.lower().startswith(_NAMES_OF_DOCUMENTS)


def _extension(path: PurePosixPath) -> str:
    return path.suffix.removeprefix(".").lower()


def describe_notes(notes: Mapping[str, Any]) -> list[str]:
    """What `Conversion.notes` say, in sentences for people."""
    sentences = [*notes.get(COLUMNS_FIELD, ())]
    if found := notes.get(_FIELD):
        images = ", ".join(f".{extension}" for extension in IMAGE_EXTENSIONS)
        sentences.append(f"left out of the source: {_named(found)}; images are named {images}")
    if empty := notes.get(_EMPTY_FIELD):
        named = ", ".join(empty[:_NUM_NAMED]) + (", ..." if len(empty) > _NUM_NAMED else "")
        sentences.append(
            f"{len(empty)} empty folder{'s' * (len(empty) > 1)} without a class: {named}; if images are still to come, "
            "wait for them: they change the numbers of later classes"
        )
    return [printable(sentence) for sentence in sentences]


def _named(extensions: Mapping[str, int]) -> str:
    total = sum(extensions.values())
    named = [f"{extension or 'no extension'} {number:,}" for extension, number in extensions.items()]
    more = ", ..." if len(named) > _NUM_NAMED else ""
    return f"{total:,} file{'s' if total > 1 else ''} ({', '.join(named[:_NUM_NAMED])}{more})"
