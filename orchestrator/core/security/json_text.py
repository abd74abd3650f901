"""Untrusted JSON: every error in it is a ``ValueError``, and its size is limited."""

from __future__ import annotations

import json
from typing import Any

MAX_BYTES = 1024**3
"""The plan of 100,000 jobs takes a tenth of it."""


def parse_json(content: bytes | str, *, max_bytes: int = MAX_BYTES) -> Any:  # noqa: ANN401 - JSON holds anything
    """As ``json.loads``.

    Raises:
        ValueError: it is no JSON, no text, larger than ``max_bytes``, or nested more deeply than Python reads.
    """
    if len(content) > max_bytes:
        raise ValueError(f"it has {len(content)} bytes; at most {max_bytes} are read")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
