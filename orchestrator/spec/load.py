"""Reads a sweep.yaml and resolves it; with ``survey`` and ``count_classes``, the part of the language that does I/O."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from orchestrator.errors import SpecError
from orchestrator.spec.count_classes import count_classes, read_table
from orchestrator.spec.model import Sweep
from orchestrator.spec.plugins import LABEL_SPACES, OBJECTIVES, InstalledPlugins
from orchestrator.spec.problems import validate
from orchestrator.spec.resolve import resolve_sweep
from orchestrator.spec.resolve_labels import LabelSources
from orchestrator.spec.resolve_recipe import RecipeBook
from orchestrator.spec.schema import SweepSpec
from orchestrator.spec.suggest import did_you_mean
from orchestrator.spec.survey import Surveys, survey_datasets
from orchestrator.spec.tree import parse_tree


def load_sweep(reference: str) -> tuple[Sweep, str]:
    """Read the file at a path, or the shipped sweep of that name; returns the sweep and the file's text.

    Raises:
        SpecError: no such file or shipped sweep, or the file is wrong.
    """
    path = find_sweep(reference)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(
            (f"{path}:1:1: not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8",)
        ) from error
    except OSError as error:
        raise SpecError((f"{path}:1:1: cannot be read: {error.strerror}",)) from error
    tree = parse_tree(text, _shown_path(path))
    spec = validate(SweepSpec, tree.value, tree)
    surveys, objectives = survey_datasets(spec, tree), InstalledPlugins(OBJECTIVES)
    labels = LabelSources(
        count=count_classes, read_table=read_table, plugins=InstalledPlugins(LABEL_SPACES), kmeans=_kmeans()
    )
    return resolve_sweep(spec, tree, shipped_recipes(), surveys, objectives=objectives, labels=labels), text


def parse_sweep(text: str, file: str, recipes: RecipeBook, surveys: Surveys | None = None) -> Sweep:
    """Resolve the text of a sweep.yaml; ``file`` is its name in errors, ``surveys`` what external data sets are. Pure.

    Raises:
        SpecError: every problem found, one line each.
    """
    tree = parse_tree(text, file)
    return resolve_sweep(validate(SweepSpec, tree.value, tree), tree, recipes, surveys)


def find_sweep(reference: str) -> Path:
    """A path as it is; otherwise the shipped sweep of that name. Raises ``SpecError``."""
    path = Path(reference)
    if path.is_file():
        return path
    shipped = {file.stem: file for file in sorted(_shipped_folder().glob("*.yaml"))}
    if reference in shipped:
        return shipped[reference]
    what = "no such file" if path.suffix or "/" in reference else "neither a file nor a shipped sweep"
    raise SpecError((f"{reference}: {what}; shipped sweeps: {did_you_mean(reference, shipped)}",))


def shipped_recipes() -> RecipeBook:
    """Fields of every shipped recipe, by name."""
    book: dict[str, dict[str, Any]] = {}
    for file in sorted((_shipped_folder() / "recipes").glob("*.yaml")):
        book[file.stem] = parse_tree(file.read_text(encoding="utf-8"), str(file)).value
    return book


def _kmeans() -> str:
    """The library of k-means where nothing is said; found without importing it."""
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
