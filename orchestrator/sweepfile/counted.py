"""How many classes label spaces have: as the data plane counts them, and as the file declares them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.sweepfile.complaints import Complaints
from orchestrator.sweepfile.model import Dataset, LabelSpace
from orchestrator.sweepfile.parse.tree import Path
from orchestrator.sweepfile.schema_labels import LabelEntry

Definition = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What the data plane says of one definition."""

    num_classes: int = 0
    multi_label: bool = False
    """A leaf class has several targets."""
    space: Definition = field(default_factory=dict)
    """The definition with the digests of its files."""
    problem: str = ""
    """Why it does not fit the data set; empty if it does."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Where its files lie, as absolute paths or URIs."""


def counted_as_declared(
    complaints: Complaints,
    name: str,
    entry: LabelEntry,
    *,
    dataset: Dataset,
    known: Sequence[int],
    spaces: Sequence[Definition],
) -> list[Counted]:
    """The label spaces of an entry whose data set is not there.

    Args:
        complaints: takes what is wrong: a number that neither the rule nor the file tells.
        name: of the entry.
        entry: what the file says.
        dataset: the declared one.
        known: numbers of classes that follow from the rule, 0 where they do not.
        spaces: their definitions.
    """
    declared = entry.num_classes or ()
    numbers = list(declared) if len(declared) == len(spaces) else list(known)
    if not all(numbers):
        what = "is not there" if dataset.missing else "is not listed"
        message = f"data set '{dataset.name}' {what}, so its classes cannot be counted; declare num_classes here"
        complaints.add(("labels", name), f"{message}, or have it there ({dataset.uncounted})")
    return [
        Counted(num_classes=max(2, number), space=space, multi_label=_has_many_targets(space))
        for number, space in zip(numbers, spaces, strict=True)
    ]


def check_declared(name: str, entry: LabelEntry, spaces: Sequence[LabelSpace], complaints: Complaints) -> None:
    """Complain where label spaces have other numbers of classes than their entry declares."""
    if entry.num_classes is None or not spaces:
        return
    path: Path = ("labels", name, "num_classes")
    if len(entry.num_classes) != len(spaces):
        message = f"{len(entry.num_classes)} numbers for {len(spaces)} label spaces; give one for each"
        complaints.add(path, message)
        return
    for position, (space, number) in enumerate(zip(spaces, entry.num_classes, strict=True)):
        if not space.num_classes:
            message = f"the number of classes of '{space.name}' follows from the clusters; remove the line"
            complaints.add((*path, position), message)
        elif space.num_classes != number:
            message = f"{number} is declared, but '{space.name}' has {space.num_classes} classes; correct one"
            complaints.add((*path, position), message)


def _has_many_targets(space: Definition) -> bool:
    """Whether a class may have several targets, as far as the rule tells."""
    rule = space.get("wordnet", {})
    is_level: bool = rule.get("level", 0) > 0 and rule.get("paths") == "all"
    return is_level
