"""Reading a WebDataset shard once: the place of each sample's image, its classes, and unusable samples.

A sample is all members that share a key, the name up to the first dot of its last part; their order in the tar does not
matter. The grouping rule is webdataset's (https://github.com/webdataset/webdataset, "The WebDataset Format"). No member
is executed, unpickled or followed: links, devices and names that leave the archive make their sample unusable.

A shard is a forward stream: read once, hashed on the way, never held as a whole. ``tarfile`` walks it; the few bytes
behind the reading position are kept, because it looks back by one.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, BinaryIO, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.units import printable
from orchestrator.storage.digests import Digests, DoubleHasher
from workloads.data.images import IMAGE_ERRORS, MAX_IMAGE_BYTES, MAX_PIXELS, ImageCheck, check_image, check_of
from workloads.data.reasons import BadSample, BadSampleError, Reason

__all__ = ["IMAGE_ERRORS", "IMAGE_EXTENSIONS", "MAX_PIXELS", "ShardTable", "scan_shard"]

IMAGE_EXTENSIONS: Final = ("png", "jpg", "jpeg", "webp", "bmp", "ppm", "pgm")
SPARE_IMAGE_EXTENSIONS: Final = ("gif", "jpe", "jfif", "pnm", "pbm", "apng")
"""Count as images only in samples that have none of the others, so that a preview beside a photograph stays ignored."""
_MAX_LABEL_BYTES: Final = 1024**2
_KEY_AND_EXTENSION = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)
_FOLDER_AS_KEY = re.compile(r"((?:.*/)?[^./]+/)\.([^./]+)", re.DOTALL)
"""``a/.jpg`` and ``a/.cls``, which webdataset groups under the key ``a/``."""
_METADATA = re.compile(r"__[^/]*__(/|$)")
"""Members and folders that webdataset's reader skips as its own: ``__meta__/a.json``, not ``__shard__.json``."""
_NUMBERED_IMAGE = re.compile(rf"[0-9]+\.(?:{'|'.join(IMAGE_EXTENSIONS)})")
"""What is left of ``img.0.png`` behind its key ``img``: its writer took it for a sample of its own."""
_NUM_SHOWN: Final = 3
CLASS_EXTENSION: Final = "cls"
METADATA_EXTENSION: Final = "json"
TEXT_EXTENSION: Final = "txt"
LABEL_EXTENSIONS: Final = frozenset({CLASS_EXTENSION, METADATA_EXTENSION, TEXT_EXTENSION})
_READ_EXTENSIONS: Final = frozenset({*IMAGE_EXTENSIONS, *LABEL_EXTENSIONS})
"""What a sample must not have as a link, a device or a sparse file."""
_FIELDS: Final = ("labels", "class", "cls", "label")
"""Fields of a sample's JSON that may name its classes; the first one that is there counts."""
_MAX_DIGITS: Final = 18
_PYTHON_INTEGER = re.compile(r"[+-]?[0-9]+(?:_[0-9]+)*")
"""What ``int`` reads, by which webdataset decodes a class."""
_KEPT_BYTES: Final = 64 * 1024
_BLOCK_BYTES: Final = 512
_PADDING_BYTES: Final = 1024**2
_MAX_READ_BYTES: Final = 512 * 1024**2
"""No member that a scan reads as a whole is as large; a broken header may claim any size."""
_COMPRESSIONS: Final = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\0": ("xz", "unxz"),
}
"""What the first bytes of a compressed file are, with the program that undoes it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardTable:
    """What one shard holds, as columns [N] in the order in which samples' first members stand."""

    name: str
    size_bytes: int
    digests: Digests
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int32]
    checks: NDArray[np.uint32]
    """`check_of` each image."""
    leaves: NDArray[np.int32]
    """All labels of all samples; ``num_leaves`` of them each."""
    num_leaves: NDArray[np.int32]
    subsets: NDArray[np.int32]
    """Index into ``subset_names``; -1 = in none."""
    subset_names: tuple[str, ...]
    keys: NDArray[np.uint8]
    """Bytes of all keys; ``key_lengths`` of them each."""
    key_lengths: NDArray[np.int32]
    key_hashes: NDArray[np.uint64]
    """64 bits of each key's BLAKE2b, to find keys that stand in two shards."""
    bad: tuple[BadSample, ...]
    warnings: tuple[str, ...] = ()
    """What its writer may not have meant, in whole sentences."""
    num_unread_bytes: int = 0
    """From the place on where the archive is damaged; all of a compressed one."""
    is_shortened: bool = False
    """It was longer than its bytes: it is cut off or compressed."""

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.offsets)


