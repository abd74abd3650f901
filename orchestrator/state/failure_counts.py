"""How the jobs of a sweep failed so far: alike, or on the same node. Pure."""

from __future__ import annotations

import re
from typing import TypeAlias

from orchestrator.core.contract import JobKind
from orchestrator.core.errors import FailureKind
from orchestrator.planning.graph.plan import Job
from orchestrator.state.job_view import Failure, JobView
from orchestrator.state.transitions import JobState

Likeness: TypeAlias = tuple[JobKind, FailureKind, str]
"""Failures with the same likeness are one problem: kind of job, kind of failure and what its message says."""

_PARTICULARS = re.compile(r"0x[0-9a-f]+|[0-9a-f]{16,}|\d+(?:\.\d+)?|(?:/[\w.@=+-]+)+|'[^']*'|\"[^\"]*\"")
_MAX_TEXT = 120


def likeness_of(job: Job, failure: Failure) -> Likeness:
    """What a failure has in common with others: its message without numbers, paths and quoted names."""
    first = failure.message.strip().partition("\n")[0]
    return job.kind, failure.kind, " ".join(_PARTICULARS.sub("*", first).split())[:_MAX_TEXT]


class FailureCounts:
    """Failures by likeness and by node, and successes by kind of job."""

    __slots__ = ("alike", "by_node", "numerics", "succeeded")

    def __init__(self) -> None:
        self.alike: dict[Likeness, set[str]] = {}
        """Names of the jobs that failed for good."""
        self.succeeded: dict[JobKind, int] = {}
        self.by_node: dict[str, dict[str, Failure]] = {}
        """By node and job: each job's latest failure."""
        self.numerics: dict[str, JobView] = {}
        """Jobs with failures of numerics, by name."""

    def count(self, job: Job, view: JobView, count: int) -> None:
        """Take a job in as it is (``count`` 1), or out as it was (-1)."""
        if view.state is JobState.SUCCEEDED:
            self.succeeded[job.kind] = self.succeeded.get(job.kind, 0) + count
        if view.numerics and count > 0:
            self.numerics[job.name] = view
        elif view.numerics:
            self.numerics.pop(job.name, None)
        failure = view.last_failure
        if failure is None:
            return
        if view.state is JobState.FAILED and view.failures:
            _keep(self.alike.setdefault(likeness_of(job, failure), set()), job.name, count)
        if failure.node:
            on_node = self.by_node.setdefault(failure.node, {})
            if count > 0:
                on_node[job.name] = failure
            else:
                on_node.pop(job.name, None)


def _keep(names: set[str], name: str, count: int) -> None:
    if count > 0:
        names.add(name)
    else:
        names.discard(name)
