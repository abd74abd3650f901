"""Artifacts that are there before a simulated sweep begins."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.core.contract import JobRequest
from orchestrator.planning.graph.plan import Job
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.protocol import ObjectStore


def commit_jobs(store: ObjectStore, jobs: Sequence[Job], now_s: float) -> None:
    """Commit a tiny artifact for each job."""
    for job in jobs:
        request = JobRequest(
            attempt_id=f"{job.key}.0",
            attempt_number=0,
            sweep="earlier",
            job=job.name,
            key=job.key,
            kind=job.kind,
            identity=job.identity,
            store_uri=store.uri,
        )
        writer = ArtifactWriter(store, request)
        writer.add("payload", job.key.encode())
        writer.commit(now=now_s)
