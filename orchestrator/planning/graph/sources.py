"""The jobs that everything else starts from: data sets, label spaces and backbones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.core.contract import JobKind
from orchestrator.planning.graph.draft import (
    Draft,
    model_parameters,
    pretrain_facets,
    pretrain_job,
    space_facets,
    subset_parameters,
)
from orchestrator.planning.graph.readable import readable_rule
from orchestrator.sweepfile.values import Checkpoints, Dataset, LabelSpace, Pretrain, ResolvedSweep


def dataset_job(kind: JobKind, dataset: Dataset, parameters: Mapping[str, Any], inputs: Mapping[str, str]) -> Draft:
    """What writes or indexes a data set."""
    return Draft(
        kind=kind,
        name=f"{kind.value}/{dataset.name}",
        readable=dataset.readable,
        parameters=parameters,
        inputs=inputs,
        facets={"dataset": dataset.name},
    )


def missing_datasets(sweep: ResolvedSweep) -> list[str]:
    """One line for each data set that is planned from its declaration, because it cannot be read."""
    return [
        f"{dataset.missing}; planned from what the file declares: it cannot be submitted, and its keys are not final"
        for dataset in sweep.datasets.values()
        if dataset.missing
    ]


def labels_job(space: LabelSpace, clusters: Mapping[str, str]) -> Draft:
    """What makes a label space; ``clusters`` is the input that holds its clusters, if it is made of them."""
    return Draft(
        kind=JobKind.LABELS,
        name=f"labels/{space.name}",
        readable=readable_rule(space.space),
        parameters={"space": space.space},
        inputs={"index": f"index/{space.dataset}", **clusters},
        facets=space_facets(space),
        execution={"label_files": space.files} if space.files else {},
    )


def backbone_job(pretrain: Pretrain, space: LabelSpace, seed: int, origin: str) -> Draft:
    """What pretrains a backbone; ``origin`` is the job of the one that it starts from, empty without one."""
    # Identity only where something is kept: backbones of which nothing is stay shared with sweeps that never asked.
    keep = {"keep": pretrain.keep} if pretrain.keep else {}
    # A file's place is execution, its sha256 identity; random initial weights follow from the seed alone.
    initial = {field: value for field, value in pretrain.initial.items() if field != "uri"}
    chosen = keep | ({"initial": initial} if initial else {}) | subset_parameters(pretrain.subset)
    inputs = {"index": f"index/{space.dataset}", "labels": f"labels/{space.name}"}
    return Draft(
        kind=JobKind.PRETRAIN,
        name=pretrain_job(pretrain.name, space.name, seed),
        readable=f"{pretrain.model.name}-{readable_rule(space.space)}-seed{seed}",
        parameters={"model": model_parameters(pretrain.model), "recipe": pretrain.recipe, "seed": seed, **chosen},
        inputs=inputs | ({"initial": origin} if origin else {}),
        facets=pretrain_facets(pretrain, space, seed),
        execution=_saved_as_asked(pretrain.checkpoints) | {"initial_uri": pretrain.initial.get("uri", "")},
    )


def _saved_as_asked(asked: Checkpoints) -> dict[str, Any]:
    return {
        "checkpoint_every_steps": asked.every_steps,
        "checkpoint_every_epochs": asked.every_epochs,
        "checkpoint_mtbf_s": asked.mtbf_s,
        "checkpoint_keep_last": asked.keep_last,
    }
