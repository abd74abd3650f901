"""``policy:`` and ``resources:``, resolved and checked against each other. Pure."""

from __future__ import annotations

from orchestrator.core.contract import Resources
from orchestrator.sweepfile.complaints import Complaints
from orchestrator.sweepfile.policy import Policy, PriorityClass
from orchestrator.sweepfile.schema_policy import PolicySpec, duration_s, moment_s
from orchestrator.sweepfile.schema_resources import ResourceGroups, ResourcesSpec


def resolve_policy(spec: PolicySpec, groups: ResourceGroups, complaints: Complaints) -> Policy:
    """The policy of a sweep; complains about jobs that its own bounds would keep from ever starting."""
    for name in type(groups).model_fields:
        smallest = _fewest_gpus(getattr(groups, name))
        if spec.max_gpus is not None and smallest > spec.max_gpus:
            message = (
                f"{spec.max_gpus:g} keeps jobs of resources.{name} from ever starting, which ask for {smallest:g} "
                "GPUs; raise max_gpus, or lower their gpus or min_gpus"
            )
            complaints.add(("policy", "max_gpus"), message)
    complaints.refuse_repeats(("policy", "users"), spec.users)
    priority = spec.priority if isinstance(spec.priority, int) else int(PriorityClass[spec.priority.upper()])
    budget, deadline = spec.budget, spec.deadline or ""
    return Policy(
        priority=priority,
        weight=spec.weight,
        max_gpus=spec.max_gpus,
        max_concurrent=spec.max_concurrent,
        max_failures=spec.failures,
        max_preemptions=spec.preemptions,
        breaker=spec.breaker,
        gpu_hours=budget.gpu_hours if budget else None,
        cost=budget.cost if budget else None,
        gpu_hour_price=(budget.gpu_hour_price if budget else None) or 0.0,
        deadline_s=moment_s(deadline),
        time_limit_s=duration_s(deadline),
        users=tuple(spec.users),
    )


def resolve_resources(spec: ResourcesSpec) -> Resources:
    """What one attempt occupies."""
    return Resources(**spec.model_dump(exclude={"workers"}))


def _fewest_gpus(spec: ResourcesSpec) -> float:
    return spec.min_gpus or spec.gpus
