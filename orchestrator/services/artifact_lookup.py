"""Finds the artifacts of a plan in a store, and their measurements.

It only reads, many objects at a time, and gives up a store that falls silent.
"""

from __future__ import annotations

import json
import math
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from orchestrator.core.code import package_digest
from orchestrator.core.errors import CorruptObjectError, NotFoundError, OrchestratorError
from orchestrator.core.ids import canonical_json, is_key, references_in
from orchestrator.core.job_kinds import BACKBONE_TRAINING_KINDS, KINDS, JobKind
from orchestrator.planning.estimate.history import Measurement, SpeedHistory, index_size, measure
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.planning.graph.reuse import Disposition, dispositions
from orchestrator.storage.artifacts import Record, is_committed, read_record
from orchestrator.storage.layout import checkpoints_folder
from orchestrator.storage.open import is_initialised, open_store
from orchestrator.storage.protocol import ObjectStore

SILENCE_S = 15.0
"""A store without any answer for so long is given up. While answers arrive, all of them are waited for."""
_MAX_SINGLE_LOOKUPS = 256
"""Up to so many keys of a kind, each is looked up; for more keys, the store first lists its keys of the kind."""
_NUM_NAMED = 3
_HISTORY_DEADLINE_S = 10.0
_PER_MODEL = 24
_PER_KIND = 24
"""Records read of a kind: of each model of the plan, and of any, for models that have none."""
_UNREADABLE = re.compile(r"[^a-z0-9]+")
_NUM_THREADS = 16

