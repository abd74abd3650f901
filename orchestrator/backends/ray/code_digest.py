"""Which code a long-lived actor runs: runners and controllers outlive upgrades and edits of the packages on disk."""

from __future__ import annotations

import time
from functools import cache, lru_cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("orchestrator", "workloads")
_REUSED_S = 5.0
"""How long a digest that was read from disk is reused: many runners may start at once."""


def code_digest() -> str:
    """Sha256 (16 hex) over all Python files of both packages as they are on disk now; imports neither.

    The files may change under a running process; the code that it runs does not.

    Raises:
        OSError: a file vanished or cannot be read: a package is being upgraded just now.
    """
    digest = sha256()
    for package in _PACKAGES:
        for path in _sources(package):
            digest.update(f"{package}/{path.name}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


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


def _sources(package: str) -> list[Path]:
    spec = find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    return sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
