"""Reads a sweep.yaml and resolves it; with ``survey``, the part of the language that does I/O."""

from __future__ import annotations

import importlib.util
import os
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from orchestrator.core.errors import SpecError
from orchestrator.core.plugins import GROUPS, SIMULATIONS, InstalledPlugins
from orchestrator.core.simulation_files import file_reference
from orchestrator.core.suggest import did_you_mean
from orchestrator.sweepfile.datasets import Surveys
from orchestrator.sweepfile.labels import LabelSources
from orchestrator.sweepfile.parse.document import Changes, read_document
from orchestrator.sweepfile.parse.tree import MAX_BYTES, Tree, implicit_scalars, parse_tree, too_large
from orchestrator.sweepfile.plugin_uses import PluginSources
from orchestrator.sweepfile.recipe import Recipe, RecipeBook
from orchestrator.sweepfile.simulate import SimulationSources
from orchestrator.sweepfile.survey import (
    check_models,
    check_plugins,
    check_simulations,
    count_classes,
    read_table,
    survey_datasets,
)
from orchestrator.sweepfile.sweep import SweepSpec, resolve_sweep, validate_sweep
from orchestrator.sweepfile.values import ResolvedSweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A sweep and its texts."""

    sweep: ResolvedSweep
    canonical: str
    """Its canonical form: complete in itself."""
    text: str
    """The stored text: the file if it is complete, else the canonical form."""
    scales: tuple[str, ...]
    """Scales of the file itself, without those of included files."""
    tree: Tree
    """Places of its values."""


class _Dumper(yaml.SafeDumper):
    """Quotes texts that this language, or another YAML reader, would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401 - PyYAML's signature
        return True


for _tag, _pattern, _first in implicit_scalars():
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def load_sweep(reference: str, overrides: Sequence[str] = (), *, scale: str = "") -> tuple[ResolvedSweep, str]:
    """Read the file at a path, or the shipped sweep of that name; returns the sweep and the text to keep with it.

    Args:
        reference: path or name.
        overrides: arguments of ``--set``: ``path=value``.
        scale: block of the file that makes it small (``tiny``); empty: as it is.

    Raises:
        SpecError: no such file or shipped sweep, or the file is wrong.
    """
    loaded = load_all(reference, Changes(overrides=overrides, scale=scale))
    return loaded.sweep, loaded.text


def load_all(reference: str, changes: Changes, *, code_below: Path | None = None) -> Loaded:
    """As ``load_sweep``, with both texts.

    Args:
        reference: path or name.
        changes: from outside the file.
        code_below: the folder in which plain Python files of simulations must lie, for a text that the user has not
            written: they are imported. None = anywhere.
    """
    path = find_sweep(reference)
    shown = _shown_path(path)
    text, home = read_text(str(path), shown), str(path.resolve().parent)
    document = read_document(
        text,
        shown,
        changes=changes,
        environment=os.environ,
        read_text=lambda name: read_text(name, name),
        folder=str(Path.cwd()),
        home=home,
    )
    tree = document.tree
    spec = validate_sweep(tree)
    surveys = survey_datasets(spec, tree)
    labels = LabelSources(count=count_classes, read_table=read_table, kmeans=_kmeans())
    installed = {group: InstalledPlugins(group) for group in GROUPS}
    sweep = resolve_sweep(
        spec,
        tree,
        shipped_recipes(),
        surveys,
        plugins=PluginSources(installed=installed, check=check_plugins),
        labels=labels,
        check_models=check_models,
        simulations=SimulationSources(
            check=check_simulations,
            plugins=installed[SIMULATIONS],
            refusal=None if code_below is None else partial(_code_outside, home=home, folder=code_below.resolve()),
            folder=home,
        ),
    )
    canonical = canonical_text(document.portable, sweep.recipes)
    kept = text if document.is_own_text else canonical
    return Loaded(sweep=sweep, canonical=canonical, text=kept, scales=document.scales, tree=tree)


def _code_outside(run: str, *, home: str, folder: Path) -> str:
    reference = file_reference(run)
    path = Path(os.path.realpath(Path(home, reference[0]))) if reference is not None else folder
    if path.is_relative_to(folder):
        return ""
    return (
        f"{path} is outside of the current directory, and the store alone names it: its code is not run here. Read the "
        "file; then run this command in a directory above it, or copy it into your project and submit from there"
    )


