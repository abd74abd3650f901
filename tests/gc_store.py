"""A store in memory with sweeps, artifacts and checkpoints written as controllers and attempts write them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count
from typing import Any, cast

from orchestrator.core.ids import make_key
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.retention.gc import Collector
from orchestrator.retention.gc_rules import Graces, Roots, Tally
from orchestrator.retention.inventory import LOCK, TRASH
from orchestrator.retention.roots import RootReader
from orchestrator.search.log import SearchEvent, SearchLog, TrialAsked, TrialCompleted
from orchestrator.state import events
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import ArtifactWriter, read_part, read_record
from orchestrator.storage.layout import checkpoints_folder, log_name, metrics_segment
from orchestrator.storage.pins import Pin, add_pin
from orchestrator.storage.protocol import ObjectStat
from orchestrator.storage.trials import Trial, TrialState, write_trial
from orchestrator.sweeps import client
from orchestrator.testing import FakeClock, SimulatedCrash
from orchestrator.testing.memory_store import MemoryStore
from tests.builders import SweepJournal, launched, make_plan, request_of
from tests.builders import make_job as make_any
from workloads.runtime.manifest import Entry, encode_manifest

GRACE_S = 3600.0
TRASH_S = 7200.0
KINDS = (JobKind.DATASET, JobKind.INDEX, JobKind.LABELS, JobKind.PRETRAIN, JobKind.FINETUNE)


def make_search(*inputs: Job) -> Job:
    """A job that searches; its trials are jobs that no plan names."""
    return replace(make_any("search/s", parameters={}, inputs=_roles(inputs)), needs=())


def make_job(number: int, *inputs: Job) -> Job:
    """Job ``number``; equal numbers and inputs make equal keys."""
    kind = KINDS[number % len(KINDS)]
    made = make_any(f"{kind.value}/j{number}", parameters={"number": number}, inputs=_roles(inputs))
    return replace(made, needs=())


def _roles(inputs: Sequence[Job]) -> Mapping[str, Job]:
    return {f"role{position}": job for position, job in enumerate(inputs)}


def with_own_key(job: Job) -> Job:
    """The same job under the key of its identity as it is now."""
    return replace(job, key=make_key(job.kind.value, job.name.partition("/")[2], job.identity))


@dataclass(slots=True)
class Lab:
    """``store`` may be exchanged for one that wraps it; the clock stamps its objects."""

    clock: FakeClock = field(default_factory=FakeClock)
    store: ObjectStore = field(init=False)
    _journals: dict[str, SweepJournal] = field(default_factory=dict)
    _plans: dict[str, Plan] = field(default_factory=dict)
    _num_attempts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = MemoryStore(self.clock)

    # ------------------------------------------------------------------------------------------------------- attempts
    def write_parts(self, job: Job, num_parts: int = 1) -> ArtifactWriter:
        """Parts of one more attempt, without a commit."""
        number = self._num_attempts[job.key] = self._num_attempts.get(job.key, 0) + 1
        writer = ArtifactWriter(self.store, request_of(job, self.store.uri, number, sweep="any"))
        for position in range(num_parts):
            writer.add(f"part{position}", f"{job.key} {position} {secrets.token_hex(4)}".encode())
        return writer

    def commit(self, job: Job) -> None:
        self.write_parts(job).commit(now=self.clock())

    def write_checkpoint(self, job: Job, step: int = 1, *, finished: bool = True) -> str:
        """Returns the reference ``<key>/checkpoints/<step>-<nonce>``."""
        name = f"{step:012d}-{secrets.token_hex(4)}"
        folder, content = f"{checkpoints_folder(job.key)}/{name}", f"state {step}".encode()
        self.store.put(f"{folder}/model.safetensors", content)
        if finished:
            manifest = encode_manifest(step, {"model.safetensors": Entry.of(content)})
            self.store.put(f"{folder}/manifest.json", manifest)
        return f"{job.key}/checkpoints/{name}"

    def write_metrics(self, job: Job) -> str:
        return self.store.put(metrics_segment(job.key, 1, 0, 10), b"{}\n").name

    def write_log(self, sweep: str, job: Job) -> str:
        return self.store.put(log_name(sweep, job.name, 1, key=job.key), b"hello\n").name

    def ask_trial(self, search: Job, trial: Job, *, completed: bool = False) -> None:
        """As an attempt at a search that goes on from its log: one more trial, which may come to its end at once."""
        log = SearchLog(self.store, search.key)
        number = len({event.trial for event in log.read()})
        told: list[SearchEvent] = [TrialAsked(trial=number, at_s=self.clock(), key=trial.key, params={"lr": 0.1})]
        if completed:
            self.commit(trial)
            self.write_metrics(trial)
            told.append(TrialCompleted(trial=number, at_s=self.clock(), value=0.1, metrics={}, spent_s=1.0))
        else:
            self.write_checkpoint(trial)
        log.append(told)
        state = TrialState.COMPLETED if completed else TrialState.RUNNING
        view = Trial(number=number, params={}, state=state, started_s=self.clock())
        write_trial(self.store, search.key, view, log=log.folder)

    # --------------------------------------------------------------------------------------------------------- sweeps
    def post(self, sweep: str, jobs: Sequence[Job]) -> None:
        """A client's message, which no controller has read."""
        self.clock.advance(0.001)
        client.submit(self.store, self._plan(sweep, jobs), "", "cluster", now=self.clock())

    def accept(self, sweep: str, jobs: Sequence[Job]) -> None:
        """A controller accepts a plan; all that was running goes on, as leaving if it is no longer planned."""
        plan = self._plan(sweep, jobs)
        self._plans[sweep] = plan
        self._journal(sweep).accept(plan, self.clock(), cluster="cluster")

    def launch(self, sweep: str, job: Job) -> str:
        """Returns the attempt's id."""
        number = self._num_attempts[job.key] = self._num_attempts.get(job.key, 0) + 1
        self.append(sweep, launched(job, at_s=self.clock(), number=number))
        return f"{job.key}.{number}"

    def lose(self, sweep: str, job: Job, attempt_id: str) -> None:
        lost = events.AttemptLost(at_s=self.clock(), job=job.name, attempt_id=attempt_id, reason="lost")
        self.append(sweep, lost)

    def finish(self, sweep: str, jobs: Iterable[Job]) -> None:
        """Every job is told to be reused, and the sweep ends."""
        for job in jobs:
            self.append(sweep, events.JobReused(at_s=self.clock(), job=job.name, key=job.key))
        self.append(sweep, events.SweepFinished(at_s=self.clock(), status=events.SweepEnding.SUCCEEDED))

    def run_sweep(self, sweep: str, jobs: Sequence[Job]) -> None:
        """From its plan to its end, every job with an artifact, metrics and a log."""
        self.accept(sweep, jobs)
        for job in jobs:
            self.commit(job)
            self.write_metrics(job)
            self.write_log(sweep, job)
        self.finish(sweep, jobs)

    def append(self, sweep: str, event: events.Event) -> None:
        self._journal(sweep).tell(event)

    def _journal(self, sweep: str) -> SweepJournal:
        if sweep not in self._journals:
            self._journals[sweep] = SweepJournal(self.store, sweep)
        return self._journals[sweep]

    def pin(self, name: str, *references: str) -> None:
        add_pin(self.store, Pin(name=name, keys=references, created_at_s=self.clock()))

    def _plan(self, sweep: str, jobs: Sequence[Job]) -> Plan:
        revision = self._plans[sweep].revision + 1 if sweep in self._plans else 1
        return make_plan(*jobs, sweep=sweep, revision=revision, store_uri=self.store.uri)

    # ------------------------------------------------------------------------------------------------------- looking
    def collector(self, store: ObjectStore | None = None) -> Collector:
        used = store or self.store
        graces = Graces(age_s=GRACE_S, trash_s=TRASH_S)
        return Collector(used, RootReader(used), graces=graces, now=self.clock)

    def collect(self, store: ObjectStore | None = None) -> Tally:
        return self.collector(store).collect()

    def collect_and_pin(self, nth: int, *references: str) -> Tally:
        """Collect; a pin comes right before the n-th reading of the roots."""
        reader, readings = RootReader(self.store), count(1)

        def read_roots(on_alive: Callable[[], None]) -> Roots:
            if next(readings) == nth:
                self.pin("late", *references)
            return reader(on_alive)

        graces = Graces(age_s=GRACE_S, trash_s=TRASH_S)
        return Collector(self.store, read_roots, graces=graces, now=self.clock).collect()

    def collect_meddled(self, at: Mapping[int, Callable[[], None]] | None = None) -> int:
        """Collect while something happens before some of the requests; returns their number."""
        store = MeddledStore(self.store, at)
        with suppress(SimulatedCrash):
            self.collect(cast("ObjectStore", store))
        return store.num_requests

    def collect_until_freed(self) -> None:
        """Two collections: the first hides, the second destroys."""
        for wait_s in (GRACE_S, TRASH_S):
            self.clock.advance(wait_s + 1)
            self.collect()

    def names(self, prefix: str = "") -> set[str]:
        return {stat.name for stat in self.store.list_objects(prefix)}

    def payload(self) -> set[str]:
        """All that gc may ever touch."""
        folders = ("artifacts/", "metrics/", "searches/", "trials/", "logs/")
        return {name for folder in folders for name in self.names(folder)}

    def trash(self) -> set[str]:
        return self.names(TRASH) - {LOCK}

    def check_intact(self, jobs: Iterable[Job]) -> None:
        """Every visible record of these has all its parts."""
        for job in jobs:
            if self.store.exists(f"artifacts/{job.kind}/{job.key}/record.json"):
                record = read_record(self.store, job.key, identity=job.identity)
                for part in record.parts:
                    read_part(self.store, record, part)


class MeddledStore:
    """Calls back before its n-th request; every object of a listing is one, as others may write between two pages."""

    def __init__(self, store: ObjectStore, at: Mapping[int, Callable[[], None]] | None = None) -> None:
        self._store = store
        self._at = dict(at or {})
        self.num_requests = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)

        def request(*arguments: object, **options: object) -> object:
            self._count()
            return found(*arguments, **options)

        return request if callable(found) else found

    def list_objects(self, prefix: str) -> Iterator[ObjectStat]:
        for stat in self._store.list_objects(prefix):
            self._count()
            yield stat
        self._count()

    def _count(self) -> None:
        self.num_requests += 1
        if self.num_requests in self._at:
            self._at[self.num_requests]()


class ShuffledStore(MeddledStore):
    """Lists in any order: folders come in pieces."""

    def list_objects(self, prefix: str) -> Iterator[ObjectStat]:
        return iter(sorted(self._store.list_objects(prefix), key=lambda stat: sha256(stat.name.encode()).digest()))


def crash() -> None:
    raise SimulatedCrash


def contents(store: ObjectStore, names: Iterable[str]) -> Mapping[str, bytes]:
    return {name: store.get(name) for name in names}
