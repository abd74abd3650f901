"""Secrets that a stack makes for its own servers: files that only the user may read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from orchestrator.security.redaction import add_secret


def write_private(path: Path, text: str) -> None:
    """Replace a file by one that only the user may read; it is never open to others, not even for a moment."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    partial.replace(path)


def ensure_password(path: Path) -> str:
    """The password in a file, which is made with a random one if there is none; hidden in everything printed."""
    if not path.exists():
        write_private(path, secrets.token_hex(24))
    password = path.read_text(encoding="utf-8")
    add_secret(password)
    return password
