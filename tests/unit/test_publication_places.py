"""Which tracking servers a publisher logs in to: those that its operators allow, and its own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.cli.commands import doctor, publish
from orchestrator.controller.actor import StorePublication
from orchestrator.core.errors import StorageDeniedError
from orchestrator.doctor.cluster import ClusterQuestion
from orchestrator.doctor.node import NodeDoctor
from orchestrator.services.settings import Settings
from orchestrator.stack.description import Stack, own_boot_id, own_identity, tracking_uri, write_stack
from orchestrator.stack.environment import STACK_VARIABLE
from orchestrator.storage.open import VARIABLE, check_tracking
from orchestrator.sweeps import client
from orchestrator.tracking.server import TrackingRefusedError, TrackingServer
from tests.commands import run_command
from tests.scripted_sweep import CLUSTER, World, diamond, make_plan

OWN = "https://mlflow.lab"
LOGIN = "MLFLOW_TRACKING_PASSWORD"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's home, where MLflow looks for a login, too."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PGPASSWORD", raising=False)
    return tmp_path / "home"


class Publishers:
    """Notes for which servers publishers are made."""

    def __init__(self) -> None:
        self.uris: list[str] = []

    def __call__(self, _: Any, uri: str, **__: Any) -> Publishers:
        self.uris.append(uri)
        return self

    def has_ended(self, _: str) -> bool:
        return False

    def publish_once(self, _: str) -> bool:
        return True


@pytest.fixture
def asked(tmp_path: Path, request: pytest.FixtureRequest) -> World:
    """A sweep that names the tracking server of the test's parameter."""
    world = World(tmp_path)
    plan = replace(make_plan(*diamond(), store_uri=world.store.uri), tracking_uri=request.param)
    client.submit(world.store, plan, "name: sweep\n", CLUSTER, now=world.clock())
    world.tick_until(lambda: world.snapshot().plan is not None)
    return world


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        ("https://elsewhere.org", ""),
        (OWN, "s3://lab"),
        ("https://second.lab/mlflow", "s3://lab https://second.lab"),
        ("", "s3://lab"),
    ],
    indirect=["asked"],
)
def test_tracking_server_that_is_allowed_or_the_clusters_own_is_published_to(
    asked: World, allowed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, allowed)
    monkeypatch.delenv(LOGIN, raising=False)
    publishers = Publishers()
    StorePublication(asked.store, OWN, publishers).run()
    plan = asked.snapshot().plan
    assert plan is not None
    assert publishers.uris == [plan.tracking_uri or OWN]


@pytest.mark.parametrize("asked", ["https://elsewhere.org", "sqlite:////data/other.db"], indirect=True)
def test_tracking_server_that_is_not_allowed_is_never_asked(asked: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "s3://lab https://second.lab")
    publishers = Publishers()
    with pytest.raises(StorageDeniedError, match="not below any of the allowed"):
        StorePublication(asked.store, OWN, publishers).run()
    assert publishers.uris == []


@pytest.mark.parametrize(
    ("asked", "allowed", "is_published"),
    [
        ("https://elsewhere.org", "", False),
        ("https://second.lab", "https://second.lab s3://lab", True),
        ("sqlite:////data/other.db", "", True),
        (OWN, "", True),
    ],
    indirect=["asked"],
)
def test_tracking_server_is_shown_the_clusters_login_only_if_it_is_listed(
    asked: World, allowed: str, is_published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, allowed)
    monkeypatch.setenv(LOGIN, "open-sesame")
    publishers = Publishers()
    publication = StorePublication(asked.store, OWN, publishers)
    if is_published:
        publication.run()
    else:
        with pytest.raises(StorageDeniedError, match="login for tracking servers"):
            publication.run()
    assert bool(publishers.uris) is is_published
    assert bool(client.read_trouble(asked.store, "sweep")) is not is_published


