"""Asking a cluster from outside: ``cluster.ask`` in a process of its own, with a deadline that holds whatever hangs."""

from __future__ import annotations

import json
import os
import platform
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import IO, Any

from orchestrator.backends.ray.digest import code_digest
from orchestrator.core.checks import CheckResult, Verdict
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.security.redaction import redacted
from orchestrator.doctor.cluster import Question
from orchestrator.doctor.judge import Here, judge
from orchestrator.stack.answers import check_answers
from orchestrator.stack.environment import python_path

_PACKAGES = ("ray", "torch", "torchvision", "timm", "numpy", "pretraining-orchestrator")
_END = ""


def examine_cluster(question: Question, address: str, limit_s: float) -> Iterator[CheckResult]:
    """All verdicts on a cluster, as they come; those that are not there in time count as failed.

    ``address`` is where Ray's control store listens, asked first without Ray.
    """
    try:
        check_answers(address)
    except OSError as error:
        remedy = "check the address, that the cluster is up, and firewalls between"
        detail = f"nobody answers at {address} ({type(error).__name__})"
        yield CheckResult(name="cluster", verdict=Verdict.FAILED, detail=detail, remedy=remedy)
        return
    started_s = time.monotonic()
    known: dict[str, Mapping[str, Any]] = {}
    here = this_machine()
    for line in _lines(question, limit_s):
        document = json.loads(line)
        stage, found = document["stage"], document["found"]
        took_s = time.monotonic() - started_s
        if stage == "error":
            yield _result(str(found["error"]), took_s)
            return
        known[stage] = found
        for result in judge(stage, found, known, here):
            yield _timed(result, took_s)
    missing = [stage for stage in _stages(question) if stage not in known]
    if missing and time.monotonic() - started_s >= limit_s:
        told = f"no answer within {limit_s:g} s about: {', '.join(missing)}; see whether its head is overloaded"
        yield _result(told, time.monotonic() - started_s)


def this_machine() -> Here:
    """What runs here."""
    return Here(
        python=platform.python_version(), packages={name: _version(name) for name in _PACKAGES}, digest=code_digest()
    )


def _stages(question: Question) -> list[str]:
    asked = ["nodes", "facts", "clocks", "services", "gloo"]
    return asked + ["store"] * bool(question.store_uri) + ["tracking"] * bool(question.tracking_uri)


def _lines(question: Question, limit_s: float) -> Iterator[str]:
    """What the process prints until it ends, or the time is over: then it is killed, whatever it does."""
    environment = {**os.environ, "PYTHONPATH": python_path(os.environ), "RAY_DEDUP_LOGS": "0"}
    command = [sys.executable, "-m", "orchestrator.doctor.cluster"]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None  # noqa: S101 - for the type checker
    assert process.stdout is not None  # noqa: S101
    assert process.stderr is not None  # noqa: S101
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    said: list[str] = []
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    threading.Thread(target=said.extend, args=(process.stderr,), daemon=True).start()
    try:
        process.stdin.write(question.to_json())
        process.stdin.close()
        deadline_s = time.monotonic() + limit_s
        while (line := _next(lines, deadline_s)) != _END:
            yield line
        if time.monotonic() < deadline_s and process.wait(max(0.1, deadline_s - time.monotonic())) not in {0, 1}:
            last = redacted("".join(said[-1:]).strip())[-300:]
            raise OrchestratorError(f"the examination ended with code {process.returncode}: {last}")
    except (BrokenPipeError, subprocess.TimeoutExpired):
        return
    finally:
        process.kill()
        process.wait()


def _read(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    for line in stream:
        if line.startswith('{"stage"'):  # Ray prints, too
            lines.put(line)
    lines.put(_END)


def _next(lines: queue.SimpleQueue[str], deadline_s: float) -> str:
    try:
        return lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
    except queue.Empty:
        return _END


def _result(text: str, took_s: float) -> CheckResult:
    detail, _, remedy = redacted(text).partition("; ")
    return CheckResult(name="cluster", verdict=Verdict.FAILED, detail=detail, remedy=remedy, duration_s=took_s)


def _timed(result: CheckResult, took_s: float) -> CheckResult:
    return replace(result, detail=redacted(result.detail), duration_s=took_s)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
