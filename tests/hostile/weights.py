"""Hostile weights files: (name, bytes) pairs."""
# ruff: noqa: E501 - tables of hostile texts

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator

import torch

from tests.hostile.payloads import Code, Command, code_payload, payload

_STATE = {"weight": torch.zeros(4, 4)}


def safetensors(header: object, body: bytes = b"\0" * 64, length: int | None = None) -> bytes:
    """A safetensors file whose header may say anything."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def weights() -> Iterator[tuple[str, bytes]]:
    """Files of which no tensor may come, and nothing executed."""
    yield from _headers()
    yield from _pickles()
    yield from _archives()


def _entry(**fields: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64], **fields}


def _headers() -> Iterator[tuple[str, bytes]]:
    yield "length-largest", safetensors({}, length=2**64 - 1)
    yield "length-100-gib", safetensors({}, length=100 * 2**30)
    yield "length-100-mib", safetensors({}, length=100 * 2**20)
    yield "length-zero", safetensors(b"", length=0)
    yield "length-short", safetensors({"w": _entry()}, length=3)
    yield "length-only", struct.pack("<Q", 8)
    yield "offsets-beyond", safetensors({"w": _entry(data_offsets=[0, 2**40])})
    yield "offsets-negative", safetensors({"w": _entry(data_offsets=[-64, 0])})
    yield "offsets-reversed", safetensors({"w": _entry(data_offsets=[64, 0])})
    yield "offsets-overlap", safetensors({"a": _entry(), "b": _entry()})
    yield "offsets-gap", safetensors({"w": _entry(data_offsets=[8, 72])}, b"\0" * 72)
    yield "offsets-texts", safetensors({"w": _entry(data_offsets=["0", "64"])})
    yield "shape-huge", safetensors({"w": _entry(shape=[2**31, 2**31])})
    yield "shape-overflow", safetensors({"w": _entry(shape=[2**63, 2])})
    yield "shape-negative", safetensors({"w": _entry(shape=[-4, -4])})
    yield "shape-other", safetensors({"w": _entry(shape=[4, 5])})
    yield "type-unknown", safetensors({"w": _entry(dtype="os.system")})
    yield "type-object", safetensors({"w": _entry(dtype={"a": 1})})
    yield "entry-list", safetensors({"w": [1, 2, 3]})
    yield "header-list", safetensors([1, 2, 3])
    yield "header-deep", safetensors(b'{"a":' + b"[" * 100_000)
    yield "header-text", safetensors(b"{" + b"x" * 1000)
    yield "header-nul", safetensors(b"\0" * 1000)
    yield "body-short", safetensors({"w": _entry()}, b"\0" * 8)
    yield "body-long", safetensors({"w": _entry()}, b"\0" * 1000)


def _pickles() -> Iterator[tuple[str, bytes]]:
    for protocol in range(2, 6):
        yield f"pickle-{protocol}", payload(protocol=protocol)
    yield "pickle-0", payload(protocol=0)
    yield "code", code_payload()
    yield "legacy-torch", _legacy({"state_dict": Command("touch /tmp/hostile-was-here")})
    yield "legacy-code", _legacy(Code("__import__('os').system('touch /tmp/hostile-was-here')"))
    yield "legacy-half", _legacy(_STATE)[:60]
    for number, content in enumerate((
        b"\x80", b"\x80\x02", b"\x80\x02.", b"\x80\x02(", b"\x80\x02}q\x00", b"\x80\x02\x8a\xff", b"\x80\x02cos\nsystem\n.",
        b"\x80\x02X\xff\xff\xff\x7f", b"\x80\x02h\x05.", b"\x80\x02R.", b"\x80\x02K\x01Q.", b"\x80\xff.", b"\x80\x02\x93.",
        b"\x80\x02" + b"(" * 20_000, b"\x80\x02" + b"]" * 20_000 + b".", b"\x80\x02" + b"\x85" * 20_000 + b".",
        b"\x80\x02]" + b"2" * 64 + b".", b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x00a\x85R.",
        b"\x80\x02ctorch\nload\nX\x01\x00\x00\x00a\x85R.", b"\x80\x02ctorch.hub\nload\n)R.",
        b"\x80\x02ccollections\nOrderedDict\n)R}X\x09\x00\x00\x00__class__K\x01sb.",
    )):  # fmt: skip
        yield f"opcodes-{number}", content


def _archives() -> Iterator[tuple[str, bytes]]:
    buffer = io.BytesIO()
    torch.save({"state_dict": Command("touch /tmp/hostile-was-here")}, buffer)
    yield "torch-save", buffer.getvalue()
    yield "torch-save-half", buffer.getvalue()[: len(buffer.getvalue()) // 2]
    yield "zip-pickle", _zip({"archive/data.pkl": payload(protocol=2), "archive/version": b"3\n"})
    yield "zip-code", _zip({"archive/data.pkl": code_payload(), "archive/version": b"3\n"})
    yield "zip-empty", _zip({})
    yield "zip-no-pickle", _zip({"a/b": b"c"})
    yield "zip-traversal", _zip({"../../../../tmp/hostile-was-here": b"x", "a/version": b"3\n"})
    yield "zip-script", _zip({"archive/data.pkl": pickle.dumps({}, 2), "archive/code/__torch__.py": b"import os\n"})
    bomb = {"archive/data.pkl": b"\x80\x02}." + b"\0" * 30_000_000, "archive/version": b"3\n"}
    yield "zip-bomb", _zip(bomb, zipfile.ZIP_DEFLATED)
    yield "gzip", b"\x1f\x8b\x08" + b"\0" * 100
    yield "hdf5", b"\x89HDF\r\n\x1a\n" + b"\0" * 100
    yield "numpy-objects", b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }" + payload()
    yield "empty", b""
    yield "text", b"touch pwned\n"


def _legacy(content: object) -> bytes:
    """As torch wrote before its version 1.6."""
    buffer = io.BytesIO()
    torch.save(
        OrderedDict(content) if isinstance(content, dict) else content, buffer, _use_new_zipfile_serialization=False
    )
    return buffer.getvalue()


def _zip(files: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()
