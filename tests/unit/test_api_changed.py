"""A changed sweep in Python: the difference is shown, and nothing is replaced that nobody agreed to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import Changed, Sweep
from orchestrator.api import Where
from orchestrator.api.sweep import agree
from orchestrator.core.errors import ControllerError, InfeasibleError, StorageError
from orchestrator.planning.graph.plan import Plan
from orchestrator.services import artifact_lookup
from orchestrator.services.artifact_lookup import lookup_artifacts
from orchestrator.services.submit import check_submit
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps import client
from orchestrator.sweeps.client import Consent, Ownership
from tests.report_sweeps import accept

VARIANT = ("pretrain.seeds=[7]",)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """One in which the quickstart was submitted."""
    made = LocalStore(tmp_path / "store")
    accept(made, replace(plan_of(made), revision=1))
    return made


def agreed(plan: Plan, changed: Changed) -> bool:
    return agree(check_submit(plan, lookup_artifacts(plan), sender="ann", consent=Consent.ASK), changed)


def plan_of(store: LocalStore, *overrides: str) -> Plan:
    return Sweep.from_yaml("quickstart", store=store.uri, overrides=overrides).plan().plan


def test_new_and_unchanged_sweeps_need_no_agreement(store: LocalStore, tmp_path: Path) -> None:
    assert agreed(plan_of(store), Changed.REFUSE)
    assert not agreed(plan_of(store, "name=other"), Changed.ASK)
    assert not agreed(replace(plan_of(store), store_uri=(tmp_path / "nothing").as_uri()), Changed.ASK)


def test_revision_that_is_seen_is_unknown_while_another_submit_waits(store: LocalStore) -> None:
    def seen(plan: Plan) -> int | None:
        return check_submit(plan, lookup_artifacts(plan), sender="ann", consent=Consent.ASK).seen_revision

    assert (seen(plan_of(store)), seen(plan_of(store, "name=other"))) == (1, 0)
    client.submit(store, plan_of(store, *VARIANT), "text", "cluster", ownership=Ownership.TAKE)
    assert seen(plan_of(store)) is None  # nobody knows what it would replace


@pytest.mark.parametrize("changed", [Changed.ASK, Changed.REFUSE])
def test_changed_sweep_is_shown_and_refused_where_nobody_can_be_asked(
    store: LocalStore, changed: Changed, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ControllerError, match=r"submit\(changed=Changed\.REPLACE\)") as refused:
        agreed(plan_of(store, *VARIANT), changed)
    assert "15 added, 75 removed" in str(refused.value)
    assert "75 removed: pretrain/levels/depth1/seed0" in " ".join(capsys.readouterr().err.split())


def test_changed_sweep_is_shown_and_replaced_by_who_says_so(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert agreed(plan_of(store, *VARIANT), Changed.REPLACE)
    assert "Difference of plans" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "is_agreed"), [("y", True), ("n", False)])
def test_changed_sweep_is_asked_about_at_a_terminal(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, answer: str, is_agreed: bool
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda: answer)
    if is_agreed:
        assert agreed(plan_of(store, *VARIANT), Changed.ASK)
    else:
        with pytest.raises(ControllerError, match="left as it is"):
            agreed(plan_of(store, *VARIANT), Changed.ASK)


def test_sweep_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    accept(store, replace(plan_of(store), revision=1, owner="somebody-else"))
    with pytest.raises(InfeasibleError, match="belongs to somebody-else"):
        Sweep.from_yaml("quickstart", store=store.uri).submit(Where.INPROCESS, changed=Changed.REPLACE)


def test_damaged_store_is_refused_before_anything_is_submitted(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_lookup, "_altered", lambda *_: ["1 records hold another identity: run fsck"])
    with pytest.raises(StorageError, match="run fsck"):
        Sweep.from_yaml("quickstart", store=store.uri).submit(Where.INPROCESS)
