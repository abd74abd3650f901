"""The jobs up to a backbone: data sets, label spaces, pretraining; and ``Draft``, a job without its key.

A data set is written by one job for the whole, after part jobs that share the work and a listing of its source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.job_kinds import JobKind
from orchestrator.core.plugins import short_name
from orchestrator.planning.graph.identity import readable_rule
from orchestrator.planning.graph.plan import FACTOR_PREFIX, LABELLED
from orchestrator.sweepfile.values import Checkpoints, Dataset, LabelSpace, Model, Pretrain


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A job without its key; ``inputs`` maps roles to job names."""

    kind: JobKind
    name: str
    readable: str
    parameters: Mapping[str, Any]
    inputs: Mapping[str, str]
    facets: Mapping[str, str | int]
    execution: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``Execution`` that belong to this job alone."""
    like: JobKind | None = None
    """Kind whose resources and execution it uses; None = its own."""
    copies: int = 1
    """How many times the resources of a job of that kind."""
    after: tuple[str, ...] = ()
    """Jobs that must be done before, but that are not part of the identity."""


def pretrain_job(block: str, space: str, seed: int) -> str:
    """Name of the job that pretrains a backbone; a single block of no name does not show in it."""
    return "/".join(part for part in ("pretrain", block, space, f"seed{seed}") if part)


def model_parameters(model: Model) -> dict[str, Any]:
    """The fields of a model that are identity."""
    return {"name": model.name, "image_size": model.image_size, "kwargs": dict(model.kwargs)}


def subset_parameters(subset: Mapping[str, Any]) -> dict[str, Any]:
    """Identity only if it leaves samples out: whole data sets keep their earlier keys."""
    return {"subset": subset} if subset else {}


def space_facets(space: LabelSpace) -> dict[str, str | int]:
    """Without ``granularity`` if only the record will have it."""
    counted = {"granularity": space.num_classes} if space.num_classes else {}
    return {"dataset": space.dataset, "label_space": space.name, "level": space.level, **counted}


def pretrain_facets(pretrain: Pretrain, space: LabelSpace, seed: int) -> dict[str, str | int]:
    """Facets by which backbones are compared."""
    named = {"pretrain": pretrain.name} if pretrain.name else {}
    baseline = {"baseline": "one_pass"} if space.name in pretrain.baselines else {}
    factors = {f"{FACTOR_PREFIX}{name}": value for name, value in pretrain.factors.items()}
    return {**space_facets(space), **named, "pretrain_seed": seed, **baseline, **factors}


def listing_job(dataset: Dataset) -> Draft:
    """The job that lists the source of a conversion."""
    return _draft(dataset, "/listing", dataset.listing, {})


def part_jobs(dataset: Dataset, inputs: Mapping[str, str], whole: str) -> Iterator[Draft]:
    """The part jobs that write shards of the data set with the key ``whole``; none if one job writes all."""
    for number in range(dataset.jobs if dataset.jobs > 1 else 0):
        part = {"of": whole, "number": number, "num": dataset.jobs}
        yield _draft(dataset, f"/part{number}", {**dataset.parameters, "part": part}, inputs)


def whole_job(dataset: Dataset, inputs: Mapping[str, str], parts: tuple[str, ...] = ()) -> Draft:
    """The job that commits all shards after the jobs ``parts``, which are not identity."""
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


def dataset_job(kind: JobKind, dataset: Dataset, parameters: Mapping[str, Any], inputs: Mapping[str, str]) -> Draft:
    """The job that writes or indexes a data set."""
    return Draft(
        kind=kind,
        name=f"{kind.value}/{dataset.name}",
        readable=dataset.readable,
        parameters=parameters,
        inputs=inputs,
        facets={"dataset": dataset.name},
    )


def labels_job(space: LabelSpace, clusters: Mapping[str, str]) -> Draft:
    """The job of a label space; ``clusters`` is the input with its clusters, if it is made of them."""
    return Draft(
        kind=JobKind.LABELS,
        name=f"labels/{space.name}",
        readable=readable_rule(space.space),
        parameters={"space": space.space},
        inputs={"index": f"index/{space.dataset}", **clusters},
        facets=space_facets(space) | ({} if space.num_labelled is None else {LABELLED: space.num_labelled}),
        execution=({"label_files": space.files} if space.files else {})
        | ({"declared_classes": space.num_classes} if space.is_declared else {}),
    )


def backbone_job(pretrain: Pretrain, space: LabelSpace, seed: int, origin: str) -> Draft:
    """The job that pretrains a backbone; ``origin`` is the job of the backbone from which it starts, if any."""
    # Identity only if weights are kept: other backbones stay shared with sweeps without this option.
    keep = {"keep": pretrain.keep} if pretrain.keep else {}
    # A file's place is execution, its sha256 identity; random initial weights follow from the seed alone.
    initial = {field: value for field, value in pretrain.initial.items() if field != "uri"}
    chosen = keep | ({"initial": initial} if initial else {}) | subset_parameters(pretrain.subset)
    inputs = {"index": f"index/{space.dataset}", "labels": f"labels/{space.name}"}
    return Draft(
        kind=JobKind.PRETRAIN,
        name=pretrain_job(pretrain.name, space.name, seed),
        readable=f"{short_name(pretrain.model.name)}-{readable_rule(space.space)}-seed{seed}",
        parameters={"model": model_parameters(pretrain.model), "recipe": pretrain.recipe, "seed": seed, **chosen},
        inputs=inputs | ({"initial": origin} if origin else {}),
        facets=pretrain_facets(pretrain, space, seed),
        execution=_checkpoint_execution(pretrain.checkpoints) | {"initial_uri": pretrain.initial.get("uri", "")},
    )


def _checkpoint_execution(checkpoints: Checkpoints) -> dict[str, Any]:
    return {
        "checkpoint_every_steps": checkpoints.every_steps,
        "checkpoint_every_epochs": checkpoints.every_epochs,
        "checkpoint_mtbf_s": checkpoints.mtbf_s,
        "checkpoint_keep_last": checkpoints.keep_last,
    }
