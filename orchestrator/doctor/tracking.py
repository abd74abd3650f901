"""Whether what stands at a tracking URI can be published to."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from orchestrator.core.errors import OrchestratorError
from orchestrator.tracking.versions import ask_database

_TIMEOUT_S = 5.0


def reach_tracking(uri: str) -> str:
    """Say in one line that MLflow answers. No message shows the URI, which may hold a password.

    Raises:
        OrchestratorError: it does not, or the URI means nothing.
    """
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
