"""How many classes label spaces have: the data plane's answers, and what a file declares in their place. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from orchestrator.sweepfile.parse.tree import Path
from orchestrator.sweepfile.problems import Complaints
from orchestrator.sweepfile.values import Dataset, LabelSpace

Definition = Mapping[str, Any]
"""The rule of a label space with its arguments, as it stands in a job's identity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The data plane's answer for one definition."""

    num_classes: int = 0
    multi_label: bool = False
    """A leaf class has several targets."""
    space: Definition = field(default_factory=dict)
    """The definition with the digests of its files."""
    kept: Sequence[int] | None = None
    """Leaf classes that have a target; None: all, or nobody knows."""
    problem: str = ""
    """Why it does not fit the data set; empty if it fits."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Where its files lie, as absolute paths or URIs."""


class CountClasses(Protocol):
    """Asks the data plane for facts that need the class table and other files.

    Where a data set is not listed, the answers have no number of classes, but the digests and places of files.
    """

    def __call__(
        self, dataset: Dataset, spaces: Sequence[Definition], files: Mapping[str, str]
    ) -> Sequence[Counted]: ...


def counted_as_declared(
    complaints: Complaints,
    name: str,
    declared: Sequence[int],
    *,
    dataset: Dataset,
    known: Sequence[int],
    read: Sequence[Counted],
) -> list[Counted]:
    """The label spaces of an entry whose data set is not there, or not listed.

    Args:
        complaints: takes what is wrong: a number that neither the rule nor the file tells.
        name: of the entry.
        declared: numbers of classes that the file gives; empty if it gives none.
        dataset: the declared one.
        known: numbers of classes that follow from the rule, 0 where they do not.
        read: what their definitions and files tell.
    """
    numbers = list(declared) if len(declared) == len(read) else list(known)
    if not all(numbers):
        what = "is not there" if dataset.missing else "is not listed"
        message = f"data set '{dataset.name}' {what}, so its classes cannot be counted; declare num_classes here"
        complaints.add(("labels", name), f"{message}, or make its files available ({dataset.uncounted})")
    return [
        replace(one, num_classes=max(2, number), multi_label=_has_many_targets(one.space))
        for number, one in zip(numbers, read, strict=True)
    ]


def num_labelled(counted: Counted, dataset: Dataset, base: LabelSpace | None) -> int | None:
    """Training samples that have a target, about; 0 if nobody knows, None if all have one.

    Exact where the data set's classes are counted; otherwise they are taken to be of one size.
    """
    if counted.kept is not None:
        sizes = dataset.class_counts or (1,) * dataset.num_classes
        return round(dataset.num_train * sum(sizes[leaf] for leaf in counted.kept) / max(1, sum(sizes)))
    is_unknown = bool(dataset.uncounted) and may_drop(counted.space)
    return 0 if is_unknown else base.num_labelled if base is not None and dataset.uncounted else None


def may_drop(space: Definition) -> bool:
    """Whether the rule, or that of a space that it is made from, may leave classes without a target."""
    return bool(left_out(space))


def left_out(space: Definition) -> Sequence[Definition]:
    """The parts of a definition that may leave classes without a target.

    Spaces of one data set whose parts are equal leave out the same classes.
    """
    own = {name: space[name] for name in ("classes", "plugin") if name in space}
    if space.get("merge", {}).get("others") == "drop":
        own |= {"merge": space["merge"], "base": space.get("base")}
    origins = (space.get("base"), space.get("random", {}).get("within"))
    return [*([own] if own else ()), *(part for origin in origins if origin is not None for part in left_out(origin))]


def check_declared(
    name: str, declared: Sequence[int] | None, spaces: Sequence[LabelSpace], complaints: Complaints
) -> None:
    """Complain where label spaces have other numbers of classes than their entry declares."""
    if declared is None or not spaces:
        return
    path: Path = ("labels", name, "num_classes")
    if len(declared) != len(spaces):
        message = f"{len(declared)} numbers for {len(spaces)} label spaces; give one for each"
        complaints.add(path, message)
        return
    for position, (space, number) in enumerate(zip(spaces, declared, strict=True)):
        if not space.num_classes:
            message = f"the number of classes of '{space.name}' follows from the clusters; remove the line"
            complaints.add((*path, position), message)
        elif space.num_classes != number:
            message = f"{number} is declared, but '{space.name}' has {space.num_classes} classes; correct one"
            complaints.add((*path, position), message)


def _has_many_targets(space: Definition) -> bool:
    """Whether a class may have several targets, according to the rule."""
    rule = space.get("wordnet", {})
    is_level: bool = rule.get("level", 0) > 0 and rule.get("paths") == "all"
    return is_level
