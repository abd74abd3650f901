"""The plan: jobs with keys, in an order in which every job stands after the jobs it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from orchestrator.contract import Execution, JobKind, Resources

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One node of the plan.

    ``facets`` are what people compare by and never part of the key: ``dataset``, ``label_space``, ``level``,
    ``granularity``, ``pretrain_seed``, ``transfer``, ``protocol``, ``target``, ``transfer_seed`` (where they apply).
    """

    name: str
    kind: JobKind
    key: str
    identity: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    """Names of the jobs whose artifacts this one reads."""
    resources: Resources = field(default_factory=Resources)
    execution: Execution = field(default_factory=Execution)
    facets: Mapping[str, str | int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``dataclasses.asdict``."""
        return cls(
            **{
                **document,
                "kind": JobKind(document["kind"]),
                "needs": tuple(document["needs"]),
                "resources": Resources(**document["resources"]),
                "execution": Execution(**document["execution"]),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All jobs of one revision of a sweep, and what its report and tracking need."""

    sweep: str
    revision: int
    store_uri: str
    jobs: tuple[Job, ...]
    baseline: str
    """Label space that the report compares with; empty for none."""
    metric: str = "val_error"
    tracking_uri: str = ""
    """MLflow tracking URI; empty for the stack's own."""
    experiment: str = ""
    """MLflow experiment; empty for the sweep's name."""
    max_failures: int = 3
    """Failed attempts per job before the job fails; preemptions and lost nodes do not count."""
    version: int = PLAN_VERSION

    def by_name(self) -> dict[str, Job]:
        """Jobs by name, in plan order."""
        return {job.name: job for job in self.jobs}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        return cls(**{**document, "jobs": tuple(Job.from_json(job) for job in document["jobs"])})
