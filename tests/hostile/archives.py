"""Hostile shards: (name, bytes) pairs."""
# ruff: noqa: E501, RUF001 - tables of hostile texts

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections.abc import Iterator

from tests.hostile.payloads import code_payload, payload
from tests.hostile.pictures import picture

PICKLE_EXTENSIONS = ("pkl", "pickle", "pyd", "pth", "pt", "npy", "npz", "ten", "tensor", "mp", "msg", "bin", "joblib")
"""What decoders of this field's libraries unpickle or decode by a member's name."""
_NAMES = (
    "/etc/cron.d/a.png", "../../a.png", "a/../../b.png", "..", "./../a.png", "a\\..\\..\\b.png", "$(touch pwned).png",
    "`touch pwned`.png", "; touch pwned;.png", "-rf.png", "a\nb.png", "a\x1b[31m.png", "\u202egnp.exe", "x" * 300 + ".png",
    "/" * 200 + "a.png", "~/.ssh/a.png", "C:\\a.png", "con.png", ".png", "a.", "a..png", "__import__('os').png",
)  # fmt: skip
_LABELS = (
    b"", b"-1", b"1e9", b"9" * 5000, b"0x0", b"NaN", b"inf", b"\xff\xfe", b"0; import os", b"__import__('os')", b"\0" * 100,
    "９".encode(), b"0 " * 200_000, b"true",
)  # fmt: skip
_METADATA = (
    b"[" * 100_000, b'{"a":' * 50_000, b'{"class": 1e400}', b'{"class": NaN}', b'{"class": {"a": 1}}', b'{"class": [[[0]]]}',
    b'{"class": "../../etc"}', b"9" * 100_000, b'{"labels": ' + b"[0," * 1000 + b"0]}", b"\xff\xfe{\0}\0", payload(),
    b'{"__class__": "os.system"}', b'{"class": true}', b'{"subset": {"a": [1]}, "class": 0}',
)  # fmt: skip


def member(name: str, content: bytes = b"", **fields: object) -> bytes:
    """Header and content of one member; ``fields`` are those of ``tarfile.TarInfo``."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    if info.pax_headers:
        header = info.tobuf(tarfile.PAX_FORMAT, errors="surrogateescape")
    else:
        header = info.tobuf(tarfile.GNU_FORMAT, errors="surrogateescape")
    return header + content + b"\0" * (-len(content) % 512)


def tar(*members: bytes) -> bytes:
    """An archive of members."""
    return b"".join(members) + b"\0" * 1024


def shards() -> Iterator[tuple[str, bytes]]:
    """Archives of which nothing may be executed, followed or written."""
    good = picture()
    yield from _links(good)
    for number, name in enumerate(_NAMES):
        yield f"member-name-{number}", tar(member(name, good), member("ok.cls", b"0"))
    for extension in PICKLE_EXTENSIONS:
        yield f"pickle-{extension}", tar(member(f"a.{extension}", payload()), member("a.cls", b"0"))
    for extension in ("png", "jpg", "cls", "json", "txt"):
        yield (
            f"pickle-as-{extension}",
            tar(
                member("a.png", good if extension != "png" else code_payload()),
                member(f"a.{extension}", code_payload()),
            ),
        )
    for number, label in enumerate(_LABELS):
        yield f"label-{number}", tar(member("a.png", good), member("a.cls", label))
    for number, metadata in enumerate(_METADATA):
        yield f"metadata-{number}", tar(member("a.png", good), member("a.json", metadata))
    yield from _damaged(good)


def _links(good: bytes) -> Iterator[tuple[str, bytes]]:
    kinds = {
        "symlink": tarfile.SYMTYPE,
        "hardlink": tarfile.LNKTYPE,
        "character-device": tarfile.CHRTYPE,
        "block-device": tarfile.BLKTYPE,
        "pipe": tarfile.FIFOTYPE,
        "contiguous": b"7",
        "unknown": b"Z",
    }
    for name, kind in kinds.items():
        for number, target in enumerate(("/etc/passwd", "../../../etc/passwd")):
            link = member("a.png", b"", type=kind, linkname=target)
            yield f"{name}-{number}", tar(link, member("a.cls", b"0"), member("b.png", good), member("b.cls", b"0"))


def _damaged(good: bytes) -> Iterator[tuple[str, bytes]]:
    sound = tar(member("a.png", good), member("a.cls", b"0"))
    yield "cut-header", sound[:100]
    yield "cut-content", sound[:600]
    yield "no-end", sound[:-1024]
    yield "gzipped", gzip.compress(sound)
    yield "zipped", _zip({"a.png": good})
    yield "zip-behind", sound + _zip({"a.png": good})
    yield "empty", b""
    yield "zeros", b"\0" * 10_240
    yield "size-too-large", _with_size(sound, b"77777777777\0")
    yield "size-negative", _with_size(sound, b"\xff" * 12)
    yield "size-binary-huge", _with_size(sound, b"\x80" + b"\xff" * 11)
    yield "size-garbage", _with_size(sound, b"zzzzzzzzzzz\0")
    yield "checksum-wrong", sound[:148] + b"0000000\0" + sound[156:]
    yield "pax-size", tar(member("a.png", good, pax_headers={"size": "99999999999999"}), member("a.cls", b"0"))
    yield "pax-size-negative", tar(member("a.png", good, pax_headers={"size": "-5"}), member("a.cls", b"0"))
    yield "pax-path", tar(member("a.png", good, pax_headers={"path": "../../../pwned.png"}), member("a.cls", b"0"))
    yield "pax-link", tar(member("a.png", good, pax_headers={"linkpath": "/etc/passwd"}), member("a.cls", b"0"))
    yield "pax-charset", tar(member("a.png", good, pax_headers={"hdrcharset": "BINARY", "path": "\udcff.png"}))
    yield "pax-large", tar(member("a.png", good, pax_headers={"comment": "x" * 5_000_000}), member("a.cls", b"0"))
    yield "long-names", tar(*(_long_name() for _ in range(2000)), member("a.png", good))
    yield "many-members", tar(*(member(f"a.x{number}", b"") for number in range(5000)))
    yield "duplicates", tar(*(member("a.png", good) for _ in range(100)), member("a.cls", b"0"))
    yield "sparse", tar(member("a.png", good, type=tarfile.GNUTYPE_SPARSE), member("a.cls", b"0"))
    yield "nested", tar(member("a.tar", sound), member("a.cls", b"0"))
    yield "script", b"#!/bin/sh\ntouch pwned\n" + b"\n" * 1024


def _long_name() -> bytes:
    return member("././@LongLink", b"x" * 200 + b"\0", type=tarfile.GNUTYPE_LONGNAME)


def _with_size(sound: bytes, size: bytes) -> bytes:
    """A sound archive whose first header claims another size, with a checksum that fits."""
    header = bytearray(sound[:512])
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + sound[512:]


def _zip(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()
