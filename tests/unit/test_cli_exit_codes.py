"""Exit codes: what scripts rely on, as documented."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.cli.commands.watch import follow_sweep
from orchestrator.cli.exits import ExitCode, exit_code_of
from orchestrator.core.errors import (
    ClusterError,
    FailureKind,
    InfeasibleError,
    NotFoundError,
    OrchestratorError,
    SpecError,
    StorageError,
    UsageError,
    UserError,
)
from orchestrator.services.settings import Settings
from orchestrator.services.transports import StoreTransport
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps import client
from orchestrator.testing import ScriptedBackend
from orchestrator.testing.scripted import Fail
from tests.commands import run_command
from tests.scripted_sweep import CLUSTER, World, diamond, make_plan

ROOT = Path(__file__).parents[2]


def failing(root: Path) -> World:
    store = LocalStore(root)
    return World(root, ScriptedBackend(store, {"pretrain/a": [Fail(kind=FailureKind.USER_ERROR)]}), store=store)


def succeeded(root: Path) -> World:
    world = World(root)
    world.submit(*diamond())
    world.finish()
    return world


def failed(root: Path) -> World:
    world = failing(root)
    world.submit(*diamond())
    world.finish()
    return world


def unfinished(root: Path) -> World:
    world = World(root)
    world.submit(*diamond())
    world.tick()
    return world


def cancelled(root: Path) -> World:
    world = unfinished(root)
    world.cancel()
    world.finish()
    return world


@pytest.mark.parametrize(("make", "code"), [(succeeded, 0), (failed, 100), (unfinished, 101), (cancelled, 103)])
@pytest.mark.parametrize("form", ["table", "json", "yaml"])
def test_status_ends_with_the_code_of_the_sweep(
    tmp_path: Path, make: Callable[[Path], World], code: int, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world = make(tmp_path / "store")
    assert run_command(capsys, "status", "sweep", "--store", world.store.uri, "-o", form).code == code


@pytest.mark.parametrize(("make", "code"), [(succeeded, 0), (failed, 100), (cancelled, 103)])
def test_watch_ends_with_the_code_of_the_sweep(
    tmp_path: Path, make: Callable[[Path], World], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    world = make(tmp_path / "store")
    assert run_command(capsys, "watch", "sweep", "--store", world.store.uri).code == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError(("sweep.yaml:1:1: wrong",)), 2),
        (InfeasibleError("too large"), 3),
        (NotFoundError("gone"), 102),
        (StorageError("silent"), 1),
        (UsageError("of no meaning"), 2),
        (UserError("refused by the job"), 1),
        (ClusterError("silent"), 1),
    ],
)
def test_errors_have_their_codes(error: OrchestratorError, code: int) -> None:
    assert exit_code_of(error) == code


def test_submit_that_the_controller_refuses_ends_as_one_that_a_dashboard_refuses(tmp_path: Path) -> None:
    world = unfinished(tmp_path / "store")
    plan = make_plan(*diamond(), store_uri=world.store.uri)
    message = client.submit(world.store, plan, "name: sweep\n", CLUSTER, sender="somebody else", now=world.clock())
    world.tick_until(lambda: message in world.snapshot().handled)
    with pytest.raises(InfeasibleError, match=r"the controller refused sweep 'sweep': .*belongs to") as refused:
        follow_sweep(StoreTransport(settings=Settings(), store=world.store), world.store, "sweep", message)
    assert exit_code_of(refused.value) == 3


def test_documented_codes_are_those_of_the_program() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    table = text.partition("## Exit codes")[2].partition("\n## ")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, flags=re.MULTILINE)] == [int(c) for c in ExitCode]


@pytest.mark.parametrize("words", [("--version",), ("schema",)], ids=["less than a buffer", "more"])
def test_reader_that_has_seen_enough_gets_no_traceback(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "orchestrator.cli", *words]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    shown = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert shown.stdout is not None
    shown.stdout.close()
    _, err = shown.communicate(timeout=60)
    assert err == b""
