"""`subset:`: the schema of a part of the training split, and how many samples it leaves. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field

from orchestrator.sweepfile.fields import Count, Seed, Strict
from orchestrator.sweepfile.parse.tree import Path
from orchestrator.sweepfile.problems import Complaints
from orchestrator.sweepfile.values import Dataset, LabelSpace


class SubsetSpec(Strict):
    """A seeded part of the training split, stratified by leaf class; smaller ones are contained in larger ones."""

    fraction: float = Field(1.0, gt=0, le=1, description="Share of each class; at least one sample.")
    max_per_class: Count | None = Field(None, description="Most samples of a class.")
    num_samples: Count | None = Field(None, description="Samples in total, as equal over the classes as possible.")
    seed: Seed = Field(0, description="Seed of the choice; never follows the other seeds.")

    def resolved(self) -> dict[str, Any]:
        """What identities hold: the fields that limit something, and the seed; nothing if nothing does."""
        given = self.model_dump(exclude_none=True, exclude={"fraction", "seed"})
        limits = given | ({"fraction": self.fraction} if self.fraction < 1 else {})
        return limits | {"seed": self.seed} if limits else {}

    @property
    def given_seed(self) -> int | None:
        """The seed, if the file gives one."""
        return self.seed if "seed" in self.model_fields_set else None


def labelled_part(space: LabelSpace, datasets: Mapping[str, Dataset]) -> Dataset:
    """The data set of a label space, with as many training samples as have a target where they are counted."""
    dataset = datasets[space.dataset]
    if not space.num_labelled or not dataset.class_counts or dataset.multi_label:
        return dataset
    return replace(dataset, name=space.name, num_train=space.num_labelled)


def thinned(dataset: Dataset, subset: Mapping[str, Any], path: Path, complaints: Complaints) -> Dataset:
    """The data set with as many training samples as a subset leaves at most; complains if it asks for too many."""
    if not subset:
        return dataset
    # Each class rounds up at worst; how large classes are is not known here. Samples without any label are one more.
    num_classes = dataset.num_classes + dataset.multi_label
    of_fraction = math.ceil(subset.get("fraction", 1) * dataset.num_train) + num_classes
    of_cap = subset.get("max_per_class", dataset.num_train) * num_classes
    left = min(dataset.num_train, of_fraction, of_cap)
    num_samples = subset.get("num_samples", left)
    if num_samples > left:
        whole = f"the {dataset.num_train} training samples of '{dataset.name}'"
        limit = "fraction" if of_fraction <= of_cap else "max_per_class"
        message = f"{num_samples} samples of {whole}; lower it"
        if num_samples <= dataset.num_train:
            message = f"{num_samples} samples, but {limit} {subset[limit]} leaves {left} at most of {whole}; lower it"
            message += f", or raise {limit}"
        complaints.add((*path, "num_samples"), message)
    return replace(dataset, num_train=min(left, num_samples))
