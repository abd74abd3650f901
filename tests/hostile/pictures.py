"""Hostile images: (name, bytes) pairs."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator

from PIL import Image

from tests.hostile.payloads import code_payload, payload
from tests.photographs import PNG_SIGNATURE, png, png_chunk

_HUGE = 100_000


def picture(form: str = "PNG", size: int = 8) -> bytes:
    """A small sound image."""
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), (200, 30, 30)).save(buffer, form)
    return buffer.getvalue()


def pictures() -> Iterator[tuple[str, bytes]]:
    """What is no image that may be decoded."""
    yield from _too_large()
    yield from _no_images()
    yield from _broken()


def polyglots() -> Iterator[tuple[str, bytes]]:
    """Sound images that are something else as well: they are decoded, and nothing else happens."""
    for form in ("PNG", "JPEG", "GIF", "BMP", "WEBP"):
        yield f"{form}-and-pickle", picture(form) + payload()
        yield f"{form}-and-zip", picture(form) + _zip()
        yield f"{form}-and-script", picture(form) + b"\n#!/bin/sh\ntouch pwned\n"


def _too_large() -> Iterator[tuple[str, bytes]]:
    yield "png-100-megapixels", png(10_001, 10_000)
    yield "png-largest", png(2**31 - 1, 2**31 - 1)
    yield "png-line", png(2**31 - 1, 1)
    yield "bmp", b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, _HUGE, _HUGE, 1, 24, 0, 0, 0, 0, 0, 0)
    yield "gif", b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b";"
    yield "ppm", b"P6\n100000 100000\n255\n" + b"\0" * 100
    yield "pgm", b"P5\n99999999 99999999\n255\n"
    yield "ppm-digits", b"P6\n" + b"9" * 100_000 + b" 1\n255\n"
    yield "ppm-comments", b"P6\n" + b"#\n" * 20_000
    jpeg = bytearray(picture("JPEG"))
    start = jpeg.index(b"\xff\xc0")
    jpeg[start + 5 : start + 9] = struct.pack(">HH", 65_500, 65_500)
    yield "jpeg", bytes(jpeg)
    webp = b"VP8X" + struct.pack("<I", 10) + b"\0" * 4 + b"\xff\xff\x00" + b"\xff\xff\x00"
    yield "webp", b"RIFF" + struct.pack("<I", 4 + len(webp)) + b"WEBP" + webp
    bomb = zlib.compress(b"\0" * 50_000_000, 9)
    yield "png-pixels-bomb", png(64, 64, pixels=bomb)
    yield "png-text-bomb", png(8, 8, png_chunk(b"zTXt", b"a\0\0" + bomb))
    yield "png-profile-bomb", png(8, 8, png_chunk(b"iCCP", b"a\0\0" + bomb))
    yield "png-international-bomb", png(8, 8, png_chunk(b"iTXt", b"a\0\1\0\0\0" + bomb))


def _no_images() -> Iterator[tuple[str, bytes]]:
    for protocol in range(6):
        yield f"pickle-{protocol}", payload(protocol=protocol)
    yield "pickle-code", code_payload()
    yield "pickle-behind-signature", PNG_SIGNATURE + payload()
    yield "zip", _zip()
    yield "eps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n(touch pwned) (w) file\n%%EOF\n"
    yield "eps-in-dos", struct.pack("<4I", 0xC6D3D0C5, 32, 64, 0) + b"\0" * 16 + b"%!PS-Adobe-3.0 EPSF-3.0\n" * 3
    yield "pdf", b"%PDF-1.7\n1 0 obj<</Type/Catalog/OpenAction<</S/Launch/F(touch pwned)>>>>endobj\n%%EOF"
    yield "svg", b'<?xml version="1.0"?><!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg>&x;</svg>'
    yield "xml-bomb", b'<!DOCTYPE a [<!ENTITY a "x"><!ENTITY b "&a;&a;&a;">]><svg>&b;</svg>'
    yield "html", b"<html><script>alert(1)</script></html>"
    yield "php", b"GIF89a<?php system('touch pwned'); ?>"
    yield "mvg", b"push graphic-context\nviewbox 0 0 8 8\nfill 'url(https://x/\"|touch pwned\")'\n"
    yield "xpm", b'/* XPM */\nstatic char *x[] = {"8 8 1 1", "a c None"};'
    yield "tiff", b"II*\0\x08\0\0\0" + b"\xff" * 200
    yield "psd", b"8BPS\0\1" + b"\xff" * 200
    yield "ico", b"\0\0\1\0\1\0" + b"\xff" * 200
    yield "icns", b"icns" + struct.pack(">I", 2**31 - 1) + b"ic10" + struct.pack(">I", 2**31 - 1)
    yield "fli", struct.pack("<IHHHH", 2**31, 0xAF12, 1, 320, 200) + b"\0" * 200
    yield "elf", b"\x7fELF" + b"\0" * 200
    yield "empty", b""
    yield "one-byte", b"\x89"
    yield "text", b"touch pwned\n"


def _broken() -> Iterator[tuple[str, bytes]]:
    for form in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "PPM"):
        whole = picture(form, 64)
        yield f"{form}-half", whole[: len(whole) // 2]
        yield f"{form}-header", whole[:12]
    sound = picture()
    yield "png-length", sound[:8] + b"\xff\xff\xff\xff" + sound[12:]
    yield "png-zero-size", png(0, 0)
    yield "png-checksum", sound[:20] + bytes([sound[20] ^ 1]) + sound[21:]
    yield "png-no-header", PNG_SIGNATURE + png_chunk(b"IDAT", b"")
    yield "png-many-chunks", png(8, 8, *(png_chunk(b"tEXt", b"a\0b") for _ in range(5_000)))[:-12]


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("__main__.py", "open('/tmp/hostile-was-here', 'w')")
    return buffer.getvalue()
