"""What the watchdog does about a controller whose methods answer and whose loop is stuck."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from orchestrator.controller import connect
from orchestrator.controller.actor import ControllerSettings
from orchestrator.controller.connect import WatchdogActor, revive_controller
from orchestrator.core.errors import StorageTimeoutError
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps.lease import LEASE_DURATION_S, Lease

CLUSTER = "cluster-a"


class Cluster:
    """Stands in for Ray: a controller that answers with the age of its last turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turn_age_s = 0.0
        self.ended: list[str] = []
        self.num_revived = 0
        monkeypatch.setattr(connect, "revive_controller", self.revive)
        monkeypatch.setattr(connect, "_find", lambda *_: "handle")
        monkeypatch.setattr(connect, "_end", lambda _, reason: self.ended.append(reason))

    def revive(self, _settings: ControllerSettings) -> dict[str, Any]:
        self.num_revived += 1
        return {"turn_age_s": self.turn_age_s}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


@pytest.fixture
def watchdog(tmp_path: Path) -> WatchdogActor:
    made: WatchdogActor = object.__new__(WatchdogActor)  # without the thread of its loop, which needs Ray
    made._settings = ControllerSettings(store_uri=LocalStore(tmp_path).uri, cluster=CLUSTER, namespace="n", runners={})
    return made


def take_lease(root: Path, *, expires_in_s: float) -> None:
    acquired_s = time.time() + expires_in_s - LEASE_DURATION_S
    Lease(LocalStore(root), CLUSTER, "holder", lambda: acquired_s).acquire()


def test_controller_with_a_stuck_loop_and_an_expired_lease_is_replaced(
    cluster: Cluster, watchdog: WatchdogActor, tmp_path: Path
) -> None:
    take_lease(tmp_path, expires_in_s=-1.0)
    cluster.turn_age_s = LEASE_DURATION_S + 1.0
    watchdog.turn()
    (reason,) = cluster.ended
    assert "its lease has expired and its loop has not turned" in reason
    assert cluster.num_revived == 2


@pytest.mark.parametrize(
    ("expires_in_s", "turn_age_s"),
    [(60.0, LEASE_DURATION_S + 1.0), (-1.0, LEASE_DURATION_S - 1.0)],
    ids=["lease is kept in a long round", "loop turns, the store delays the lease"],
)
def test_controller_that_works_is_left_alone(
    cluster: Cluster, watchdog: WatchdogActor, tmp_path: Path, expires_in_s: float, turn_age_s: float
) -> None:
    take_lease(tmp_path, expires_in_s=expires_in_s)
    cluster.turn_age_s = turn_age_s
    watchdog.turn()
    assert cluster.ended == []


def test_cluster_without_a_lease_has_nothing_expired(cluster: Cluster, watchdog: WatchdogActor) -> None:
    cluster.turn_age_s = LEASE_DURATION_S + 1.0
    watchdog.turn()
    assert cluster.ended == []


@pytest.mark.parametrize("answers", [True, False])
def test_controller_that_waits_for_its_store_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: bool
) -> None:
    """A new one would wait as well, and would not know which attempts were asked to stop."""
    stuck_s = connect.HANGS_AFTER_S + 1.0
    ages_s, ended = iter([stuck_s, stuck_s, 0.0]), list[str]()
    monkeypatch.setattr(connect, "_find", lambda *_: "handle")
    monkeypatch.setattr(connect, "_controller", lambda _: "handle")
    monkeypatch.setattr(connect, "_ping", lambda *_: {"turn_age_s": next(ages_s), "epoch": 3, "last_error": ""})
    monkeypatch.setattr(connect, "_end", lambda _, reason: ended.append(reason))
    take_lease(tmp_path, expires_in_s=-1.0)
    if not answers:
        monkeypatch.setattr(connect, "read_lease", Mock(side_effect=StorageTimeoutError("no answer")))
    settings = ControllerSettings(store_uri=LocalStore(tmp_path).uri, cluster=CLUSTER, namespace="n", runners={})
    assert revive_controller(settings)["epoch"] == 3
    assert len(ended) == answers
