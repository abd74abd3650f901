"""`transfer:`: the schema of an entry, and the transfer that it resolves to, with the cells of its grid. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from math import prod
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from orchestrator.core.errors import SpecError
from orchestrator.core.job_kinds import JobKind
from orchestrator.core.suggest import did_you_mean
from orchestrator.sweepfile.fields import Count, Name, Seeds, Strict
from orchestrator.sweepfile.parse.tree import Path, dotted
from orchestrator.sweepfile.pretrain import is_in_doubt, shown_block
from orchestrator.sweepfile.problems import Complaints
from orchestrator.sweepfile.recipe import GivenRecipe, ProtocolRecipes, RecipeResolver, given_fields
from orchestrator.sweepfile.search import (
    SearchedRecipe,
    SearchSpec,
    check_grace,
    judging_probe,
    label_search,
    pretrain_search,
    problems_of_values,
    resolve_search,
)
from orchestrator.sweepfile.subset import SubsetSpec
from orchestrator.sweepfile.values import Cell, Dataset, LabelSpace, Pretrain, Search, Transfer

MAX_CELLS: Final = 1000
_UNNAMED = re.compile(r"[^A-Za-z0-9_.+=-]")
"""Signs that a cell's name leaves out: it is part of names of objects."""
Grid = Mapping[str, Sequence[Any]]
SELECT_HOLDOUT: Final = 0.1
"""Default share of the training samples on which a grid is selected."""


class TransferSpec(Strict):
    """One measurement of every backbone."""

    name: Name = Field(description="What tables and job names call it.")
    target: str = Field(
        description="Label space to transfer to, by its path (levels/depth1); of any data set of the sweep."
    )
    protocol: Literal["finetune", "probe", "knn"] = Field(
        description="Train everything, a linear head on a frozen backbone, or nothing (nearest neighbours)."
    )
    pretrain: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="Blocks whose backbones are measured, by name or glob; default: all."
    )
    labels: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="Label spaces whose backbones are measured, by path or glob (levels/*); default: all."
    )
    recipe: str | dict[str, Any] | None = Field(
        None, description="As in pretrain; default: the protocol's shipped one. probe: features: cached reads features."
    )
    seeds: Seeds = Field([0], description="Transfer seeds.")
    subset: SubsetSpec | None = Field(None, description="Part of the training split to train on; default: all.")
    fractions: Annotated[list[Annotated[float, Field(gt=0, le=1)]], Field(min_length=1)] | None = Field(
        None,
        description="Label fractions, one job each: nested, stratified parts of the training split in (0, 1], drawn by "
        "the transfer seed, or by subset.seed.",
    )
    from_checkpoints: Annotated[list[Count], Field(min_length=1)] | None = Field(
        None,
        description="Epochs of the pretraining to measure: kept ones (pretrain.checkpoints.keep.epochs) or its last; "
        "default: the final weights.",
    )
    grid: dict[str, list[Any]] | None = Field(
        None, description="Recipe fields and the values to try; every combination is a cell, run with all seeds."
    )
    search: SearchSpec | None = Field(
        None, description="Trials of recipe values or label spaces; the best one is used. In place of a grid."
    )
    select_on: Literal["train", "val"] | None = Field(
        None,
        description="Where a grid's cell, or a search's trial, is chosen, per label space: train (default): on a keyed "
        "tenth of the training samples, which the runs do not train on (backbones pretrained on the same data set "
        "did); val: on the validation split itself, and labelled so.",
    )
    baselines: Annotated[list[Literal["one_pass", "retrain"]], Field(min_length=1)] | None = Field(
        None,
        description="one_pass: train on the target's own labels by the pretraining's recipe; retrain: the same, then "
        "this transfer from it.",
    )


