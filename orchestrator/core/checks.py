"""Checks of an installation: each returns what it found, or why it failed and what to do, within its own time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from enum import StrEnum
from threading import Thread

from orchestrator.core.errors import OrchestratorError

LIMIT_S = 10.0


class Verdict(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    """It works, but something should be checked."""
    FAILED = "failed"
    SKIPPED = "skipped"
    """Not run: a check that it needs has failed, or its devices are in use."""


class ConcernError(OrchestratorError):
    """Raised by a check that works, but where something should be checked. The text after ``; `` is the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """``run`` returns what it found, or raises an ``OrchestratorError`` of the form ``problem; what to do``."""

    name: str
    run: Callable[[], str]
    needs: Sequence[str] = ()
    """Checks that must have succeeded."""
    remedy: str = ""
    """What to do where the error does not say."""
    limit_s: float = LIMIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One line for people."""

    name: str
    verdict: Verdict
    detail: str
    remedy: str = ""
    duration_s: float = 0.0
    node: str = ""
    """Where it was checked; empty = here, or of the cluster as a whole."""


def run_checks(checks: Sequence[Check]) -> Iterator[CheckResult]:
    """Run checks one after the other, each for at most its limit; no error is raised."""
    missed: set[str] = set()
    for check in checks:
        unmet = [name for name in check.needs if name in missed]
        if unmet:
            result = CheckResult(name=check.name, verdict=Verdict.SKIPPED, detail=f"needs: {', '.join(unmet)}")
        else:
            result = _run(check)
        if result.verdict in {Verdict.FAILED, Verdict.SKIPPED}:
            missed.add(check.name)
        yield result


def _run(check: Check) -> CheckResult:
    started_s = time.monotonic()
    future: Future[str] = Future()

    def work() -> None:
        try:
            future.set_result(check.run())
        except Exception as error:  # noqa: BLE001 - it becomes the check's result
            future.set_exception(error)

    # A daemon thread: a call that hangs in a network or a file system cannot be interrupted.
    Thread(target=work, name=f"check-{check.name}", daemon=True).start()
    is_done = bool(wait([future], check.limit_s).done)
    duration_s = time.monotonic() - started_s
    if not is_done:
        detail = f"no answer within {check.limit_s:g} s"
        return _result(check, Verdict.FAILED, detail, "", duration_s)
    error = future.exception()
    if error is None:
        return _result(check, Verdict.OK, future.result(), "", duration_s)
    verdict = Verdict.WARNING if isinstance(error, ConcernError) else Verdict.FAILED
    # An unexpected error may quote anything, also credentials: only our own errors are shown.
    text = str(error) if isinstance(error, OrchestratorError) else f"{type(error).__name__}"
    detail, _, remedy = text.partition("; ")
    return _result(check, verdict, detail, remedy, duration_s)


def _result(check: Check, verdict: Verdict, detail: str, remedy: str, duration_s: float) -> CheckResult:
    advice = "" if verdict is Verdict.OK else remedy or check.remedy
    return CheckResult(name=check.name, verdict=verdict, detail=detail, remedy=advice, duration_s=duration_s)
