"""The files of a source: plain ones, inside it. A folder that somebody else fills may hold anything by any name.

A link that leaves the source could pack any file that this user may read into shards that others read; a named pipe
would hold its reader for ever. Neither is followed or opened unless somebody says so.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from orchestrator.core.errors import UserError
from orchestrator.storage.files import is_inside, kind_of
from workloads.data.convert.items import is_image


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRule:
    """Where links of a source may lead."""

    roots: Sequence[str]
    """Real paths of folders."""
    follows_all: bool = False

    @classmethod
    def within(cls, *folders: Path, follow_links: bool) -> Self:
        """Links may lead anywhere inside these folders, each of which may be reached by a link itself."""
        return cls(roots=tuple(os.path.realpath(folder) for folder in folders), follows_all=follow_links)

    def check(self, path: Path) -> None:
        """Look at a link. Raises ``UserError``: it leads nowhere, in a circle, or out of the source."""
        try:
            target = os.path.realpath(path, strict=True)
        except OSError as error:
            where = "in a circle" if error.errno == errno.ELOOP else "to nothing that can be read"
            raise UserError(f"{path} is a link that leads {where}; repair or remove it") from error
        if not self.follows_all and not any(is_inside(target, root) for root in self.roots):
            message = f"{path} is a link to {target}, which lies outside of the source; copy the file, or say that "
            raise UserError(message + "links may be followed anywhere: --follow-links")


def folder_images(folder: Path, rule: LinkRule) -> Iterator[tuple[str, int]]:
    """(path within the folder, bytes) of every image below it, sorted; hidden folders are left out.

    Raises:
        UserError: what is named as an image is no plain file, or a link may not be followed.
    """
    return _images(folder, rule, ())


def image_bytes(path: Path, rule: LinkRule) -> int:
    """Size of an image of the source.

    Raises:
        UserError: it is no plain file, or a link that may not be followed.
        OSError: it cannot be looked at.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        rule.check(path)
        status = path.stat()
    _check_plain(path, status)
    return status.st_size


def _images(folder: Path, rule: LinkRule, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, int]]:
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        raise UserError(f"{folder} is a link to a folder that holds it, so that its images have no end; remove it")
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name.startswith("."):
            continue
        path = folder / entry.name
        if entry.is_symlink() and (is_image(entry.name) or entry.is_dir()):
            rule.check(path)
        if entry.is_dir():
            yield from ((f"{entry.name}/{name}", size) for name, size in _images(path, rule, (*above, here)))
        elif is_image(entry.name):
            yield entry.name, image_bytes(path, rule)


def _check_plain(path: str | Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is {kind_of(status.st_mode)}, and images are plain files; remove it from the source")
