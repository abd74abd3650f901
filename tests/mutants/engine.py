"""Plants one bug in the running program: a function's source with some text replaced, compiled again in its module."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """``old`` must stand exactly once in the source of ``where`` (``package.module:Class.function``)."""

    name: str
    where: str
    old: str
    new: str
    seed: int
    """A seed of the simulation that found the bug; it is tried first."""

    @property
    def target(self) -> tuple[Any, str]:
        """What holds the function, and its name there."""
        module, _, path = self.where.partition(":")
        holder: Any = import_module(module)
        *outer, name = path.split(".")
        for part in outer:
            holder = getattr(holder, part)
        return holder, name


class StaleMutantError(Exception):
    """The code has changed: the mutant must follow it."""


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The program with this bug. Raises ``StaleMutantError`` if there is no such code any more."""
    holder, name = mutant.target
    original = inspect.getattr_static(holder, name)
    changed = _recompiled(mutant, original)
    places = [(holder, name)]
    if inspect.ismodule(holder):  # others may have imported the function by name
        places += [
            (module, key)
            for module in list(sys.modules.values())
            if getattr(module, "__name__", "").startswith(("orchestrator", "tests"))
            for key, value in list(vars(module).items())
            if value is original and (module, key) != (holder, name)
        ]
    for place, key in places:
        setattr(place, key, changed)
    try:
        yield
    finally:
        for place, key in places:
            setattr(place, key, original)


def _recompiled(mutant: Mutant, original: Any) -> Any:
    function: Any = original.fget if isinstance(original, property) else inspect.unwrap(original)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutant.old) != 1:
        raise StaleMutantError(
            f"{mutant.name}: {mutant.where} has {mutant.old!r} {source.count(mutant.old)} times, not once"
        )
    names = dict(function.__globals__)
    exec(compile(source.replace(mutant.old, mutant.new), f"<{mutant.name}>", "exec"), function.__globals__, names)  # noqa: S102
    return names[function.__name__]
