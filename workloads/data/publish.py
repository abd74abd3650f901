"""The last step of the short jobs: commit what was written and say how it ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from orchestrator.contract import JobRequest, JobResult
from orchestrator.storage.artifacts import ArtifactWriter
from workloads.package import package_digest


def publish(
    writer: ArtifactWriter, request: JobRequest, *, metrics: Mapping[str, float], summary: Mapping[str, Any]
) -> JobResult:
    """Commit the parts written so far as the artifact of the request's key."""
    outcome = writer.commit(now=time.time(), metrics=metrics, summary=summary, package_digest=package_digest())
    return JobResult(attempt_id=request.attempt_id, key=request.key, outcome=outcome, metrics=metrics)
