"""Reading a WebDataset shard once: where each sample's image lies, its classes, and what cannot be used.

A sample is all members that share a key, the name up to the first dot of its last part; their order in the tar does not
matter. The grouping rule is webdataset's (https://github.com/webdataset/webdataset, "The WebDataset Format"). No member
is executed, unpickled or followed: links, devices and names that leave the archive make their sample unusable.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from orchestrator.storage.digests import Digests
from workloads.data.checks import check_of
from workloads.data.images import IMAGE_ERRORS, MAX_IMAGE_BYTES, MAX_PIXELS, ImageCheck, check_image
from workloads.data.labels_in_shards import LABEL_EXTENSIONS, ClassRule, Labels, read_labels
from workloads.data.reasons import BadSample, BadSampleError, Reason, printable
from workloads.data.tar_stream import (
    CompressedArchiveError,
    DamagedArchiveError,
    ShardStream,
    TrailingBytesError,
    content_of,
    walk,
)

__all__ = ["IMAGE_ERRORS", "IMAGE_EXTENSIONS", "MAX_PIXELS", "ShardTable", "scan_shard"]

IMAGE_EXTENSIONS: Final = ("png", "jpg", "jpeg", "webp", "bmp", "ppm", "pgm")
_MAX_LABEL_BYTES: Final = 1024**2
_KEY_AND_EXTENSION = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)
_NUMBERED_IMAGE = re.compile(rf"[0-9]+\.(?:{'|'.join(IMAGE_EXTENSIONS)})")
"""What is left of ``img.0.png`` behind its key ``img``: its writer took it for a sample of its own."""
_NUM_SHOWN: Final = 3


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
    other_images: list[str] = field(default_factory=list)
    """Members whose names end as an image's do, behind more than one dot; the first few."""
    error: BadSampleError | None = None
    """The first thing found wrong."""


def scan_shard(
    chunks: Iterator[bytes], name: str, rule: ClassRule, check: ImageCheck = ImageCheck.HEADER
) -> ShardTable:
    """Scan a shard given as consecutive chunks of its bytes; memory stays at one chunk, one member and the columns.

    A damaged archive gives the samples before the damage and one bad sample of the reason ``damaged_archive``.

    Args:
        chunks: the shard's bytes, in order.
        name: the shard's own name, for ``shard:key``.
        rule: the data set's classes.
        check: how closely images are looked at.
    """
    stream = ShardStream(chunks)
    samples: dict[str, _Sample] = {}
    damage: list[BadSample] = []
    try:
        for member in walk(stream):
            _take(samples, stream, member, check)
    except CompressedArchiveError as error:
        damage = [BadSample(place=name, reason=Reason.COMPRESSED_ARCHIVE, message=str(error))]
    except TrailingBytesError as error:
        message = f"is where the archive is damaged: {error}"
        damage = [BadSample(place=_last_of(name, samples), reason=Reason.DAMAGED_ARCHIVE, message=message)]
    except DamagedArchiveError as error:
        message = f"is where the archive is damaged: {error}; write the shard again"
        damage = [BadSample(place=_last_of(name, samples), reason=Reason.DAMAGED_ARCHIVE, message=message)]
        if samples:
            samples.popitem()  # its members may be missing
    digests = stream.drain()
    return _table(name, samples, rule, damage, size_bytes=stream.size_bytes, digests=digests)


def _last_of(name: str, samples: dict[str, _Sample]) -> str:
    """``shard:key`` of the last sample that was met."""
    return f"{name}:{next(reversed(samples), '')}"


def _take(samples: dict[str, _Sample], stream: ShardStream, member: tarfile.TarInfo, check: ImageCheck) -> None:
    match = _KEY_AND_EXTENSION.fullmatch(member.name)
    if member.isdir() or match is None or member.name.startswith("__"):
        return  # folders, files without an extension and webdataset's own metadata are not samples
    key, extension = match[1], match[2].lower()
    sample = samples.setdefault(key, _Sample())
    try:
        _check_member(sample, member, extension)
        if extension in IMAGE_EXTENSIONS:
            encoded = content_of(stream, member)  # first: of a damaged archive, what is cut off is no image
            sample.images.append((member.offset_data, member.size, check_of(encoded)))
            check_image(encoded, check)
        elif extension in LABEL_EXTENSIONS:
            sample.labels[extension] = content_of(stream, member)
        elif _NUMBERED_IMAGE.fullmatch(extension) and len(sample.other_images) < _NUM_SHOWN:
            sample.other_images.append(member.name)
    except BadSampleError as error:
        sample.error = sample.error or error


def _check_member(sample: _Sample, member: tarfile.TarInfo, extension: str) -> None:
    if not member.isreg() or member.issparse():
        message = f"has the member {member.name!r}, which is a link, a device or sparse; samples must be plain files"
        raise BadSampleError(Reason.NOT_A_PLAIN_FILE, message)
    if member.name.startswith("/") or ".." in member.name.split("/"):
        raise BadSampleError(Reason.UNSAFE_NAME, f"has the member {member.name!r}, whose name leaves the archive")
    if extension in sample.extensions:
        raise BadSampleError(Reason.DUPLICATE_KEY, f"has the member .{extension} twice; keys must be unique")
    sample.extensions.add(extension)
    limit = MAX_IMAGE_BYTES if extension in IMAGE_EXTENSIONS else _MAX_LABEL_BYTES
    if extension in {*IMAGE_EXTENSIONS, *LABEL_EXTENSIONS} and member.size > limit:
        message = f"has the member .{extension} of {member.size} bytes; at most {limit} are read"
        raise BadSampleError(Reason.TOO_LARGE, message)


def _labels_of(sample: _Sample, rule: ClassRule) -> Labels:
    """Raises ``BadSampleError``: what was found wrong while its members were read, or is missing now."""
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
