"""Which code this is: versions of packages, and the digest of our code on disk.

The digest distinguishes two results of one ``code_version`` if the code was edited.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("orchestrator", "workloads")


def version_or_empty(name: str) -> str:
    """Version of an installed distribution; empty where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


@cache
def package_digest() -> str:
    """Digest of the sources of both packages, as of the first call. Imports neither package."""
    return sources_digest(package_folders())


def package_folders() -> list[Path]:
    """Folders of both packages. Imports neither package."""
    specs = [find_spec(package) for package in _PACKAGES]
    return [Path(folder) for spec in specs for folder in (spec.submodule_search_locations if spec else None) or []]


def sources_digest(packages: Iterable[Path]) -> str:
    """Sha256 over the Python files of some packages: relative path, size and content of each, in path order.

    Raises:
        OSError: a file vanished or cannot be read.
    """
    digest = sha256()
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package.parent).as_posix()}\n{len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()
