"""Runs a simulation of a plain Python file: what is executed is what was digested, and the modules beside it, too."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any, Final

from orchestrator.core.errors import UserError
from orchestrator.core.simulation_files import SimulationCode

_MAIN: Final = "simulation_"


def load_function(sources: SimulationCode, function: str) -> Any:  # noqa: ANN401 - foreign code
    """The function. Raises ``UserError``: the file cannot be imported, or has no such function."""
    name, shown = f"{_MAIN}{sources.digest[:16]}", sources.path.name
    _forget_earlier()
    sys.meta_path.insert(0, _Finder(sources))
    module = ModuleType(name)
    module.__file__ = str(sources.path)
    sys.modules[name] = module  # pydantic looks there for what annotations name
    try:
        # Without `dont_inherit` the file would be read with the `from __future__` imports of this one.
        code = compile(sources.main, shown, "exec", dont_inherit=True)
        exec(code, module.__dict__)  # noqa: S102 - its digest is that of the plan
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
