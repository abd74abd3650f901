"""The digest of this code: what tells two results of the same ``code_version`` apart when the code was edited."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path

import orchestrator.contract
import workloads


@cache
def package_digest() -> str:
    """Digest of the sources of both packages, as they were when this was first asked."""
    return sources_digest([Path(orchestrator.contract.__file__).parent, Path(workloads.__file__).parent])


def sources_digest(packages: Iterable[Path]) -> str:
    """Sha256 over the Python files of some packages: relative path, size and content of each, in path order."""
    digest = sha256()
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package.parent).as_posix()}\n{len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()
