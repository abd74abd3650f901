"""Altered objects of a store: (name, bytes) pairs, from what programs of ours wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from orchestrator.core.ids import canonical_json, sha256_hex
from tests.hostile.payloads import payload

_VALUES: tuple[Any, ...] = (None, 1, "os.system", [1], [[1]], {"a": 1}, [[[]]])
_TRAVERSALS = ("../../../../etc/passwd", "/etc/passwd", "parts/../../../../x", "a\0b", "$(touch pwned)", "..", "")


def garbage() -> Iterator[tuple[str, bytes]]:
    """What no JSON reader of ours may stumble over."""
    yield "empty", b""
    yield "text", b"touch pwned\n"
    yield "pickle", payload()
    yield "zeros", b"\0" * 10_000
    yield "not-utf-8", b'{"a": "\xff\xfe"}'
    yield "deep-lists", b"[" * 200_000
    yield "deep-objects", b'{"a":' * 100_000
    yield "digits", b"9" * 100_000
    yield "half", b'{"version": 3, "parts": {'
    yield "list", b"[]"
    yield "null", b"null"
    yield "number", b"1e400"
    yield "string", b'"' + b"x" * 1_000_000 + b'"'
    yield "surrogate", b'{"a": "\\ud800"}'
    yield "not-a-number", b'{"version": NaN}'
    yield "keys-twice", b'{"version": 3, "version": 2}'


def records(sound: bytes) -> Iterator[tuple[str, bytes]]:
    """A record with one thing altered: as it stands, and with a seal that fits again."""
    yield from garbage()
    for name, document in _altered_records(json.loads(sound)):
        yield name, json.dumps(document).encode()
        yield f"{name}-sealed", json.dumps(_sealed(document)).encode()


def _altered_records(sound: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    part = next(iter(sound["parts"]))
    for number, path in enumerate(_TRAVERSALS):
        yield f"path-{number}", _with(sound, "parts", {part: {**sound["parts"][part], "path": path}})
    for field in ("size_bytes", "sha256", "blake3"):
        for number, value in enumerate((-1, 2**70, None, "x", [1], {"a": 1})):
            yield f"{field}-{number}", _with(sound, "parts", {part: {**sound["parts"][part], field: value}})
    yield "identity-other", _with(sound, "identity", {**sound["identity"], "code_version": 999})
    yield "identity-list", _with(sound, "identity", [1])
    yield "metrics-text", _with(sound, "metrics", "x")
    yield "version-later", _with(sound, "version", 10**6)
    yield "version-text", _with(sound, "version", "x")
    yield "unknown", {**sound, "__class__": "os.system"}


def events(sound: bytes) -> Iterator[tuple[str, bytes]]:
    """A journal's segment with one thing altered."""
    header, *lines = sound.decode().splitlines()
    for name, content in garbage():
        if name != "empty":
            yield name, header.encode() + b"\n" + content + b"\n"
    told = [json.loads(line) for line in lines]
    for position, event in enumerate(told[:6]):
        for field in event:
            for number, value in enumerate((None, -1, "../../x", [1], {"a": 1}, "$(touch pwned)")):
                changed = [*told[:position], {**event, field: value}, *told[position + 1 :]]
                yield f"{event['type']}-{field}-{number}", "\n".join([header, *map(json.dumps, changed), ""]).encode()


def plans(sound: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A plan as somebody might send it."""
    job = sound["jobs"][0]
    for number, name in enumerate(
        (*_TRAVERSALS, "dataset-x/../../y", "dataset-$(x)", "dataset-a b", "-", "pretrain-x")
    ):
        yield f"key-{number}", _with_job(sound, {**job, "key": name})
    for number, name in enumerate((*_TRAVERSALS, "a/../b", "a b", "a\nb", "`x`", "<b>")):
        yield f"name-{number}", _with_job(sound, {**job, "name": name})
    for field in ("jobs", "policy", "sweep", "store_uri"):
        for number, value in enumerate(_VALUES):
            yield f"{field}-{number}", _with(sound, field, value)
    for field in ("kind", "identity", "needs", "resources", "execution", "facets"):
        for number, value in enumerate(_VALUES):
            yield f"job-{field}-{number}", _with_job(sound, {**job, field: value})
    yield "unknown", {**sound, "__class__": "x"}
    yield "twice", {**sound, "jobs": [job, job]}


def _with_job(sound: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    return {**sound, "jobs": [job, *sound["jobs"][1:]]}


def _with(sound: dict[str, Any], field: str, value: object) -> dict[str, Any]:
    return {**sound, field: value}


def _sealed(document: dict[str, Any]) -> dict[str, Any]:
    body = {name: value for name, value in document.items() if name != "record_sha256"}
    try:
        return {**body, "record_sha256": sha256_hex(canonical_json(body))}
    except ValueError:
        return body