Question = TypeVar("Question")
Answer = TypeVar("Answer")
_Answered = tuple[Question, Answer | Exception]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactSummary:
    """The fields of a committed record that planning needs; its seal is checked by readers of its parts."""

    key: str
    job: str
    """Its name in the sweep that made it."""
    sweep: str
    identity: Mapping[str, Any]
    metrics: Mapping[str, float]
    summary: Mapping[str, Any]
    package_digest: str
    created_at_s: float
    num_bytes: int

    @classmethod
    def of(cls, record: Record) -> Self:
        """The part of a record that planning needs."""
        return cls(
            key=record.key,
            job=record.job,
            sweep=record.sweep,
            identity=record.identity,
            metrics=record.metrics,
            summary=record.summary,
            package_digest=record.package_digest,
            created_at_s=float(record.created_at_s),
            num_bytes=sum(part.size_bytes for part in record.parts.values()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactStatus:
    """The artifacts of a plan's jobs in a store."""

    dispositions: Mapping[str, Disposition]
    """By name of the job."""
    records: Mapping[str, ArtifactSummary] = field(default_factory=dict)
    """By key, of committed jobs."""
    absent: tuple[str, ...] = ()
    """Keys without a result that no job of the plan makes and jobs start from (``init: {artifact: ...}``)."""
    problems: tuple[str, ...] = ()
    """Why the lookup may be incomplete or wrong."""
    store: ObjectStore | None = None
    """The opened store; None = it does not exist yet, or did not answer."""

    @property
    def reused(self) -> set[str]:
        """Names of the jobs that need not run."""
        return {name for name, disposition in self.dispositions.items() if disposition.is_reused}


def lookup_artifacts(plan: Plan, *, silence_s: float = SILENCE_S) -> ArtifactStatus:
    """Compare a plan with its store. Creates nothing; a store that cannot be asked is a problem, not an error.

    Args:
        plan: names its store.
        silence_s: seconds without an answer after which to go on with what is known.
    """
    uri = plan.store_uri
    nothing = dispositions(plan, (), ())
    store: ObjectStore | None = None
    try:
        store = _opened(uri, silence_s)
        if store is None:
            return ArtifactStatus(dispositions=nothing, absent=_other_sources(plan), problems=_absent(uri))
        there = _there(store, plan.jobs, silence_s)
        records, damaged = _records(store, there, silence_s)
        absent = _absent_sources(store, plan, silence_s)
        started = _started(store, [key for key in there if key not in records], silence_s)
    except TimeoutError:
        problem = f"store {uri} did not answer within {silence_s:g} s: jobs are shown as new that may have a result"
        return ArtifactStatus(dispositions=nothing, problems=(problem,), store=store)
    except (OrchestratorError, OSError, ValueError) as error:
        problem = f"store {uri} cannot be read, so jobs with a result may be shown as new: {error}"
        return ArtifactStatus(dispositions=nothing, problems=(problem,), store=store)
    digest = package_digest()
    stale = {key for key, record in records.items() if record.package_digest not in {"", digest}}
    return ArtifactStatus(
        dispositions=dispositions(plan, records.keys(), started, stale),
        records=records,
        absent=absent,
        problems=(*damaged, *_altered(plan, records)),
        store=store,
    )


def read_artifact_summary(store: ObjectStore, key: str) -> ArtifactSummary | None:
    """The record of a key; None if it is not committed, or not readable."""
    found = _summary_or_reason(store, key)
    return found if isinstance(found, ArtifactSummary) else None


def _summary_or_reason(store: ObjectStore, key: str) -> ArtifactSummary | str | None:
    """The record of a key, or what is wrong with it."""
    try:
        return ArtifactSummary.of(read_record(store, key))
    except NotFoundError:
        return None
    except CorruptObjectError as error:
        return str(error)


def _other_sources(plan: Plan) -> tuple[str, ...]:
    """Keys that jobs start from and no job of the plan makes."""
    keys = {key for job in plan.jobs for key in references_in(job.identity)} - {job.key for job in plan.jobs}
    return tuple(sorted(keys))


def _absent_sources(store: ObjectStore, plan: Plan, silence_s: float) -> tuple[str, ...]:
    """Those of them without a result."""

    def is_there(key: str) -> bool:
        return is_key(key) and is_committed(store, key)  # a sweep.yaml may have any text there

    try:
        found = ask_all(is_there, _other_sources(plan), silence_s=silence_s)
    except TimeoutError:
        return ()  # a warning less; the other answers stay
    return tuple(key for key, has_result in found.items() if not has_result)


def _absent(uri: str) -> tuple[str, ...]:
    """The first submit creates a directory, but no command creates a bucket."""
    if uri.startswith("file:"):
        return ()
    return (f"the bucket of store {uri} does not exist: create it, or correct the store's URI, before you submit",)


def _records(store: ObjectStore, keys: Sequence[str], silence_s: float) -> tuple[dict[str, ArtifactSummary], list[str]]:
    """Records by key, and messages about damaged ones, at which a submit would fail."""
    found = ask_all(lambda key: _summary_or_reason(store, key), keys, silence_s=silence_s)
    damaged = [reason for reason in found.values() if isinstance(reason, str)]
    shown = damaged[:_NUM_NAMED] + (
        [f"{len(damaged) - _NUM_NAMED} more records are damaged"] if damaged[_NUM_NAMED:] else []
    )
    return {key: seen for key, seen in found.items() if isinstance(seen, ArtifactSummary)}, shown


def _started(store: ObjectStore, keys: Sequence[str], silence_s: float) -> set[str]:
    """Those of the keys that have checkpoints."""

    def has_checkpoint(key: str) -> bool:
        return bool(store.list_children(checkpoints_folder(key) + "/"))

    found = ask_all(has_checkpoint, keys, silence_s=silence_s)
    return {key for key, is_started in found.items() if is_started}


def _there(store: ObjectStore, jobs: Iterable[Job], silence_s: float) -> list[str]:
    """Keys for which the store may have objects."""
    by_kind: dict[str, set[str]] = {}
    for job in jobs:
        by_kind.setdefault(job.kind.value, set()).add(job.key)
    large = [kind for kind, keys in by_kind.items() if len(keys) > _MAX_SINGLE_LOOKUPS]
    try:
        listed = ask_all(lambda kind: store.list_children(f"artifacts/{kind}/"), large, silence_s=silence_s)
    except TimeoutError:
        # A list is one answer, and takes as long as the store is old: it has the results of all sweeps. The keys of
        # this plan are then looked up one by one, which tells whether the store answers.
        listed = {}
    for kind, there in listed.items():
        by_kind[kind] &= set(there)
    return sorted(key for keys in by_kind.values() for key in keys)


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two identities have the same canonical form; equal JSON tells it in half the time."""
    is_equal = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    return is_equal or canonical_json(one) == canonical_json(other)


def _altered(plan: Plan, records: Mapping[str, ArtifactSummary]) -> list[str]:
    """Records whose identity is not that of their key: a submit would fail at them."""
    names = [
        job.name for job in plan.jobs if job.key in records and not _is_same(records[job.key].identity, job.identity)
    ]
    if not names:
        return []
    named = ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")
    return [f"{len(names)} records in {plan.store_uri} hold another identity than their key's ({named}): run fsck"]


def ask_all(
    ask: Callable[[Question], Answer],
    questions: Sequence[Question],
    *,
    silence_s: float = SILENCE_S,
    deadline_s: float = math.inf,
) -> dict[Question, Answer]:
    """Answers by question.

    Args:
        ask: called in up to 16 threads.
        questions: hashable.
        silence_s: seconds without any answer after which to stop waiting.
        deadline_s: value of ``time.monotonic`` at which to stop waiting, even if answers arrive.

    Raises:
        TimeoutError: not everything was answered in time; its ``args[0]`` is the number of answers.
        OrchestratorError, OSError: the first one that a question raised.
    """
    waiting: queue.SimpleQueue[Question] = queue.SimpleQueue()
    answered: queue.SimpleQueue[_Answered[Question, Answer]] = queue.SimpleQueue()
    for question in questions:
        waiting.put(question)
    for _ in range(min(_NUM_THREADS, len(questions))):
        threading.Thread(target=_serve, args=(ask, waiting, answered), daemon=True).start()
    answers: dict[Question, Answer] = {}
    heard_at_s = time.monotonic()
    try:
        while len(answers) < len(questions):
            until_s = min(deadline_s, heard_at_s + silence_s)
            question, answer = answered.get(timeout=max(0.0, until_s - time.monotonic()))
            heard_at_s = time.monotonic()
            if isinstance(answer, Exception):
                raise answer
            answers[question] = answer
    except queue.Empty:
        raise TimeoutError(len(answers)) from None
    finally:
        while not waiting.empty():  # the threads end after the question in hand
            _drop(waiting)
    return answers


def _serve(
    ask: Callable[[Question], Answer],
    waiting: queue.SimpleQueue[Question],
    answered: queue.SimpleQueue[_Answered[Question, Answer]],
) -> None:
    while True:
        try:
            question = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            answered.put((question, ask(question)))
        except (OrchestratorError, OSError, ValueError) as error:
            answered.put((question, error))


def _drop(waiting: queue.SimpleQueue[Question]) -> None:
    try:
        waiting.get_nowait()
    except queue.Empty:
        return


def history_of(plan: Plan, known: ArtifactStatus | None = None) -> SpeedHistory:
    """Measurements of the results in a plan's store; empty if the store does not answer in time.

    Args:
        plan: names its store and models.
        known: what was read of the store already.
    """
    until_s = time.monotonic() + _HISTORY_DEADLINE_S
    records = known.records if known is not None else {}
    more: Mapping[str, ArtifactSummary | None] = {}
    try:
        store = known.store if known is not None else _opened(plan.store_uri, _HISTORY_DEADLINE_S)
        if store is not None:
            more = _sample(store, plan, records, until_s)
    except (OrchestratorError, OSError, TimeoutError, ValueError):
        more = {}  # estimates also work without measurements, by the model of speed alone
    return make_history([*records.values(), *(seen for seen in more.values() if seen is not None)])


def _opened(uri: str, silence_s: float) -> ObjectStore | None:
    """The store, if there is one."""
    return open_store(uri) if ask_all(is_initialised, [uri], silence_s=silence_s)[uri] else None


def make_history(records: Iterable[ArtifactSummary]) -> SpeedHistory:
    """From records, in any order."""
    seen = list(records)
    found = (measure(record.identity, record.metrics, record.summary) for record in seen)
    measurements: list[Measurement] = [measurement for measurement in found if measurement is not None]
    sizes = {record.key: index_size(record.metrics) for record in seen if record.identity.get("kind") == JobKind.INDEX}
    return SpeedHistory(measurements, sizes)


def _sample(
    store: ObjectStore, plan: Plan, known: Mapping[str, ArtifactSummary], until_s: float
) -> dict[str, ArtifactSummary | None]:
    kinds = [
        kind.value for kind, row in KINDS.items() if row.is_measured and any(job.kind is kind for job in plan.jobs)
    ]
    kinds = sorted({*kinds, *_trained_alike(kinds)})
    listed = ask_all(lambda kind: store.list_children(f"artifacts/{kind}/"), kinds, deadline_s=until_s)
    wanted: set[str] = set()
    for kind, keys in listed.items():
        wanted.update(_spread(keys, _PER_KIND))
        for prefix in _prefixes(plan.jobs, kind):
            wanted.update(_spread([key for key in keys if key.startswith(prefix)], _PER_MODEL))
    return ask_all(lambda key: read_artifact_summary(store, key), sorted(wanted - known.keys()), deadline_s=until_s)


def _trained_alike(kinds: Sequence[str]) -> list[str]:
    """A pretraining tells about fine-tuning, and the other way round."""
    both = sorted(kind.value for kind in BACKBONE_TRAINING_KINDS)
    return both if set(both) & set(kinds) else []


def _prefixes(jobs: Iterable[Job], kind: str) -> list[str]:
    """How keys of this kind begin whose model the plan has; see ``make_key``."""
    models = {
        str(job.identity["parameters"]["model"]["name"]) for job in jobs if job.identity["parameters"].get("model")
    }
    return [f"{kind}-{_UNREADABLE.sub('-', model.lower()).strip('-')}-" for model in sorted(models)]


def _spread(keys: Sequence[str], number: int) -> list[str]:
    """Some keys at even distances; they end in a hash, so any choice is as good."""
    step = max(1, len(keys) // number)
    return list(keys[::step][:number])