@dataclass(slots=True, kw_only=True)
class _Sample:
    """Members of a key as far as they were met."""

    images: list[tuple[int, int, int]] = field(default_factory=list)
    """(offset, length, check) of each image."""
    labels: dict[str, bytes] = field(default_factory=dict)
    extensions: set[str] = field(default_factory=set)
    spare_images: list[tuple[int, int, int] | BadSampleError] = field(default_factory=list)
    """The same of ``SPARE_IMAGE_EXTENSIONS``, or what is wrong with it."""
    other_images: list[str] = field(default_factory=list)
    """Members whose names end as an image's do, behind more than one dot; the first few."""
    error: BadSampleError | None = None
    """The first thing found wrong."""


def scan_shard(
    chunks: Iterator[bytes], name: str, rule: ClassRule, check: ImageCheck = ImageCheck.HEADER
) -> ShardTable:
    """Scan a shard given as consecutive chunks of its bytes; memory stays at one chunk, one member and the columns.

    A damaged archive gives the samples before the damage and one bad sample of the reason ``damaged_archive``, which
    stands for all that could not be read: see ``num_unread_bytes``.

    Args:
        chunks: the shard's bytes, in order.
        name: the shard's own name, for ``shard:key``.
        rule: the data set's classes.
        check: how closely images are looked at.
    """
    stream = ShardStream(chunks)
    samples: dict[str, _Sample] = {}
    damage: list[BadSample] = []
    read_bytes, is_shortened = 0, False
    try:
        for member in walk(stream):
            read_bytes = member.offset
            _take(samples, stream, member, check)
    except CompressedArchiveError as error:
        is_shortened = True
        damage = [BadSample(place=name, reason=Reason.COMPRESSED_ARCHIVE, message=str(error))]
    except TrailingBytesError as error:
        read_bytes = error.end_bytes
        message = f"is where the archive is damaged: {error}: was it joined of several by `cat`? Join them by "
        message += "`tar --concatenate`, or split it into one shard for each"
        damage = [BadSample(place=_last_of(name, samples), reason=Reason.DAMAGED_ARCHIVE, message=message)]
    except DamagedArchiveError as error:
        is_shortened = stream.is_exhausted
        message = f"is where the archive is damaged: {error}; write the shard again"
        damage = [BadSample(place=_last_of(name, samples), reason=Reason.DAMAGED_ARCHIVE, message=message)]
        if samples:
            samples.popitem()  # its members may be missing
    digests = stream.drain()
    table = _table(name, samples, rule, damage, size_bytes=stream.size_bytes, digests=digests)
    num_unread_bytes = stream.size_bytes - read_bytes if damage else 0
    return replace(table, num_unread_bytes=num_unread_bytes, is_shortened=is_shortened)


def _last_of(name: str, samples: dict[str, _Sample]) -> str:
    """``shard:key`` of the last sample that was met."""
    return f"{name}:{next(reversed(samples), '')}"


def _take(samples: dict[str, _Sample], stream: ShardStream, member: tarfile.TarInfo, check: ImageCheck) -> None:
    found = _key_and_extension(member)
    if found is None:
        return
    key, extension = found
    sample = samples.setdefault(key, _Sample())
    try:
        _check_member(sample, member, extension)
        if extension in IMAGE_EXTENSIONS:
            _take_image(sample.images, stream, member, check)
        elif extension in SPARE_IMAGE_EXTENSIONS:
            _take_spare(sample, stream, member, check)
        elif extension in LABEL_EXTENSIONS and not _is_long_caption(member, extension):
            sample.labels[extension] = content_of(stream, member)
        elif _NUMBERED_IMAGE.fullmatch(extension) and len(sample.other_images) < _NUM_SHOWN:
            sample.other_images.append(member.name)
    except BadSampleError as error:
        sample.error = sample.error or error


