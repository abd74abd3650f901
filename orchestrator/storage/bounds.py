"""Size limits of objects that are read as a whole.

Our own objects are far smaller: the limits keep a damaged or altered object from filling the memory of a controller
that serves a thousand other jobs. A reader reports a larger object and treats it as damaged. Writers have the same
limits, so that every written object can be read.
"""

from __future__ import annotations

from orchestrator.core.errors import TooLargeError
from orchestrator.core.units import MIB

SMALL_BYTES = 1 * MIB
"""Leases, claims, drains, quotas, and other objects of a few numbers."""
RECORD_BYTES = 256 * MIB
"""A record names its parts: 113,000 shards take 30 MB."""
SEGMENT_BYTES = 512 * MIB
"""A journal's segment: one round that ends 100,000 jobs takes 40 MB."""
PLAN_BYTES = 512 * MIB
"""Plans, the messages that bring them, and snapshots of journals: 140 MB with 100,000 jobs."""
PROGRESS_BYTES = 256 * MIB
"""Lines of live attempts and reasons of waiting jobs, some hundred bytes each."""
METRICS_BYTES = 256 * MIB
"""A metric segment: a line per logged step since the last checkpoint."""


def check_size(name: str, uri: str, size_bytes: int, max_bytes: int | None) -> None:
    """Raise ``TooLargeError`` for an object above the limit; ``None`` = no limit."""
    if max_bytes is not None and size_bytes > max_bytes:
        message = (
            f"{name} in {uri} has {size_bytes} bytes, and at most {max_bytes} of such an object are read: no program "
            "of ours writes as much, so it was damaged or altered; restore it from a copy of the store, or delete it"
        )
        raise TooLargeError(message)


def check_writable(what: str, size_bytes: int, max_bytes: int, remedy: str) -> None:
    """Raise ``TooLargeError`` for content that readers would refuse."""
    if size_bytes > max_bytes:
        message = f"{what} has {size_bytes} bytes, and at most {max_bytes} are read again: {remedy}"
        raise TooLargeError(message)
