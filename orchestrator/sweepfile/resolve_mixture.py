"""Data sets that are made of others: joined classes and samples. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orchestrator.core.errors import BadDataError
from orchestrator.storage.dataset_files import join_class_tables, level_counts
from orchestrator.sweepfile.complaints import Complaints
from orchestrator.sweepfile.model import Dataset
from orchestrator.sweepfile.schema_datasets import MixtureSpec
from orchestrator.sweepfile.suggest import did_you_mean

ReadClassTable = Callable[[Dataset], Sequence[Mapping[str, Any]]]
"""The class table of a data set, which may take the data plane to make."""


def resolve_mixture(
    name: str,
    entry: MixtureSpec,
    datasets: Mapping[str, Dataset],
    complaints: Complaints,
    read_table: ReadClassTable | None,
) -> Dataset | None:
    """A mixture of resolved data sets; None if something is wrong with it."""
    path = ("datasets", name, "mixture")
    complaints.refuse_repeats(path, entry.mixture)
    unknown = [part for part in entry.mixture if part not in datasets]
    for part in unknown:
        hint = did_you_mean(part, datasets)
        complaints.add((*path, entry.mixture.index(part)), f"'{part}' is not a data set that can be mixed: {hint}")
    if unknown:
        return None
    parts = [datasets[part] for part in entry.mixture]
    try:
        rows, _ = join_class_tables([_table(part, read_table) for part in parts])
    except BadDataError as error:
        complaints.add(path, str(error))
        return None
    return Dataset(
        name=name,
        readable=f"mixture{len(parts)}",
        parameters={"mixture": {"weights": entry.weights}},
        levels=level_counts(rows),
        num_classes=len(rows),
        num_train=sum(part.num_train for part in parts),
        class_table=tuple(rows),
        multi_label=any(part.multi_label for part in parts),
        has_val=any(part.has_val for part in parts),
        components=tuple(entry.mixture),
    )


def _table(dataset: Dataset, read_table: ReadClassTable | None) -> Sequence[Mapping[str, Any]]:
    if dataset.class_table:
        return dataset.class_table
    if dataset.location:
        raise BadDataError(f"data set '{dataset.name}' has no class table; classes are joined by name, so give it one")
    if read_table is None:
        raise BadDataError(f"the classes of '{dataset.name}' are only known where the data plane can be asked")
    return read_table(dataset)
