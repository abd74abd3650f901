"""The jobs that write data sets: one for the whole, before it part jobs that share the work and listings of sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.core.contract import JobKind
from orchestrator.planning.graph.draft import Draft
from orchestrator.sweepfile.values import Dataset


def listing_job(dataset: Dataset) -> Draft:
    """What lists the source of a conversion."""
    return _draft(dataset, "/listing", dataset.listing, {})


def part_jobs(dataset: Dataset, inputs: Mapping[str, str], whole: str) -> Iterator[Draft]:
    """What writes shares of the shards of the data set whose key is ``whole``; nothing where one job writes all."""
    for number in range(dataset.jobs if dataset.jobs > 1 else 0):
        part = {"of": whole, "number": number, "num": dataset.jobs}
        yield _draft(dataset, f"/part{number}", {**dataset.parameters, "part": part}, inputs)


def whole_job(dataset: Dataset, inputs: Mapping[str, str], parts: tuple[str, ...] = ()) -> Draft:
    """What commits all shards after the jobs ``parts``, none of which is identity: their number changes no result."""
    return _draft(dataset, "", dataset.parameters, inputs, parts)


def _draft(
    dataset: Dataset,
    suffix: str,
    parameters: Mapping[str, Any],
    inputs: Mapping[str, str],
    after: tuple[str, ...] = (),
) -> Draft:
    return Draft(
        kind=JobKind.DATASET,
        name=f"{JobKind.DATASET.value}/{dataset.name}{suffix}",
        readable=dataset.readable,
        parameters=parameters,
        inputs=inputs,
        facets={"dataset": dataset.name},
        execution={"data_location": dataset.source} if dataset.source else {},
        after=after,
    )
