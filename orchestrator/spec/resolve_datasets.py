"""From the schema of a data set to its resolved form. Pure."""

from __future__ import annotations

from math import prod

from orchestrator.spec.complaints import Complaints
from orchestrator.spec.model import Dataset
from orchestrator.spec.schema_datasets import Digits, SyntheticHierarchy
from orchestrator.spec.tree import Path

BUILTIN_VERSION = 1
_NUM_DIGITS = 1797


def resolve_dataset(name: str, entry: SyntheticHierarchy | Digits, complaints: Complaints) -> Dataset:
    """A data set with its levels and sizes, as far as the file tells."""
    parameters = {**entry.model_dump(), "version": BUILTIN_VERSION}
    if isinstance(entry, Digits):
        num_train = int(_NUM_DIGITS * (1 - entry.val_fraction))
        return Dataset(
            name=name,
            readable="digits",
            parameters=parameters,
            levels={"digit": 10},
            num_classes=10,
            num_train=num_train,
        )
    _check_patches(("datasets", name), entry, complaints)
    levels = {f"depth{depth}": prod(entry.branching[:depth]) for depth in range(1, len(entry.branching) + 1)}
    return Dataset(
        name=name,
        readable="synthetic-" + "x".join(str(children) for children in entry.branching),
        parameters=parameters,
        levels=levels,
        num_classes=prod(entry.branching),
        num_train=entry.num_train,
    )


def _check_patches(path: Path, entry: SyntheticHierarchy, complaints: Complaints) -> None:
    if entry.image_size % entry.patch_size:
        message = f"{entry.image_size} is not a multiple of patch_size {entry.patch_size}; images hold whole patches"
        complaints.add((*path, "image_size"), message)
        return
    patches = (entry.image_size // entry.patch_size) ** 2
    needed = entry.num_common_patches + entry.num_subclass_patches * (len(entry.branching) - 1)
    if needed > patches:
        message = f"an image has {patches} patches, but features need {needed}; use smaller patches or fewer"
        complaints.add(path, message)
    if entry.branching[0] < 2:
        message = f"{entry.branching} has a single superclass; the first number must be at least 2"
        complaints.add((*path, "branching"), message)
    nodes = sum(prod(entry.branching[:depth]) for depth in range(1, len(entry.branching) + 1))
    if nodes > (values := 3 * entry.patch_size**2):
        message = f"the tree has {nodes} nodes, but a patch of {entry.patch_size} pixels has {values} values and so"
        complaints.add(path, f"{message} at most {values} independent features; use fewer nodes or larger patches")
