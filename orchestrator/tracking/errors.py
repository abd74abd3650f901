"""What can go wrong between the publisher and a tracking server. None of it ever touches a sweep's truth."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.security.redaction import redacted

_MAX_CAUSE_CHARACTERS = 300
_READ_ONLY = ("readonly database", "read-only", "permission denied")
_FORBIDDEN = {"PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"}


class TrackingError(OrchestratorError):
    """The tracking server cannot be reached or refuses a call; what was not published is published later."""


class TrackingRefusedError(TrackingError):
    """What will not pass by itself: somebody must change the sweep, the server or the environment first."""


@contextmanager
def failures_named(action: str, server: str) -> Iterator[None]:
    """Turn whatever MLflow, HTTP or SQL raises into a ``TrackingError`` that names the action.

    ``server`` is shown to people: never a URI that may hold a password.
    """
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        if not _comes_from_server(error):
            raise
        message, remedy = f"{action} on MLflow ({server}) failed: {_cause(error)}", _remedy(error)
        if remedy:
            raise TrackingRefusedError(f"{message}; training goes on; {remedy}") from error
        raise TrackingError(f"{message}; nothing is lost, it is published once MLflow answers") from error


def _comes_from_server(error: Exception) -> bool:
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return isinstance(error, MlflowException | SQLAlchemyError | OSError)


def _cause(error: Exception) -> str:
    """The first line, without the SQL and its parameters that SQLAlchemy appends, and without credentials."""
    text = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
    first = text.partition("\n")[0].partition("[SQL:")[0].strip()
    return redacted(re.sub(r"//[^/@\s]+@", "//", first))[:_MAX_CAUSE_CHARACTERS]


def _remedy(error: Exception) -> str:
    """What somebody must do; empty where waiting is enough."""
    text = str(error).lower()
    if getattr(error, "error_code", "") in _FORBIDDEN or " 401" in text or " 403" in text:
        login = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN,"
        return f"set {login} to those of a user who may write there"
    if any(sign in text for sign in _READ_ONLY):
        return "let the publisher write there, or name another tracking.uri"
    return ""
