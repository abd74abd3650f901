"""What a command costs before it does anything: it makes itself alone, and imports what it needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from orchestrator.cli.app import COMMANDS
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


def test_command_line_imports_only_the_command_that_it_names(tmp_path: Path) -> None:
    ran = fresh("validate", "quickstart", ORCHESTRATOR_DIRECTORY=str(tmp_path))
    imported = set(json.loads(ran.stdout.splitlines()[-1]))
    commands = {name for name in imported if name.startswith("orchestrator.cli.commands.")}
    assert commands == {"orchestrator.cli.commands.validate"}


def test_sweep_without_plugins_searches_no_installed_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def search(**_: str) -> None:
        pytest.fail("reading the entry points of all packages takes 10 to 200 ms")

    monkeypatch.setattr("orchestrator.core.plugins.entry_points", search)
    assert run_command(capsys, "validate", "quickstart").code == 0


def test_help_lists_every_command_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run_command(capsys, "--help").out
    for command in chain.from_iterable(COMMANDS.values()):
        assert f"\n  {command.name} " in printed
        assert command.summary.split()[0] in printed


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


def test_defect_of_a_command_is_shown_without_secrets() -> None:
    secret = "hunter2-of-the-database"  # noqa: S105 - a word that no form tells
    script = (
        "import sys; sys.argv = ['orchestrator', 'validate', 'quickstart']\n"
        "from orchestrator.cli import main\n"
        "from orchestrator.cli.commands import validate\n"
        "def crash(*_): raise RuntimeError('cannot log in with password=' + 'hunter2-of-the-database')\n"
        "validate.load_all = crash\n"
        "main()"
    )
    known = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", script], env=known, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "RuntimeError: cannot log in with password=[hidden]" in ran.stderr
    assert secret not in ran.stderr.rpartition("RuntimeError")[2]
