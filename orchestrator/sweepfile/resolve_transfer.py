"""From an entry of ``transfer:`` to a resolved transfer. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final

from orchestrator.core.contract import JobKind
from orchestrator.sweepfile.complaints import Complaints
from orchestrator.sweepfile.grids import GivenRecipe, grid_cells
from orchestrator.sweepfile.model import Cell, LabelSpace, Pretrain, Search, Transfer
from orchestrator.sweepfile.parse.tree import Path
from orchestrator.sweepfile.resolve_recipe import RecipeResolver
from orchestrator.sweepfile.resolve_search import (
    Asked,
    judging_probe,
    label_search,
    pretrain_search,
    resolve_search,
    with_grace,
)
from orchestrator.sweepfile.schema_transfer import TransferSpec
from orchestrator.sweepfile.suggest import did_you_mean

SELECT_HOLDOUT: Final = 0.1
"""Of the training samples, where a grid is selected on them and its recipe says nothing else."""
_KEEPING: Final = "pretrain.checkpoints.keep.epochs"


def resolve_transfer(
    position: int,
    entry: TransferSpec,
    labels: Mapping[str, LabelSpace],
    recipes: RecipeResolver,
    complaints: Complaints,
    *,
    pretrains: Sequence[Pretrain],
) -> Transfer:
    """The transfer of the entry at a position of the list; complains of what is wrong and goes on.

    Args:
        position: of the entry.
        entry: as it stands in the file.
        labels: the sweep's label spaces.
        recipes: what recipes are resolved by.
        complaints: collects what is wrong.
        pretrains: the sweep's blocks, resolved.
    """
    path: Path = ("transfer", position)
    if entry.target not in labels and not complaints.doubts(("labels", entry.target.partition("/")[0])):
        hint = did_you_mean(entry.target, labels)
        complaints.add((*path, "target"), f"'{entry.target}' is not a label space of this sweep: {hint}")
    complaints.refuse_repeats((*path, "seeds"), [str(seed) for seed in entry.seeds])
    _check_fractions(path, entry, complaints)
    measured = _measured((*path, "pretrain"), entry.pretrain, pretrains, complaints)
    _check_epochs((*path, "from_checkpoints"), entry.from_checkpoints or (), measured, complaints)
    search, cells = _search_and_cells(
        path, entry, recipes, complaints, measured=measured, target=labels.get(entry.target)
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
        subset_seed=_subset_seed(entry),
        checkpoints=tuple(entry.from_checkpoints or ()),
        select_on=(entry.select_on or "train") if entry.grid is not None or search is not None else "",
        baselines=tuple(dict.fromkeys(entry.baselines or ())),
        pretrains=tuple(pretrain.name for pretrain in measured),
        labels=_chosen_labels((*path, "labels"), entry.labels, measured, complaints),
    )


def with_baselines(pretrains: Sequence[Pretrain], transfer: Sequence[Transfer]) -> dict[str, tuple[str, ...]]:
    """By block, the label spaces that it pretrains for the baselines of transfers alone."""
    return {
        pretrain.name: tuple(
            dict.fromkeys(
                item.target
                for item in transfer
                if item.baselines and pretrain.name in item.pretrains and item.target not in pretrain.labels
            )
        )
        for pretrain in pretrains
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A recipe that trains on label spaces; ``path`` is the block or transfer that says so."""

    path: Path
    recipe: Mapping[str, Any]
    subset: Mapping[str, Any]
    labels: Sequence[str]


def uses_of(position: int, transfer: Transfer) -> Iterator[Use]:
    """What a transfer trains: each of its recipes, on its smallest part of the training split."""
    smallest = {"fraction": min(transfer.fractions)} if transfer.fractions else {}
    for recipe in transfer.recipes:
        subset = {**transfer.subset, **smallest}
        yield Use(path=("transfer", position), recipe=recipe, subset=subset, labels=(transfer.target,))


def check_targets(transfer: Sequence[Transfer], labels: Mapping[str, LabelSpace], complaints: Complaints) -> None:
    """Complain of targets that no validation sample can tell anything about."""
    for position, item in enumerate(transfer):
        space = labels.get(item.target)
        if space is not None and space.space.keys() & {"random", "split"}:
            message = f"'{item.target}' are random ids: nothing can be learnt of them for validation samples"
            complaints.add(("transfer", position, "target"), message + "; choose a level of a hierarchy")