@pytest.mark.parametrize(
    ("asked", "login"),
    [
        ("https://elsewhere.org", "MLFLOW_TRACKING_TOKEN"),
        ("https://elsewhere.org", "MLFLOW_TRACKING_AUTH"),
        ("https://elsewhere.org", ".mlflow/credentials"),
        ("postgresql+psycopg://elsewhere.org/mlflow", "PGPASSWORD"),
    ],
    indirect=["asked"],
)
def test_every_login_that_a_client_would_send_counts(
    asked: World, login: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishers = Publishers()
    publication = StorePublication(asked.store, OWN, publishers)
    if login.startswith("."):
        (home / login).parent.mkdir(parents=True)
        (home / login).write_text("[mlflow]\nmlflow_tracking_username = me\n")
    else:
        monkeypatch.setenv(login, "open-sesame")
    with pytest.raises(StorageDeniedError, match="login for tracking servers"):
        publication.run()
    assert publishers.uris == []


@pytest.mark.parametrize(
    ("asked", "own", "is_published"),
    [("https://elsewhere.org", OWN, False), (OWN, OWN, True), ("", OWN, True)],
    indirect=["asked"],
)
def test_publish_by_hand_shows_the_login_to_no_other_server_either(
    asked: World,
    own: str,
    is_published: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(LOGIN, "open-sesame")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", own)
    publishers = Publishers()
    monkeypatch.setattr(publish, "Publisher", publishers)
    monkeypatch.setattr(publish, "publish_until_done", lambda *_, **__: None)
    ended = run_command(capsys, "publish", "sweep", "--store", asked.store.uri)
    assert publishers.uris == ([OWN] if is_published else [])
    assert (ended.code == 0) is is_published
    assert ("login for tracking servers" in ended.message) is not is_published


def test_doctor_says_that_a_server_may_not_see_the_login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOGIN, "open-sesame")
    sweep: Any = SimpleNamespace(tracking_uri="http://127.0.0.1:1")
    checks = {check.name: check for check in doctor._machine_checks(Settings(), sweep)}
    with pytest.raises(StorageDeniedError, match="login for tracking servers"):
        checks["tracking"].run()


def test_doctor_shows_no_login_of_a_node_to_a_server_that_a_sweep_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("orchestrator.doctor.sweep_inputs.reach_tracking", asked.append)
    questions: list[ClusterQuestion] = []

    def examine(question: ClusterQuestion, *_: object) -> tuple[()]:
        questions.append(question)
        return ()

    monkeypatch.setattr(doctor, "examine_cluster", examine)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", OWN)
    for named in ("https://elsewhere.org", OWN, ""):
        sweep: Any = SimpleNamespace(tracking_uri=named, datasets={})
        list(doctor._cluster_results(Settings(), sweep, "s3://lab", set(), 1.0))
    monkeypatch.setenv(LOGIN, "open-sesame")
    answers = [NodeDoctor().tracking(one.tracking_uri, of_sweep=one.tracking_is_of_sweep) for one in questions]
    assert ["login for tracking servers" in answer.get("error", "") for answer in answers] == [True, False, False]
    assert asked == [OWN, OWN]


@pytest.mark.parametrize(
    "uri",
    ["http://169.254.169.254/latest", "postgresql://db.lab/mlflow?sslmode=require&host=db.lab:5432,169.254.169.254"],
)
def test_tracking_server_at_an_address_of_a_metadata_service_is_never_asked(uri: str) -> None:
    with pytest.raises(TrackingRefusedError, match="credentials of machines"):
        TrackingServer(uri)._check()


def test_database_of_a_listed_address_at_another_host_is_not_shown_the_login(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "postgresql://db.lab/mlflow")
    monkeypatch.setenv("PGPASSWORD", "open-sesame")
    check_tracking("postgresql://db.lab/mlflow?sslmode=require")
    with pytest.raises(StorageDeniedError, match="not below any"):
        check_tracking("postgresql://db.lab/mlflow?host=elsewhere.org")


@pytest.mark.parametrize("path", ["team-a/../team-b", "team-a/%2e%2e/team-b", "team-a/..%2fteam-b"])
def test_path_that_leads_out_of_a_listed_server_is_not_shown_the_login(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "https://host/team-a")
    monkeypatch.setenv(LOGIN, "open-sesame")
    check_tracking("https://host/team-a/runs")
    with pytest.raises(StorageDeniedError, match="not below any"):
        check_tracking(f"https://host/{path}")


def test_home_that_may_not_be_read_holds_no_login(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(os, "stat", refuse)
    check_tracking("https://elsewhere.org")


@pytest.mark.parametrize("asked", ["http://localhost:5000"], indirect=True)
def test_sweep_that_names_the_stacks_own_server_is_written_to_its_database(
    asked: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, pid_started_at = own_identity()
    stack = Stack(
        directory=str(tmp_path), ray_address="", dashboard_url="", mlflow_url="http://127.0.0.1:5000", token_path="",
        tracking_uri="", pid=pid, pid_started_at=pid_started_at, started_at_s=0.0, boot_id=own_boot_id(),
    )  # fmt: skip
    own = tracking_uri(tmp_path)
    write_stack(tmp_path, stack)
    monkeypatch.setenv(STACK_VARIABLE, str(tmp_path))
    publishers = Publishers()
    StorePublication(asked.store, own, publishers).run()
    assert publishers.uris == [own]
    settings = Settings(directory=tmp_path)
    assert settings.tracking_uri("http://127.0.0.1:5000") == own
    assert settings.tracking_uri("http://127.0.0.1:5001") == "http://127.0.0.1:5001"
    assert settings.tracking_uri("https://mlflow.lab:5000") == "https://mlflow.lab:5000"
