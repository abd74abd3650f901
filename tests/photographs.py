"""Pictures with the statistics of photographs, the same every time, and PNGs whose parts can be wrong."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

import numpy as np
from PIL import Image

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_NUM_DISCS = 12


def photograph(seed: int, *, width: int = 500, height: int = 375) -> Image.Image:
    """Pink noise (natural images have a spectrum of about 1/f) shared by the channels, with discs that have edges."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1
    planes = []
    for _ in range(4):
        spectrum = rng.standard_normal((2, *frequency.shape))
        plane = np.fft.irfft2((spectrum[0] + 1j * spectrum[1]) / frequency**1.1, (height, width))
        planes.append(plane / plane.std())
    image = np.stack([0.9 * planes[0] + 0.35 * plane for plane in planes[1:]], axis=2)
    rows, columns = np.mgrid[:height, :width]
    for _ in range(_NUM_DISCS):
        row, column = rng.uniform(0, height), rng.uniform(0, width)
        radii = rng.uniform(15, 120, 2)
        inside = ((rows - row) / radii[0]) ** 2 + ((columns - column) / radii[1]) ** 2 < 1
        image[inside] = 0.5 * image[inside] + rng.normal(0, 1, 3)
    return Image.fromarray((image * 50 + 120).clip(0, 255).astype(np.uint8))


def jpeg(image: Image.Image, *, quality: int = 90) -> bytes:
    """As cameras store them: chroma at half the resolution."""
    buffer = BytesIO()
    image.save(buffer, format="JPEG", quality=quality)
    return buffer.getvalue()


def png_chunk(kind: bytes, content: bytes) -> bytes:
    """A PNG chunk with its checksum."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, *chunks: bytes, pixels: bytes = b"") -> bytes:
    """A PNG that claims a size, with further chunks before its pixels; by default these are next to none."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = png_chunk(b"IDAT", pixels or zlib.compress(b"\0" * 1000))
    return b"".join((PNG_SIGNATURE, header, *chunks, body, png_chunk(b"IEND", b"")))
