"""Why a job has no result: the nearest result of the store, and the identity fields that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.core.errors import NotFoundError, SpecError, StorageTimeoutError, UsageError
from orchestrator.core.job_kinds import JobKind
from orchestrator.core.suggest import did_you_mean
from orchestrator.planning.graph.diff import FieldChange, causes, nearest
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.services.artifact_lookup import ArtifactSummary, ask_all, read_artifact_summary
from orchestrator.storage.layout import checkpoints_folder
from orchestrator.storage.protocol import ObjectStore
from orchestrator.sweeps.client import list_sweeps

_SILENCE_S = 20.0
"""Without any answer for so long, the store is given up."""
_MAX_CANDIDATES = 400
"""Records read to find the nearest one: first those of the same readable name, then any of the kind."""
_MAX_TIES = 32
_HASH_LENGTH = 17  # 16 hex digits and the dash before them


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a job has or lacks a result in the store."""

    name: str
    """Of the job in its plan; empty if only a key was given."""
    key: str
    state: str
    """``committed``, ``resumable`` or ``new``."""
    committed_by: str = ""
    """Sweep and job that made the result."""
    compared_with: str = ""
    """Key of the result that the fields are compared with; empty if there is none."""
    compared_job: str = ""
    """Sweep and job that made that one."""
    num_candidates: int = 0
    """Number of results that were compared to find the nearest."""
    fields: tuple[FieldChange, ...] = ()
    """From the other result to this job."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)


@dataclass(slots=True, kw_only=True)
class _Identities:
    """Identities by key, from the plan and from the store."""

    store: ObjectStore | None
    plan: Mapping[str, Job]
    read: dict[str, Mapping[str, Any] | None] = field(default_factory=dict)

    def planned(self, key: str) -> Mapping[str, Any] | None:
        return self.plan[key].identity if key in self.plan else self.stored(key)

    def stored(self, key: str) -> Mapping[str, Any] | None:
        if key not in self.read:
            seen = read_artifact_summary(self.store, key) if self.store is not None else None
            self.read[key] = None if seen is None else seen.identity
        # The plan may have identities that are not committed, such as inputs of a job that both sweeps have.
        return self.read[key] or (self.plan[key].identity if key in self.plan else None)

    def causes(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[FieldChange]:
        return causes(old, new, self.stored, self.planned)


def explain_job(
    name: str, plan: Plan | None, store_uri: str, store: ObjectStore | None, *, against: str = ""
) -> Explanation:
    """Explain a job of a plan, or without a plan a key of the store.

    Args:
        name: of the job; or a key.
        plan: the job's.
        store_uri: where results are.
        store: the same, opened; None = there is none yet.
        against: key to compare with; default: the nearest result of the same kind.

    Raises:
        NotFoundError: there is no such job, key or result to compare with.
        StorageTimeoutError: the store did not answer in time.
    """
    key, identity = _subject(name, plan, store, store_uri)
    committed = read_artifact_summary(store, key) if store is not None else None
    jobs = {job.key: job for job in plan.jobs} if plan is not None else {}
    known = _Identities(store=store, plan=jobs)
    others: list[ArtifactSummary] = []
    if against or committed is None:
        others = _others(store, key, against)
    other = _nearest(identity, others, known)
    fields = known.causes(other.identity, identity) if other is not None else []
    return Explanation(
        name=jobs[key].name if key in jobs else "",
        key=key,
        state="committed" if committed is not None else _state(store, key),
        committed_by=_origin(committed),
        compared_with=other.key if other is not None else "",
        compared_job=_origin(other),
        num_candidates=len(others),
        fields=tuple(fields),
    )


def _subject(name: str, plan: Plan | None, store: ObjectStore | None, uri: str) -> tuple[str, Mapping[str, Any]]:
    if plan is not None:
        jobs = plan.by_name()
        job = jobs.get(name) or next((job for job in plan.jobs if job.key == name), None)
        if job is None:
            raise NotFoundError(f"sweep '{plan.sweep}' has no job or key '{name}': {did_you_mean(name, jobs)}")
        return job.key, job.identity
    seen = read_artifact_summary(store, name) if store is not None and _is_key(name) else None
    if seen is not None:
        return name, seen.identity
    if _is_sweep(name, store):
        raise UsageError(f"'{name}' is a sweep: name one of its jobs, too, as in: orchestrator explain {name} JOB")
    if "/" in name:
        raise UsageError(f"'{name}' is the name of a job: put its sweep (a file, or a submitted sweep) before it")
    message = f"no result in {uri} has the key '{name}'; for a job that has none yet, give its sweep and its name"
    raise NotFoundError(message)


def _is_sweep(name: str, store: ObjectStore | None) -> bool:
    """Whether a file, a submitted or a shipped sweep has that name."""
    from orchestrator.sweepfile.load import find_sweep  # not needed where the key of a result is given

    try:
        return (store is not None and name in list_sweeps(store)) or bool(find_sweep(name))
    except SpecError:
        return False


def _others(store: ObjectStore | None, key: str, against: str) -> list[ArtifactSummary]:
    """Results to compare with."""
    if store is None:
        if against:
            raise NotFoundError(f"there is no store, so there is no result '{against}' to compare with")
        return []
    if against:
        seen = read_artifact_summary(store, against) if _is_key(against) else None
        if seen is None:
            raise NotFoundError(f"no result in {store.uri} has the key '{against}'; list them with `orchestrator ls`")
        return [seen]
    try:
        return _candidates(store, key)
    except TimeoutError as error:
        message = f"store {store.uri} did not answer within {_SILENCE_S:g} s; try again, or name a key with --against"
        raise StorageTimeoutError(message) from error


def _nearest(
    identity: Mapping[str, Any], others: Sequence[ArtifactSummary], known: _Identities
) -> ArtifactSummary | None:
    """The result with the fewest differences, those behind its inputs included; of equal ones the first."""
    keys = nearest(identity, ((seen.key, seen.identity) for seen in others))[:_MAX_TIES]
    tied = [seen for seen in others if seen.key in keys]
    return min(tied, key=lambda seen: len(known.causes(seen.identity, identity)), default=None)


def _candidates(store: ObjectStore, key: str) -> list[ArtifactSummary]:
    """Results of a key's kind: those of its own readable name first, of each the newest first."""
    keys = [other for other in store.list_children(f"artifacts/{key.partition('-')[0]}/") if other != key]
    alike = key[:-_HASH_LENGTH]
    chosen = sorted(keys, key=lambda other: other[:-_HASH_LENGTH] != alike)[:_MAX_CANDIDATES]
    found = ask_all(lambda other: read_artifact_summary(store, other), chosen, silence_s=_SILENCE_S)
    seen = [record for record in found.values() if record is not None]
    return sorted(seen, key=lambda record: (record.key[:-_HASH_LENGTH] != alike, -record.created_at_s))


def _state(store: ObjectStore | None, key: str) -> str:
    is_started = store is not None and bool(store.list_children(checkpoints_folder(key) + "/"))
    return "resumable" if is_started else "new"


def _origin(seen: ArtifactSummary | None) -> str:
    return "" if seen is None else f"{seen.sweep}: {seen.job}"


def _is_key(text: str) -> bool:
    return text.partition("-")[0] in set(JobKind) and "/" not in text
