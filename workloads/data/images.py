"""Checks that bytes are a complete image that may be decoded, without decoding the pixels.

Decoding costs milliseconds, a scan has microseconds. So the header is parsed, its pixels are counted, and the end is
looked for; only an image whose end looks wrong is decoded, to be sure.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from enum import StrEnum
from io import BytesIO
from typing import Final

import xxhash
from PIL import Image, UnidentifiedImageError

from workloads.data.reasons import BadSampleError, Reason

MAX_PIXELS: Final = 100_000_000
"""Width x height above which an image is refused before decoding: 300 MB as RGB; cameras make 20 to 60 million."""

MAX_IMAGE_BYTES: Final = 256 * 1024**2
"""Encoded; no image of ``MAX_PIXELS`` needs more, and lengths stay far from 2**31."""

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

FORMATS: Final = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "GIF")
"""What Pillow may try: formats whose parsers could run other programs (EPS) are never among them."""
_END_OF_IMAGE, _START_OF_SCAN = b"\xff\xd9", b"\xff\xda"


class ImageCheck(StrEnum):
    """How closely images are looked at."""

    HEADER = "header"
    """Header and end; only a suspicious image is decoded."""
    PIXELS = "pixels"
    """Every image is decoded."""


def check_image(encoded: bytes, check: ImageCheck = ImageCheck.HEADER) -> None:
    """Raises ``BadSampleError``: empty, no image, too many pixels, cut off or, if asked, not decodable."""
    if not encoded:
        raise BadSampleError(Reason.EMPTY, "its image has zero bytes")
    if encoded[:4] == b"RIFF" and not _has_end("WEBP", encoded):  # Pillow calls it no image at all
        raise BadSampleError(Reason.TRUNCATED, f"is not a readable image: {len(encoded)} bytes of a longer WebP file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # MAX_PIXELS decides
            image = Image.open(BytesIO(encoded), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise BadSampleError(Reason.TOO_MANY_PIXELS, f"its image is too large to decode: {error}") from error
    except IMAGE_ERRORS as error:
        raise BadSampleError(Reason.NOT_AN_IMAGE, f"is not a readable image: {complaint_of(error)}") from error
    with image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            message = f"its image has {width} x {height} pixels; at most {MAX_PIXELS} are decoded"
            raise BadSampleError(Reason.TOO_MANY_PIXELS, message)
        _check_whole(image, encoded, check)


def _check_whole(image: Image.Image, encoded: bytes, check: ImageCheck) -> None:
    try:
        if check is ImageCheck.PIXELS:
            _decode(encoded)
        elif image.format == "PNG":
            image.verify()  # every chunk's checksum
        elif not _has_end(str(image.format), encoded):
            _decode(encoded)
    except IMAGE_ERRORS as error:
        raise BadSampleError(Reason.TRUNCATED, f"is not a readable image: {complaint_of(error)}") from error


def is_image_form(encoded: bytes) -> bool:
    """Whether bytes are an image by their header, whole or not; some 30 us."""
    if encoded[:4] == b"RIFF" and encoded[8:12] == b"WEBP":  # a cut one is none to Pillow
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            Image.open(BytesIO(encoded), formats=FORMATS).close()
    except (Image.DecompressionBombError, MemoryError):
        return True
    except IMAGE_ERRORS:
        return False
    return True


def complaint_of(error: Exception) -> str:
    """What Pillow says of bytes, without the address in memory by which it names them."""
    if isinstance(error, UnidentifiedImageError):
        return f"its bytes have none of the formats {', '.join(FORMATS)}, whatever its name says"
    return str(error)


def _has_end(image_format: str, encoded: bytes) -> bool:
    """Whether the end is where a whole file has it. JPEG: within scans 0xff is stuffed, so markers are real ones.

    ITU-T T.81 (JPEG), B.1.1.5; RFC 9649 (WebP), section 2.3.
    """
    if image_format == "JPEG":
        end = encoded.rfind(_END_OF_IMAGE)
        return end >= 0 and encoded.find(_START_OF_SCAN, end) < 0  # the end of a thumbnail comes before the scan
    if image_format == "WEBP":
        return len(encoded) >= 8 + int.from_bytes(encoded[4:8], "little")
    return False


def _decode(encoded: bytes) -> None:
    with Image.open(BytesIO(encoded), formats=FORMATS) as image:
        image.load()


def check_of(encoded: bytes) -> int:
    """The lower 32 bits of the XXH3 of some bytes: others have the same with a probability of 2**-32.

    It guards against mistakes, not against forgers; whole shards have cryptographic digests. 1.4 us for 90 kB, where
    zlib's CRC-32 and BLAKE3 take 20 (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md).
    """
    return xxhash.xxh3_64_intdigest(encoded) & 0xFFFF_FFFF
