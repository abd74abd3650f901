"""The kinds of jobs: all properties of a kind are in its row of ``KINDS``; sets of kinds follow from the rows.

Invariants:

- Every ``JobKind`` has exactly one row. Kinds are listed to people in the order of the rows.
- ``code_version`` is part of every key. It is raised by hand whenever the code of a kind computes another result from
  the same parameters, and never lowered.
- The handler is a string, so that the control plane imports nothing of the data plane.

A new kind is a member and a row here, its jobs in ``orchestrator.planning.graph`` (``build`` calls them), its work and
output in ``orchestrator.planning.estimate.volumes``, and its handler in ``workloads.jobs``. If no group of resources
fits, it also has a field in ``orchestrator.sweepfile.resources.ResourceGroups``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

from orchestrator.core.errors import UserError


class JobKind(StrEnum):
    """What a job does; the first part of its name and key."""

    DATASET = "dataset"
    INDEX = "index"
    EMBED = "embed"
    CLUSTER = "cluster"
    LABELS = "labels"
    PRETRAIN = "pretrain"
    FINETUNE = "finetune"
    PROBE = "probe"
    KNN = "knn"
    SEARCH = "search"
    ANALYZE = "analyze"
    THEORY = "theory"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRow:
    """All properties of one kind."""

    code_version: int | None = None
    """None = this version plans no such jobs."""
    resources: Literal["data", "embed", "cluster", "pretrain", "transfer", "analyze", "simulate"] | None = None
    """The group of ``resources`` in a sweep.yaml that it runs with."""
    default_s: float
    """Seconds of a job without an estimate; measured ratios soon correct them."""
    handler: str = ""
    """``module:function`` of the data plane; empty = the backend itself runs it, or nothing does."""
    trains: Literal["", "head", "backbone"] = ""
    """Which weights it trains on images: a head on a frozen backbone, all weights, or none."""
    saves: bool = False
    """Whether an attempt that was stopped goes on from a checkpoint."""
    is_measured: bool = False
    """Whether its record has the amount of work and its seconds, so that estimates use it."""
    result: Literal["", "backbone", "transfer"] = ""
    """The kind of result that a report compares; empty = it is no result."""
    in_report: Literal["", "time", "content"] = ""
    """``content``: a report lacks something until it is committed; ``time``: a report counts its seconds alone."""
    makes_data: bool = False
    """Whether it writes or indexes a data set."""


KINDS: Final[Mapping[JobKind, KindRow]] = {
    JobKind.DATASET: KindRow(
        code_version=1,
        resources="data",
        default_s=60.0,
        handler="workloads.jobs.dataset:run_dataset",
        is_measured=True,
        makes_data=True,
    ),
    JobKind.INDEX: KindRow(
        code_version=2,
        resources="data",
        default_s=30.0,
        handler="workloads.jobs.index:run_index",
        is_measured=True,
        makes_data=True,
    ),
    JobKind.EMBED: KindRow(
        code_version=1,
        resources="embed",
        default_s=300.0,
        handler="workloads.jobs.embed:run_embed",
        is_measured=True,
        in_report="time",
    ),
    JobKind.CLUSTER: KindRow(
        code_version=1,
        resources="cluster",
        default_s=120.0,
        handler="workloads.jobs.cluster:run_cluster",
    ),
    JobKind.LABELS: KindRow(
        code_version=1,
        resources="data",
        default_s=10.0,
        handler="workloads.jobs.labels:run_labels",
        is_measured=True,
        in_report="content",
    ),
    JobKind.PRETRAIN: KindRow(
        code_version=1,
        resources="pretrain",
        default_s=3600.0,
        handler="workloads.jobs.pretrain:run_pretrain",
        trains="backbone",
        saves=True,
        is_measured=True,
        result="backbone",
        in_report="content",
    ),
    JobKind.FINETUNE: KindRow(
        code_version=1,
        resources="transfer",
        default_s=900.0,
        handler="workloads.jobs.finetune:run_finetune",
        trains="backbone",
        saves=True,
        is_measured=True,
        result="transfer",
        in_report="content",
    ),
    JobKind.PROBE: KindRow(
        code_version=1,
        resources="transfer",
        default_s=300.0,
        handler="workloads.jobs.probe:run_probe",
        trains="head",
        saves=True,
        is_measured=True,
        result="transfer",
        in_report="content",
    ),
    JobKind.KNN: KindRow(
        code_version=1,
        resources="transfer",
        default_s=60.0,
        handler="workloads.jobs.knn:run_knn",
        result="transfer",
        in_report="content",
    ),
    JobKind.SEARCH: KindRow(code_version=1, resources="transfer", default_s=3600.0, saves=True, in_report="time"),
    JobKind.ANALYZE: KindRow(
        code_version=2,
        resources="analyze",
        default_s=60.0,
        handler="workloads.jobs.analyze:run_analyze",
        in_report="content",
    ),
    JobKind.THEORY: KindRow(
        code_version=1,
        resources="simulate",
        default_s=60.0,
        handler="workloads.jobs.theory:run_theory",
        saves=True,
        is_measured=True,
        in_report="content",
    ),
}

DATA_KINDS: Final = frozenset(kind for kind, row in KINDS.items() if row.makes_data)
TRAINING_KINDS: Final = frozenset(kind for kind, row in KINDS.items() if row.trains)
BACKBONE_TRAINING_KINDS: Final = frozenset(kind for kind, row in KINDS.items() if row.trains == "backbone")
TRANSFER_KINDS: Final = frozenset(kind for kind, row in KINDS.items() if row.result == "transfer")
RESULT_KINDS: Final = frozenset(kind for kind, row in KINDS.items() if row.result)
REPORTED_KINDS: Final = frozenset(kind for kind, row in KINDS.items() if row.in_report == "content")
TIMED_KINDS: Final = frozenset(kind for kind, row in KINDS.items() if row.in_report)


def other_versions(kind: JobKind, identity: Mapping[str, Any]) -> set[tuple[JobKind, Any]]:
    """Kinds of which this program computes other results than an identity names, each with the named ``code_version``.

    Of a search these are also the kind of the trials that it makes where it runs, and that of the probes which judge
    them.
    """
    named = {(kind, identity.get("code_version"))}
    if kind is JobKind.SEARCH:
        parameters = identity["parameters"]
        if trial := parameters.get("trial"):
            named.add((JobKind(trial["kind"]), trial["code_version"]))
        if probe := parameters.get("probe"):
            named.add((JobKind.PROBE, probe["code_version"]))
    return {(one, number) for one, number in named if number != KINDS[one].code_version}


def describe_versions(versions: set[tuple[JobKind, Any]]) -> str:
    """``pretrain 1 (here 2), probe 3 (here 4)``."""
    ordered = sorted(versions, key=str)
    return ", ".join(f"{kind.value} {number} (here {KINDS[kind].code_version})" for kind, number in ordered)


def require_own_versions(job: str, kind: JobKind, identity: Mapping[str, Any]) -> None:
    """Ask this before a job's work: its program may have been upgraded since the job was planned.

    Raises:
        UserError: the job's key promises a result that this program does not compute.
    """
    if other := other_versions(kind, identity):
        raise UserError(
            f"{job} was planned by a release that computes other results than this one: code_version of "
            f"{describe_versions(other)}, so its result does not belong under its key; use one release on the whole "
            "cluster and submit the sweep again: it keeps every result that has the same key"
        )