def _key_and_extension(member: tarfile.TarInfo) -> tuple[str, str] | None:
    """None of what belongs to no sample.

    That is: folders, webdataset's metadata, hidden files, files without an extension, and what is no file and
    would be no image and no class if it were one (the label of a GNU tar, a link to a caption).
    """
    if member.isdir() or _METADATA.match(member.name):
        return None
    match = _KEY_AND_EXTENSION.fullmatch(member.name)
    if match is None:
        match = _FOLDER_AS_KEY.fullmatch(member.name)
        if match is None or match[2].lower() not in _READ_EXTENSIONS:
            return None
    key, extension = match[1], match[2].lower()
    return (key, extension) if member.isreg() or extension in _READ_EXTENSIONS else None


def _take_image(
    images: list[tuple[int, int, int]], stream: ShardStream, member: tarfile.TarInfo, check: ImageCheck
) -> None:
    encoded = content_of(stream, member)  # first: of a damaged archive, what is cut off is no image
    images.append((member.offset_data, member.size, check_of(encoded)))
    check_image(encoded, check)


def _take_spare(sample: _Sample, stream: ShardStream, member: tarfile.TarInfo, check: ImageCheck) -> None:
    if member.issparse() or member.size > MAX_IMAGE_BYTES:
        return
    images: list[tuple[int, int, int]] = []
    try:
        _take_image(images, stream, member, check)
    except BadSampleError as error:
        sample.spare_images.append(error)
    else:
        sample.spare_images.extend(images)


def _check_member(sample: _Sample, member: tarfile.TarInfo, extension: str) -> None:
    is_read = extension in _READ_EXTENSIONS
    if is_read and (not member.isreg() or member.issparse()):
        message = f"has the member {member.name!r}, which is a link, a device or sparse; samples must be plain files"
        raise BadSampleError(Reason.NOT_A_PLAIN_FILE, message)
    if member.name.startswith("/") or ".." in member.name.split("/"):
        raise BadSampleError(Reason.UNSAFE_NAME, f"has the member {member.name!r}, whose name leaves the archive")
    if extension in sample.extensions:
        raise BadSampleError(Reason.DUPLICATE_KEY, f"has the member .{extension} twice; keys must be unique")
    sample.extensions.add(extension)
    limit = MAX_IMAGE_BYTES if extension in IMAGE_EXTENSIONS else _MAX_LABEL_BYTES
    if is_read and member.size > limit and not _is_long_caption(member, extension):
        message = f"has the member .{extension} of {member.size} bytes; at most {limit} are read"
        raise BadSampleError(Reason.TOO_LARGE, message)


def _is_long_caption(member: tarfile.TarInfo, extension: str) -> bool:
    """A text of more than a megabyte names no class."""
    return extension == TEXT_EXTENSION and member.size > _MAX_LABEL_BYTES


def _labels_of(sample: _Sample, rule: ClassRule) -> Labels:
    """Raises ``BadSampleError``: what was found wrong while its members were read, or is missing now."""
    for spare in sample.spare_images if not sample.images else ():
        if isinstance(spare, BadSampleError):
            sample.error = sample.error or spare
        else:
            sample.images.append(spare)
    if sample.error is not None:
        raise sample.error
    if len(sample.images) != 1:
        reason = Reason.SEVERAL_IMAGES if sample.images else Reason.NO_IMAGE
        known = ", ".join(IMAGE_EXTENSIONS)
        message = f"has {len(sample.images)} images; every sample needs exactly one member of {known}"
        raise BadSampleError(reason, f"{message}; {_renaming(sample)}" if sample.other_images else message)
    return read_labels(sample.labels, rule)


def _renaming(sample: _Sample) -> str:
    key, _, rest = sample.other_images[0].rpartition("/")[2].partition(".")
    named, wanted = ", ".join(sample.other_images), f"{key}_{rest}"
    return f"a key ends at the first dot, so {named} are members of this one sample: rename them ({wanted}, ...)"


def _warnings(name: str, samples: dict[str, _Sample], num_kept: int, bad: list[BadSample]) -> Iterator[str]:
    if not num_kept and not bad:
        yield f"{name} holds no samples"
    numbered = [(key, sample) for key, sample in samples.items() if sample.other_images and sample.images]
    if numbered:
        key, first = numbered[0]
        yield printable(
            f"{name}:{key} takes one image and leaves others out ({len(numbered)} such samples in {name}); "
            + _renaming(first)
        )


