"""Altered objects of a store: records, journals, plans and messages. Refused in words, and each harms itself alone."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller.controller import Controller
from orchestrator.controller.run_inprocess import run_sweep_inprocess
from orchestrator.core.errors import ControllerError, NotFoundError, OrchestratorError, StorageError
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.state.transitions import SweepState
from orchestrator.storage.artifacts import read_part, read_record
from orchestrator.storage.claims import Claims
from orchestrator.storage.layout import (
    claim_name,
    inbox_folder,
    inbox_message,
    journal_segment,
    lease_name,
    plan_name,
    record_name,
    snapshots_folder,
    sweep_folder,
)
from orchestrator.sweepfile import parse_sweep
from orchestrator.sweepfile.values import Policy
from orchestrator.sweeps.client import submit
from orchestrator.sweeps.ledger import SweepLedger
from orchestrator.sweeps.requests import new_message_id
from orchestrator.testing.memory_store import MemoryStore
from orchestrator.testing.scripted import Hang, ScriptedBackend
from orchestrator.tracking.memory import MemoryFile
from orchestrator.tracking.provenance import load
from tests.builders import make_job, make_plan
from tests.hostile import objects
from tests.hostile.guard import watched
from tests.hostile.sweeps import filled

CLUSTER = "c"


def plan_of(name: str, store: MemoryStore) -> Plan:
    return build_plan(parse_sweep(filled(name=name).decode(), "sweep.yaml", {}), store_uri=store.uri)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[MemoryStore, Plan]:
    """A store with a sweep that ran to its end."""
    store = MemoryStore()
    plan = plan_of("sound", store)
    run_sweep_inprocess(store, plan, directory=tmp_path_factory.mktemp("node"), backend=ScriptedBackend(store))
    return store, plan


def altered(store: MemoryStore, name: str, content: bytes) -> Callable[[], None]:
    """Put something in an object's place; what is returned puts the object back."""
    sound = store.get(name)
    store.put(name, content)

    def restore() -> None:
        store.put(name, sound)

    return restore


def outcomes(
    store: MemoryStore, name: str, variants: Iterator[tuple[str, bytes]], read: Callable[[], object], root: Path
) -> dict[str, Exception | None]:
    """What a reader makes of each variant of an object: the error that it raises, if any."""
    found: dict[str, Exception | None] = {}
    for variant, content in variants:
        restore = altered(store, name, content)
        try:
            with watched(root):
                read()
            found[variant] = None
        except OrchestratorError as error:
            found[variant] = error
        finally:
            restore()
    return found


def test_record_altered_is_refused_or_leads_nowhere_else(finished, tmp_path: Path) -> None:
    store, plan = finished
    key = plan.jobs[0].key

    def read() -> None:
        record = read_record(store, key, identity=plan.jobs[0].identity)
        for part in record.parts:
            read_part(store, record, part)

    name = record_name(key)
    found = outcomes(store, name, objects.records(store.get(name)), read, tmp_path)
    assert len(found) > 50
    # With a seal that fits, one passes: where there is a BLAKE3, the content is held to that, whatever the sha256 says.
    assert [variant for variant, error in found.items() if error is None] == ["sha256-3-sealed"]
    assert all(isinstance(error, StorageError) for error in found.values() if error is not None)


def test_journal_altered_is_refused_in_words_or_harmless(finished, tmp_path: Path) -> None:
    store, _ = finished
    for child in store.list_children(snapshots_folder("sound")):  # the journal is read from its beginning
        store.delete(f"{snapshots_folder('sound')}{child}")
    name = journal_segment("sound", 0)
    sound = store.get(name)
    found = outcomes(store, name, objects.events(sound), lambda: SweepLedger(store, "sound").refresh(), tmp_path)
    assert len(found) > 50
    unnamed = [error for error in found.values() if error is not None and "sound" not in str(error)]
    assert [error for error in unnamed if not isinstance(error, ControllerError | NotFoundError)] == []
    assert all(isinstance(found[variant], ControllerError) for variant, _ in objects.garbage() if variant != "empty")


def test_plan_stored_altered_is_refused_in_words(finished, tmp_path: Path) -> None:
    store, _ = finished
    name = plan_name("sound", 1)
    variants = list(objects.garbage())
    found = outcomes(store, name, iter(variants), lambda: SweepLedger(store, "sound").refresh(), tmp_path)
    assert all(isinstance(error, ControllerError) for error in found.values())


@pytest.mark.parametrize("place", ["claim", "lease", "memory", "submission"])
def test_small_object_altered_is_an_error_of_ours_or_passed_over(place: str, tmp_path: Path) -> None:
    store = MemoryStore()
    names: dict[str, tuple[str, Callable[[], object]]] = {
        "claim": (claim_name("dataset-x"), lambda: Claims(store, CLUSTER).take("dataset-x", "s", 1.0)),
        "lease": (lease_name(CLUSTER), lambda: Controller(store, ScriptedBackend(store), CLUSTER, "me").tick()),
        "memory": (f"{sweep_folder('s')}/tracking/x.json", lambda: _memory(store).load()),
        "submission": (f"{sweep_folder('s')}/provenance/m.json", lambda: load(store, "s", "m")),
    }
    name, read = names[place]
    for _, content in objects.garbage():
        store.put(name, content)
        # What a reader passes on to a guard of its own; never a RecursionError, which none of them would catch.
        with watched(tmp_path), suppress(OrchestratorError, ValueError, KeyError, TypeError, AttributeError):
            read()


