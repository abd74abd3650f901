"""A simulation in a plain Python file: what is read of it, its digest, and its function.

Invariants:

- The *sources* are the file and the modules beside it that it imports, directly or through each other. An identity
  holds their digest and the function's name, ``<64 hex>.py:<function>``: neither the file's name nor its place.
- What is executed is what was digested. Nothing is executed before the digest is that of the identity, and nothing that
  is not below the allowed URIs (``orchestrator.storage.open``).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Self

from orchestrator.core.errors import UserError
from orchestrator.storage.open import check_allowed

_IDENTITY: Final = re.compile(r"([0-9a-f]{64})\.py:([A-Za-z_]\w*)")
_REFERENCE: Final = re.compile(r"(.+\.py):([^:/]*)")
_MAX_BYTES: Final = 1 << 20
_MAIN: Final = "simulation_"


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
        """Read a file and what it imports; nothing is executed.

        Raises:
            UserError: a file is not there, too large or not Python, or hides an installed module.
            StorageDeniedError: the file is not below any of the allowed URIs.
        """
        check_allowed(path.absolute().as_uri())
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

    def load(self, function: str) -> Any:  # noqa: ANN401 - foreign code
        """The function. Raises ``UserError``: the file cannot be imported, or has no such function."""
        name, shown = f"{_MAIN}{self.digest[:16]}", self.path.name
        _forget_earlier()
        sys.meta_path.insert(0, _Finder(self))
        module = ModuleType(name)
        module.__file__ = str(self.path)
        sys.modules[name] = module  # pydantic looks there for what annotations name
        try:
            exec(compile(self.main, shown, "exec"), module.__dict__)  # noqa: S102 - its digest is that of the plan
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            message = f"{shown} cannot be imported: {type(error).__name__}: {error}; correct the file"
            raise UserError(message) from error
        found = getattr(module, function, None)
        if not callable(found):
            own = sorted(one for one, value in vars(module).items() if getattr(value, "__module__", "") == name)
            message = f"{shown} has no function {function!r}; it has {', '.join(own) or 'none'}"
            raise UserError(message)
        return found


class _Finder(MetaPathFinder, InspectLoader):
    """Finds the modules beside a file as they were digested."""

    def __init__(self, sources: SimulationCode) -> None:
        self.folder = sources.path.parent
        self._files = sources.modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that is ours."""
        file = self._file(fullname)
        if file is None:
            return None
        is_package = file.endswith("/__init__.py")
        return spec_from_loader(fullname, self, origin=str(self.folder / file), is_package=is_package)

    def get_source(self, fullname: str) -> str:
        """The text of a module."""
        return self._files[self._file(fullname) or ""].decode()

    def is_package(self, fullname: str) -> bool:
        """Whether it is a folder."""
        return str(self._file(fullname)).endswith("/__init__.py")

    def _file(self, fullname: str) -> str | None:
        stem = fullname.replace(".", "/")
        return next((name for name in (f"{stem}/__init__.py", f"{stem}.py") if name in self._files), None)

    def names(self) -> set[str]:
        """Top-level names of its modules."""
        return {name.partition("/")[0].removesuffix(".py") for name in self._files}


def _forget_earlier() -> None:
    """Drop what a warm process has imported of other contents."""
    for finder in [one for one in sys.meta_path if isinstance(one, _Finder)]:
        sys.meta_path.remove(finder)
        names = finder.names()
        for module in [one for one in sys.modules if one.partition(".")[0] in names]:
            del sys.modules[module]


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
