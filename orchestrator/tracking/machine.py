"""What is installed beside this process. Read, never asked for."""

from __future__ import annotations

import re
from importlib.metadata import distributions
from pathlib import Path


def installed_packages() -> dict[str, str]:
    """Versions of all installed distributions by their normalised names, sorted (PEP 503).

    Copies that a package brings inside its own folder (Ray does) are part of it: nobody installs them.
    """
    found = {
        re.sub(r"[-_.]+", "-", one.name).lower(): one.version
        for one in distributions()
        if one.name and not _is_inside_package(Path(str(one.locate_file(""))))
    }
    return dict(sorted(found.items()))


def requirements_text(packages: dict[str, str]) -> str:
    """The packages as a requirements file, to be installed with ``pip install --no-deps -r``."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(packages.items()))


def _is_inside_package(folder: Path) -> bool:
    """Whether a folder that distributions lie in, or the one above it, is an importable package."""
    return any((one / "__init__.py").is_file() for one in (folder, folder.parent))
