"""Reading a WebDataset shard's table of contents: where each sample's image lies, and its leaf class.

A sample is all members that share a key, the name up to the first dot of its last part; their order in the tar does not
matter. The grouping rule is webdataset's (https://github.com/webdataset/webdataset, "The WebDataset Format").
"""

from __future__ import annotations

import json
import re
import struct
import tarfile
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Final

from PIL import Image

from orchestrator.errors import BadDataError

IMAGE_EXTENSIONS: Final = ("png", "jpg", "jpeg", "webp", "bmp", "ppm", "pgm")
CLASS_EXTENSION: Final = "cls"
METADATA_EXTENSION: Final = "json"

IMAGE_ERRORS: Final = (
    OSError,
    SyntaxError,  # Pillow's word for a broken PNG chunk
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
"""All that Pillow raises on bytes that are no image it can read."""

_KEY_AND_EXTENSION = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")
_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedSample:
    """A row of the index; ``offset_bytes`` counts from the shard's first byte to the image's."""

    key: str
    offset_bytes: int
    length_bytes: int
    leaf: int
    subset: str | None


def scan_shard(path: Path, name: str, *, num_classes: int) -> list[ScannedSample]:
    """Samples of the shard at ``path`` in the order in which their first members stand.

    Args:
        path: local copy of the shard.
        name: the shard's own name, for errors.
        num_classes: leaf classes of the data set; classes must lie in ``[0, num_classes)``.

    Raises:
        BadDataError: naming ``shard:key``; the shard is no plain tar, is cut off, has links or a member twice, or a
            sample lacks its class or its (one, readable) image.
    """
    samples = _members_by_key(path, name)
    with path.open("rb") as file:
        return [_scan_sample(file, f"{name}:{key}", key, members, num_classes) for key, members in samples.items()]


def _members_by_key(path: Path, name: str) -> dict[str, dict[str, tarfile.TarInfo]]:
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                _group(samples, member, name)
            end_bytes = tar.offset
    except tarfile.TarError as error:
        raise BadDataError(f"{name} is not a whole, uncompressed tar: {error}; write the shard again") from error
    _check_end(path, name, end_bytes)
    return samples


def _check_end(path: Path, name: str, end_bytes: int) -> None:
    """A broken header in the middle ends tarfile's listing in silence: what follows the end must be padding."""
    with path.open("rb") as file:
        file.seek(end_bytes)
        if file.read(_BLOCK_BYTES).strip(b"\0"):
            raise BadDataError(f"{name} has a broken member header at byte {end_bytes}; write the shard again")


def _group(samples: dict[str, dict[str, tarfile.TarInfo]], member: tarfile.TarInfo, name: str) -> None:
    match = _KEY_AND_EXTENSION.fullmatch(member.name)
    if member.isdir() or match is None or member.name.startswith("__"):
        return  # folders, files without an extension and webdataset's own metadata are not samples
    if not member.isreg() or member.issparse():
        raise BadDataError(f"{name}:{member.name} is a link, a device or sparse; samples must be plain files")
    key, extension = match[1], match[2].lower()
    members = samples.setdefault(key, {})
    if extension in members:
        raise BadDataError(f"{name}:{key} has the member .{extension} twice; keys must be unique")
    members[extension] = member


def _scan_sample(
    file: BinaryIO, place: str, key: str, members: dict[str, tarfile.TarInfo], num_classes: int
) -> ScannedSample:
    image = _image_member(members, place)
    _check_image(_content(file, image), place)
    return ScannedSample(
        key=key,
        offset_bytes=image.offset_data,
        length_bytes=image.size,
        leaf=_leaf(file, members, place, num_classes),
        subset=_subset(file, members, place),
    )


def _content(file: BinaryIO, member: tarfile.TarInfo) -> bytes:
    file.seek(member.offset_data)
    return file.read(member.size)


def _image_member(members: dict[str, tarfile.TarInfo], place: str) -> tarfile.TarInfo:
    images = [member for extension, member in members.items() if extension in IMAGE_EXTENSIONS]
    if len(images) != 1:
        known = ", ".join(IMAGE_EXTENSIONS)
        raise BadDataError(f"{place} has {len(images)} images; every sample needs exactly one member of {known}")
    return images[0]


def _check_image(encoded: bytes, place: str) -> None:
    """Header, and for PNG the checksums too; decoding every pixel would cost more than the whole scan."""
    try:
        with Image.open(BytesIO(encoded)) as image:
            image.verify()
    except IMAGE_ERRORS as error:
        raise BadDataError(f"{place} is not a readable image: {error}; replace or remove the sample") from error


def _leaf(file: BinaryIO, members: dict[str, tarfile.TarInfo], place: str, num_classes: int) -> int:
    member = members.get(CLASS_EXTENSION)
    if member is None:
        raise BadDataError(f"{place} has no class; every sample needs a member .{CLASS_EXTENSION} with its leaf class")
    text = _content(file, member)
    try:
        leaf = int(text)
    except ValueError as error:
        raise BadDataError(f"{place} has the class {text[:40]!r}, which is not an integer") from error
    if not 0 <= leaf < num_classes:
        raise BadDataError(f"{place} has the class {leaf}; the class table has 0 to {num_classes - 1}")
    return leaf


def _subset(file: BinaryIO, members: dict[str, tarfile.TarInfo], place: str) -> str | None:
    member = members.get(METADATA_EXTENSION)
    if member is None:
        return None
    try:
        metadata = json.loads(_content(file, member))
    except ValueError as error:
        raise BadDataError(f"{place} has metadata that is not JSON: {error}") from error
    subset = metadata.get("subset") if isinstance(metadata, dict) else None
    return None if subset is None else str(subset)
