"""Which code a long-lived actor runs: runners and controllers outlive upgrades and edits of the packages on disk."""

from __future__ import annotations

from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("orchestrator", "workloads")


def code_digest() -> str:
    """Sha256 (16 hex) over all Python files of both packages as they are on disk now; imports neither.

    A process calls it once, as it starts: afterwards the files may change, the code that it runs does not.
    """
    digest = sha256()
    for package in _PACKAGES:
        for path in _sources(package):
            digest.update(f"{package}/{path.name}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _sources(package: str) -> list[Path]:
    spec = find_spec(package)
    folders = (spec.submodule_search_locations if spec else None) or []
    return sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
