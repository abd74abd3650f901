"""Code of other packages: which plug-ins are installed, how an identity names one, and how it is loaded.

A package offers them as entry points of the groups below. The control plane reads the metadata of installed packages
and imports none of them; the data plane loads what an identity names. An identity holds a *reference*,
``<distribution>==<version>:<name>``. If a package is installed editable, its sources change under one version, so
the version has a local label: ``<version>+src.<16 hex of its sources' digest>``.

The digest is over all files of the importable packages that the distribution's entry points name, by path and content,
without hidden files and what Python compiles.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from hashlib import sha256
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from orchestrator.core.errors import UserError

LABEL_SPACES: Final = "pretraining_orchestrator.label_spaces"
OBJECTIVES: Final = "pretraining_orchestrator.objectives"
MODELS: Final = "pretraining_orchestrator.models"
AUGMENTATIONS: Final = "pretraining_orchestrator.augmentations"
SIMULATIONS: Final = "pretraining_orchestrator.simulations"
MEASURES: Final = "pretraining_orchestrator.measures"
GROUPS: Final[Mapping[str, str]] = {
    LABEL_SPACES: "label space",
    OBJECTIVES: "objective",
    MODELS: "model",
    AUGMENTATIONS: "augmentation",
    SIMULATIONS: "simulation",
    MEASURES: "measure",
}
"""Groups of entry points, and the word for one of each group in messages."""

_DIGEST_DIGITS: Final = 16
_loaded: dict[str, str] = {}
"""The version with which this process has loaded a distribution."""


class InstalledPlugins(Mapping[str, str]):
    """Entry points of one group: name -> reference, which is what identities hold.

    Installed packages are searched at the first look, because few sweeps name a plug-in.
    """

    def __init__(self, group: str) -> None:
        self._group = group

    @cached_property
    def _found(self) -> Mapping[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self._group) if point.dist is not None}

    def __getitem__(self, name: str) -> str:
        package = self._found[name].dist
        if package is None:
            raise KeyError(name)
        return f"{package.name}=={version_of(package)}:{name}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def is_reference(name: str) -> bool:
    """Whether an identity means a plug-in, and nothing that is built in."""
    return "==" in name


def short_name(name: str) -> str:
    """For people: the entry point's name of a reference, anything else as it is."""
    return name.rpartition(":")[2] if is_reference(name) else name


def load_plugin(reference: str, group: str) -> Any:  # noqa: ANN401 - foreign code
    """The object that the entry point of a reference names.

    Raises:
        UserError: it is not installed here, or in another version, or its sources differ from those that were planned.
    """
    what, (package, _, name) = GROUPS[group], reference.partition(":")
    project, _, version = package.partition("==")
    try:
        installed = distribution(project)
    except (PackageNotFoundError, ValueError) as error:
        message = f"the {what} {name!r} comes from {project}, which is not installed here: install {package} on every"
        raise UserError(f"{message} node") from error
    here = version_of(installed)
    if here != version:
        message = f"the {what} {name!r} was planned with {project} {version}; {here} is installed here: install that "
        raise UserError(f"{message}version, or plan again")
    points = [point for point in installed.entry_points if (point.group, point.name) == (group, name)]
    if not points:
        raise UserError(f"{project} {version} has no {what} {name!r} (entry points of the group {group})")
    if _loaded.setdefault(project, here) != here:
        _forget(installed)  # a warm process that has loaded earlier sources
        _loaded[project] = here
    return points[0].load()


def version_of(package: Distribution) -> str:
    """Its version, with the digest of its sources where these may change under it."""
    digest = _digest_of_sources(package)
    if not digest:
        return package.version
    return f"{package.version}{'.' if '+' in package.version else '+'}src.{digest[:_DIGEST_DIGITS]}"


def _digest_of_sources(package: Distribution) -> str:
    """Empty for a package that is not installed editable (PEP 610, ``direct_url.json``)."""
    direct_url = package.read_text("direct_url.json")
    if not direct_url or not json.loads(direct_url).get("dir_info", {}).get("editable"):
        return ""
    lines = [line for name in _top_levels(package) for line in _lines_of(name)]
    return sha256("".join(sorted(lines)).encode()).hexdigest()


def _top_levels(package: Distribution) -> list[str]:
    return sorted({point.module.partition(".")[0] for point in package.entry_points if point.group in GROUPS})


def _lines_of(name: str) -> Iterator[str]:
    """A line for each file of an importable package; the top level is found without being imported."""
    spec = find_spec(name)
    if spec is None:
        return
    roots = [Path(place) for place in spec.submodule_search_locations or ()]
    if not roots and spec.origin:
        yield f"{name}.py {sha256(Path(spec.origin).read_bytes()).hexdigest()}\n"
    for root in roots:
        for file in root.rglob("*"):
            path = file.relative_to(root)
            is_made = "__pycache__" in path.parts or any(part.startswith(".") for part in path.parts)
            if file.is_file() and not is_made:
                yield f"{name}/{path.as_posix()} {sha256(file.read_bytes()).hexdigest()}\n"


def _forget(package: Distribution) -> None:
    names = set(_top_levels(package))
    for module in [module for module in sys.modules if module.partition(".")[0] in names]:
        del sys.modules[module]
    importlib.invalidate_caches()
