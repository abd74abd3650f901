"""The data that is written to a tracking server, as values: runs with all of their content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from orchestrator.tracking.facts import RunFacts, RunIdentity

PARENT_TAG = "mlflow.parentRunId"
_MAX_DIGEST_CHARACTERS = 32
"""MLflow keeps 36; the whole digest stands in the profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """A run of a sweep that is on the server, by its tags."""

    job: str
    key: str
    run_id: str
    parent_run_id: str

    @property
    def identity(self) -> RunIdentity:
        """What it is found by."""
        return self.job, self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    """One value of a run's metric history; ``value`` is finite, ``at_s`` unix seconds."""

    name: str
    value: float
    step: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetUse:
    """A data set that a job reads."""

    name: str
    digest: str
    """Sha256 of its shards, or of its generator's parameters."""
    source: str
    """URI, or the parameters of the generator."""
    num_samples: int | None = None

    @property
    def short_digest(self) -> str:
        """As much of the digest as MLflow's column holds."""
        return self.digest[:_MAX_DIGEST_CHARACTERS]

    @property
    def source_type(self) -> str:
        """One of those that MLflow's pages can show."""
        return "s3" if self.source.startswith("s3://") else "local"

    @property
    def source_json(self) -> str:
        """As MLflow's pages read it."""
        return json.dumps({"uri": self.source})

    @property
    def profile_json(self) -> str:
        """What else is known."""
        return json.dumps({"num_samples": self.num_samples, "digest": self.digest})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDraft:
    """All that a run shall say besides what it says already. Writing the same draft twice changes nothing."""

    name: str
    facts: RunFacts
    run_id: str = ""
    """Empty for a run that is to be made."""
    parent_run_id: str = ""
    params: Mapping[str, str] = field(default_factory=dict)
    """Those that the run has already keep their value: MLflow cannot change one."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Besides those of the facts."""
    points: tuple[MetricPoint, ...] = ()
    datasets: tuple[DatasetUse, ...] = ()
    only_points: bool = False
    """Whether the run says all facts and tags already."""

    @property
    def all_tags(self) -> dict[str, str]:
        """Tags of the facts and those that are not part of them, and the parent's, by which MLflow nests runs."""
        parent = {PARENT_TAG: self.parent_run_id} if self.parent_run_id else {}
        return {**self.facts.tags, **self.tags, **parent}


def generated_digest(parameters: Mapping[str, object]) -> str:
    """Digest of a built-in data set: of what generates it."""
    return sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()


def milliseconds(at_s: float) -> int:
    """Unix time as MLflow counts it."""
    return round(1000 * at_s)
