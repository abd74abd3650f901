"""Whether a sweep.yaml declares of its data sets what their committed indexes say. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from orchestrator.core.contract import JobKind
from orchestrator.planning.graph.plan import Plan


def miscounted(plan: Plan, metrics: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Why the plan must not start: numbers of samples that are not those of an index that will not be made again.

    Args:
        plan: the plan.
        metrics: of committed records, by key.
    """
    for job in plan.jobs:
        if job.kind is not JobKind.INDEX or job.key not in metrics:
            continue
        found = metrics[job.key]
        for split, number in job.execution.data_location.get("num_samples", {}).items():
            good, bad = found.get(f"num_{split}"), found.get(f"num_bad_{split}", 0)
            # Samples that were left out as bad may be among those that were declared, or not.
            if number is None or good is None or good <= number <= good + bad:
                continue
            left_out = f" and {bad:.0f} bad ones" if bad else ""
            message = f"datasets.{job.name.partition('/')[2]}.num_{split} declares {number} samples, but its index, "
            yield f"{message}{job.key}, has {good:.0f}{left_out}; correct the number, or the URIs if they name others"
