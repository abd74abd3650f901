"""The description of a stack that is not there."""

from __future__ import annotations

import socket
from pathlib import Path

from orchestrator.stack.description import (
    MLFLOW_TOKEN_FILE,
    TOKEN_FILE,
    Stack,
    own_boot_id,
    own_identity,
    tracking_uri,
    write_stack,
)


def described_stack(home: Path, *, mlflow_url: str = "http://127.0.0.1:3") -> Stack:
    """Write it; its supervisor is this very process."""
    pid, pid_started_at = own_identity()
    stack = Stack(
        directory=str(home),
        ray_address="127.0.0.1:1",
        dashboard_url="http://127.0.0.1:2",
        mlflow_url=mlflow_url,
        tracking_uri=tracking_uri(home),
        token_path=str(home / TOKEN_FILE),
        mlflow_token_path=str(home / MLFLOW_TOKEN_FILE),
        pid=pid,
        pid_started_at=pid_started_at,
        started_at_s=1.0,
        host=socket.gethostname(),
        boot_id=own_boot_id(),
    )
    write_stack(home, stack)
    return stack