def _memory(store: MemoryStore) -> MemoryFile:
    memory = MemoryFile(store, "s", "x")
    memory._name = f"{sweep_folder('s')}/tracking/x.json"
    return memory


def test_messages_hostile_are_refused_and_other_sweeps_go_on(tmp_path: Path) -> None:
    store = MemoryStore()
    backend = ScriptedBackend(store)
    controller = Controller(store, backend, CLUSTER, "me")
    document = plan_of("victim", store).to_json()
    sent = list(_messages(document))
    ids = {name: new_message_id(float(number)) for number, (name, _) in enumerate(sent)}
    for name, content in sent:
        store.put(inbox_message("victim", ids[name]), content)
    submit(store, plan_of("bystander", store), "", CLUSTER)
    with watched(tmp_path):
        _tick_to_the_end(controller, store, "bystander")
        while controller.tick():
            pass
    assert store.list_children(inbox_folder("victim")) == []
    snapshot = SweepLedger(store, "victim").refresh()
    assert len(snapshot.refusals) + len(snapshot.handled) >= len(sent)
    assert all(len(reason) > 8 for reason in snapshot.refusals.values())
    paths = [name for name in ids if re.fullmatch(r"(key|name)-\d+", name)]
    assert [name for name in paths if "plan the sweep again" not in snapshot.refusals.get(ids[name], "")] == []
    for request in backend.launched:
        assert "/" not in request.key
        assert ".." not in request.job
    assert len(sent) > 60


def test_numbers_hostile_are_refused_and_a_sweep_beside_the_victim_goes_on() -> None:
    accepted: set[str] = set()
    for number, (name, value, message) in enumerate(_numbers()):
        store = MemoryStore()
        backend = ScriptedBackend(store, {"pretrain/a": [Hang()], "pretrain/b": [Hang()]})
        controller = Controller(store, backend, CLUSTER, "me")
        # One of its jobs runs and the other is ready, so that it is ranked beside the bystander in each round.
        jobs = (make_job("pretrain/a"), make_job("pretrain/b"))
        plan = make_plan(*jobs, sweep="victim", store_uri=store.uri, max_concurrent=1)
        submit(store, plan, "", CLUSTER)
        controller.tick()
        assert len(backend.live) == 1
        message_id = new_message_id(2e9 + number)
        content = {**message, "plan": message["plan"](plan.to_json())} if "plan" in message else message
        store.put(inbox_message("victim", message_id), json.dumps(content).encode())
        controller.wake()
        controller.tick()
        submit(store, make_plan(make_job("probe/c"), sweep="bystander", store_uri=store.uri), "", CLUSTER)
        controller.wake()
        _tick_to_the_end(controller, store, "bystander")
        snapshot = SweepLedger(store, "victim").refresh()
        assert message_id in snapshot.handled, (name, value)
        assert store.list_children(inbox_folder("victim")) == []
        if message_id not in snapshot.refusals:
            accepted.add(f"{name}={value!r}")
    unbounded = {"max_gpus", "max_concurrent", "gpu_hours", "cost", "deadline_s", "time_limit_s"}
    zeros = {"priority", "max_preemptions", "breaker", "gpu_hour_price", "deadline_s"}
    sound = {f"policy.{name}=None" for name in unbounded} | {f"policy.{name}=0" for name in zeros}
    sound |= {"policy.users='x'", "policy.priority=-1", "policy.deadline_s=-1"}
    assert accepted == sound | {"priority=0", "priority=-1"}


def _numbers() -> Iterator[tuple[str, object, dict[str, Any]]]:
    """Messages with one wrong number or name: of a policy, of a job, of a priority."""

    def submitting(changes: dict[str, Any], *where: str | int) -> dict[str, Any]:
        def changed(plan: dict[str, Any]) -> dict[str, Any]:
            part = plan = json.loads(json.dumps(plan))
            for step in where:
                part = part[step]
            part.update(changes)
            return plan

        return {"type": "submit", "cluster": CLUSTER, "spec_text": "", "plan": changed}

    for value in (0, -1, float("nan"), "x", None):
        for field in dataclasses.fields(Policy):
            yield f"policy.{field.name}", value, submitting({field.name: value}, "policy")
        for name in ("num_workers", "num_threads"):
            yield name, value, submitting({name: value}, "jobs", 1, "execution")
        yield "owner", value, submitting({"owner": [value]})
        yield "priority", value, {"type": "set_priority", "priority": value}
        yield "sender", value, {"type": "set_priority", "priority": 1, "sender": value}


def _messages(document: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    yield from objects.garbage()
    for name, plan in objects.plans(document):
        message = {"type": "submit", "cluster": CLUSTER, "plan": plan, "spec_text": "", "sender": "ann"}
        yield name, json.dumps(message).encode()
    for number, value in enumerate((None, 1, "x", [1], {"__class__": "os.system"})):
        for kind in ("submit", "cancel", "pause", "retry", "set_priority", "os.system"):
            yield (
                f"{kind}-{number}",
                json.dumps({"type": kind, "jobs": value, "priority": value, "plan": value}).encode(),
            )


def _tick_to_the_end(controller: Controller, store: MemoryStore, sweep: str) -> None:
    ledger = SweepLedger(store, sweep)
    for _ in range(500):
        controller.tick()
        if ledger.refresh().state.is_final:
            break
    assert ledger.snapshot.state is SweepState.SUCCEEDED
