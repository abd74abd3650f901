"""Commands in this very process, as ``orchestrator`` runs them: arguments in; exit code, stdout and stderr out."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any
from unittest.mock import patch

import pytest

from orchestrator.cli.app import run_app


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """What it printed with ``-o json``."""
        return json.loads(self.out)

    @property
    def message(self) -> str:
        """Standard error as one line, however it was wrapped."""
        return " ".join(self.err.split())


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ended:
    """Run one command."""
    capsys.readouterr()
    code = _run(arguments)
    printed = capsys.readouterr()
    return Ended(code=code, out=printed.out, err=printed.err)


def run_captured(*arguments: str) -> Ended:
    """Run one command where no test's ``capsys`` is at hand."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = _run(arguments)
    return Ended(code=code, out=out.getvalue(), err=err.getvalue())


def _run(arguments: tuple[str, ...]) -> int:
    code: object = 0
    with patch("sys.argv", ["orchestrator", *arguments]):
        try:
            run_app()
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int | None)
    return int(code or 0)
