"""Exit codes and the one place where errors become them."""

from __future__ import annotations

import sys
from enum import IntEnum

from orchestrator.core.errors import InfeasibleError, NotFoundError, OrchestratorError, SpecError, UsageError
from orchestrator.core.security.redaction import redacted
from orchestrator.core.units import printable


class ExitCode(IntEnum):
    """What the process ends with; documented in ``docs/cli.md``."""

    OK = 0
    FAILURE = 1
    SPEC = 2
    REFUSED = 3
    SWEEP_FAILED = 100
    UNFINISHED = 101
    NOT_FOUND = 102
    CANCELLED = 103
    EXPECTATION = 104
    INTERRUPTED = 130
    TERMINATED = 143


def exit_code_of(error: OrchestratorError) -> ExitCode:
    """Exit code of an error that reached the top."""
    if isinstance(error, SpecError | UsageError):
        return ExitCode.SPEC
    if isinstance(error, InfeasibleError):
        return ExitCode.REFUSED
    return ExitCode.NOT_FOUND if isinstance(error, NotFoundError) else ExitCode.FAILURE


def complain(message: str) -> None:
    """Write an error to stderr, without secrets and control characters; stdout stays for results."""
    message = printable(redacted(message))
    sys.stderr.write(f"error: {message}\n" if "\n" not in message else f"errors:\n{message}\n")
