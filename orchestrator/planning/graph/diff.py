"""Differences between two identities, and between two plans. Pure.

For identities: the fields that differ, also those of their inputs. For plans: which jobs are new, removed, equal, or
have the same name and another key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from orchestrator.planning.graph.plan import Job, Plan

Identity = Mapping[str, Any]
Find = Callable[[str], Identity | None]
"""Returns the identity of a key; None if it is unknown."""

ABSENT = "(absent)"
_MAX_DEPTH = 16
_INPUTS = "inputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChange:
    """One identity field with two values; ``via`` are the roles of inputs that lead to the job that has the field."""

    path: str
    """Such as ``parameters.recipe.lr``."""
    old: Any
    new: Any
    via: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = "".join(f"{role} > " for role in self.via) + self.path
        return f"{place}: {_show(self.old)} -> {_show(self.new)}"


def changes(old: Identity, new: Identity) -> list[FieldChange]:
    """Fields that differ between two identities, inputs included, in the order of the new one."""
    before, after = dict(_leaves(old, "")), dict(_leaves(new, ""))
    paths = dict.fromkeys((*after, *before))
    return [
        FieldChange(path=path, old=before.get(path, ABSENT), new=after.get(path, ABSENT))
        for path in paths
        if before.get(path, ABSENT) != after.get(path, ABSENT)
    ]


def causes(old: Identity, new: Identity, find_old: Find, find_new: Find) -> list[FieldChange]:
    """As ``changes``, with each changed input replaced by what changed in the job behind it.

    An input stays as it is (two keys) where one of the two identities is not known. A job that several inputs lead to
    is shown once, by the first way.
    """
    return list(_causes(old, new, (find_old, find_new), (), set()))


def nearest(wanted: Identity, others: Iterable[tuple[str, Identity]]) -> list[str]:
    """Keys of the identities that differ from the wanted one in the fewest fields, in the order given.

    Inputs count as one field each, so that a job with one changed recipe field is nearer than one on other data; which
    of several is the nearest, ``causes`` tells by what is behind their inputs.
    """
    distances = {key: len(changes(identity, wanted)) for key, identity in others}
    least = min(distances.values(), default=0)
    return [key for key, distance in distances.items() if distance == least]


def _causes(
    old: Identity, new: Identity, find: tuple[Find, Find], via: tuple[str, ...], seen: set[tuple[str, str]]
) -> Iterator[FieldChange]:
    for change in changes(old, new):
        role = change.path.removeprefix(f"{_INPUTS}.")
        if role == change.path:
            yield FieldChange(path=change.path, old=change.old, new=change.new, via=via)
            continue
        pair = (str(change.old), str(change.new))
        if pair in seen:
            continue
        seen.add(pair)
        behind = find[0](pair[0]), find[1](pair[1])
        if behind[0] is None or behind[1] is None or len(via) >= _MAX_DEPTH:
            yield FieldChange(path=change.path, old=change.old, new=change.new, via=via)
        else:
            yield from _causes(behind[0], behind[1], find, (*via, role), seen)


def _leaves(value: object, path: str) -> Iterator[tuple[str, Any]]:
    """Paths of all values that are not a mappings; lists count as values, for their items have no names."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}" if path else str(name))
    else:
        yield path, list(value) if isinstance(value, tuple) else value


