"""The job ``probe``: which of its forms a recipe asks for."""

from __future__ import annotations

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult
from workloads.transfer.cached_probe import run_cached_probe
from workloads.transfer.logistic_probe import run_logistic_probe
from workloads.transfer.probe import run_online_probe


def run_probe(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit ``head.safetensors`` and ``model.json``; the backbone stays the pretraining's artifact.

    Raises:
        UserError, BadDataError, NumericsError, PreemptedError, StorageError: why there is no commit.
    """
    recipe = request.parameters["recipe"]
    if recipe.get("features") != "cached":
        return run_online_probe(request, context)
    return run_cached_probe(request, context) if recipe["solver"] == "sgd" else run_logistic_probe(request, context)