# ---------------------------------------------------------------------------------------------------------------- grids


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
        recipe = resolver.resolve((*path, "recipe"), {**given_fields(given), **chosen})
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
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return _UNNAMED.sub("", text.replace(",", "_"))  # a comma would begin the next field


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
        elif name == "select_holdout":
            yield place, "what is held out is what cells are selected by, the same for all; write it into recipe"
        yield from problems_of_values(place, values)
    names = [cell_name({"": value}) for values in grid.values() for value in values]
    if any(len(name) > 80 for name in names):
        yield path, "values of a grid name its jobs and may have 80 signs at most; make recipes of them"
    if prod(len(values) for values in grid.values()) > MAX_CELLS:
        number = prod(len(values) for values in grid.values())
        yield path, f"the grid has {number:,} cells, each run with every backbone and seed; use {MAX_CELLS:,} or fewer"


# -------------------------------------------------------------------------------------------------- what it resolves to


def resolve_transfer(
    position: int,
    entry: TransferSpec,
    labels: Mapping[str, LabelSpace],
    recipes: RecipeResolver,
    complaints: Complaints,
    *,
    datasets: Mapping[str, Dataset],
    pretrains: Sequence[Pretrain],
) -> Transfer:
    """The transfer of the entry at a position of the list; complains about errors and continues.

    Args:
        position: of the entry.
        entry: as it stands in the file.
        labels: the sweep's label spaces.
        recipes: resolve recipes.
        complaints: collects errors.
        datasets: the sweep's data sets.
        pretrains: the sweep's blocks, resolved.
    """
    path: Path = ("transfer", position)
    if entry.target not in labels and not complaints.doubts(("labels", entry.target.partition("/")[0])):
        hint = did_you_mean(entry.target, labels)
        complaints.add((*path, "target"), f"'{entry.target}' is not a label space of this sweep: {hint}")
    complaints.refuse_repeats((*path, "seeds"), [str(seed) for seed in entry.seeds])
    _check_fractions(path, entry, complaints)
    _check_holdout(path, entry, recipes, complaints)
    measured = measured_blocks((*path, "pretrain"), entry.pretrain, pretrains, complaints)
    check_epochs((*path, "from_checkpoints"), entry.from_checkpoints or (), measured, complaints)
    target = labels.get(entry.target)
    search, cells = _search_and_cells(
        path, entry, recipes, complaints, measured=measured, target=target, datasets=datasets
    )
    return Transfer(
        name=entry.name,
        target=entry.target,
        protocol=JobKind(entry.protocol),
        cells=cells,
        search=search,
        seeds=tuple(entry.seeds),
        subset=entry.subset.resolved() if entry.subset else {},
        fractions=tuple(entry.fractions or ()),
        subset_seed=entry.subset.given_seed if entry.subset else None,
        checkpoints=tuple(entry.from_checkpoints or ()),
        select_on=(entry.select_on or "train") if entry.grid is not None or search is not None else "",
        baselines=tuple(dict.fromkeys(entry.baselines or ())),
        pretrains=tuple(pretrain.name for pretrain in measured),
        labels=chosen_labels((*path, "labels"), entry.labels, measured, complaints),
    )


