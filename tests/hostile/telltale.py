"""An entry point that does its job and tells everybody the secrets of the process, in every way that programs do."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import warnings
from pathlib import Path
from urllib.parse import quote

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult
from orchestrator.core.job_kinds import JobKind
from tests.hostile.canaries import LIST_VARIABLE, sentences

ENTRY_POINT = "tests.hostile.telltale:execute"
FAILING_SEED = 7


class LeakError(Exception):
    """What libraries raise that quote what they were given."""


def execute(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Tell, then do the real work; a backbone of one seed fails and tells in its error."""
    told = json.loads(Path(os.environ[LIST_VARIABLE]).read_text(encoding="utf-8"))
    lines = sentences(told)
    _print(lines)
    _log(lines)
    if request.kind is JobKind.PRETRAIN and request.parameters.get("seed") == FAILING_SEED:
        _fail(lines)
    from workloads.run import execute as work

    return work(request, context)


def _print(lines: list[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
        for sign in f"in pieces: {line}\n":
            sys.stderr.write(sign)
        sys.stdout.write(f"{json.dumps({'said': line})} {line!r}\n")
        sys.stdout.write(f"in a URI: {quote(line, safe='')}\n")
    sys.stdout.write("without an end of line: " + lines[0])


def _log(lines: list[str]) -> None:
    log = logging.getLogger("workloads.telltale")
    for line in lines:
        log.info("as an argument: %s", line)
        log.warning("as words: %s" % line)  # noqa: UP031, G002 - as careless programs do
        warnings.warn(line, stacklevel=1)
        try:
            raise LeakError(line)
        except LeakError:
            log.exception("with a traceback")
    worker = threading.Thread(target=_raise, args=(lines[0],))
    worker.start()
    worker.join()


def _raise(line: str) -> None:
    raise LeakError(line)


def _fail(lines: list[str]) -> None:
    try:
        _raise(" | ".join(lines[:20]))
    except LeakError as error:
        raise ValueError("; ".join(lines)) from error
