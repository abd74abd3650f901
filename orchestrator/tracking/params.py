"""Parameters, tags and data sets of the runs of jobs: what people filter, group and compare by; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.core.contract import JobKind
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.storage.artifacts import Record
from orchestrator.storage.layout import artifact_folder, checkpoints_folder
from orchestrator.tracking.draft import DatasetUse, generated_digest

_MAX_PARAM_CHARACTERS = 6000
_BACKBONE = "backbone.safetensors"
_SPLIT = "num_train"


def sweep_params(plan: Plan) -> dict[str, str]:
    """Parameters of the sweep's run."""
    params = {"baseline": plan.baseline, "metric": plan.metric, "store": plan.store_uri}
    return {name: value for name, value in params.items() if value}


def job_params(job: Job, granularity: int | None, digest: str = "") -> dict[str, str]:
    """Parameters of a job's run: what people compare by, the recipe's fields, and the key.

    ``granularity`` and the data set's ``digest`` are left out while they are not known.
    """
    parameters = dict(job.identity["parameters"])
    model, recipe = parameters.pop("model", {}), parameters.pop("recipe", {})
    found: dict[str, Any] = {**parameters, **recipe, **_model_params(model), **_label_space(job), **job.facets}
    found |= {"key": job.key, "dataset_digest": digest}
    if granularity is not None:
        found["granularity"] = granularity
    return {name: _text(value)[:_MAX_PARAM_CHARACTERS] for name, value in found.items() if value not in (None, "")}


def counts_classes(job: Job) -> bool:
    """Whether a job has a granularity: it makes a label space, or is about a backbone of one."""
    return job.kind is JobKind.LABELS or "label_space" in job.facets


def artifact_tags(job: Job, record: Record, store_uri: str) -> dict[str, str]:
    """Where a job's results lie in the store."""
    folder = f"{store_uri}/{artifact_folder(job.key)}"
    tags = {"artifact": folder}
    if job.kind is JobKind.PRETRAIN:
        tags["checkpoints"] = f"{store_uri}/{checkpoints_folder(job.key)}"
    if _BACKBONE in record.parts:
        tags["backbone"] = f"{folder}/{record.parts[_BACKBONE].path}"
    return tags


def dataset_use(index: Job, record: Record, dataset: Job | None, store_uri: str) -> DatasetUse:
    """The data set behind an index.

    Args:
        index: the job that scanned it.
        record: what that job committed.
        dataset: the job that generated it; None for an external one.
        store_uri: where generated shards are.
    """
    name = str(index.facets.get("dataset") or index.name.partition("/")[2])
    return DatasetUse(
        name=name,
        digest=dataset_digest(record) or generated_digest(dict(index.identity["parameters"])),
        source=_location(index) if dataset is None else f"{store_uri}/{artifact_folder(dataset.key)}",
        num_samples=int(record.metrics[_SPLIT]) if _SPLIT in record.metrics else None,
    )


def dataset_digest(record: Record) -> str:
    """Sha256 over a data set's shards, as its index found them; empty in records that have none."""
    return str(record.summary.get("dataset_digest", ""))


def _location(index: Job) -> str:
    """The first URI of an external data set."""
    location = index.execution.data_location
    splits: Mapping[str, Any] = location.get("splits") or {}
    first = next((uris[0] for uris in splits.values() if uris), "")
    return str(location.get("dataset") or first)


def _label_space(job: Job) -> dict[str, str]:
    """Of a job that makes one: its facets name none."""
    if job.kind is not JobKind.LABELS:
        return {}
    name = job.name.partition("/")[2]
    return {"label_space": name, "level": name.partition("/")[2]}


def _model_params(model: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {"name": "model", "kwargs": "model_kwargs"}
    return {renamed.get(name, name): value for name, value in model.items() if value != {}}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
