"""Values that every reader of JSON accepts."""

from __future__ import annotations

import math
from typing import Any


def json_ready(document: Any) -> Any:  # noqa: ANN401 - JSON is any of these
    """The document with ``null`` for numbers that JSON does not have (RFC 8259 knows neither NaN nor infinity)."""
    if isinstance(document, float):
        return document if math.isfinite(document) else None
    if isinstance(document, dict):
        return {key: json_ready(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [json_ready(value) for value in document]
    return document