def canonical_text(document: Mapping[str, Any], recipes: Mapping[str, Mapping[str, Any]]) -> str:
    """The canonical form of a sweep.yaml: complete in itself, without includes, variables, overrides and scales.

    Args:
        document: as ``Document.portable``: ``${env:NAME}`` stays, so that nothing of a machine gets into it.
        recipes: those that the sweep names, without bases; they are written out, whatever later releases ship.
    """
    order = [field.alias or name for name, field in SweepSpec.model_fields.items()]
    complete = {**document, "recipes": {name: dict(recipes[name]) for name in sorted(recipes)}}
    if not recipes:
        del complete["recipes"]
    sections = {name: complete[name] for name in order if name in complete}
    return yaml.dump(sections, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def parse_sweep(text: str, file: str, recipes: RecipeBook, surveys: Surveys | None = None) -> ResolvedSweep:
    """Resolve the text of a sweep.yaml; ``file`` is its name in errors, ``surveys`` what external data sets are. Pure.

    Raises:
        SpecError: every problem found, one line each.
    """
    tree = read_document(text, file).tree
    return resolve_sweep(validate_sweep(tree), tree, recipes, surveys)


def read_text(path: str, shown: str) -> str:
    """The text of a file, called ``shown`` in errors. Raises ``SpecError``: it is not there or no text of that size."""
    found = Path(path)
    if found.exists() and not found.is_file() and not found.is_dir():
        # Opening a pipe that nobody writes into would wait for ever.
        raise SpecError((f"{shown}:1:1: cannot be read: it is a pipe or a device; name a file",))
    try:
        with found.open("rb") as file:
            content = file.read(MAX_BYTES + 1)  # whatever it is: a device has no size
        return content.decode("utf-8-sig" if content.startswith(BOM_UTF8) else "utf-8")
    except UnicodeDecodeError as error:
        if len(content) > MAX_BYTES:
            raise SpecError((f"{shown}:1:1: {too_large()}",)) from error
        before = content[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        place = f"{shown}:{line}:{column}"
        raise SpecError(
            (f"{place}: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8",)
        ) from error
    except OSError as error:
        raise SpecError((f"{shown}:1:1: cannot be read: {error.strerror}; check the path",)) from error


def find_sweep(reference: str) -> Path:
    """A path as it is; otherwise the shipped sweep of that name. Raises ``SpecError``."""
    path = Path(reference)
    if path.is_file():
        return path
    shipped = {file.stem: file for file in sorted(_shipped_folder().glob("*.yaml"))}
    if reference in shipped:
        return shipped[reference]
    what = "no such file" if path.suffix or "/" in reference else "neither a file nor a shipped sweep"
    if path.is_dir():
        what = "a directory; name the file of a sweep in it"
    raise SpecError((f"{reference}: {what}; {did_you_mean(reference, shipped, they_are='shipped sweeps')}",))


class ShippedRecipes(Mapping[str, Recipe]):
    """The recipes of the package by name; each is read when it is asked for."""

    def __init__(self) -> None:
        self._files = {file.stem: file for file in sorted((_shipped_folder() / "recipes").glob("*.yaml"))}
        self._read: dict[str, Recipe] = {}

    def __getitem__(self, name: str) -> Recipe:
        if name not in self._read:
            file = self._files[name]
            self._read[name] = parse_tree(file.read_text(encoding="utf-8"), str(file)).value
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def shipped_recipes() -> RecipeBook:
    """Fields of every shipped recipe, by name."""
    return ShippedRecipes()


def _kmeans() -> str:
    """The default library of k-means; found without importing it."""
    return "faiss" if importlib.util.find_spec("faiss") else "scikit-learn"


def _shipped_folder() -> Path:
    """Folder ``workloads/sweeps``, found without importing the data plane."""
    found = importlib.util.find_spec("workloads")
    locations = list(found.submodule_search_locations or ()) if found else []
    return Path(locations[0]) / "sweeps" if locations else Path("/nonexistent")


def _shown_path(path: Path) -> str:
    """Relative to the working directory where that is shorter."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
