"""RFC 8785 (JSON Canonicalization Scheme), several times as fast as the package ``rfc8785`` for typical records.

Only common values are encoded here: text, whole and plain decimal numbers, lists and mappings. Numbers in any other
notation are left to the package; tests compare both.
"""

from __future__ import annotations

from collections.abc import Mapping
from json.encoder import encode_basestring

import rfc8785

_MAX_INTEGER = 2**53 - 1
_PLAIN_FROM, _PLAIN_BELOW = 1e-4, 1e16
"""Python and ECMAScript write numbers of this size with the same digits and without an exponent."""


def encode(value: object) -> bytes:
    """Canonical bytes of plain JSON values.

    Raises:
        ValueError: the value, named by its path, has no canonical form.
    """
    try:
        return _encode(value, ()).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds text that is not Unicode (a lone surrogate)") from error


def _encode(value: object, path: tuple[object, ...]) -> str:
    kind = type(value)
    if kind is str:  # the most frequent types; subclasses (enums) come below
        return encode_basestring(value)  # type: ignore[arg-type]
    if kind is float:
        return _number(value)  # type: ignore[arg-type]
    if kind is dict:
        return _mapping(value, path)  # type: ignore[arg-type]
    if value is None or kind is bool:
        return "null" if value is None else "true" if value else "false"
    return _encode_rare(value, path)


def _encode_rare(value: object, path: tuple[object, ...]) -> str:
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join([_encode(item, (*path, number)) for number, item in enumerate(value)]) + "]"
    if isinstance(value, Mapping):
        return _mapping(value, path)
    if isinstance(value, str):
        return encode_basestring(str.__str__(value))
    if isinstance(value, float):
        return _number(value)
    message = f"identity field {_shown(path)} is a {type(value).__name__}, which has no canonical JSON form"
    raise ValueError(message)


def _mapping(value: Mapping[object, object], path: tuple[object, ...]) -> str:
    names = [name if type(name) is str else _name(name, path) for name in value]
    if "".join(names).isascii():
        names.sort()
    else:
        names.sort(key=lambda name: name.encode("utf-16-be", "surrogatepass"))  # RFC 8785, 3.2.3
    return "{" + ",".join([f"{encode_basestring(name)}:{_encode(value[name], (*path, name))}" for name in names]) + "}"


def _name(name: object, path: tuple[object, ...]) -> str:
    if isinstance(name, str):
        return str.__str__(name)
    message = f"identity field {_shown(path)} has the key {name!r}; keys must be text"
    raise ValueError(message)


def _shown(path: tuple[object, ...]) -> str:
    """``$.parts[0].size``."""
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def _integer(number: int) -> str:
    if abs(number) > _MAX_INTEGER:
        message = f"{number} exceeds safe integer domain for JSON floats"
        raise ValueError(message)
    return int.__repr__(number)


def _number(number: float) -> str:
    if _PLAIN_FROM <= number < _PLAIN_BELOW or _PLAIN_FROM <= -number < _PLAIN_BELOW:
        return float.__repr__(number).removesuffix(".0")
    return rfc8785.dumps(float(number)).decode()
