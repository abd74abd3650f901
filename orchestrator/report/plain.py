"""Values that every reader of JSON accepts."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, cast


def json_ready(document: Any) -> Any:  # noqa: ANN401 - JSON is any of these
    """The document with ``null`` for numbers that JSON does not have (RFC 8259 knows neither NaN nor infinity)."""
    if isinstance(document, float):
        return document if math.isfinite(document) else None
    if isinstance(document, Mapping):
        return {key: json_ready(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [json_ready(value) for value in document]
    if is_dataclass(document):
        return json_ready(fields_of(document))
    return document


def json_text(document: Any, **form: Any) -> str:  # noqa: ANN401 - JSON is any of these
    """``json_ready(document)`` as text, in the ``form`` that ``json.dumps`` knows; dataclasses are mappings."""
    try:
        # Almost always: ten times as fast as to look at every number first.
        return json.dumps(document, default=fields_of, allow_nan=False, **form)
    except ValueError:
        return json.dumps(json_ready(document), allow_nan=False, **form)


def fields_of(value: Any) -> dict[str, Any]:  # noqa: ANN401 - of any dataclass
    """The fields of a dataclass (or items of a mapping) by name, themselves as they are.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(value, Mapping):
        return dict(value)
    return {name: getattr(value, name) for name in _names(cast("Hashable", type(value)))}


@cache
def _names(kind: Any) -> tuple[str, ...]:  # noqa: ANN401 - of any dataclass
    return tuple(field.name for field in fields(kind))