def with_baselines(pretrains: Sequence[Pretrain], transfer: Sequence[Transfer]) -> dict[str, tuple[str, ...]]:
    """By block, the label spaces that it pretrains for baselines alone: its own, and those of blocks that start from it
    on the same label space.
    """
    blocks = {pretrain.name: pretrain for pretrain in pretrains}
    found: dict[str, dict[str, None]] = {name: {} for name in blocks}
    for pretrain in pretrains:
        wanted = [item.target for item in transfer if item.baselines and pretrain.name in item.pretrains]
        block: Pretrain | None = pretrain
        passed: set[str] = set()
        while block is not None and block.name not in passed:  # a circle is complained of elsewhere
            passed.add(block.name)
            wanted = [target for target in wanted if target not in block.labels]
            found[block.name].update(dict.fromkeys(wanted))
            origin = block.initial_from
            block = blocks.get(origin.pretrain) if origin is not None and not origin.labels else None
    return {name: tuple(targets) for name, targets in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeUse:
    """A recipe that trains on label spaces; ``path`` is the block or transfer that names it."""

    path: Path
    recipe: Mapping[str, Any]
    subset: Mapping[str, Any]
    labels: Sequence[str]


def uses_of(position: int, transfer: Transfer) -> Iterator[RecipeUse]:
    """The trainings of a transfer: each of its recipes, on its smallest part of the training split."""
    smallest = {"fraction": min(transfer.fractions)} if transfer.fractions else {}
    for recipe in transfer.recipes:
        subset = {**transfer.subset, **smallest}
        yield RecipeUse(path=("transfer", position), recipe=recipe, subset=subset, labels=(transfer.target,))


def check_targets(transfer: Sequence[Transfer], labels: Mapping[str, LabelSpace], complaints: Complaints) -> None:
    """Complain about targets that cannot be evaluated on validation samples."""
    for position, item in enumerate(transfer):
        space = labels.get(item.target)
        if space is not None and space.space.keys() & {"random", "split"}:
            message = f"'{item.target}' are random ids, and those of validation samples cannot be predicted"
            complaints.add(("transfer", position, "target"), message + "; choose a level of a hierarchy")


def _search_and_cells(
    path: Path,
    entry: TransferSpec,
    recipes: RecipeResolver,
    complaints: Complaints,
    *,
    measured: Sequence[Pretrain],
    target: LabelSpace | None,
    datasets: Mapping[str, Dataset],
) -> tuple[Search | None, tuple[Cell, ...]]:
    """The search or grid that chooses values, and the recipes to run."""
    spec, where = entry.search, (*path, "search")
    if spec is None:
        return None, _cells(path, entry, recipes, complaints)
    if entry.grid is not None:
        message = "there is a grid as well; a search and a grid exclude each other, keep one"
        complaints.add(where, message)
    given: GivenRecipe = entry.recipe if entry.recipe is not None else f"default-{entry.protocol}"
    if spec.over == "recipe":
        holds_out = {"select_holdout": SELECT_HOLDOUT} if entry.select_on != "val" else {}
        searched = SearchedRecipe(path=where, spec=spec, given=given, recipe_path=(*path, "recipe"))
        search, recipe = resolve_search(searched, recipes.of(entry.protocol), complaints, holds_out=holds_out)
        if "select_holdout" in recipe:
            search = replace(search, holds_out={})
        check_grace(search, recipe, where, complaints)
        return search, (Cell(recipe=recipe),)
    recipe = recipes.resolve((*path, "recipe"), given, entry.protocol)
    probe = judging_probe(recipe, target, datasets)
    if spec.over == "pretrain":
        search = pretrain_search(where, spec, measured, recipes.of(""), complaints, probe=probe)
        return search, (Cell(recipe=recipe),)
    search = label_search(where, spec, complaints, probe)
    for block in measured:
        check_grace(search, block.recipe, where, complaints)
    return search, (Cell(recipe=recipe),)


def _cells(path: Path, entry: TransferSpec, recipes: RecipeResolver, complaints: Complaints) -> tuple[Cell, ...]:
    given = entry.recipe if entry.recipe is not None else f"default-{entry.protocol}"
    if entry.grid is None:
        if entry.select_on is not None:
            message = "it chooses a cell of a grid, and there is no 'grid' here; add one or remove select_on"
            complaints.add((*path, "select_on"), message)
        return (Cell(recipe=recipes.resolve((*path, "recipe"), given, entry.protocol)),)
    cells = grid_cells(path, given, entry.grid, recipes.of(entry.protocol), complaints)
    return cells if entry.select_on == "val" else tuple(_held_out(cell) for cell in cells)


def _held_out(cell: Cell) -> Cell:
    """The cell with samples to select it by, unless it has some."""
    recipe: Mapping[str, Any] = {"select_holdout": SELECT_HOLDOUT, **cell.recipe} if cell.recipe else {}
    return Cell(name=cell.name, recipe=recipe)


def _check_fractions(path: Path, entry: TransferSpec, complaints: Complaints) -> None:
    complaints.refuse_repeats((*path, "fractions"), [f"{fraction:g}" for fraction in entry.fractions or ()])
    if entry.fractions and entry.subset is not None and "fraction" in entry.subset.model_fields_set:
        message = "'fractions' says which shares of the training split are used; keep one of the two"
        complaints.add((*path, "subset", "fraction"), message)


def _check_holdout(path: Path, entry: TransferSpec, recipes: RecipeResolver, complaints: Complaints) -> None:
    chooses = entry.grid is not None or (entry.search is not None and entry.search.over == "recipe")
    if not chooses or entry.select_on == "val" or entry.recipe is None:
        return
    if (recipes.written_fields(entry.recipe) or {}).get("select_holdout", SELECT_HOLDOUT) == 0:
        message = f"0 holds no samples out to choose by; remove it (default: {SELECT_HOLDOUT}), or write select_on: val"
        complaints.add((*path, "recipe", "select_holdout"), message)


def measured_blocks(
    path: Path, wanted: Sequence[str] | None, pretrains: Sequence[Pretrain], complaints: Complaints
) -> list[Pretrain]:
    """The blocks that a transfer names; all of them where it names none."""
    if wanted is None:
        return list(pretrains)
    names = [pretrain.name for pretrain in pretrains if pretrain.name]
    found: dict[str, Pretrain] = {}
    for position, glob in enumerate(wanted):
        # The name of a block with factors means all of its cells.
        matches = {
            block.name: block
            for block in pretrains
            if block.name and any(fnmatchcase(name, glob) for name in (block.name, block.cell_of))
        }
        if not matches:
            hint = did_you_mean(glob, names) if names else "the only block has no name; remove this"
            complaints.add((*path, position), f"'{glob}' matches no block of pretrain: {hint}")
        found.update(matches)
    return list(found.values())


def chosen_labels(
    path: Path, wanted: Sequence[str] | None, measured: Sequence[Pretrain], complaints: Complaints
) -> tuple[str, ...] | None:
    """The label spaces that a transfer names, of those that its blocks pretrain; None where it names none."""
    if wanted is None:
        return None
    known = dict.fromkeys(space for pretrain in measured for space in pretrain.labels)
    found: dict[str, None] = {}
    for position, glob in enumerate(wanted):
        matches = [space for space in known if fnmatchcase(space, glob)]
        if not matches and known and not is_in_doubt(glob, measured, complaints):
            hint = did_you_mean(glob, known)
            complaints.add((*path, position), f"'{glob}' matches no label space that is pretrained: {hint}")
        found.update(dict.fromkeys(matches))
    return tuple(found)


def check_epochs(path: Path, epochs: Sequence[int], measured: Sequence[Pretrain], complaints: Complaints) -> None:
    """Complain of epochs of which a block keeps no weights."""
    complaints.refuse_repeats(path, [str(epoch) for epoch in epochs])
    for position, epoch in enumerate(epochs):
        for pretrain in measured:
            last, kept = pretrain.recipe.get("epochs", epoch), pretrain.keep.get("epochs", ())
            if epoch in kept or epoch == last:
                continue
            block = shown_block(pretrain.name, complaints.tree)
            if epoch > last:
                message = f"epoch {epoch} never ends: {block} trains {last:g} epochs; name epochs up to that"
            else:
                origin = complaints.tree.origin_of(pretrain.name)
                keeping = dotted((*origin, "checkpoints", "keep", "epochs"))
                message = f"{block} keeps no weights of epoch {epoch}; add it: {keeping}: {sorted({*kept, epoch})}"
            complaints.add((*path, position), message, pretrain.name)
