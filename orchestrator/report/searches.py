"""The searches of a sweep: what was tried, what was found, what was saved, and at what risk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.core.contract import JobKind
from orchestrator.planning.graph.plan import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTrial:
    """One trial; ``value`` is the newest one of what was minimised."""

    number: int
    params: Mapping[str, Any]
    state: str
    epoch: float
    value: float | None
    hours: float
    """Of its attempts, as far as they told."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RungRisk:
    """How often completed trials changed places between a rung and the end."""

    rung: float
    num_stopped: int
    num_pairs: int
    num_swapped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
    """What one search found. Hours are those of trials, each on ``gpus`` GPUs and ``cpus`` CPUs."""

    job: str
    over: str
    algorithm: str
    metric: str
    best: int
    trials: tuple[SearchTrial, ...]
    """The best ones first: those that completed, then those that came furthest."""
    epochs: float
    full_epochs: float
    spent_hours: float
    full_hours: float
    """What all of its trials would have taken to their ends, estimated by what they took per epoch."""
    saved_share: float
    risks: tuple[RungRisk, ...]
    gpus: float
    cpus: float

    @classmethod
    def of(cls, job: Job, found: Mapping[str, Any]) -> SearchReport:
        """From a search job and ``summary["search"]`` of its record."""
        saving, num_workers = found["saving"], max(1, job.execution.num_workers)
        trials = [
            SearchTrial(
                number=one["trial"],
                params=one["params"],
                state=one["state"],
                epoch=one["epoch"],
                value=one["value"],
                hours=one["spent_s"] / 3600,
                reason=one["reason"],
            )
            for one in found["trials"]
        ]
        return cls(
            job=job.name,
            over=found["over"],
            algorithm=found["algorithm"],
            metric=found["metric"],
            best=found["best"]["trial"],
            trials=tuple(sorted(trials, key=_rank)),
            epochs=saving["epochs"],
            full_epochs=saving["full_epochs"],
            spent_hours=saving["spent_s"] / 3600,
            full_hours=saving["full_s"] / 3600,
            saved_share=saving["share"],
            risks=tuple(RungRisk(**one) for one in found["risk"]),
            gpus=job.resources.gpus / num_workers,
            cpus=job.resources.cpus / num_workers,
        )


def build_searches(jobs: Iterable[Job], found: Mapping[str, Mapping[str, Any]]) -> tuple[SearchReport, ...]:
    """The searches of a plan that are committed; ``found`` is by job."""
    return tuple(
        SearchReport.of(job, found[job.name]) for job in jobs if job.kind is JobKind.SEARCH and found.get(job.name)
    )


def _rank(trial: SearchTrial) -> tuple[bool, float, float, int]:
    is_done = trial.state == "completed"
    value = float("inf") if trial.value is None else trial.value
    return (not is_done, 0.0 if is_done else -trial.epoch, value, trial.number)
