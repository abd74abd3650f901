"""Grids: every combination of some recipe fields' values becomes a recipe of its own, a *cell*. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, Final

from orchestrator.core.errors import SpecError
from orchestrator.sweepfile.complaints import Complaints
from orchestrator.sweepfile.model import Cell
from orchestrator.sweepfile.parse.tree import Path
from orchestrator.sweepfile.resolve_recipe import ProtocolRecipes
from orchestrator.sweepfile.suggest import did_you_mean

MAX_CELLS: Final = 1000
_UNNAMED = re.compile(r"[^A-Za-z0-9_.;+=-]")

GivenRecipe = str | Mapping[str, Any]
Grid = Mapping[str, Sequence[Any]]


def grid_cells(
    path: Path, given: GivenRecipe, grid: Grid, recipes: ProtocolRecipes, complaints: Complaints
) -> tuple[Cell, ...]:
    """The cells of the grid at ``(*path, "grid")`` over the recipe ``given`` at ``(*path, "recipe")``.

    Complains of what is wrong, at the value where it stands, and then gives fewer cells, but one at least.
    """
    if not _is_well_formed((*path, "grid"), given, grid, recipes, complaints):
        return (Cell(recipe={}),)
    cells: list[Cell] = []
    seen: set[str] = set()
    for places in product(*(range(len(values)) for values in grid.values())):
        chosen = {name: grid[name][place] for name, place in zip(grid, places, strict=True)}
        moved = {
            (*path, "recipe", name): (*path, "grid", name, place) for name, place in zip(grid, places, strict=True)
        }
        resolver, problems = recipes.elsewhere(moved)
        recipe = resolver.resolve((*path, "recipe"), {**_fields(given), **chosen})
        complaints.extend(SpecError(tuple(line for line in problems.problems if line not in seen)))
        seen.update(problems.problems)
        cells.append(Cell(name=cell_name(chosen), recipe=recipe))
    return tuple(cells)


def cell_name(chosen: Mapping[str, Any]) -> str:
    """Such as ``lr=0.4,batch_size=512``: what tables and job names call a cell."""
    return ",".join(f"{name}={_text(value)}" for name, value in chosen.items())


def _text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        return f"{value:.12g}"
    text = value if isinstance(value, str) else json.dumps(value, separators=(";", ":"))
    return _UNNAMED.sub("", text.replace(",", ";"))


def _fields(given: GivenRecipe) -> dict[str, Any]:
    return {"base": given} if isinstance(given, str) else dict(given)


def _is_well_formed(
    path: Path, given: GivenRecipe, grid: Grid, recipes: ProtocolRecipes, complaints: Complaints
) -> bool:
    problems = [*_problems(path, given, grid, recipes.known_fields(given))]
    for place, message in problems:
        complaints.add(place, message)
    return not problems


def _problems(path: Path, given: GivenRecipe, grid: Grid, known: Sequence[str]) -> Iterator[tuple[Path, str]]:
    if not grid:
        yield path, "the grid is empty; name recipe fields and the values to try (lr: [0.1, 0.4]), or remove it"
    for name, values in grid.items():
        place: Path = (*path, name)
        if known and name not in known:
            yield place, f"'{name}' is not a field of this recipe: {did_you_mean(name, known)}"
        elif isinstance(given, Mapping) and name in given:
            yield place, f"recipe says {name}: {given[name]!r} as well; keep one of the two"
        if len(values) < 2:
            held = f"the single value {values[0]!r}" if values else "no value"
            yield place, f"{held} is nothing to choose from; give two values or more, or write the field into recipe"
        for position, value in enumerate(values):
            if value in values[:position]:
                yield (*place, position), f"{value!r} stands here a second time; keep one"
    names = [cell_name({"": value}) for values in grid.values() for value in values]
    if any(len(name) > 80 for name in names):
        yield path, "values of a grid name its jobs and may have 80 signs at most; make recipes of them"
    if prod(len(values) for values in grid.values()) > MAX_CELLS:
        number = prod(len(values) for values in grid.values())
        yield path, f"the grid has {number:,} cells, each run with every backbone and seed; use {MAX_CELLS:,} or fewer"
