"""Submitting through the store alone, and the cluster's side of a submit from elsewhere, without Ray."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from orchestrator.cli.accept import _refusal, _settings, _store_of
from orchestrator.cli.accept import accept as submit_here
from orchestrator.cli.commands import submit as submit_command
from orchestrator.controller.connect import ControllerLink
from orchestrator.core.errors import InfeasibleError, StorageError, UserError
from orchestrator.core.job_kinds import KINDS, JobKind
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.services import transports
from orchestrator.services.artifact_lookup import lookup_artifacts
from orchestrator.services.settings import UNKNOWN_STORE, Settings
from orchestrator.services.submit import (
    PreviousRevision,
    Program,
    SubmitAnswer,
    SubmitCheck,
    SubmitRequest,
    SubmitVerdict,
    check_code_versions,
    check_submit,
)
from orchestrator.services.transports import RayTransport, StoreTransport, open_submitter
from orchestrator.stack.environment import STACK_VARIABLE
from orchestrator.state.snapshot import Snapshot
from orchestrator.storage.layout import inbox_folder
from orchestrator.storage.local import LocalStore
from orchestrator.sweepfile import load_sweep
from orchestrator.sweeps import lease as lease_module
from orchestrator.sweeps.client import Consent, submit
from orchestrator.sweeps.lease import LEASE_DURATION_S, Lease
from orchestrator.testing import FakeClock
from tests.commands import run_command
from tests.report_sweeps import accept
from tests.sample_journal import SampleJournal
from tests.sample_sweep import sample_plan
from tests.scripted_sweep import CLUSTER, World, diamond, make_plan


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A cluster with its store; this process knows the name of the one and the URI of the other."""
    made = World(tmp_path / "store")
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "ORCHESTRATOR_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ORCHESTRATOR_STORE", made.store.uri)
    monkeypatch.setenv("ORCHESTRATOR_CLUSTER", CLUSTER)
    monkeypatch.chdir(tmp_path)
    return made


