"""What a command costs before it does anything: it makes itself alone, and imports what it needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from orchestrator.cli import on_demand
from orchestrator.cli.app import app
from orchestrator.cli.on_demand import command_line
from orchestrator.sweepfile import plugins
from tests.commands import run_command

ROOT = Path(__file__).parents[2]
_FRAMEWORKS = ("torch", "timm", "ray", "mlflow", "workloads", "boto3", "pandas", "numpy", "scipy", "sklearn")
_NEEDLESS = {
    ("validate", "quickstart"): ("pydantic_settings", "rich", "filelock", "asyncio", "orchestrator.services.settings"),
    ("--help",): (
        "pydantic_settings",
        "rich",
        "filelock",
        "yaml",
        "orchestrator.sweepfile",
        "orchestrator.planning.graph",
    ),
    ("plan", "quickstart", "-o", "json"): (),
}
"""What each of these commands has no use for, beside frameworks; each takes 10 to 70 ms."""


def fresh(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own; behind its own output, as the last line, the modules that it imported."""
    script = (
        "import json, sys\n"
        "from orchestrator.cli import main\n"
        "try: main()\n"
        "finally: print('\\n' + json.dumps(sorted(sys.modules)))\n"
    )
    command = [sys.executable, "-c", script, *arguments]
    known = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, env=known, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", sorted(_NEEDLESS), ids=" ".join)
def test_command_imports_nothing_that_it_has_no_use_for(arguments: tuple[str, ...], tmp_path: Path) -> None:
    ran = fresh(*arguments, ORCHESTRATOR_DIRECTORY=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    imported = set(json.loads(ran.stdout.splitlines()[-1]))
    assert "orchestrator.cli.app" in imported
    assert imported & {*_FRAMEWORKS, *_NEEDLESS[arguments]} == set()


def test_commands_on_demand_are_those_of_the_app_in_its_order() -> None:
    whole: Any = typer.main.get_command(app)
    line = command_line(app)
    assert list(line.commands) == list(whole.commands)
    for name, command in whole.commands.items():
        assert line.commands[name].get_short_help_str() == command.get_short_help_str()
        assert [parameter.name for parameter in line.commands[name].params] == [part.name for part in command.params]
    assert [parameter.name for parameter in line.params] == [parameter.name for parameter in whole.params]


def test_command_line_makes_only_the_command_that_it_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    made = []

    def make(info: Any, **options: Any) -> Any:
        made.append(info.callback.__name__)
        return typer.main.get_command_from_info(info, **options)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(on_demand, "get_command_from_info", make)
    assert run_command(capsys, "validate", "quickstart").code == 0
    assert made == ["validate"]


def test_sweep_without_plugins_searches_no_installed_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def search(**_: str) -> None:
        pytest.fail("reading the entry points of all packages takes 10 to 200 ms")

    monkeypatch.setattr(plugins, "entry_points", search)
    assert run_command(capsys, "validate", "quickstart").code == 0


def test_help_lists_every_command_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run_command(capsys, "--help").out
    whole: Any = typer.main.get_command(app)
    for name, command in whole.commands.items():
        assert f"\n  {name} " in printed
        assert command.get_short_help_str(12).removesuffix("...") in printed


def test_shell_is_offered_commands_and_their_options() -> None:
    def offered(line: str) -> set[str]:
        asked = {"_ORCHESTRATOR_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line}
        ran = subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys; sys.argv = ['orchestrator']\nfrom orchestrator.cli import main; main()",
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT), **asked},
            capture_output=True,
            text=True,
            check=False,
        )
        return set(re.findall(r'"([\w-]+)":', ran.stdout))

    assert offered("orchestrator va") == {"validate"}
    assert offered("orchestrator config use") == {"use-context"}
    assert "--scale" in offered("orchestrator validate --s")


def test_unknown_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    ended = run_command(capsys, "vlidate")
    assert ended.code == 2
    assert "No such command 'vlidate'. Did you mean 'validate'?" in ended.message


def test_defect_of_a_command_is_shown_without_secrets() -> None:
    secret = "hunter2-of-the-database"  # noqa: S105 - a word that no form tells
    script = (
        "import sys; sys.argv = ['orchestrator', 'validate', 'quickstart']\n"
        "from orchestrator.cli import main, validate\n"
        "def crash(*_): raise RuntimeError('cannot log in with password=' + 'hunter2-of-the-database')\n"
        "validate.validate_sweep = crash\n"
        "main()"
    )
    known = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", script], env=known, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "RuntimeError: cannot log in with password=[hidden]" in ran.stderr
    assert secret not in ran.stderr.rpartition("RuntimeError")[2]
