"""Exit codes: what scripts rely on, as documented."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
from orchestrator.storage.local import LocalStore
from orchestrator.testing import ScriptedBackend
from orchestrator.testing.scripted import Fail
from tests.commands import run_command
from tests.scripted_sweep import World, diamond

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
    "arguments",
    [
        ("status", "swep"),
        ("watch", "swep"),
        ("pause", "swep"),
        ("cancel", "sweep", "pretrain/z", "-y"),
        ("logs", "sweep", "pretrain/z"),
        ("describe", "sweep", "pretrain/z"),
        ("export", "pretrain/a", "out", "--sweep", "swep"),
        ("report", "swep"),
    ],
    ids=" ".join,
)
def test_what_is_not_there_ends_with_102(
    tmp_path: Path, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    world = unfinished(tmp_path / "store")
    result = run_command(capsys, *arguments, "--store", world.store.uri)
    assert result.code == 102
    assert result.out == ""
    assert result.err.startswith("error: ")


@pytest.mark.parametrize(
    "arguments",
    [("statsu",), ("status", "--no-such-flag"), ("status", "a", "b"), ("watch",), ("logs", "s", "j", "--attempt", "x")],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    result = run_command(capsys, *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err


@pytest.mark.parametrize(
    "line",
    [
        "plan quickstart --prices none.yaml",
        "plan quickstart --prices empty.yaml",
        "plan quickstart --prices bad.yaml",
        "plan quickstart --gpus -1",
        "plan quickstart --accelerator X9000",
        "forecast quickstart --spot 2",
        "forecast quickstart --replace -1",
        "status --store /x",
        "ls --store ftp://host/x",
        "run pretrain/a --sweep sweep",
        "quota show --cluster ../..",
        "compare sweep sweep",
        "compare sweep",
        "explain pretrain/a",
    ],
)
def test_value_that_can_mean_nothing_ends_with_2(
    tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "bad.yaml").write_text("{A100: [1, 2]}")
    monkeypatch.setenv("ORCHESTRATOR_STORE", unfinished(tmp_path / "store").store.uri)
    result = run_command(capsys, *line.split())
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")


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


def test_documented_codes_are_those_of_the_program() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    table = text.partition("## Exit codes")[2].partition("\n## ")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, flags=re.MULTILINE)] == [int(c) for c in ExitCode]


def test_reader_that_has_seen_enough_gets_no_traceback(tmp_path: Path) -> None:
    world = unfinished(tmp_path / "store")
    command = [sys.executable, "-m", "orchestrator.cli", "status", "sweep", "-o", "json", "--store", world.store.uri]
    shown = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert shown.stdout is not None
    shown.stdout.close()
    _, err = shown.communicate(timeout=60)
    assert err == b""


def test_directory_in_place_of_a_sweep_is_refused_as_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = run_command(capsys, "validate", str(tmp_path))
    assert refused.code == 2
    assert f"{tmp_path}: a directory; name the file" in refused.err


def test_up_full_says_what_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_command(capsys, "up", "--full")
    assert (result.code, result.out) == (2, "")
    assert "infra/compose" in result.message
    assert not list(tmp_path.iterdir())
