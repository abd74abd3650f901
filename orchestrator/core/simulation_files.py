"""A simulation in a plain Python file: its sources, their digest, and the package in which they are sent.

Invariants:

- The *sources* are the file and the modules beside it that it imports, directly or through each other. An identity
  holds their digest and the function's name, ``<64 hex>.py:<function>``: neither the file's name nor its place.
- A package is not trusted: the code that opens one compares its digest with that of an identity.
"""

from __future__ import annotations

import ast
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.machinery import PathFinder
from io import BytesIO
from pathlib import Path
from typing import Final, Self

from orchestrator.core.errors import UserError

FILE_ROLE: Final = "simulation"
"""Name of the file's location in the ``label_files`` of a job."""
_IDENTITY: Final = re.compile(r"([0-9a-f]{64})\.py:([A-Za-z_]\w*)")
_REFERENCE: Final = re.compile(r"(.+\.py):([^:/]*)")
_MAX_BYTES: Final = 1 << 20
_MAX_PACKAGE_BYTES: Final = 16 << 20
_DATE: Final = (1980, 1, 1, 0, 0, 0)
"""The same sources make the same bytes."""
_MODULE: Final = re.compile(r"(\w+/)*\w+\.py")
_AGAIN: Final = "submit the sweep again"


def file_identity(name: str) -> tuple[str, str] | None:
    """Digest and function of an identity that means a file; None for any other."""
    found = _IDENTITY.fullmatch(name)
    return (found[1], found[2]) if found else None


def file_reference(run: str) -> tuple[str, str] | None:
    """Path and function of a ``run: path.py:function``; None for any other."""
    found = _REFERENCE.fullmatch(run)
    return (found[1], found[2]) if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationCode:
    """The text of a file and of the modules beside it that it imports."""

    path: Path
    main: bytes
    modules: Mapping[str, bytes]
    """By path relative to the file's folder."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ``UserError``: a file is not there, too large or not Python, or hides an installed module."""
        modules: dict[str, bytes] = {}
        main = _read(path)
        waiting = list(_imported(path.name, main, ""))
        while waiting:
            for relative in _beside(path.parent, waiting.pop()):
                if relative not in modules and path.parent / relative != path:
                    modules[relative] = _read(path.parent / relative)
                    package = relative.rpartition("/")[0].replace("/", ".")
                    waiting += _imported(relative, modules[relative], package)
        return cls(path=path, main=main, modules=modules)

    @property
    def digest(self) -> str:
        """Sha256 in hex over the file, and over name and content of the modules."""
        parts = [sha256(self.main).hexdigest()]
        parts += [f"{name} {sha256(content).hexdigest()}" for name, content in sorted(self.modules.items())]
        return sha256("\n".join(parts).encode()).hexdigest()

    def to_package(self) -> bytes:
        """A zip archive of the sources, the file itself first. Raises ``UserError``: they are too large to travel."""
        if len(self.main) + sum(map(len, self.modules.values())) > _MAX_PACKAGE_BYTES:
            message = f"{self.path.name} and what it imports beside it have more than {_MAX_PACKAGE_BYTES} bytes"
            raise UserError(f"{message}; install them where jobs run, as a package")
        buffer = BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in ((self.path.name, self.main), *sorted(self.modules.items())):
                archive.writestr(zipfile.ZipInfo(name, date_time=_DATE), content, zipfile.ZIP_DEFLATED)
        return buffer.getvalue()

    @classmethod
    def from_package(cls, content: bytes, digest: str) -> Self:
        """Inverse of ``to_package``. Raises ``UserError``: it is damaged, or not of this digest."""
        try:
            with zipfile.ZipFile(BytesIO(content)) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > _MAX_PACKAGE_BYTES:
                    raise ValueError("it is too large")
                (name, main), *modules = ((entry.filename, archive.read(entry)) for entry in archive.infolist())
        except (zipfile.BadZipFile, ValueError, EOFError, OSError, zlib.error) as error:
            raise UserError(f"the package of the simulation {digest[:12]} is damaged: {error}; {_AGAIN}") from error
        found = cls(path=Path(name), main=main, modules=dict(modules))
        if found.digest != digest:
            message = f"the package of the simulation {digest[:12]} holds {found.digest[:12]}"
            raise UserError(f"{message}: its files are not what was planned; {_AGAIN}")
        return found

    def write(self, folder: Path) -> Path:
        """Write the sources into an empty folder; returns where the file lies. Raises ``UserError``: unsafe names."""
        for name, content in self.modules.items():
            if not _MODULE.fullmatch(name):
                raise UserError(f"the package of a simulation names {name!r}, which is not a module; {_AGAIN}")
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        path = folder / self.path.name
        path.write_bytes(self.main)
        return path


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise UserError(f"there is no file {path.name}; give its path relative to the folder of the sweep file")
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path.name} cannot be read: {error.strerror}; check its permissions") from error
    if len(content) > _MAX_BYTES:
        raise UserError(f"{path.name} has more than {_MAX_BYTES} bytes; keep data in files of their own")
    return content


def _imported(shown: str, content: bytes, package: str) -> Iterator[str]:
    """Dotted names that a source imports anywhere, relative ones made absolute."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError) as error:
        at = f":{error.lineno}:{error.offset}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UserError(f"{shown}{at}: {getattr(error, 'msg', error)}; correct the file") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            stem = ".".join([*filter(None, base), *([node.module] if node.module else [])])
            yield from filter(None, (stem, *(f"{stem}.{alias.name}".lstrip(".") for alias in node.names)))


def _beside(folder: Path, name: str) -> Iterator[str]:
    """Files in the folder that an import of this name reads: the packages above it, and itself."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        stem = "/".join(parts[:depth])
        found = next((file for file in (f"{stem}/__init__.py", f"{stem}.py") if (folder / file).is_file()), None)
        if found is None:
            return
        if depth == 1:
            _refuse_hidden(folder, parts[0], found)
        yield found


def _refuse_hidden(folder: Path, name: str, file: str) -> None:
    """Whether a file or an installed module is meant must not depend on what was imported first."""
    spec = PathFinder.find_spec(name)
    elsewhere = spec is not None and spec.origin is not None and not Path(spec.origin).is_relative_to(folder)
    if name in sys.stdlib_module_names or elsewhere:
        raise UserError(f"{file} has the name of an installed module; rename it")
