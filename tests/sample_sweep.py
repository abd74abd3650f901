"""A small sweep's plan, and its records committed by hand: what reports and tracking are tested on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.sample_outcomes import SUMMARY_FIELD, SampleOutcomes
from tests.builders import START_S, make_job, request_of

__all__ = ["START_S", "commit", "sample_metrics", "sample_plan"]

SWEEP = "sample"
BASELINE = "levels/depth1"
GRANULARITY = {"levels/depth1": 2, "levels/depth2": 8, "levels/depth3": 32, "levels/depth4": 128, "random/128": 128}
ERROR = {
    "levels/depth1": 0.27,
    "levels/depth2": 0.12,
    "levels/depth3": 0.07,
    "levels/depth4": 0.08,
    "random/128": 0.28,
}
SEED_OFFSET = {0: -0.01, 1: 0.0, 2: 0.01}
"""Added to the error in turn over seeds and label spaces: all have the same spread, in another order of the seeds."""
TRANSFERS = {"superclass": JobKind.FINETUNE, "superclass-probe": JobKind.PROBE}

_RECIPE = {"epochs": 2.0, "batch_size": 64, "optimizer": "sgd", "lr": 0.1, "betas": [0.9, 0.999]}
_MODEL = {"name": "test_resnet", "image_size": 32, "kwargs": {}}


def sample_plan(
    store_uri: str,
    *,
    sweep: str = SWEEP,
    spaces: Iterable[str] = GRANULARITY,
    seeds: Iterable[int] = (0, 1, 2),
    transfers: Iterable[str] = tuple(TRANSFERS),
    baseline: str = BASELINE,
) -> Plan:
    """One data set, the label spaces, a backbone per space and seed, and their transfers to the baseline."""
    dataset = _job("dataset/tree", {"builtin": "synthetic-hierarchy", "version": 1, "branching": [2, 4, 4, 4]}, {})
    index = _job("index/tree", {}, {"dataset": dataset})
    jobs = [dataset, index]
    labels = {space: _job(f"labels/{space}", {"space": _rule(space)}, {"index": index}) for space in spaces}
    jobs += labels.values()
    for space in spaces:
        for seed in seeds:
            facets: dict[str, str | int] = {
                "label_space": space,
                "level": space.partition("/")[2],
                "pretrain_seed": seed,
            }
            inputs = {"index": index, "labels": labels[space]}
            jobs.append(_job(f"pretrain/{space}/seed{seed}", _training(seed), inputs, facets))
    backbones = [job for job in jobs if job.kind is JobKind.PRETRAIN]
    for transfer in transfers:
        for backbone in backbones:
            jobs.append(_transfer_job(transfer, backbone, index, labels.get(baseline)))
    return Plan(sweep=sweep, revision=1, store_uri=store_uri, jobs=tuple(jobs), baseline=baseline)


def commit(
    store: ObjectStore,
    job: Job,
    metrics: Mapping[str, float] | None = None,
    *,
    sweep: str = SWEEP,
    at_s: float = START_S,
    outcomes: SampleOutcomes | None = None,
    said: Mapping[str, Any] | None = None,
) -> None:
    """Commit a job's record as an attempt would; without ``metrics`` it reports what the sample says.

    ``said`` changes what the record says of the outcomes.
    """
    writer = ArtifactWriter(store, request_of(job, store.uri, sweep=sweep))
    writer.add("weights.bin", job.name.encode())
    for name, content in ({} if outcomes is None else outcomes.parts()).items():
        writer.add(name, content)
    summary = {} if outcomes is None else {SUMMARY_FIELD: outcomes.summary() | dict(said or {})}
    writer.commit(now=at_s, metrics=sample_metrics(job) if metrics is None else metrics, summary=summary)


def sample_metrics(job: Job) -> dict[str, float]:
    """The final metrics of a job of the sample."""
    if job.kind is JobKind.LABELS:
        return {"num_classes": float(GRANULARITY.get(job.name.removeprefix("labels/"), 5))}
    if job.kind is JobKind.ANALYZE:
        return {"nc1": 1 / int(str(job.facets.get("checkpoint", "epoch1")).removeprefix("epoch"))}
    if "label_space" not in job.facets:
        return {"num_samples": 4096.0}
    probe = 0.02 if job.kind is JobKind.PROBE else 0.0
    error = ERROR[str(job.facets["label_space"])] + _offset(job) + probe
    metrics = {"val_error": error, "best_val_error": error - 0.001, "train_loss": 2 * error}
    if job.kind is not JobKind.PRETRAIN:
        metrics |= {"val_error_normal": error / 2, "val_error_hard": error * 1.5}
    return metrics


def _offset(job: Job) -> float:
    turn = list(GRANULARITY).index(str(job.facets["label_space"]))
    return SEED_OFFSET[(int(job.facets["pretrain_seed"]) + turn) % len(SEED_OFFSET)]


def _transfer_job(transfer: str, backbone: Job, index: Job, target: Job | None) -> Job:
    kind = TRANSFERS[transfer]
    space, seed = backbone.facets["label_space"], backbone.facets["pretrain_seed"]
    target_name = "" if target is None else target.name.removeprefix("labels/")
    facets = {
        **backbone.facets,
        "transfer": transfer,
        "protocol": kind.value,
        "target": target_name,
        "transfer_seed": 0,
    }
    inputs = {"index": index, "backbone": backbone} | ({} if target is None else {"labels": target})
    return _job(f"{kind.value}/{transfer}/{space}/seed{seed}/seed0", _training(0), inputs, facets)


def _training(seed: int) -> dict[str, Any]:
    return {"model": _MODEL, "recipe": _RECIPE, "seed": seed}


def _rule(space: str) -> dict[str, Any]:
    entry, _, level = space.partition("/")
    if entry == "random":
        return {"random": {"num_classes": int(level), "seed": 0}}
    return {"hierarchy": level} if level else {"modulo": int(space.removeprefix("mod"))}


def _job(
    name: str,
    parameters: Mapping[str, Any],
    inputs: Mapping[str, Job],
    facets: Mapping[str, str | int] | None = None,
) -> Job:
    told: dict[str, str | int] = {"dataset": "tree", **(facets or {})}
    return make_job(name, label="sample", parameters=parameters, inputs=inputs, facets=told)
