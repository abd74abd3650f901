"""The digest of the code on disk, as records name the code that made them."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("orchestrator", "workloads")


@cache
def package_digest() -> str:
    """As ``workloads.package.package_digest``, which a test compares, without importing the data plane.

    Sha256 over the Python files of both packages: relative path, size and content of each, in path order.
    """
    digest = sha256()
    for package in _PACKAGES:
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations if spec else None) or []:
            root = Path(folder)
            for path in sorted(root.rglob("*.py")):
                content = path.read_bytes()
                digest.update(f"{path.relative_to(root.parent).as_posix()}\n{len(content)}\n".encode())
                digest.update(content)
    return digest.hexdigest()
