"""Selects jobs of a sweep by names, kinds, states and facets. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import typer

from orchestrator.core.errors import NotFoundError
from orchestrator.core.suggest import did_you_mean
from orchestrator.planning.graph.plan import Job
from orchestrator.state.snapshot import JobView, Snapshot
from orchestrator.state.transitions import JobState

_OWN = ("job", "kind", "state")
"""Fields by which every job can be selected, besides its facets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One ``NAME=VALUE`` of ``--where``."""

    name: str
    patterns: tuple[str, ...]
    """Alternatives, as of a shell."""

    def matches(self, text: str) -> bool:
        """Whether a job with this text passes."""
        return any(fnmatchcase(text, pattern) for pattern in self.patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSelection:
    """The jobs that a user selected; without names and conditions it is the whole sweep."""

    names: tuple[str, ...] = ()
    """Or patterns, as of a shell."""
    conditions: tuple[Condition, ...] = ()
    states: tuple[JobState, ...] = ()
    """States of jobs that can be selected."""

    @property
    def is_everything(self) -> bool:
        """Whether nothing was named."""
        return not self.names and not self.conditions

    def select(self, snapshot: Snapshot) -> list[JobView]:
        """The jobs of a sweep, whatever state they are in. Raises as ``select``."""
        return select(snapshot, self.names, self.conditions)


def parse_where(arguments: Sequence[str]) -> tuple[Condition, ...]:
    """``["level=family,kind=finetune|probe"]``: all conditions must hold, ``|`` parts alternatives.

    Raises:
        typer.BadParameter: an argument is not a list of ``NAME=VALUE``.
    """
    return tuple(_condition(part.strip(), argument) for argument in arguments for part in _parts(argument))


def select(snapshot: Snapshot, names: Sequence[str], conditions: Sequence[Condition]) -> list[JobView]:
    """Jobs that one of ``names`` (or patterns; none = all jobs) names and that meet all conditions, in plan order.

    Raises:
        NotFoundError: no job is named so.
        typer.BadParameter: the name of a condition is unknown.
    """
    jobs = snapshot.plan.by_name() if snapshot.plan is not None else {}
    _check_conditions(jobs, conditions)
    named = set(_named(jobs, names, snapshot.sweep)) if names else jobs.keys()
    return [
        view
        for name, view in snapshot.jobs.items()
        if name in named and all(condition.matches(_text(jobs[name], view, condition.name)) for condition in conditions)
    ]


def _parts(argument: str) -> Iterator[str]:
    """Commas part conditions, except within a value: facets such as ``cell`` hold ``lr=0.4,batch_size=512``."""
    pending = ""
    for part in argument.split(","):
        if pending and "=" in part and not pending.startswith("cell="):
            yield pending
            pending = part
        else:
            pending = f"{pending},{part}" if pending else part
    yield pending


def _condition(text: str, argument: str) -> Condition:
    name, separator, value = text.partition("=")
    if not separator or not name.strip() or not value.strip():
        message = f"--where {argument!r}: {text!r} is not NAME=VALUE; write for example level=family,kind=finetune"
        raise typer.BadParameter(message)
    return Condition(name=name.strip(), patterns=tuple(part.strip() for part in value.split("|")))


def _check_conditions(jobs: Mapping[str, Job], conditions: Sequence[Condition]) -> None:
    known = sorted({*_OWN, *(facet for job in jobs.values() for facet in job.facets)})
    for condition in conditions:
        if condition.name not in known:
            hint = did_you_mean(condition.name, known)
            message = f"--where {condition.name}=...: no job of this sweep has this facet; {hint}"
            raise typer.BadParameter(message)


def _named(jobs: Mapping[str, Job], names: Sequence[str], sweep: str) -> Iterator[str]:
    for name in names:
        found = [name] if name in jobs else [job for job in jobs if fnmatchcase(job, name)]
        if not found:
            message = f"sweep '{sweep}' has no job '{name}': {did_you_mean(name, jobs)}"
            raise NotFoundError(message)
        yield from found


def _text(job: Job, view: JobView, name: str) -> str:
    if name == "job":
        return job.name
    if name == "kind":
        return job.kind.value
    return view.state.value if name == "state" else str(job.facets.get(name, ""))
