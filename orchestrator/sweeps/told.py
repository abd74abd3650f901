"""What journals are told in words: the last filter before it is stored, shown and published.

Runners redact what they know; a controller may know secrets that a runner does not, and words of its own quote errors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.core.security.redaction import redacted
from orchestrator.state.events import Event

_WORDS = ("message", "reason", "traceback")
"""Fields of events that hold prose; all others are names and numbers, which must stay as they are."""


def without_secrets(event: Event) -> Event:
    """The event with its prose redacted."""
    told = {name: text for name in _WORDS if (text := getattr(event, name, ""))}
    cleaned: dict[str, Any] = {name: clean for name, text in told.items() if (clean := redacted(text)) != text}
    return replace(event, **cleaned) if cleaned else event
