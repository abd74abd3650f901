"""``orchestrator doctor``: whether this machine can do what sweeps need, with what to do where it cannot."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from rich.markup import escape
from rich.table import Table

from orchestrator.backends.ray.settings import CACHE_VARIABLE, cache_directory
from orchestrator.checks import Check, CheckResult, Verdict, run_checks
from orchestrator.cli.console import stderr_console, stdout_console
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.settings import Settings
from orchestrator.errors import OrchestratorError
from orchestrator.storage.checkup import check_free_space, store_checks
from orchestrator.tracking.versions import ask_database

_TIMEOUT_S = 5.0
_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "red", Verdict.SKIPPED: "dim"}


def examine(store_uri: str, *, as_json: bool) -> ExitCode:
    """Run all checks and print one line for each; fails if any of them does."""
    settings = Settings()
    uri = store_uri or settings.store_uri()
    results = list(run_checks([*store_checks(uri), *_machine_checks(settings)]))
    num_failed = sum(result.verdict is Verdict.FAILED for result in results)
    if as_json:
        stdout_console().print_json(
            json.dumps({"ok": not num_failed, "checks": [asdict(result) for result in results]})
        )
    else:
        stdout_console().print(_table(results))
    if num_failed:
        stderr_console().print(f"{num_failed} of {len(results)} checks failed.")
    return ExitCode.FAILURE if num_failed else ExitCode.OK


def _machine_checks(settings: Settings) -> Iterator[Check]:
    cache = Path(os.environ.get(CACHE_VARIABLE) or _usual_cache(settings))
    yield Check(name="cache", run=lambda: check_free_space(cache, "the cache"), remedy=f"set {CACHE_VARIABLE}")
    yield Check(name="tracking", run=lambda: _reach_tracking(settings.tracking_uri()))


def _usual_cache(settings: Settings) -> Path:
    """The local stack has its own; elsewhere it is the nodes'."""
    return cache_directory() if settings.ray_address else settings.home / "cache"


def _reach_tracking(uri: str) -> str:
    """No message shows the URI, which may hold a password."""
    parts = urlsplit(uri)
    if parts.scheme in {"http", "https"}:
        return _ask_server(f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}")
    if parts.scheme == "sqlite":
        return _check_database(Path(parts.path.removeprefix("/") if parts.path.startswith("//") else parts.path))
    if parts.scheme.partition("+")[0] == "postgresql":
        return ask_database(uri)
    raise OrchestratorError(
        f"the tracking URI has the scheme {parts.scheme!r}; write http(s)://host:port, sqlite:///absolute/path or "
        "postgresql://host/database"
    )


def _ask_server(address: str) -> str:
    request = Request(f"{address.rstrip('/')}/health")  # noqa: S310 - http and https only
    try:
        with urlopen(request, timeout=_TIMEOUT_S):  # noqa: S310
            return f"MLflow at {address} answers"
    except HTTPError as error:
        if error.code in {401, 403}:
            return f"MLflow at {address} answers, and asks who we are"
        message = f"{address} answers with HTTP {error.code} and is no MLflow server; check MLFLOW_TRACKING_URI"
        raise OrchestratorError(message) from None
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        message = f"{address} does not answer: {reason}; start the server, or check MLFLOW_TRACKING_URI and proxies"
        raise OrchestratorError(message) from None


def _check_database(path: Path) -> str:
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(there, os.W_OK):
        raise OrchestratorError(f"{there} cannot be written to; choose another MLFLOW_TRACKING_URI")
    return f"{path} {'is there' if path.exists() else 'is made at the first run'}"


def _table(results: list[CheckResult]) -> Table:
    table = Table(title="Doctor", title_justify="left")
    for column in ("check", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for result in results:
        style = _STYLES[result.verdict]
        verdict = f"[{style}]{result.verdict.value}[/{style}]"
        table.add_row(result.name, verdict, escape(result.detail), escape(result.remedy))
    return table