def _search_and_cells(
    path: Path,
    entry: TransferSpec,
    recipes: RecipeResolver,
    complaints: Complaints,
    *,
    measured: Sequence[Pretrain],
    target: LabelSpace | None,
) -> tuple[Search | None, tuple[Cell, ...]]:
    """What chooses values, and the recipes to run."""
    spec, where = entry.search, (*path, "search")
    if spec is None:
        return None, _cells(path, entry, recipes, complaints)
    if entry.grid is not None:
        message = "there is a grid as well, and both choose values; keep one of the two"
        complaints.add(where, message)
    given: GivenRecipe = entry.recipe if entry.recipe is not None else f"default-{entry.protocol}"
    if spec.over == "recipe":
        holds_out = {"select_holdout": SELECT_HOLDOUT} if entry.select_on != "val" else {}
        asked = Asked(path=where, spec=spec, given=given, recipe_path=(*path, "recipe"))
        search, recipe = resolve_search(asked, recipes.of(entry.protocol), complaints, holds_out=holds_out)
        if "select_holdout" in recipe:
            search = replace(search, holds_out={})
        return with_grace(search, recipe, where, complaints), (Cell(recipe=recipe),)
    recipe = recipes.resolve((*path, "recipe"), given, entry.protocol)
    probe = judging_probe(recipe, target)
    if spec.over == "pretrain":
        search = pretrain_search(where, spec, measured, recipes.of(""), complaints, probe=probe)
        return search, (Cell(recipe=recipe),)
    search = label_search(where, spec, complaints, probe)
    for block in measured:
        search = with_grace(search, block.recipe, where, complaints)
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


def _subset_seed(entry: TransferSpec) -> int | None:
    is_given = entry.subset is not None and "seed" in entry.subset.model_fields_set
    return entry.subset.seed if entry.subset is not None and is_given else None


def _measured(
    path: Path, wanted: Sequence[str] | None, pretrains: Sequence[Pretrain], complaints: Complaints
) -> list[Pretrain]:
    """The blocks that a transfer names; all of them where it names none."""
    if wanted is None:
        return list(pretrains)
    names = [pretrain.name for pretrain in pretrains if pretrain.name]
    found: dict[str, Pretrain] = {}
    for position, glob in enumerate(wanted):
        matches = {block.name: block for block in pretrains if block.name and fnmatchcase(block.name, glob)}
        if not matches:
            hint = did_you_mean(glob, names) if names else "the only block has no name; remove this"
            complaints.add((*path, position), f"'{glob}' matches no block of pretrain: {hint}")
        found.update(matches)
    return list(found.values())


def _chosen_labels(
    path: Path, wanted: Sequence[str] | None, measured: Sequence[Pretrain], complaints: Complaints
) -> tuple[str, ...] | None:
    """The label spaces that a transfer names, of those that its blocks pretrain; None where it names none."""
    if wanted is None:
        return None
    known = dict.fromkeys(space for pretrain in measured for space in pretrain.labels)
    found: dict[str, None] = {}
    for position, glob in enumerate(wanted):
        matches = [space for space in known if fnmatchcase(space, glob)]
        if not matches and known and not complaints.doubts(("labels", glob.partition("/")[0])):
            hint = did_you_mean(glob, known)
            complaints.add((*path, position), f"'{glob}' matches no label space that is pretrained: {hint}")
        found.update(dict.fromkeys(matches))
    return tuple(found)


def _check_epochs(path: Path, epochs: Sequence[int], measured: Sequence[Pretrain], complaints: Complaints) -> None:
    complaints.refuse_repeats(path, [str(epoch) for epoch in epochs])
    for position, epoch in enumerate(epochs):
        for pretrain in measured:
            last, kept = pretrain.recipe.get("epochs", epoch), pretrain.keep.get("epochs", ())
            if epoch in kept or epoch == last:
                continue
            block = f"block '{pretrain.name}'" if pretrain.name else "the pretraining"
            keeping = _KEEPING.replace("pretrain", f"pretrain.{pretrain.name}") if pretrain.name else _KEEPING
            if epoch > last:
                message = f"epoch {epoch} never ends: {block} trains {last:g} epochs; name epochs up to that"
            else:
                message = f"{block} keeps no weights of epoch {epoch}; add it: {keeping}: {sorted({*kept, epoch})}"
            complaints.add((*path, position), message)
