"""Random damage to a store: every change is found, or does no harm, and nothing wrong is ever committed.

Two stores with the same sweep, one finished and one interrupted, get one random change at a time: flipped bits, cut or
zeroed or appended bytes, contents of two objects exchanged, an earlier version of an object put back, a segment of a
journal lost before others. Then every
reader must say the truth or refuse with an error of ours, ``fsck`` must find the damage unless all of them say the
truth, and a controller that takes the sweep over must commit nothing but what the undisturbed run committed.

    python -m tests.hostile.damage --changes 2000 --seed 7
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any
from unittest.mock import patch

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.job_kinds import JobKind
from orchestrator.notifications.messages import Notice
from orchestrator.notifications.notifier import add_entry, read_entries
from orchestrator.report.inputs import read_committed, read_metric_history
from orchestrator.retention.fsck import Depth, Finding, check_documents, check_store, check_sweep
from orchestrator.retention.gc import Tombstone, Trash
from orchestrator.retention.gc_rules import Reason
from orchestrator.retention.roots import forget, is_forgotten
from orchestrator.scheduling.budgets import Cap
from orchestrator.search.log import SearchLog, TrialAsked
from orchestrator.services.artifact_lookup import read_artifact_summary
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.claims import Claim
from orchestrator.storage.layout import claim_name, provenance_name, record_name, spec_name
from orchestrator.storage.pins import Pin, add_pin, read_pins
from orchestrator.storage.protocol import ObjectStat, ObjectStore
from orchestrator.sweepfile.values import Occasion
from orchestrator.sweeps import client, ledger, quotas
from orchestrator.sweeps.ledger import read_document
from orchestrator.testing.memory_store import MemoryStore
from orchestrator.testing.scripted import Hang, Script, ScriptedBackend, Succeed
from orchestrator.tracking import provenance
from orchestrator.tracking.memory import Memory, MemoryFile, RunMemory
from tests.builders import request_of
from tests.sample_sweep import sample_metrics, sample_plan
from tests.scripted_sweep import CLUSTER, World, make_job
from workloads.train.step_metrics import MetricsLog

SWEEP, FORMER = "sample", "former"
_MAX_TICKS = 400
_LOST = 0.5
"""Share of cuts of segments that leave nothing of them."""
_SNAPSHOT_EVERY = 4
_OPERATIONAL = {"quotas", "memory", "notices", "claims", "trash"}
"""Views of objects that are rewritten: an earlier version changes neither answer, states, keys nor provenance."""
_REFUSALS = (OrchestratorError, ValueError, KeyError, TypeError)
"""What readers document; commands turn all of them into one sentence."""


class RecordingStore(MemoryStore):
    """A store that remembers every version of every object."""

    def __init__(self) -> None:
        super().__init__(lambda: 1_800_000_000.0)
        self.versions: dict[str, list[bytes]] = {}

    def put(self, name: str, content: bytes) -> ObjectStat:
        """See ``ObjectStore.put``."""
        self.versions.setdefault(name, []).append(content)
        return super().put(name, content)


@dataclass(frozen=True, slots=True)
class Change:
    """One change: what the named objects hold afterwards; none = they are gone."""

    how: str
    contents: Mapping[str, bytes | None]

    def __str__(self) -> str:
        return f"{self.how}: {', '.join(self.contents)}"


@dataclass(slots=True)
class Scene:
    """A store as it was left, and what is true of it."""

    is_finished: bool
    contents: dict[str, bytes]
    versions: dict[str, list[bytes]]
    uri: str
    message_id: str
    truth: dict[str, object] = field(default_factory=dict)

    def restored(self, change: Change | None = None) -> MemoryStore:
        """A fresh copy of the store, with a change."""
        store = MemoryStore(lambda: 1_800_000_000.0)
        store._uri = self.uri  # the plan names it
        for name, content in {**self.contents, **(change.contents if change else {})}.items():
            if content is not None:
                store.put(name, content)
        return store


# ------------------------------------------------------------------------------------------------------- the two stores
def _scripts(*, hang: bool) -> dict[str, list[Script]]:
    plan = _plan("memory://any")
    scripts: dict[str, list[Script]] = {job.name: [Succeed(metrics=sample_metrics(job))] for job in plan.jobs}
    if hang:
        trained = [job.name for job in plan.jobs if job.kind is JobKind.PRETRAIN]
        scripts |= {name: [Hang()] for name in trained[2:]}
    return scripts


def _plan(store_uri: str) -> Any:
    spaces = ("levels/depth1", "levels/depth2", "levels/depth4")
    plan = sample_plan(store_uri, spaces=spaces, seeds=(0, 1), transfers=("superclass",), baseline="levels/depth4")
    return replace(plan, revision=0)


def make_scene(*, is_finished: bool) -> Scene:
    """Run the sweep to its end, or until backbones are being trained, and write what else a store holds."""
    store = RecordingStore()
    world = World(None, ScriptedBackend(store, _scripts(hang=not is_finished)), store=store)  # type: ignore[arg-type]
    world.submit(make_job("dataset/old"), sweep=FORMER)
    world.finish(FORMER)
    forget(store, FORMER, now=world.clock())
    plan = _plan(store.uri)
    spec, told = "name: sample\n", {"commit": "abc"}
    message_id = client.submit(store, plan, spec, CLUSTER, provenance=told, now=world.clock())
    world.last_message[SWEEP] = message_id
    _write_the_rest(store, plan, message_id)
    if is_finished:
        world.finish(SWEEP)
    else:
        world.tick_until(lambda: len(world.backend.live) >= 2)
        client.set_priority(store, SWEEP, 3, now=world.clock())
    scene = Scene(
        is_finished=is_finished,
        contents={stat.name: store.get(stat.name) for stat in store.list_objects("")},
        versions=store.versions,
        uri=store.uri,
        message_id=message_id,
    )
    scene.truth = {name: view() for name, view in views(scene.restored(), scene).items()}
    return scene


def _write_the_rest(store: MemoryStore, plan: Any, message_id: str) -> None:
    """One object of each kind that the controller does not write."""
    for job in [job for job in plan.jobs if job.kind is JobKind.PRETRAIN][:3]:
        request = request_of(job, store.uri, sweep=SWEEP)
        log = MetricsLog(store, request, 0)
        for step in range(1, 9):
            log.add(step, step / 8, {"train_loss": 1 / step})
            if step in {4, 8}:
                log.close_segment(step)
    provenance.save(store, SWEEP, message_id, provenance.Provenance(commit="abc", packages={"torch": "2"}))
    quotas.write_quotas(store, CLUSTER, {"ann": Cap(max_gpus=8.0)})
    quotas.write_quotas(store, CLUSTER, {"ann": Cap(max_gpus=4.0)})
    add_pin(store, Pin(name="best", keys=(plan.jobs[0].key,), created_at_s=1.0))
    stone = Tombstone(unit="artifacts/x/y/", reason=Reason.ABANDONED_JOB, key="x-y", at_s=1.0, num_bytes=3)
    Trash(store, "000000000001-0123abcd").add_batch([stone])
    SearchLog(store, "search-lr-0").append([TrialAsked(trial=0, at_s=1.0, key="pretrain-a-0", params={"lr": 0.1})])
    memory = MemoryFile(store, SWEEP, "http://tracking")
    for number in (1, 2):
        memory.load()
        memory.save(Memory(runs=[RunMemory(job="pretrain/a", key="k", run_id=f"run{number}")]))
    notice = Notice(
        notification_id="n1", sweep=SWEEP, occasion=Occasion.FAILED, at_s=1.0, title="a job failed", text="why"
    )
    add_entry(store, notice, ())


# ------------------------------------------------------------------------------------------------------------- readers
def views(store: MemoryStore, scene: Scene) -> dict[str, Callable[[], object]]:
    """Everything that is read out of a store for the answer, the states, the keys and the provenance."""
    plan = _plan(store.uri)
    trained = [job for job in plan.jobs if job.kind is JobKind.PRETRAIN]

    def snapshot() -> object:
        found = client.load_snapshot(store, SWEEP)
        return found, found.plan

    def documents() -> object:
        names = (spec_name(SWEEP, 1), provenance_name(SWEEP, 1))
        return [read_document(store, name, client.load_snapshot(store, SWEEP).documents) for name in names]

    def claims() -> object:
        claimed = {job.key: claim_name(job.key) for job in plan.jobs}
        return {
            key: _or_default(Claim.from_bytes(name, store.get(name)))
            for key, name in claimed.items()
            if store.exists(name)
        }

    return {
        "states": snapshot,
        "former": lambda: client.load_snapshot(store, FORMER),
        "documents": documents,
        "answer": lambda: read_committed(store, plan.jobs),
        "seen": lambda: {
            job.key: seen for job in plan.jobs if (seen := read_artifact_summary(store, job.key)) is not None
        },
        "curves": lambda: {job.name: read_metric_history(store, job.key) for job in trained},
        "origin": lambda: provenance.load(store, SWEEP, scene.message_id),
        "search": lambda: SearchLog(store, "search-lr-0").read(),
        "pins": lambda: list(read_pins(store)),
        "quotas": lambda: quotas.read_quotas(store, CLUSTER),
        "trash": lambda: list(Trash(store).read_all()),
        "forgotten": lambda: is_forgotten(store, FORMER) or None,
        "memory": lambda: MemoryFile(store, SWEEP, "http://tracking").load() if _has_memory(store) else None,
        "notices": lambda: [entry.notice for entry in read_entries(store, SWEEP)] or None,
        "claims": claims,
    }


def _has_memory(store: MemoryStore) -> bool:
    return bool(MemoryFile(store, SWEEP, "http://tracking").load().runs)


def _or_default(claim: Claim) -> Claim | None:
    return claim if claim.cluster else None


def _is_safe(name: str, found: object, truth: object) -> bool:
    """The truth, or what a reader falls back to where that costs time and no answer: nothing remembered."""
    if name in {"claims", "seen"} and isinstance(found, dict) and isinstance(truth, dict):
        return all(one in (None, truth.get(key)) for key, one in found.items())
    return found == truth or (name in {"forgotten", "memory", "notices"} and found is None)


def find_damage(store: ObjectStore) -> list[Finding]:
    """What ``fsck --deep`` prints."""
    sweeps = (finding for sweep in client.list_sweeps(store) for finding in check_sweep(store, sweep).findings)
    others = (check_documents(store, Depth.CONTENT), check_store(store, Depth.CONTENT))
    return list(chain(sweeps, *others))


# ------------------------------------------------------------------------------------------------------------- changes
def draw_change(scene: Scene, rng: random.Random) -> Change:
    """One random change of a random object; kinds of objects are equally likely, however many there are of each."""
    kinds: dict[str, list[str]] = {}
    for name in scene.contents:
        kinds.setdefault(_kind_of(name), []).append(name)
    names = kinds[rng.choice(sorted(kinds))]
    name = rng.choice(sorted(names))
    how = rng.choice(("flip", "flip", "flips", "cut", "append", "zeros", "exchange", "earlier", "digit"))
    content = scene.contents[name]
    if how == "cut" and _has_later_segment(scene, name) and rng.random() < _LOST:
        return Change("lost", {name: None})
    if how == "exchange":
        other = rng.choice(sorted(names))
        return Change(how, {name: scene.contents[other], other: content})
    if how == "earlier":
        past = rng.choice(sorted(scene.versions))  # also of objects that were deleted since
        return Change(how, {past: rng.choice(scene.versions[past])})
    return Change(how, {name: _changed(content, how, rng)})


def _has_later_segment(scene: Scene, name: str) -> bool:
    """Whether it is a segment of a journal, and not the last one: whether that was ever there, nothing can tell."""
    folder, _, _ = name.rpartition("/")
    return folder.endswith("/journal") and any(other > name for other in scene.contents if other.startswith(folder))


def _kind_of(name: str) -> str:
    """``sweeps/*/journal``, ``metrics``, ...: names with their last part and their varying parts left out."""
    parts = name.split("/")
    if parts[0] == "sweeps":
        return "/".join(["sweeps", *parts[2:3]]) if len(parts) > 3 else f"sweeps/{parts[-1].partition('-')[0]}"
    return "/".join([parts[0], parts[-1] if parts[0] in {"jobs", "controllers", "artifacts"} else ""])


def _changed(content: bytes, how: str, rng: random.Random) -> bytes:
    found = bytearray(content)
    if not found:
        return b"x"
    match how:
        case "flip" | "flips":
            for _ in range(1 if how == "flip" else rng.randint(2, 20)):
                found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
        case "digit":  # damage that stays well-formed JSON
            places = [place for place, byte in enumerate(found) if chr(byte).isdigit()] or [0]
            found[rng.choice(places)] = ord(rng.choice("0123456789"))
        case "cut":
            del found[rng.randrange(len(found)) :]
        case "append":
            last = bytes(found).splitlines()[-1] + b"\n" if bytes(found).strip() else b"\n"
            found += rng.choice((b"\n", b" ", b"{}", last, rng.randbytes(30)))
        case "zeros":
            start = rng.randrange(len(found))
            found[start : start + 512] = bytes(len(found[start : start + 512]))
    return bytes(found)


# ------------------------------------------------------------------------------------------------------------- verdicts
def judge(scene: Scene, change: Change) -> str:
    """``found`` or ``harmless``. Raises ``AssertionError`` for a change that is neither."""
    if all(scene.contents.get(name) == content for name, content in change.contents.items()):
        return "no change"
    store = scene.restored(change)
    findings = find_damage(store)
    refused = 0
    for name, view in views(store, scene).items():
        try:
            found = view()
        except _REFUSALS:
            refused += 1
            continue
        if change.how == "earlier" and name in _OPERATIONAL:
            continue
        assert _is_safe(name, found, scene.truth[name]), f"{change}: {name} reads {found!r}, not {scene.truth[name]!r}"
    assert findings or not refused, f"{change}: {refused} readers refuse, and fsck finds nothing"
    _judge_recovery(scene, change, has_findings=bool(findings))
    return "found" if findings else "harmless"


def _judge_recovery(scene: Scene, change: Change, *, has_findings: bool) -> None:
    """A controller takes over: it ends the sweep as undisturbed, or the damage was found; never another result."""
    store = scene.restored(change)
    world = World(None, ScriptedBackend(store, _scripts(hang=False)), store=store)  # type: ignore[arg-type]
    world.clock.advance(10_000.0)
    ended = False
    for _ in range(_MAX_TICKS):
        try:
            changed = world.controller.tick()
            world.clock.advance(0.1 if changed else 5.0)
            ended = world.snapshot(SWEEP).state.is_final
        except OrchestratorError:
            break  # in one sentence, and the sweep is set aside
        if ended:
            break
    assert ended or has_findings, f"{change}: the sweep does not end, and fsck finds nothing"
    for job in _plan(scene.uri).jobs:
        if record_name(job.key) in change.contents or not store.exists(record_name(job.key)):
            continue
        record = read_record(store, job.key)
        told = {name: value for name, value in sample_metrics(job).items() if name in record.metrics}
        assert record.identity == job.identity, f"{change}: {job.key} is committed with {record.identity}"
        assert dict(record.metrics) == told, f"{change}: {job.key} is committed with {dict(record.metrics)}"


@contextmanager
def many_snapshots() -> Iterator[None]:
    """Short sweeps have snapshots too."""
    with patch.object(ledger, "SNAPSHOT_EVERY", _SNAPSHOT_EVERY):
        yield


def run_campaign(num_changes: int, seed: int) -> Counter[str]:
    """Judge this many random changes; verdicts by kind of change. Raises ``AssertionError`` at the first bad one."""
    verdicts: Counter[str] = Counter()
    with many_snapshots():
        scenes = [make_scene(is_finished=True), make_scene(is_finished=False)]
        for number in range(num_changes):
            rng = random.Random(f"{seed}/{number}")  # noqa: S311 - not for secrets
            scene = scenes[number % len(scenes)]
            change = draw_change(scene, rng)
            try:
                verdicts[judge(scene, change)] += 1
            except Exception as error:
                error.add_note(f"change {number} of seed {seed}, {'finished' if scene.is_finished else 'interrupted'}")
                raise
    return verdicts


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    logging.disable()  # readers warn of each change that they meet
    started_s = time.monotonic()
    verdicts = run_campaign(options.changes, options.seed)
    said = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    sys.stdout.write(f"seed {options.seed}: {said}, in {time.monotonic() - started_s:.0f} s\n")


if __name__ == "__main__":
    main()
