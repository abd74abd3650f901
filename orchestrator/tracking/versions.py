"""Whether what answers at a tracking URI is an MLflow that we can talk to; asked once, before anything is written."""

from __future__ import annotations

from urllib.parse import urlsplit

from orchestrator.tracking.errors import TrackingRefusedError, failures_named

OLDEST_SERVER = 2
"""Major version; the interface that the publisher uses is the same since then."""


def check_server(uri: str) -> None:
    """Ask a server for its version.

    Raises:
        TrackingRefusedError: it is not MLflow, or too old a one.
        Exception: whatever HTTP raises if nobody answers.
    """
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    credentials = get_default_host_creds(uri)  # type: ignore[no-untyped-call]
    answer = http_request(credentials, "/version", "GET", raise_on_status=False)  # type: ignore[no-untyped-call]
    if answer.status_code in {401, 403}:
        return  # whoever may not ask is told so by the first call that matters
    text = answer.text.strip()[:20]
    major = text.partition(".")[0]
    if answer.status_code != 200 or not major.isdigit():
        message = (
            f"what answers at the tracking URI is not an MLflow server (HTTP {answer.status_code} to /version); "
            "correct tracking.uri or MLFLOW_TRACKING_URI. Training goes on"
        )
        raise TrackingRefusedError(message)
    if int(major) < OLDEST_SERVER:
        message = f"the tracking server runs MLflow {text}, and {OLDEST_SERVER}.0 is the oldest that works; upgrade it"
        raise TrackingRefusedError(f"{message}. Training goes on, and everything is published afterwards")


def check_database(uri: str) -> None:
    """Refuse a database of another release: MLflow itself would change an older one where it finds tables missing.

    Raises:
        TrackingRefusedError: its tables are older or newer than those of the installed MLflow.
        SQLAlchemyError: it cannot be reached.
    """
    import mlflow
    from alembic.migration import MigrationContext
    from mlflow.store.db.utils import _get_latest_schema_revision
    from sqlalchemy import create_engine, inspect
    from sqlalchemy.pool import NullPool

    engine = create_engine(uri, poolclass=NullPool)
    with engine.connect() as connection:
        found = MigrationContext.configure(connection).get_current_revision()
        is_empty = found is None and not inspect(connection).has_table("experiments")
    expected = _get_latest_schema_revision()  # type: ignore[no-untyped-call]
    if not is_empty and found != expected:
        message = (
            f"the MLflow database has tables of version {found}, and the installed MLflow {mlflow.__version__} needs "
            f"{expected}: install the release that made them, or back it up and run `mlflow db upgrade`. Training "
            "goes on, and everything is published afterwards"
        )
        raise TrackingRefusedError(message)


def ask_database(uri: str) -> str:
    """Connect to a database as the publisher does; says in one line that it works.

    Raises:
        TrackingError: it cannot be used; the message never shows the URI, which may hold a password.
    """
    host = urlsplit(uri).hostname or "localhost"
    try:
        with failures_named("connecting", host):
            check_database(uri)
    except ImportError as error:
        raise TrackingRefusedError(missing_driver(uri, error)) from error
    return f"the MLflow database on {host} answers"


def missing_driver(uri: str, error: ImportError) -> str:
    """What to say where the program that talks to a kind of database is not installed."""
    return (
        f"the program that talks to {urlsplit(uri).scheme} databases is not installed ({error}); for PostgreSQL: "
        "pip install 'pretraining-orchestrator[postgres]'"
    )