def _table(
    name: str, samples: dict[str, _Sample], rule: ClassRule, bad: list[BadSample], *, size_bytes: int, digests: Digests
) -> ShardTable:
    kept: list[tuple[bytes, tuple[int, int, int], Labels]] = []
    for key, sample in samples.items():
        try:
            labels = _labels_of(sample, rule)
        except BadSampleError as error:
            # Hidden files, and metadata such as __meta__.json: webdataset makes samples of them, seldom meant ones.
            if not key.endswith("/") and not key.startswith("__"):
                bad.append(BadSample(place=f"{name}:{key}", reason=error.reason, message=error.message))
        else:
            kept.append((key.encode(errors="surrogateescape"), sample.images[0], labels))
    subset_names = tuple(sorted({labels.subset for _, _, labels in kept if labels.subset is not None}))
    subset_ids: dict[str | None, int] = {None: -1, **{subset: number for number, subset in enumerate(subset_names)}}
    return ShardTable(
        name=name,
        size_bytes=size_bytes,
        digests=digests,
        offsets=np.array([offset for _, (offset, _, _), _ in kept], dtype=np.int64),
        lengths=np.array([length for _, (_, length, _), _ in kept], dtype=np.int32),
        checks=np.array([check for _, (_, _, check), _ in kept], dtype=np.uint32),
        leaves=np.array([leaf for _, _, labels in kept for leaf in labels.leaves], dtype=np.int32),
        num_leaves=np.array([len(labels.leaves) for _, _, labels in kept], dtype=np.int32),
        subsets=np.array([subset_ids[labels.subset] for _, _, labels in kept], dtype=np.int32),
        subset_names=subset_names,
        keys=np.frombuffer(b"".join(key for key, _, _ in kept), dtype=np.uint8),
        key_lengths=np.array([len(key) for key, _, _ in kept], dtype=np.int32),
        key_hashes=np.array([_hash(key) for key, _, _ in kept], dtype=np.uint64),
        bad=tuple(bad),
        warnings=tuple(_warnings(name, samples, len(kept), bad)),
    )