def _show(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


class Change(StrEnum):
    """How a job changed."""

    ADDED = "added"
    REMOVED = "removed"
    REKEYED = "rekeyed"
    """Same name, another key: it has to run again, unless another job has that key."""
    RENAMED = "renamed"
    """Same key, another name in place of one that is gone: its result stays."""
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChange:
    """One job of either plan."""

    name: str
    """In the new plan; of removed jobs in the old one."""
    kind: str
    change: Change
    old_name: str = ""
    old_key: str = ""
    new_key: str = ""
    fields: tuple[FieldChange, ...] = ()
    """Of rekeyed jobs: why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """The difference of an old plan and a new one."""

    jobs: tuple[JobChange, ...]
    """Jobs of the new plan in its order, then the removed ones."""

    @property
    def counts(self) -> Mapping[Change, int]:
        """Number of jobs by change."""
        counts = Counter(job.change for job in self.jobs)
        return {change: counts[change] for change in Change}

    @property
    def has_new_keys(self) -> bool:
        """Whether the new plan has a key that the old one lacks, whose job has to run."""
        former = {job.old_key for job in self.jobs}
        return any(job.new_key and job.new_key not in former for job in self.jobs)

    def __repr__(self) -> str:
        return f"<PlanDiff: {', '.join(f'{number} {change.value}' for change, number in self.counts.items())}>"

    def by_cause(self) -> dict[str, list[JobChange]]:
        """Rekeyed jobs by what changed; most share one cause, such as a recipe."""
        grouped: dict[str, list[JobChange]] = {}
        for job in self.jobs:
            if job.change is Change.REKEYED:
                grouped.setdefault("; ".join(_cause(field) for field in job.fields), []).append(job)
        return grouped

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        jobs = [{**asdict(job), "change": job.change.value} for job in self.jobs]
        return {"counts": {change.value: number for change, number in self.counts.items()}, "jobs": jobs}


def diff_plans(old: Plan, new: Plan) -> PlanDiff:
    """What changes when the new plan takes the place of the old one."""
    return PlanDiff(jobs=tuple(_changes(old, new)))


def _changes(old: Plan, new: Plan) -> Iterator[JobChange]:
    before, after = old.by_name(), new.by_name()
    old_keys, new_keys = {job.key: job for job in old.jobs}, {job.key: job for job in new.jobs}

    def find_old(key: str) -> Mapping[str, Any] | None:
        return old_keys[key].identity if key in old_keys else None

    def find_new(key: str) -> Mapping[str, Any] | None:
        return new_keys[key].identity if key in new_keys else None

    gone = _gone(old, after)
    taken, rekeyed = set(), set()
    for job in new.jobs:
        same = before.get(job.name)
        if same is not None and same.key == job.key:
            yield _change(job, Change.UNCHANGED, same)
        elif gone.get(job.key):
            former = gone[job.key].pop(0)
            taken.add(former.name)
            yield _change(job, Change.RENAMED, former)
        elif same is not None:
            fields = tuple(causes(same.identity, job.identity, find_old, find_new))
            rekeyed.add(job.name)
            yield _change(job, Change.REKEYED, same, fields)
        else:
            yield _change(job, Change.ADDED, None)
    for job in old.jobs:
        # Another job may have its name now, and have lost its own: then it is gone all the same.
        is_lost = job.name not in after or (after[job.name].key != job.key and job.name not in rekeyed)
        if is_lost and job.name not in taken:
            yield JobChange(name=job.name, kind=job.kind.value, change=Change.REMOVED, old_key=job.key)


def _gone(old: Plan, after: Mapping[str, Job]) -> dict[str, list[Job]]:
    """By key the jobs that lose their names. One that keeps its name is not renamed, though a new one may be equal."""
    found: dict[str, list[Job]] = {}
    for job in sorted(old.jobs, key=lambda job: job.name in after):  # first those whose names nobody has any more
        if job.name not in after or after[job.name].key != job.key:
            found.setdefault(job.key, []).append(job)
    return found


def _change(job: Job, change: Change, old: Job | None, fields: tuple[FieldChange, ...] = ()) -> JobChange:
    return JobChange(
        name=job.name,
        kind=job.kind.value,
        change=change,
        old_name=old.name if old is not None and change is Change.RENAMED else "",
        old_key=old.key if old is not None else "",
        new_key=job.key,
        fields=fields,
    )


def _cause(field: FieldChange) -> str:
    """Without the path of inputs: all jobs that depend on a changed recipe have the same cause."""
    return str(FieldChange(path=field.path, old=field.old, new=field.new))
