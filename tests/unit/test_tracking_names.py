"""What messages call a tracking server."""

from __future__ import annotations

import pytest

from orchestrator.tracking.server import TrackingServer


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://me:hunter2@mlflow.example:5000/path", "mlflow.example"),
        ("postgresql://me:hunter2@db.example/mlflow?password=hunter2", "db.example"),
        ("postgresql://me:hunter2@/mlflow?host=/var/run/postgresql", "postgresql:///mlflow"),
        ("postgresql+psycopg2://me:hunter2@:5432/mlflow", "postgresql+psycopg2://:5432/mlflow"),
        ("sqlite:////home/me/mlflow.db", "sqlite:////home/me/mlflow.db"),
    ],
)
def test_server_is_shown_without_user_password_and_options(uri: str, shown: str) -> None:
    assert TrackingServer(uri).shown == shown
    assert "hunter2" not in TrackingServer(uri).shown
