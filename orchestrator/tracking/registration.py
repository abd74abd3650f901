"""The best backbone of a finished sweep in MLflow's model registry, if the sweep asks for it (``register: best``)."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from orchestrator.core.contract import JobKind
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.report.results import Report, Result
from orchestrator.storage.artifacts import part_object, read_record
from orchestrator.storage.protocol import ObjectStore
from orchestrator.tracking.server import ModelVersion, TrackingServer

_PARTS = ("backbone.safetensors", "model.json")
FOLDER = "backbone"
"""Of the run's artifacts, where the registered files are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """A backbone, and why it is the best."""

    job: Job
    error: float
    """Mean over its transfer seeds, in [0, 1]."""
    metric: str
    transfer: str


def best_backbone(plan: Plan, report: Report) -> Best | None:
    """Of the label space that is best under the sweep's first transfer, the seed that transfers best.

    None while no transfer of that table has a result.
    """
    ranked = report.headlines[0].ranked if report.headlines else ()
    if not ranked:
        return None
    jobs = plan.by_name()
    by_backbone: dict[str, list[float]] = {}
    for result in ranked[0].results:
        backbone = _backbone_of(jobs, result)
        if backbone is not None:
            by_backbone.setdefault(backbone.name, []).append(result.metrics[report.metric])
    if not by_backbone:
        return None
    error, name = min((fmean(errors), name) for name, errors in by_backbone.items())
    return Best(job=jobs[name], error=error, metric=report.metric, transfer=report.headlines[0].transfer)


def register(store: ObjectStore, server: TrackingServer, plan: Plan, best: Best, run_id: str) -> None:
    """Attach the backbone's files to its run and make them the model's newest version, unless they are one already.

    Raises:
        TrackingError: the server refuses; nothing but the registry lacks anything.
        NotFoundError: the artifact is gone from the store.
    """
    facets = {name: str(value) for name, value in best.job.facets.items()}
    tags = {**facets, "sweep": plan.sweep, "key": best.job.key, best.metric: f"{best.error:.6g}"}
    version = ModelVersion(
        name=plan.sweep,
        run_id=run_id,
        folder=FOLDER,
        tags={**tags, "transfer": best.transfer, "store": store.uri},
        unless_tagged=("key", best.job.key),
        description=f"Lowest {best.metric} under the transfer {best.transfer!r}; timm reads it",
    )
    if server.has_version(version):
        return
    record = read_record(store, best.job.key)
    with tempfile.TemporaryDirectory(prefix="orchestrator-backbone-") as folder:
        for part in _PARTS:
            if part in record.parts:
                store.download(part_object(record, part), Path(folder, part))
        server.attach(run_id, Path(folder), FOLDER)
    server.register(version)


def _backbone_of(jobs: Mapping[str, Job], result: Result) -> Job | None:
    """The pretraining behind a transfer, whatever stands in between."""
    waiting = [result.job]
    while waiting:
        job = jobs[waiting.pop()]
        if job.kind is JobKind.PRETRAIN:
            return job
        waiting += [need for need in job.needs if jobs[need].kind not in {JobKind.LABELS, JobKind.INDEX}]
    return None
