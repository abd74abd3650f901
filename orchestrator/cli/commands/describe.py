"""``orchestrator describe``: everything that is known about one job of a submitted sweep."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from orchestrator.cli.arguments import JobName, StoreOption, SweepName
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document, stdout_console
from orchestrator.cli.pages import tracking_and_pages
from orchestrator.core.errors import NotFoundError, OrchestratorError
from orchestrator.core.suggest import did_you_mean
from orchestrator.core.units import format_bytes, format_duration
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.services.artifact_lookup import read_artifact_summary
from orchestrator.services.stores import open_existing_store, require_sweep
from orchestrator.state.snapshot import JobView
from orchestrator.storage.layout import (
    artifact_folder,
    checkpoints_folder,
    job_logs_folder,
    metrics_folder,
    record_name,
    short_hash,
)
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import load_snapshot
from orchestrator.sweeps.ledger import accepted_plan
from orchestrator.tracking.links import find_run_links


def describe(
    sweep: SweepName,
    job: JobName,
    *,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Show all details of one job: identity, attempts, failures, and where its results and logs are."""
    objects = open_existing_store(store)
    require_sweep(objects, sweep)
    snapshot = load_snapshot(objects, sweep)
    plan = accepted_plan(snapshot)
    jobs = plan.by_name()
    if job not in jobs:
        raise NotFoundError(f"sweep '{sweep}' has no job '{job}': {did_you_mean(job, jobs)}")
    document = job_document(objects, plan, jobs[job], snapshot.jobs[job])
    if output is not DocumentForm.TABLE:
        print_document(document, output)
        return
    for line in description_lines(document):
        stdout_console().print(line)


def job_document(store: ObjectStore, plan: Plan, job: Job, view: JobView) -> dict[str, Any]:
    """The same as plain JSON."""
    seen, key = read_artifact_summary(store, job.key), job.key
    failure = view.last_failure
    return {
        "job": job.name,
        "sweep": plan.sweep,
        "kind": job.kind.value,
        "key": key,
        "state": view.state.value,
        "reason": view.reason,
        "attempts": view.num_attempts,
        "failures": {kind.value: number for kind, number in view.failures.items()},
        "last_failure": None if failure is None else {**asdict(failure), "kind": failure.kind.value},
        "ran_s": view.ran_s,
        "queued_s": view.queued_s,
        "timings": asdict(view.timings) if view.timings else None,
        "resumed_from_step": view.resumed_from_step,
        "metrics": dict(view.metrics or (seen.metrics if seen else {})),
        "needs": list(job.needs),
        "facets": dict(job.facets),
        "resources": asdict(job.resources),
        "execution": asdict(job.execution),
        "identity": dict(job.identity),
        "result": None
        if seen is None
        else {"made_by": f"{seen.sweep}: {seen.job}", "num_bytes": seen.num_bytes, "code": seen.package_digest},
        "places": _places(store, plan, job),
        "mlflow": _mlflow_link(store, plan, job),
    }


def description_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The text for people."""
    yield f"{document['job']} of sweep {document['sweep']}: {document['state']}"
    yield from _lines(document, ("key", "reason"))
    yield f"  attempts     {document['attempts']}{_failures(document)}"
    if document["ran_s"]:
        yield f"  ran          {format_duration(document['ran_s'])}, waited {format_duration(document['queued_s'])}"
    result = document["result"]
    if result:
        yield f"  result       {format_bytes(result['num_bytes'])}, made by {result['made_by']}"
    for name, value in sorted(document["metrics"].items()):
        yield f"  metric       {name} {value:.6g}"
    yield f"  resources    {_resources_line(document)}"
    yield from (f"  needs        {need}" for need in document["needs"])
    yield from (f"  {name:13}{place}" for name, place in document["places"].items())
    yield from _lines(document, ("mlflow",))
    yield "  identity"
    for line in json.dumps(document["identity"], indent=2, ensure_ascii=False).splitlines():
        yield f"    {line}"


def _lines(document: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[str]:
    return (f"  {name:13}{document[name]}" for name in names if document[name])


def _failures(document: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{number} {kind}" for kind, number in document["failures"].items())
    last = document["last_failure"]
    return (f"; ended without a result: {counts}" if counts else "") + (f"; last: {last['message']}" if last else "")


def _resources_line(document: Mapping[str, Any]) -> str:
    resources, workers = document["resources"], document["execution"]["num_workers"]
    named = ", ".join(f"{name} {value}" for name, value in resources.items() if value)
    return named + (f"; {workers} workers" if workers > 1 else "")


def _places(store: ObjectStore, plan: Plan, job: Job) -> dict[str, str]:
    """Locations of results and logs, whether or not they exist yet."""
    uri, key = store.uri, job.key
    checkpoints = store.list_children(checkpoints_folder(key) + "/")
    found = {
        "artifact": f"{uri}/{artifact_folder(key)}/",
        "record": f"{uri}/{record_name(key)}" if store.exists(record_name(key)) else "",
        "checkpoints": f"{uri}/{checkpoints_folder(key)}/ ({len(checkpoints)})" if checkpoints else "",
        "metrics": f"{uri}/{metrics_folder(key)}",
        "logs": f"{uri}/{job_logs_folder(plan.sweep, job.name)}<attempt>-{short_hash(key)}/",
    }
    return {name: place for name, place in found.items() if place}


def _mlflow_link(store: ObjectStore, plan: Plan, job: Job) -> str:
    """The job's MLflow page; empty if it is not published, or if no server shows MLflow's pages."""
    try:
        return find_run_links(store, plan, *tracking_and_pages(plan)).get(job.name, "")
    except OrchestratorError:
        return ""
