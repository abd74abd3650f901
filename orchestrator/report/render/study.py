"""The facts of a study in a few lines, from its plan: question, data, model, recipe and seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.core.job_kinds import TRANSFER_KINDS, JobKind
from orchestrator.core.metrics import Better, better_of
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.report.results import Report

_RECIPE = ("epochs", "batch_size", "optimizer", "lr", "schedule", "weight_decay", "label_smoothing", "augment")
"""Fields that a reader asks for first; sweep.yaml has all."""
_MAX_NAMES = 8


def study_facts(report: Report, plan: Plan) -> list[tuple[str, str]]:
    """Name and text of each fact in the plan and its records; unknown facts are left out."""
    pretrains = [job for job in plan.jobs if job.kind is JobKind.PRETRAIN]
    if not pretrains:
        return []
    facts = [
        ("Question", _question(report)),
        ("Data", _listed(_data(plan, report))),
        ("Model", _listed(_model(job) for job in pretrains)),
        ("Pretraining", _listed(_recipe(job) for job in pretrains)),
        ("Label spaces", _listed(str(job.facets["label_space"]) for job in pretrains if "label_space" in job.facets)),
        ("Transfers", _listed(_transfer(job) for job in plan.jobs if "transfer" in job.facets)),
        ("Seeds", _seeds(plan, pretrains)),
    ]
    return [(name, text) for name, text in facts if text]


def _question(report: Report) -> str:
    direction = "highest" if better_of(report.metric) is Better.HIGHER else "lowest"
    than = f", and is that more than the spread over seeds (baseline: {report.baseline})" if report.baseline else ""
    return f"Which pretraining gives the {direction} {report.metric} after transfer{than}?"


def _data(plan: Plan, report: Report) -> Iterator[str]:
    datasets = [job for job in plan.jobs if job.kind in {JobKind.DATASET, JobKind.INDEX} and "dataset" in job.facets]
    sizes = _judged_sizes(plan, report, {job.name: str(job.facets["dataset"]) for job in datasets})
    by_name: dict[str, Mapping[str, Any]] = {}
    for job in datasets:
        by_name.setdefault(str(job.facets["dataset"]), job.identity.get("parameters", {}))
    for name, parameters in by_name.items():
        what = parameters.get("builtin") or parameters.get("converter") or "shards"
        counts = [
            f"{parameters[field]:,} {split}" for field, split in _SPLITS if isinstance(parameters.get(field), int)
        ]
        found = sizes.get(name, set())
        judged = [f"judged on {min(found):,} images"] if len(found) == 1 else []
        yield f"{name} ({', '.join([str(what), *counts, *judged])})"


def _judged_sizes(plan: Plan, report: Report, datasets: Mapping[str, str]) -> dict[str, set[int]]:
    """Validation samples of the tables by the data set of their targets; ``datasets`` are by the name of their jobs."""
    transfers = [job for job in plan.jobs if job.kind in TRANSFER_KINDS]
    of_targets = {job.facets["target"]: datasets[need] for job in transfers for need in job.needs if need in datasets}
    found: dict[str, set[int]] = {}
    for table in report.tables:
        if table.num_val and table.target in of_targets:
            found.setdefault(of_targets[table.target], set()).add(table.num_val)
    return found


_SPLITS = (("num_train", "training"), ("num_val", "validation images"))


def _model(job: Job) -> str:
    model = job.identity.get("parameters", {}).get("model", {})
    size = f" at {model['image_size']} x {model['image_size']} pixels" if "image_size" in model else ""
    return f"{model['name']}{size}" if "name" in model else ""


def _recipe(job: Job) -> str:
    recipe = job.identity.get("parameters", {}).get("recipe", {})
    return ", ".join(f"{name.replace('_', ' ')} {_number(recipe[name])}" for name in _RECIPE if name in recipe)


def _transfer(job: Job) -> str:
    return f"{job.facets['transfer']} ({job.facets.get('protocol', job.kind.value)} on {job.facets.get('target', '?')})"


def _seeds(plan: Plan, pretrains: Sequence[Job]) -> str:
    first = len({job.facets.get("pretrain_seed") for job in pretrains})
    then = len({job.facets["transfer_seed"] for job in plan.jobs if "transfer_seed" in job.facets})
    return f"{first} of pretraining" + (f", {then} of transfer" if then else "")


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _listed(texts: Iterator[str] | Sequence[str]) -> str:
    """Each once; of many, the first."""
    names = [text for text in dict.fromkeys(texts) if text]
    more = [f"and {len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
    return "; ".join([*names[:_MAX_NAMES], *more])
