"""``-o table|json|yaml`` on every command that prints something: JSON on stdout alone, messages on stderr."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from orchestrator.cli.app import COMMANDS, load_command
from orchestrator.cli.exits import complain
from orchestrator.cli.output import stdout_console
from orchestrator.services.terminal import say, stderr_console
from orchestrator.storage.local import LocalStore
from tests.commands import run_command
from tests.live_sweep import SWEEP, write_live_sweep

WITHOUT_FORMS = {
    "watch": "a screen that renews itself; status has the same as a document",
    "top": "the same for all sweeps",
    "serve": "runs until it is told to end",
    "cluster up": "shows what the launcher's own program prints",
    "cluster down": "the same",
    "cluster status": "the same",
}
"""Commands that print nothing that a machine could read, and why."""
FORMS = {"table", "json", "yaml"}
OTHER_FORMS = {"schema": {"json", "yaml"}, "logs": {"text", "json"}}
"""Neither is a table, and a log is lines, not one document."""


def commands() -> Iterator[tuple[str, Any]]:
    for line in chain.from_iterable(COMMANDS.values()):
        command = load_command(line.name)
        verbs = getattr(command, "commands", {})
        yield from ((f"{line.name} {verb}", one) for verb, one in verbs.items())
        if not verbs or command.invoke_without_command:
            yield line.name, command


ALL = dict(commands())


@pytest.mark.parametrize("name", sorted(ALL))
def test_every_command_offers_forms_or_has_a_reason_not_to(name: str) -> None:
    options = {option: parameter for parameter in ALL[name].params for option in getattr(parameter, "opts", ())}
    if name in WITHOUT_FORMS:
        assert "-o" not in options
        return
    assert "-o" in options, f"{name} prints no documents: add DocumentOption, or a reason here"
    offered = {form.value for form in options["-o"].type_descriptor.annotation}
    assert offered >= OTHER_FORMS.get(name, FORMS)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a sweep in its store, and no cluster."""
    for name in ("RAY_ADDRESS", "ORCHESTRATOR_STORE", "ORCHESTRATOR_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # of the data plane's processes
    monkeypatch.chdir(tmp_path)
    write_live_sweep(LocalStore(tmp_path / ".orchestrator" / "store"), num_transfers=40, now=time.time())
    return tmp_path


JOB = "pretrain/levels/depth1/seed0"
RUN = (
    ("config",),
    ("config", "--origin"),
    ("config", "contexts"),
    ("config", "set-context", "lab", "store=s3://lab"),
    ("init", "new.yaml"),
    ("validate", "quickstart"),
    ("plan", "quickstart"),
    ("plan", "quickstart", "--diff", SWEEP),
    ("forecast", "quickstart", "--set", "pretrain.seeds=[0]"),
    ("explain", "quickstart", JOB),
    ("describe", SWEEP, JOB),
    ("status",),
    ("status", SWEEP),
    ("pause", SWEEP, "--force"),
    ("drain", "--show"),
    ("quota", "show"),
    ("quota", "set", "--others", "--max-gpus", "8"),
    ("gc",),
    ("gc", "--pin", f"mine={SWEEP}"),
    ("fsck",),
    ("ls", "artifacts"),
    ("ls", "pins"),
    ("du",),
    ("down",),
    ("labels", "show", "quickstart"),
)
"""Commands that need neither cluster nor network, at least one of each module."""


@pytest.mark.parametrize("line", RUN, ids=" ".join)
def test_documents_are_all_that_stdout_holds_and_both_forms_say_the_same(
    project: Path, capsys: pytest.CaptureFixture[str], line: tuple[str, ...]
) -> None:
    result = run_command(capsys, *line, "-o", "json")
    assert result.code in {0, 101}, result.err
    document = json.loads(result.out)
    assert "\x1b" not in result.out
    if line[0] in {
        "pause",
        "init",
        "status",
        "forecast",
        "gc",
        "plan",
        "drain",
    }:  # what they say changes with each call
        return
    again = run_command(capsys, *line, "-o", "yaml")
    assert yaml.safe_load(again.out) == document


def test_schema_is_printed_in_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    as_json = json.loads(run_command(capsys, "schema").out)
    assert yaml.safe_load(run_command(capsys, "schema", "-o", "yaml").out) == as_json


def test_errors_leave_stdout_empty(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in (("status", "nothing"), ("validate", "nothing.yaml"), ("describe", SWEEP, "nothing")):
        result = run_command(capsys, *line, "-o", "json")
        assert result.code in {2, 102}
        assert result.out == ""
        assert result.err.startswith("error")


def test_store_and_form_stand_before_or_behind_the_command_and_the_latter_counts(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = (project / ".orchestrator" / "store").as_uri()
    monkeypatch.setenv("ORCHESTRATOR_STORE", "file:///another")
    behind = run_command(capsys, "ls", "artifacts", "--store", store, "-o", "json")
    assert behind.code == 0, behind.err
    assert run_command(capsys, "--store", store, "-o", "json", "ls", "artifacts") == behind
    before = ("--store", "file:///wrong", "--output=yaml")
    assert run_command(capsys, *before, "ls", "artifacts", "--store", store, "-o", "json") == behind
    quotas = run_command(capsys, "--store", store, "-o", "json", "quota", "show")
    assert quotas == run_command(capsys, "quota", "show", "--store", store, "-o", "json")
    assert "--store" in run_command(capsys, "--store", store, "up").err  # has no such option


HOSTILE = "crane [bird] [/x] :smile: \x1b[2J\x9b1m\udc80"
SHOWN = "crane [bird] [/x] :smile: \\x1b[2J\\x9b1m\\udc80"


@pytest.mark.parametrize("console", [stdout_console, stderr_console])
def test_names_of_others_are_printed_as_they_are_and_move_no_cursor(
    console: Callable[[], Console], capsys: pytest.CaptureFixture[str]
) -> None:
    table, tree = Table(HOSTILE, title=HOSTILE), Tree(HOSTILE)
    table.add_row(HOSTILE)
    table.caption = HOSTILE
    tree.add(HOSTILE)
    for part in (HOSTILE, Text(HOSTILE), table, tree):
        console().print(part)
    printed = capsys.readouterr()
    told = printed.out + printed.err
    assert told.count(SHOWN) == 1 + 1 + 4 + 2
    assert told.replace("\n", "").isprintable()


@pytest.mark.parametrize("write", [say, complain])
def test_messages_move_no_cursor(write: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    write(f"{HOSTILE}\n\tnext")
    assert capsys.readouterr().err.endswith(f"{SHOWN}\n\tnext\n")