def _hash(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassRule:
    """How classes are written in the shards of one data set."""

    num_classes: int
    multi_label: bool = False
    """Samples have any number of classes, also none if their list is there and empty."""
    names: Mapping[str, int] | None = None
    """Classes by name, for shards that write names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What the members of a sample say."""

    leaves: tuple[int, ...]
    subset: str | None


def class_names(classes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Classes by their names, and by every other text in their rows that names one class only: ``synset``, leaf levels.

    What reads as the number of a class is never a name: members hold numbers, and a column may number its groups.
    """
    names: dict[str, set[int]] = {}
    others: dict[str, set[int]] = {}
    for row in classes:
        for column, value in row.items():
            if column != "class" and value is not None:
                (names if column == "name" else others).setdefault(str(value), set()).add(int(row["class"]))
    found = {text: leaves for text, leaves in (others | names).items() if len(leaves) == 1}
    return {text: min(leaves) for text, leaves in found.items() if not _is_number_of_a_class(text, len(classes))}


def read_labels(members: Mapping[str, bytes], rule: ClassRule) -> Labels:
    """Classes and subset from the label members of a sample, by extension.

    Raises:
        BadSampleError: there is no class, it is not in the table, or a member cannot be read.
    """
    metadata = _metadata(members.get(METADATA_EXTENSION))
    leaves = tuple(dict.fromkeys(_leaf(token, rule) for token in _tokens(members, metadata, rule)))
    if len(leaves) > 1 and not rule.multi_label:
        message = f"has the classes {list(leaves[:8])}; declare the data set multi_label: true to keep all of them"
        raise BadSampleError(Reason.SEVERAL_CLASSES, message)
    subset = metadata.get("subset")
    return Labels(leaves=leaves, subset=None if subset is None else str(subset))


def _metadata(content: bytes | None) -> Mapping[str, Any]:
    if content is None:
        return {}
    try:
        metadata = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadSampleError(Reason.BAD_METADATA, f"has metadata that is not JSON: {error}") from error
    return metadata if isinstance(metadata, dict) else {"class": metadata}


def _tokens(members: Mapping[str, bytes], metadata: Mapping[str, Any], rule: ClassRule) -> Sequence[Any]:
    """The classes as written: integers or text."""
    if CLASS_EXTENSION in members:
        return _split(members[CLASS_EXTENSION], rule)
    found = next((metadata[field] for field in _FIELDS if metadata.get(field) is not None), None)
    if found is not None:
        if found == [] and not rule.multi_label:
            raise BadSampleError(Reason.NO_CLASS, "has no class: its list of labels is empty")
        return found if isinstance(found, list) else [found]
    if TEXT_EXTENSION in members:
        tokens = _split(members[TEXT_EXTENSION], rule)
        if all(_is_integer(token) or token in (rule.names or {}) for token in tokens):
            return tokens  # anything else is a caption
    message = "has no class; every sample needs a member .cls, or a .json with one of " + ", ".join(_FIELDS)
    raise BadSampleError(Reason.NO_CLASS, message)


def _split(content: bytes, rule: ClassRule) -> list[str]:
    """Integers separated by blanks or commas, or one name, which may have both in it; one name per line is a list."""
    text = content[:65536].decode("utf-8", errors="replace").strip()
    if text in (rule.names or {}):
        return [text]
    tokens = text.replace(",", " ").split()
    if all(_is_integer(token) for token in tokens):
        if not tokens:
            raise BadSampleError(Reason.NO_CLASS, "has no class: its class member is empty")
        return tokens
    return [line.strip() for line in text.splitlines()]


def _is_integer(token: str) -> bool:
    return token.removeprefix("-").isascii() and token.removeprefix("-").isdigit()


def _is_number_of_a_class(text: str, num_classes: int) -> bool:
    return len(text) <= _MAX_DIGITS and _is_integer(text) and 0 <= int(text) < num_classes


def _leaf(token: Any, rule: ClassRule) -> int:  # noqa: ANN401 - whatever a JSON holds
    if isinstance(token, str):
        named = (rule.names or {}).get(token)
        if named is not None:
            return named
    is_number = isinstance(token, int) and not isinstance(token, bool)
    if not is_number and not (
        isinstance(token, str) and len(token) <= _MAX_DIGITS and _PYTHON_INTEGER.fullmatch(token)
    ):
        shown = repr(token)[:48]
        raise BadSampleError(
            Reason.BAD_CLASS, f"has the class {shown}, neither an integer nor a name of the class table"
        )
    leaf = int(token)
    if not 0 <= leaf < rule.num_classes:
        message = f"has the class {leaf}; the class table has 0 to {rule.num_classes - 1}"
        raise BadSampleError(Reason.CLASS_OUT_OF_RANGE, message)
    return leaf


class DamagedArchiveError(Exception):
    """The archive is no tar, is cut off, or has a broken header; what came before it is whole."""


class TrailingBytesError(DamagedArchiveError):
    """The archive is whole up to ``end_bytes``, but more follows its end: every member up to there can be used."""

    def __init__(self, message: str, end_bytes: int) -> None:
        super().__init__(message)
        self.end_bytes = end_bytes


class CompressedArchiveError(Exception):
    """The archive is compressed: its members have no place of their own in it."""


class ShardStream:
    """A file object over chunks of bytes that can seek forward, and back by a little.

    ``size_bytes`` is of all chunks taken so far; after `drain`, of the whole shard.
    """

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._window = b""
        self._window_start = 0
        self._position = 0
        self._hasher = DoubleHasher()
        self.size_bytes = 0
        self.is_exhausted = False
        """Whether more bytes were asked for than there are."""

    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes from the position; fewer only at the end. A negative size is refused."""
        if not 0 <= size <= _MAX_READ_BYTES:
            raise DamagedArchiveError(f"a member claims {size} bytes")
        pieces: list[bytes] = []
        while size > 0 and self._reach(self._position):
            offset = self._position - self._window_start
            piece = self._window[offset : offset + size]
            pieces.append(piece)
            self._position += len(piece)
            size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def seek(self, position: int, whence: int = 0) -> int:
        """Move; bytes in between are read and hashed when reading goes on."""
        if whence or position < self._window_start:
            raise DamagedArchiveError(f"its headers point back to byte {position}")
        self._position = position
        return position

    def tell(self) -> int:
        """The position."""
        return self._position

    def drain(self) -> Digests:
        """Take all that is left; returns the shard's digests."""
        while self._advance():
            pass
        return self._hasher.digests()

    def _reach(self, position: int) -> bool:
        """Whether there is a byte at a position; takes chunks up to it."""
        while position >= self._window_start + len(self._window):
            if not self._advance():
                return False
        return True

    def _advance(self) -> bool:
        chunk = next(self._chunks, b"")
        if not chunk:
            self.is_exhausted = True
            return False
        self._hasher.update(chunk)
        self.size_bytes += len(chunk)
        # What lies before the position is kept only as far as tarfile looks back.
        end = self._window_start + len(self._window)
        kept_from = max(self._window_start, min(self._position, end) - _KEPT_BYTES)
        self._window = self._window[kept_from - self._window_start :] + chunk
        self._window_start = kept_from
        return True


def walk(stream: ShardStream) -> Iterator[tarfile.TarInfo]:
    """Members in the order of the archive; a member's content may be read until the next one is asked for.

    Raises:
        DamagedArchiveError: after the last whole member.
        CompressedArchiveError: before the first one.
    """
    _check_plain(stream)
    try:
        tar = tarfile.open(fileobj=cast("BinaryIO", stream), mode="r:")  # noqa: SIM115 - nothing to close: not our file
        for member in tar:
            tar.members = []  # type: ignore[attr-defined] # tarfile would keep every header
            if member.size < 0:  # it would lead in a circle
                raise DamagedArchiveError(f"a header of it claims {member.size} bytes")
            yield member
        check_end(stream, tar.offset)
    except tarfile.TarError as error:
        raise DamagedArchiveError(f"it is not a whole, uncompressed tar ({error})") from error
    # Numbers and encodings in pax headers; tarfile calls itself for each long name that follows another.
    except (ValueError, OverflowError, UnicodeError, RecursionError) as error:
        raise DamagedArchiveError(f"a header of it cannot be read ({error})") from error


def content_of(stream: ShardStream, member: tarfile.TarInfo) -> bytes:
    """Raises ``DamagedArchiveError`` if the archive ends within the member."""
    stream.seek(member.offset_data)
    content = stream.read(member.size)
    if len(content) != member.size:
        raise DamagedArchiveError(f"it ends within {member.name}")
    return content


def _check_plain(stream: ShardStream) -> None:
    head = stream.read(max(map(len, _COMPRESSIONS)))
    stream.seek(0)
    for magic, (form, program) in _COMPRESSIONS.items():
        if head.startswith(magic):
            message = f"is compressed with {form}, so single samples cannot be read from it; decompress it with "
            raise CompressedArchiveError(message + f"`{program}` and store the plain tar in its place")


class ForwardFile(Protocol):
    """What is needed of a file to look at the end of an archive."""

    def read(self, size: int, /) -> bytes:
        """Up to ``size`` bytes from the position."""

    def seek(self, position: int, /) -> int:
        """Move to a position from the beginning."""


def check_end(file: ForwardFile, end_bytes: int) -> None:
    """See that an archive ends where ``tarfile`` stopped to list it; a whole tar ends in zeros.

    A broken header, a cut between members and a hole of zeros end that listing in silence.

    Args:
        file: the archive.
        end_bytes: where the next header would be: ``tarfile.TarFile.offset``.

    Raises:
        DamagedArchiveError: members are missing.
        TrailingBytesError: what follows the end is not zeros.
    """
    file.seek(end_bytes)
    block = file.read(_BLOCK_BYTES)
    if block.strip(b"\0"):
        raise DamagedArchiveError(f"it has a broken member header at byte {end_bytes}")
    if len(block) < _BLOCK_BYTES:
        raise DamagedArchiveError(f"it is cut off at byte {end_bytes}: the mark of its end is missing")
    _check_padding(file, end_bytes)


def _check_padding(file: ForwardFile, end_bytes: int) -> None:
    """Writers pad a tar with zeros (GNU tar to 10,240 bytes); anything else there is what no reader would ever see."""
    position = end_bytes + _BLOCK_BYTES
    while content := file.read(_PADDING_BYTES):
        if content.count(0) != len(content):
            position += len(content) - len(content.lstrip(b"\0"))
            message = f"its end is marked at byte {end_bytes}, but more follows at byte {position}, which no reader of "
            raise TrailingBytesError(message + "tars sees", end_bytes)
        position += len(content)