def test_submit_through_the_store_is_taken_by_the_clusters_controller(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_command(capsys, "submit", "quickstart", "-y", "--no-wait", "-o", "json")
    assert result.code == 0, result.err
    assert result.document["sweep"] == "quickstart"
    world.controller.tick()
    snapshot = world.snapshot("quickstart")
    assert result.document["message"] in snapshot.handled
    assert (snapshot.revision, snapshot.cluster) == (1, CLUSTER)
    assert not (world.store.list_children(inbox_folder("quickstart")))


def test_submit_to_a_store_nobody_serves_waits_there_and_says_so(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_command(capsys, "submit", "quickstart", "-y", "--no-wait")
    assert result.code == 0
    assert f"No controller of cluster {CLUSTER} runs" in result.message
    assert len(world.store.list_children(inbox_folder("quickstart"))) == 1


@pytest.mark.parametrize(
    ("overrides", "count"), [((), 1), (("--set", "tracking.uri=https://mlflow.elsewhere"), 0)], ids=["unnamed", "named"]
)
def test_submit_through_the_store_says_once_that_a_tracking_server_of_this_machine_does_not_count(
    overrides: tuple[str, ...],
    count: int,
    world: World,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.lab")
    result = run_command(capsys, "submit", "quickstart", "-y", "--no-wait", *overrides)
    assert result.code == 0, result.err
    assert result.message.count("to choose one, write tracking: {uri: ...} in the sweep file") == count


def test_ctrl_c_while_mlflow_is_waited_for_says_how_to_publish(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    plan = sample_plan(world.store.uri, spaces=("levels/depth1",), seeds=(0,), transfers=("superclass",))
    SampleJournal(world.store, plan).run_all()
    monkeypatch.setattr(StoreTransport, "wait_for_publisher", interrupt)
    connection = StoreTransport(settings=Settings(), store=world.store)
    options = submit_command.SubmitOptions()
    try:
        code = submit_command.conclude(world.store, plan, world.snapshot(plan.sweep), options, connection=connection)
    except KeyboardInterrupt:  # would end all tests
        pytest.fail("Ctrl-C ended the command without a word")
    assert code == 130
    assert f"To publish them now: orchestrator publish {plan.sweep}" in capsys.readouterr().err


@pytest.fixture
def is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is pressed as soon as a submit follows its sweep."""

    def follow_sweep(*_: object) -> Snapshot:
        raise KeyboardInterrupt

    monkeypatch.setattr(submit_command, "follow_sweep", follow_sweep)


@pytest.mark.usefixtures("is_left")
def test_submit_that_is_left_says_commands_that_go_to_the_same_sweep(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with patch.dict(os.environ, {"XDG_CONFIG_HOME": str(tmp_path / "config")}):
        run_command(capsys, "config", "set-context", "lab", f"store={world.store.uri}", f"cluster={CLUSTER}")
        flags = ["-y", "--set", "policy.users=[ann, bob]", "--force", "--take-over"]
        by_context = run_command(capsys, "submit", "quickstart", *flags, "--context", "lab")
        by_variable = run_command(capsys, "submit", "quickstart", "-y")
    assert by_context.code == 130
    told = "orchestrator submit quickstart -y --set 'policy.users=[ann, bob]' --take-over --force --context lab, or: "
    assert f"{told}orchestrator watch quickstart --context lab" in by_context.message
    assert "again: orchestrator submit quickstart -y, or: orchestrator watch quickstart" in by_variable.message


@pytest.mark.usefixtures("is_left")
def test_submit_in_the_foreground_that_is_left_says_that_the_sweep_stops(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def open_submitter(settings: Settings, *_: object, **__: object) -> Iterator[StoreTransport]:
        yield StoreTransport(settings=settings, store=world.store)  # in place of Ray

    monkeypatch.setattr(submit_command, "open_submitter", open_submitter)
    result = run_command(capsys, "submit", "quickstart", "-y", "--foreground")
    assert result.code == 130
    assert "Stopped; submit it again to continue: orchestrator submit quickstart -y --foreground" in result.message
    assert "the sweep continues" not in result.message


@pytest.mark.parametrize("is_connected", [True, False])
def test_sigterm_to_a_submit_in_the_foreground_ends_it_as_ctrl_c(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, is_connected: bool
) -> None:
    ended: list[str] = []

    def by_ray(number: int, _: object) -> None:
        sys.exit(number)

    former = signal.signal(signal.SIGTERM, by_ray)

    def terminate(*_: object) -> Snapshot:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise KeyboardInterrupt from None  # as Ray's calls do, of whatever class it was
        raise AssertionError("SIGTERM has no effect")

    @contextmanager
    def open_submitter(settings: Settings, *_: object, **__: object) -> Iterator[StoreTransport]:
        try:
            if not is_connected:
                signal.signal(signal.SIGTERM, by_ray)  # while Ray starts
                terminate()
            yield StoreTransport(settings=settings, store=world.store)  # in place of Ray
        finally:
            if is_connected:
                signal.raise_signal(signal.SIGTERM)  # a second one, while Ray ends
            ended.append("Ray")

    monkeypatch.setattr(submit_command, "open_submitter", open_submitter)
    monkeypatch.setattr(submit_command, "follow_sweep", terminate)
    try:
        result = run_command(capsys, "submit", "quickstart", "-y", "--foreground")
    finally:
        signal.signal(signal.SIGTERM, former)
    assert (result.code, ended) == (143, ["Ray"])
    assert ("Stopped; submit it again to continue: orchestrator submit" in result.message) is is_connected
    assert len(world.store.list_children(inbox_folder("quickstart"))) == is_connected


def test_submit_in_the_foreground_that_is_refused_ends_as_every_refusal(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_command(capsys, "submit", "quickstart", "-y", "--foreground")
    assert (result.code, f"the settings name cluster {CLUSTER}" in result.message) == (3, True)
    assert "Nothing was submitted." in result.message
    assert not world.store.list_children(inbox_folder("quickstart"))


class RayStartsError(Exception):
    """In place of Ray in this process."""


@pytest.fixture
def begin(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Begins a submit in the foreground, for the cluster of this directory."""

    def attach(*_: object, **__: object) -> None:
        raise RayStartsError

    def run() -> None:
        with open_submitter(Settings(), world.store.uri, foreground=True):
            pass

    monkeypatch.setattr(transports, "_attached", attach)
    monkeypatch.delenv("ORCHESTRATOR_CLUSTER")
    return run


@pytest.mark.parametrize("variable", ["RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "ORCHESTRATOR_CLUSTER"])
def test_submit_in_the_foreground_is_refused_where_the_settings_name_a_cluster(
    begin: Callable[[], None], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "head:6379")
    with pytest.raises(InfeasibleError, match="the settings name cluster"):
        begin()


def test_submit_in_the_foreground_is_refused_while_a_controller_renews_its_lease(
    world: World, begin: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease(world.store, Settings().cluster, "elsewhere-7-0123abcd", time.time)
    lease.acquire()
    times = SimpleNamespace(time=time.time, monotonic=FakeClock(), sleep=lambda _: lease.verify())
    monkeypatch.setattr(lease_module, "time", times)
    with pytest.raises(InfeasibleError, match=r"runs already \(elsewhere-7-0123abcd\)"):
        begin()


def test_submit_in_the_foreground_waits_for_a_lease_that_nobody_renews_unless_its_process_has_ended(
    world: World, begin: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, waits = FakeClock(), list[float]()

    def sleep(wait_s: float) -> None:
        waits.append(wait_s)
        clock.advance(wait_s)

    monkeypatch.setattr(lease_module, "time", SimpleNamespace(time=time.time, monotonic=clock, sleep=sleep))
    monkeypatch.setattr(lease_module, "_POLL_S", LEASE_DURATION_S + 1.0)
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as ended:
        ended.wait()
    for host, num_waits in (("elsewhere", 1), (socket.gethostname(), 0)):
        Lease(world.store, Settings().cluster, f"{host}-{ended.pid}-0123abcd", time.time).acquire()
        waits.clear()
        with pytest.raises(RayStartsError):
            begin()
        assert len(waits) == num_waits, host


def test_message_that_is_sent_twice_is_followed_once(world: World) -> None:
    plan = make_plan(*diamond(), store_uri=world.store.uri)
    for _ in range(2):
        message = submit(world.store, plan, "", CLUSTER, message_id="0001-once")
    assert message == "0001-once"
    world.controller.tick()
    submit(world.store, plan, "", CLUSTER, message_id="0001-once")
    world.clock.advance(10.0)
    world.controller.tick()
    assert world.snapshot().revision == 1
    assert world.store.list_children(inbox_folder("sweep")) == []


def quickstart() -> Plan:
    sweep, _ = load_sweep("quickstart")
    return build_plan(sweep, store_uri="file:///lab")


def payload(plan: Plan, **changes: object) -> SubmitRequest:
    made = SubmitRequest(message_id="1", plan=plan, spec_text="", sender="ann")
    return replace(made, **changes)  # type: ignore[arg-type]


def former(plan: Plan) -> PreviousRevision:
    return PreviousRevision(snapshot=Snapshot(sweep=plan.sweep), plan=plan)


def refusal(previous: PreviousRevision | None, request: SubmitRequest) -> SubmitAnswer | None:
    """What the cluster answers to a request that it does not take."""
    owned = previous.owned_by_other(request.sender) if previous and request.consent is not Consent.FORCE else ""
    refusals = (owned,) if owned else ()
    return _refusal(SubmitCheck(plan=request.plan, store=None, previous=previous, refusals=refusals), request)


def test_changed_plan_is_only_taken_from_who_agrees_to_replace() -> None:
    plan = quickstart()
    smaller = replace(plan, jobs=plan.jobs[:-1])
    answer = refusal(former(smaller), payload(plan))
    assert answer is not None
    assert answer.verdict is SubmitVerdict.DIFFERS
    assert "1 added" in answer.message
    assert refusal(former(smaller), payload(plan, replaces=True)) is None
    assert refusal(former(plan), payload(plan)) is None
    assert refusal(None, payload(plan)) is None


def test_sweep_of_somebody_else_is_refused_unless_forced(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    theirs = replace(quickstart(), store_uri=store.uri, revision=1, owner="bob")
    accept(store, theirs)
    found = lookup_artifacts(theirs)
    check = check_submit(theirs, found, sender="ann", consent=Consent.ASK)
    answer = _refusal(check, payload(theirs))
    assert answer is not None
    assert (answer.verdict, answer.exit_code) == (SubmitVerdict.REFUSED, 3)
    assert "belongs to bob, and you are ann" in answer.message
    assert not check_submit(theirs, found, sender="ann", consent=Consent.FORCE).refusals


@pytest.fixture
def here(world: World, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a job on the world's cluster, whose controller takes what it is woken for."""
    link = SimpleNamespace(notice="", failure="", wake=lambda sweep: world.controller.tick())
    monkeypatch.setattr("orchestrator.stack.attach.attach_cluster", lambda *_, **__: None)
    monkeypatch.setattr("orchestrator.controller.connect.find_controller", lambda _: None)
    monkeypatch.setattr("orchestrator.controller.connect.ensure_controller", lambda *_: link)
    monkeypatch.setattr("orchestrator.controller.connect.ensure_publisher", lambda *_: None)
    return {"RAY_ADDRESS": "127.0.0.1:6379"}


def test_request_from_elsewhere_is_taken_where_the_cluster_keeps_its_store(world: World, here: dict[str, str]) -> None:
    request = SubmitRequest.from_bytes(payload(replace(quickstart(), store_uri=UNKNOWN_STORE)).to_bytes())
    answer = submit_here(request, Path(), here)
    assert (answer.verdict, answer.store_uri, answer.cluster) == (SubmitVerdict.ACCEPTED, world.store.uri, CLUSTER)
    assert answer.counts == {"new": len(request.plan.jobs)}
    assert world.snapshot("quickstart").handled == {"1"}


@pytest.mark.parametrize(("own", "noticed"), [("", ()), ("https://mlflow.lab", ("the publisher uses another one",))])
def test_cluster_whose_publisher_has_another_tracking_server_than_its_environment_says_so(
    own: str, noticed: tuple[str, ...], world: World, here: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own)
    monkeypatch.setattr(
        "orchestrator.controller.connect.publishes_elsewhere", lambda *_: "the publisher uses another one"
    )
    request = payload(replace(quickstart(), store_uri=world.store.uri))
    before = tuple(request.program.differences(Program.here()))
    assert submit_here(request, Path(), here).notices == (*before, *noticed)


def test_connection_has_a_publisher_again_after_its_controller_was_replaced(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ensure_controller`` ends the publisher along with an idle controller of other code."""
    link: Any = SimpleNamespace(notice="", failure="")
    monkeypatch.setattr("orchestrator.controller.connect.ensure_controller", lambda *_: link)
    monkeypatch.setattr("orchestrator.controller.connect.ensure_publisher", lambda *_: "another publisher")
    connection = RayTransport(
        settings=Settings(), store=world.store, link=link, publisher="the ended one", _checked_at_s=-math.inf
    )
    connection.keep_alive()
    assert connection.publisher == "another publisher"


def test_controller_that_answers_and_whose_rounds_fail_is_told_once(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not replaced, and its lease expires: without this a command would wait without a word."""
    links = [
        ControllerLink(handle="", epoch=1, holder="", pid=7, has_unfinished=True, last_error=error)  # type: ignore[arg-type]
        for error in ("", "StorageDeniedError: first", "StorageDeniedError: second")
    ]
    left = iter(links[1:])
    monkeypatch.setattr("orchestrator.controller.connect.ensure_controller", lambda *_: next(left))
    monkeypatch.setattr("orchestrator.controller.connect.ensure_publisher", lambda *_: None)
    connection = RayTransport(settings=Settings(), store=world.store, link=links[0], publisher=None)
    for _ in links[1:]:
        connection._checked_at_s = -math.inf
        connection.keep_alive()
    told = " ".join(capsys.readouterr().err.split())
    assert "the controller (pid 7) runs, but its last round failed: StorageDeniedError: first" in told
    assert "second" not in told


def test_request_over_damaged_records_is_refused_as_on_the_command_line(
    world: World, here: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(capsys, "submit", "quickstart", "-y", "--no-wait").code == 0
    monkeypatch.setattr("orchestrator.services.artifact_lookup._altered", lambda *_: ["a damaged record: run fsck"])
    with pytest.raises(StorageError, match="run fsck"):
        submit_here(payload(replace(quickstart(), store_uri=world.store.uri)), Path(), here)
    assert "run fsck" in run_command(capsys, "submit", "quickstart", "-y", "--no-wait").err


def test_plan_of_a_program_that_computes_something_else_is_refused() -> None:
    plan = quickstart()
    check_code_versions(plan)
    job = plan.jobs[-1]
    other = replace(job, identity={**job.identity, "code_version": 99})
    with pytest.raises(UserError, match=rf"{job.kind.value} 99 \(here 1\)"):
        check_code_versions(replace(plan, jobs=(*plan.jobs[:-1], other)))


def test_search_whose_trials_are_computed_otherwise_here_is_refused() -> None:
    plan = quickstart()
    versions = {"trial": {"kind": "finetune", "code_version": 98}, "probe": {"code_version": 99}}
    identity = {"code_version": KINDS[JobKind.SEARCH].code_version, "parameters": versions}
    search = replace(plan.jobs[-1], kind=JobKind.SEARCH, identity=identity)
    with pytest.raises(UserError, match=r"finetune 98 .*probe 99"):
        check_code_versions(replace(plan, jobs=(*plan.jobs, search)))


def test_job_on_a_stack_belongs_to_its_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")  # Ray tells it to every job
    monkeypatch.delenv("ORCHESTRATOR_STORE", raising=False)
    environment = {STACK_VARIABLE: str(tmp_path)}
    settings = _settings(payload(quickstart()), environment)
    assert settings.cluster == Settings(directory=tmp_path, ray_address="").cluster
    assert settings.cluster.startswith("local-")
    assert _store_of(settings, environment) == (tmp_path / "store").as_uri()
    assert _settings(payload(quickstart(), namespace="mine"), environment).namespace == "mine"


def test_cluster_without_a_store_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORCHESTRATOR_STORE", raising=False)
    with pytest.raises(UserError, match="the store of this cluster is not known"):
        _store_of(Settings(), {})


def test_plan_for_a_cluster_behind_its_dashboard_reads_no_local_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_ADDRESS", "ORCHESTRATOR_STORE"):
        monkeypatch.delenv(name, raising=False)
    assert Settings(dashboard_address="https://ray").store_uri() == UNKNOWN_STORE
    assert Settings(dashboard_address="https://ray", store="s3://lab").store_uri() == "s3://lab"
    assert Settings(ray_address="http://ray:8265").jobs_address == "http://ray:8265"
    assert Settings(ray_address="ray:6379", dashboard_address="https://ray").jobs_address == ""
