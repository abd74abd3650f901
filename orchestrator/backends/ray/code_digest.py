"""Which code a long-lived actor runs: runners and controllers outlive upgrades and edits of the packages on disk."""

from __future__ import annotations

import time
from functools import cache, lru_cache

from orchestrator.core.code import package_folders, sources_digest

_REUSED_S = 5.0
"""How long a digest that was read from disk is reused: many runners may start at once."""


def code_digest() -> str:
    """First 16 digits of ``sources_digest`` of both packages as they are on disk now; imports neither.

    The files may change under a running process; the code that it runs does not.

    Raises:
        OSError: a file vanished or cannot be read: a package is being upgraded just now.
    """
    return sources_digest(package_folders())[:16]


@cache
def own_digest() -> str:
    """The same for the calling process, as of its first call."""
    return code_digest()


def current_digests(own: str) -> tuple[str, ...]:
    """Code that a process which starts now may run beside this one: the same, or what lies on this node's disk now.

    Whoever edits or upgrades a package under a running stack wants the next process to have it: that one is right and
    this one is old. While files are being exchanged it is not known yet, and only ``own`` counts.

    Args:
        own: digest of this process's code, as it started.
    """
    try:
        return tuple(dict.fromkeys((own, _digest_at(int(time.monotonic() / _REUSED_S)))))
    except OSError:
        return (own,)


@lru_cache(maxsize=1)
def _digest_at(_period: int) -> str:
    return code_digest()


def other_code(who: str, digest: str, own: str) -> str:
    """Why a process is refused, in one line; see the failure signature "other code".

    Args:
        who: the process, with the node's name or id in quotes.
        digest: of its code.
        own: digest of the processes that it was to join.
    """
    theirs = f"runs code {digest}" if digest else "runs code of an earlier version"
    return f"{who} {theirs}, and not {own} as the others: results of two versions must not mix"
