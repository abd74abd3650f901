"""From the schema of label spaces to their resolved form. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.spec.complaints import Complaints
from orchestrator.spec.model import Dataset, LabelSpace
from orchestrator.spec.schema_labels import LabelEntry
from orchestrator.spec.suggest import did_you_mean
from orchestrator.spec.tree import Path


def resolve_label_spaces(
    name: str, entry: LabelEntry, datasets: Mapping[str, Dataset], complaints: Complaints
) -> Iterator[LabelSpace]:
    """The label spaces of one entry of ``labels``."""
    path: Path = ("labels", name)
    dataset = datasets.get(entry.dataset)
    if dataset is None:
        hint = did_you_mean(entry.dataset, datasets)
        complaints.add((*path, "dataset"), f"'{entry.dataset}' is not a data set of this sweep: {hint}")
    elif entry.hierarchy is not None:
        yield from _levels(name, entry.hierarchy, dataset, complaints)
    elif entry.random is not None:
        yield from _random(name, entry, dataset, complaints)
    else:
        yield _modulo(name, entry, dataset, complaints)


def _levels(name: str, levels: Sequence[str], dataset: Dataset, complaints: Complaints) -> Iterator[LabelSpace]:
    complaints.refuse_repeats(("labels", name, "hierarchy"), levels)
    for position, level in enumerate(levels):
        if level not in dataset.levels:
            hint = did_you_mean(level, dataset.levels)
            message = f"'{level}' is not a level of data set '{dataset.name}': {hint}"
            complaints.add(("labels", name, "hierarchy", position), message)
            continue
        space = {"hierarchy": level}
        yield _space(f"{name}/{level}", name, level, dataset, (space, dataset.levels[level]))


def _random(name: str, entry: LabelEntry, dataset: Dataset, complaints: Complaints) -> Iterator[LabelSpace]:
    assert entry.random is not None  # noqa: S101 - for the type checker
    path: Path = ("labels", name, "random", "num_classes")
    complaints.refuse_repeats(path, [str(number) for number in entry.random.num_classes])
    for position, number in enumerate(entry.random.num_classes):
        if number > dataset.num_train:
            message = f"{number} classes for {dataset.num_train} training samples; at most one class per sample"
            complaints.add((*path, position), message)
        space = {"random": {"num_classes": number, "seed": entry.random.seed}}
        yield _space(f"{name}/{number}", name, str(number), dataset, (space, number))


def _modulo(name: str, entry: LabelEntry, dataset: Dataset, complaints: Complaints) -> LabelSpace:
    assert entry.modulo is not None  # noqa: S101 - for the type checker
    if entry.modulo > dataset.num_classes:
        message = f"{entry.modulo} is more than the {dataset.num_classes} classes of data set '{dataset.name}'"
        complaints.add(("labels", name, "modulo"), message + f"; use 2 to {dataset.num_classes}")
    return _space(name, name, f"mod{entry.modulo}", dataset, ({"modulo": entry.modulo}, entry.modulo))


def _space(name: str, entry: str, level: str, dataset: Dataset, rule: tuple[Mapping[str, Any], int]) -> LabelSpace:
    space, num_classes = rule
    return LabelSpace(name=name, entry=entry, level=level, dataset=dataset.name, space=space, num_classes=num_classes)
