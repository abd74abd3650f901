"""From an entry of ``transfer:`` to a resolved transfer. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.contract import JobKind
from orchestrator.spec.complaints import Complaints
from orchestrator.spec.model import LabelSpace, Transfer
from orchestrator.spec.resolve_recipe import RecipeResolver
from orchestrator.spec.schema_transfer import TransferSpec
from orchestrator.spec.suggest import did_you_mean
from orchestrator.spec.tree import Path


def resolve_transfer(
    position: int,
    entry: TransferSpec,
    labels: Mapping[str, LabelSpace],
    recipes: RecipeResolver,
    complaints: Complaints,
) -> Transfer:
    """The transfer of the entry at a position of the list; complains of what is wrong and goes on."""
    path: Path = ("transfer", position)
    if entry.target not in labels:
        hint = did_you_mean(entry.target, labels)
        complaints.add((*path, "target"), f"'{entry.target}' is not a label space of this sweep: {hint}")
    complaints.refuse_repeats((*path, "seeds"), [str(seed) for seed in entry.seeds])
    recipe = entry.recipe if entry.recipe is not None else f"default-{entry.protocol}"
    return Transfer(
        name=entry.name,
        target=entry.target,
        protocol=JobKind(entry.protocol),
        recipe=recipes.resolve((*path, "recipe"), recipe, entry.protocol),
        seeds=tuple(entry.seeds),
        subset=entry.subset.resolved() if entry.subset else {},
    )


def check_targets(transfer: Sequence[Transfer], labels: Mapping[str, LabelSpace], complaints: Complaints) -> None:
    """Complain of targets that no validation sample can tell anything about."""
    for position, item in enumerate(transfer):
        space = labels.get(item.target)
        if space is not None and space.space.keys() & {"random", "split"}:
            message = f"'{item.target}' are random ids: nothing can be learnt of them for validation samples"
            complaints.add(("transfer", position, "target"), message + "; choose a level of a hierarchy")
