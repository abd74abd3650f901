"""Frozen dataclasses to plain JSON and back, by their annotations: the form of journals and snapshots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

Decoder: TypeAlias = Callable[[Any], Any]
Decoded = TypeVar("Decoded")


def decode_value(kind: type[Decoded], document: Mapping[str, Any]) -> Decoded:
    """A dataclass from its JSON form. Fields that the document lacks get their defaults; unknown ones are ignored.

    Raises:
        TypeError: the document lacks a field without a default.
        ValueError: a value is not of the field's enum.
    """
    value: Decoded = _dataclass_decoder(cast("type", kind))(document)
    return value


def encode_value(value: Any) -> Any:  # noqa: ANN401 - any value of a dataclass's field to any JSON value
    """Plain JSON form. Fields at their defaults are left out: most of a large sweep's jobs are alike."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            name: encode_value(item)
            for name, default in _defaults(type(value))
            if (item := getattr(value, name)) != default
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {encode_value(key): encode_value(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [encode_value(item) for item in value]
    if isinstance(value, frozenset | set):
        return sorted(encode_value(item) for item in value)
    return value


def _same(value: Any) -> Any:  # noqa: ANN401 - see ``encode_value``
    return value


@cache
def _defaults(kind: type) -> tuple[tuple[str, object], ...]:
    return tuple((item.name, _default(item)) for item in fields(kind))


def _default(item: Field[Any]) -> object:
    if item.default is not MISSING:
        return item.default
    # ``MISSING`` equals no value, so that a field without a default is always written.
    return item.default_factory() if item.default_factory is not MISSING else MISSING


@cache
def _dataclass_decoder(kind: type) -> Decoder:
    hints = get_type_hints(kind)
    decoders = {item.name: _decoder(hints[item.name]) for item in fields(kind) if item.init}

    def decode(document: Mapping[str, Any]) -> object:
        return kind(**{name: decoders[name](value) for name, value in document.items() if name in decoders})

    return decode


def _decoder(kind: Any) -> Decoder:  # noqa: ANN401 - any annotation
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in {UnionType, Union}:
        return _optional(next(choice for choice in arguments if choice is not NoneType))
    if origin is tuple:
        inner = _decoder(arguments[0]) if arguments[1:] == (...,) else _same
        return lambda values: tuple(map(inner, values))
    if origin is frozenset:
        return frozenset
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(_decoder(arguments[0]), _decoder(arguments[1]))
    return _class_decoder(kind) if isinstance(kind, type) else _same


def _class_decoder(kind: type) -> Decoder:
    if issubclass(kind, Enum):
        return kind
    return _dataclass_decoder(kind) if is_dataclass(kind) else _same


def _optional(kind: Any) -> Decoder:  # noqa: ANN401 - any annotation
    inner = _decoder(kind)
    return lambda value: None if value is None else inner(value)


def _mapping(key: Decoder, item: Decoder) -> Decoder:
    return lambda values: {key(name): item(value) for name, value in values.items()}
