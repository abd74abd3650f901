"""Files of a source that are not converted, because their names are not those of images.

They are counted, so that people are told. A class of which every file is left out would vanish, and later classes would
get other numbers: it is refused, unless it holds documents only, as a folder of annotations beside the classes does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from orchestrator.core.errors import UserError
from workloads.data.reasons import printable
from workloads.data.scan import IMAGE_EXTENSIONS

_FIELD: Final = "left_out"
_DOCUMENTS: Final = frozenset(
    (
        *(".txt", ".md", ".rst", ".pdf", ".html", ".htm", ".log"),
        *(".json", ".jsonl", ".xml", ".yaml", ".yml", ".csv", ".tsv", ".mat"),
        *(".db", ".ini", ".py", ".sh"),  # Thumbs.db, desktop.ini
    )
)
"""Extensions of files that nobody takes for images."""
_NAMES_OF_DOCUMENTS: Final = ("readme", "license", "copying")
_NUM_NAMED: Final = 8


class LeftOut:
    """Files that are left out, by folder; a tar counts as a folder. Hidden files do not count."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._others: dict[Path, Counter[str]] = {}
        """Without documents."""

    def add(self, folder: Path, name: str) -> None:
        """Count a file."""
        base, extension = PurePosixPath(name).name, PurePosixPath(name).suffix.lower()
        if base.startswith("."):
            return
        self._counts[extension] += 1
        if extension not in _DOCUMENTS and not base.lower().startswith(_NAMES_OF_DOCUMENTS):
            self._others.setdefault(folder, Counter())[extension] += 1

    def notes(self) -> dict[str, Any]:
        """For `Conversion`: number of files by extension, the most frequent first; empty if there are none."""
        return {_FIELD: dict(self._counts.most_common())} if self._counts else {}

    def check_classes(self, root: Path, kept: Iterable[str], *, depth: int | None = None) -> None:
        """See that no class is lost.

        Args:
            root: of the folders of the classes, as of the files that were counted.
            kept: paths of folders below it that hold images.
            depth: how many parts of a path name a class; None = all of them.

        Raises:
            UserError: a class has files, and none of them is an image.
        """
        lost: dict[PurePosixPath, Counter[str]] = {}
        for folder, extensions in self._others.items():
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
        message += f"({', '.join(IMAGE_EXTENSIONS)}; .jfif and .jpe are JPEGs: rename them to .jpg), or move it out of "
        message += "the source"
        raise UserError(printable(message))


def describe_notes(notes: Mapping[str, Any]) -> list[str]:
    """What `Conversion.notes` say, in sentences for people."""
    found = notes.get(_FIELD)
    if not found:
        return []
    images = ", ".join(f".{extension}" for extension in IMAGE_EXTENSIONS)
    return [printable(f"left out of the source: {_named(found)}; images are named {images}")]


def _named(extensions: Mapping[str, int]) -> str:
    total = sum(extensions.values())
    named = [f"{extension or 'no extension'} {number:,}" for extension, number in extensions.items()]
    more = ", ..." if len(named) > _NUM_NAMED else ""
    return f"{total:,} file{'s' if total > 1 else ''} ({', '.join(named[:_NUM_NAMED])}{more})"
