"""The plan: jobs with keys, in an order in which every job stands after the jobs it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Self

from orchestrator.core.contract import Execution, JobKind, Resources
from orchestrator.planning.graph.published import Published
from orchestrator.sweepfile.values import Channel, Policy

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
    def from_json(cls, document: Mapping[str, Any], made: dict[int, Any] | None = None) -> Self:
        """Inverse of ``dataclasses.asdict``. ``made``, by the ids of their JSON, are parts that jobs may share."""
        made = {} if made is None else made
        resources, execution = document["resources"], document["execution"]
        return cls(
            **{
                **document,
                "kind": JobKind(document["kind"]),
                "needs": tuple(document["needs"]),
                "resources": made.get(id(resources)) or made.setdefault(id(resources), Resources(**resources)),
                "execution": made.get(id(execution)) or made.setdefault(id(execution), Execution(**execution)),
            }
        )


@dataclass(frozen=True, kw_only=True)  # no slots: it remembers ``by_name``
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
    policy: Policy = field(default_factory=Policy)
    owner: str = ""
    """Who submitted the sweep; messages of others are refused unless they insist. Empty = anybody's."""
    register: str = ""
    """``best``: MLflow's model registry gets the best backbone."""
    published: tuple[Published, ...] = ()
    """Printed numbers to show beside those of the report."""
    notify: tuple[Channel, ...] = ()
    """Who is told what, besides those whom the cluster's own file names."""
    version: int = PLAN_VERSION

    def by_name(self) -> Mapping[str, Job]:
        """Jobs by name, in plan order; computed once."""
        return self._by_name

    @cached_property
    def _by_name(self) -> Mapping[str, Job]:
        return {job.name: job for job in self.jobs}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form. Without anybody to notify it is that of earlier versions, which know no such field."""
        document = asdict(self)
        if not self.notify:
            del document["notify"]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of ``to_json``."""
        made: dict[int, Any] = {}
        jobs = tuple(Job.from_json(job, made) for job in document["jobs"])
        published = tuple(Published.from_json(entry) for entry in document.get("published", ()))
        former = {"max_failures": document["max_failures"]} if "max_failures" in document else {}
        policy = Policy.from_json(document.get("policy", former))
        known = {name: value for name, value in document.items() if name != "max_failures"}
        notify = tuple(Channel.from_json(entry) for entry in document.get("notify", ()))
        return cls(**{**known, "jobs": jobs, "published": published, "policy": policy, "notify": notify})
