"""The end of a search: its record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.core.contract import JobRequest, JobResult
from orchestrator.search.outcome import search_summary
from orchestrator.search.study import Study
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.protocol import ObjectStore


def commit_search(study: Study, request: JobRequest, store: ObjectStore, now: float) -> JobResult:
    """Commit what a search that is over found; its log and trials stay beside it.

    Raises:
        UserError: no trial completed.
    """
    best = study.best()
    num_workers = request.execution.num_workers
    summary = search_summary(study.plan, study.trials, best, study.ladder.values, num_workers=num_workers)
    found = summary["search"]
    writer = ArtifactWriter(store, request)
    writer.add("trials.json", json.dumps(found["trials"], indent=1, sort_keys=True).encode())
    metrics = _metrics(found)
    outcome = writer.commit(now=now, metrics=metrics, summary=summary)
    return JobResult(attempt_id=request.attempt_id, key=request.key, outcome=outcome, metrics=metrics)


def _metrics(found: Mapping[str, Any]) -> dict[str, float]:
    saving, best = found["saving"], found["best"]
    numbers = ("num_completed", "num_stopped", "num_failed", "epochs", "full_epochs", "spent_s", "full_s")
    return {
        "best_value": float(best["value"]),
        "best_trial": float(best["trial"]),
        "saved_share": saving["share"],
        **{name: float(saving[name]) for name in numbers},
    }
