"""Numbers of samples that a sweep.yaml declares, against those of the index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.core.errors import BadDataError


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCount:
    """Samples of a split."""

    good: int
    bad: int = 0
    """Left out of the index."""


def counts_of_splits(splits: Mapping[str, Mapping[str, Any]]) -> dict[str, SplitCount]:
    """Of the ``splits`` of an ``index.json``."""
    return {
        name: SplitCount(
            good=sum(shard["num_samples"] for shard in split["shards"]),
            bad=sum(reason["count"] for reason in split.get("bad", {}).values()),
        )
        for name, split in splits.items()
    }


def check_declared_counts(location: Mapping[str, Any], found: Mapping[str, SplitCount]) -> None:
    """Compare what ``location["num_samples"]`` declares with what there is.

    Samples that were left out as bad may be among those that were declared, or not: whoever counts files counts them.

    Raises:
        BadDataError: a split has another number of samples.
    """
    for name, number in location.get("num_samples", {}).items():
        split = found.get(name)
        if split is None or number is None or split.good <= number <= split.good + split.bad:
            continue
        bad = f" and {split.bad} bad ones" if split.bad else ""
        message = f"num_{name} declares {number} samples, but the shards of split {name!r} hold {split.good}"
        raise BadDataError(f"{message}{bad}; correct num_{name}, or the URIs if they name other shards than meant")
